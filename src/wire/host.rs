//! Reports on a host's health, backups, updates and snapshot checks, which heartbeats carry and the API returns.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::text::{Time, WireString, default_unknown, string_enum};
use svc_machine::name::ImageVersion;

string_enum!(
    /// The status of a component.
    ComponentStatus { Ok = "ok", Failing = "failing" }
);
string_enum!(
    /// The outcome of a backup or a snapshot check.
    Outcome { Success = "success", Error = "error" }
);
string_enum!(
    /// The outcome of an update.
    UpdateOutcome { Updated = "updated", RolledBack = "rolled_back", Refused = "refused", Failed = "failed" }
);

string_enum!(
    /// Where a host's certificate comes from.
    CertificateSource { SelfSigned = "self_signed", Acme = "acme", File = "file" }
);

/// The certificate that a host presents.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct HostCertificate {
    /// The name that the platform gave the host.
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub host_name: Option<String>,
    #[serde(default)]
    pub source: WireString<CertificateSource>,
    #[serde(default)]
    pub issued_at: Time,
    #[serde(default)]
    pub expires_at: Time,
    /// Whether the host's roots verified the chain for its name when it was last checked.
    #[serde(default)]
    #[schemars(skip_serializing_if = "std::ops::Not::not", with = "Option<bool>")]
    pub is_trusted: bool,
    /// The reason the last attempt to replace the certificate failed.
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// When the host requests the next certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_attempt_at: Option<Time>,
}

/// The state of a host's file backup, by the host's clock.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct FileBackupReport {
    /// Everything that was written before this time is saved. Absent until the first save.
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub saved_until: Option<Time>,
    /// When the host detected the oldest unsaved change; absent if there is none.
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub changed_since: Option<Time>,
    /// Estimated number of unsaved bytes; absent if there are none, or if the number is unknown.
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub pending_bytes: Option<u64>,
    /// The number of files, and their total size, when the whole home directory was last saved.
    #[serde(default)]
    pub files: u64,
    #[serde(default)]
    pub bytes: u64,
    /// The point in time from which this machine restored its predecessor's files; absent if it restored none.
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub restored_as_of: Option<Time>,
    /// Why the last save failed.
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// When part of the backup was last verified.
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub verified_at: Option<Time>,
    /// When a sample was last restored and compared with the current files.
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub drilled_at: Option<Time>,
    /// The most serious known problem, such as a latest snapshot that cannot be restored completely, damaged packs and
    /// the files that need them, a failed or differing sample, or a key that the platform does not have; absent if
    /// there is none.
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub damage: Option<String>,
}

/// The last backup.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct LastBackup {
    pub status: WireString<Outcome>,
    /// When the backup started, by the host's clock.
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub began_at: Option<Time>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub taken_at: Option<Time>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The last update.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct LastUpdate {
    pub version: WireString<ImageVersion>,
    pub outcome: WireString<UpdateOutcome>,
    #[schemars(schema_with = "nul_free_text")]
    #[serde(default = "default_unknown")]
    pub stage: String,
    #[serde(default)]
    pub at: Time,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The last snapshot checks, by kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct SnapshotChecks {
    /// The last verification, which reads stored snapshots in full.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verify: Option<SnapshotCheck>,
    /// The last drill, which restores the latest snapshot into a test database.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drill: Option<SnapshotCheck>,
}

/// A snapshot check.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct SnapshotCheck {
    pub status: WireString<Outcome>,
    #[serde(default)]
    pub at: Time,
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Keys of the damaged snapshots.
    #[serde(default)]
    #[schemars(skip_serializing_if = "Vec::is_empty", schema_with = "damaged_keys")]
    pub damaged: Vec<String>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Maximum number of damaged snapshots that a report names.
pub const MAX_DAMAGED_KEYS: usize = 20;

/// Returns the schema of text without NUL, which PostgreSQL cannot store.
fn nul_free_text(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({ "type": "string", "pattern": "^[^\\u0000]*$" })
}

fn damaged_keys(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": ["array", "null"],
        "items": { "type": "string", "pattern": "^[^\\u0000]*$" },
        "maxItems": MAX_DAMAGED_KEYS,
    })
}
