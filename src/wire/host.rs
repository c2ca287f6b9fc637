//! Reports on a host's health, backups, updates and snapshot checks, which heartbeats carry and the API returns.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::text::{Text, Time, unknown, words};
use svc_machine::name::ImageVersion;

words!(
    /// The status of a component.
    ComponentStatus { Ok = "ok", Failing = "failing" }
);
words!(
    /// The outcome of a backup or a snapshot check.
    Outcome { Success = "success", Error = "error" }
);
words!(
    /// The outcome of an update.
    UpdateOutcome { Updated = "updated", RolledBack = "rolled_back", Refused = "refused", Failed = "failed" }
);

words!(
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
    pub source: Text<CertificateSource>,
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
pub struct FilesReport {
    /// Everything that was written before this time is saved. Absent until the first save.
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub saved_until: Option<Time>,
    /// When the host saw the first change that is not saved yet; absent if there is none.
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub changed_since: Option<Time>,
    /// An estimate of the bytes that are not saved yet; absent if there are none, or if it is not known.
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub pending_bytes: Option<u64>,
    /// The number of files, and their sizes together, when the whole home was last saved.
    #[serde(default)]
    pub files: u64,
    #[serde(default)]
    pub bytes: u64,
    /// The moment of the predecessor's files that this machine restored, if it restored any.
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub restored_as_of: Option<Time>,
    /// Why the last save failed.
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// When a share of the backup was last read again.
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub verified_at: Option<Time>,
    /// When a sample was last restored and compared with the present files.
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub drilled_at: Option<Time>,
    /// What the checks have found: damaged packs with the files that need them, or files that differ from those on the
    /// machine; absent if all is intact.
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub damage: Option<String>,
}

/// The last backup.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct LastBackup {
    pub status: Text<Outcome>,
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
    pub version: Text<ImageVersion>,
    pub outcome: Text<UpdateOutcome>,
    #[schemars(schema_with = "nul_free_text")]
    #[serde(default = "unknown")]
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
    pub status: Text<Outcome>,
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
