//! `POST /vps/:id/heartbeat`: a host's report about itself, and its desired state in the platform's response.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use secrecy::SecretString;
use serde::{Deserialize, Serialize};

use crate::host::{
    ComponentStatus, FileBackupReport, HostCertificate, LastBackup, LastUpdate, SnapshotChecks,
};
use crate::machine::{Attention, Disk};
use crate::registration::Registration;
use crate::secret;
use crate::text::WireString;
use svc_machine::epoch::Epoch;
use svc_machine::id::OperationId;
use svc_machine::name::ImageVersion;

/// Maximum number of proof keys that a host accepts.
pub const MAX_PROOF_KIDS: usize = 16;
/// Maximum number of release keys that a host trusts.
pub const MAX_TRUSTED_KEYS: usize = 16;
/// Maximum number of items that need attention.
pub const MAX_ATTENTION_ITEMS: usize = 16;
/// Maximum number of characters in an attention code, which consists of lowercase letters and underscores.
pub const MAX_ATTENTION_CODE_CHARS: usize = 40;
/// The attention code of a host that does not back up files, because it could not restore its predecessor's files.
pub const FILES_NOT_RESTORED: &str = "files_not_restored";
/// The attention code of a host that has not saved changes to the owner's files for a long time.
pub const FILES_UNSAVED: &str = "files_unsaved";
/// The attention code of a host that cannot read, and therefore cannot save, some of the owner's files.
pub const FILES_UNREADABLE: &str = "files_unreadable";
/// The attention code of a host whose file backup is damaged, cannot be opened with the platform's key, or could not be
/// checked for a long time.
pub const FILES_DAMAGED: &str = "files_damaged";

/// A host's report. Optional fields may be `null` or absent. If the last backup, the last update, the checks or the
/// trusted keys are missing, the platform keeps those from the previous report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct Heartbeat {
    /// The release that the host is running.
    #[schemars(with = "WireString<ImageVersion>")]
    pub image_version: ImageVersion,
    /// The epoch under which the host writes.
    #[schemars(with = "u64")]
    pub epoch: Epoch,
    pub health: ComponentHealth,
    /// Space on the owner's file system. `null` or absent if the host cannot measure it; older platforms reject such a
    /// report.
    #[serde(default)]
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub disk: Option<Disk>,
    /// The last backup, successful or not.
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub last_backup: Option<LastBackup>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_update: Option<LastUpdate>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checks: Option<SnapshotChecks>,
    /// Whether an update is in progress.
    #[serde(default)]
    #[schemars(skip_serializing_if = "std::ops::Not::not", with = "Option<bool>")]
    pub updating: bool,
    /// Problems that need an operator's attention: at most 16. The platform truncates long details.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "attention_items")]
    pub attention: Vec<Attention>,
    /// The ids of the platform's proof keys that the host accepts: at most 16.
    #[serde(default)]
    #[schemars(skip_serializing_if = "Vec::is_empty", schema_with = "proof_kids")]
    pub proof_kids: Vec<String>,
    /// Absent until the host's updater has written the ids.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trusted_keys: Option<TrustedKeyIds>,
    /// Absent until the host's gateway has reported the certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<HostCertificate>,
    /// Absent until the host's file backup has started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<FileBackupReport>,
    /// The registration that the platform accepted. The host repeats it, because a platform database restored from a
    /// backup may lack it. Absent before registration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registration: Option<Registration>,
}

/// The health of a host's gateway, database and code-server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct ComponentHealth {
    pub gateway: WireString<ComponentStatus>,
    pub database: WireString<ComponentStatus>,
    /// Absent while code-server is starting, and if the release has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<WireString<ComponentStatus>>,
}

/// The release keys that a host trusts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct TrustedKeyIds {
    /// Sequence number of the key set; a later set has a higher one.
    #[schemars(schema_with = "any_u32")]
    pub sequence: u32,
    /// 16 hexadecimal digits each; at most 16 ids.
    #[schemars(schema_with = "key_ids")]
    pub ids: Vec<String>,
}

/// The desired state of a host. A host treats an absent field as no change, except that it resumes its writers if
/// `quiesce` does not name the operation that stopped them.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(inline)]
pub struct HeartbeatResponse {
    /// The release that the host must run; the reported one if no other is desired.
    #[schemars(with = "String")]
    pub desired_image_version: Option<ImageVersion>,
    /// The current epoch of the host's machine.
    #[schemars(with = "u64")]
    pub epoch: Option<Epoch>,
    /// Whether the machine has been replaced or deleted. If so, the host must stop.
    pub superseded: bool,
    /// The keys whose proofs the host must accept.
    #[schemars(with = "ProofKeys")]
    pub proof_keys: Option<ProofKeys>,
    /// The operation during which the host must keep its writers stopped.
    pub quiesce: Option<WireString<OperationId>>,
    /// The request id of the update to `desiredImageVersion`. Present while a rollout requests the update.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub desired_request_id: Option<String>,
    /// How the host gets its certificate. Older platforms omit it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "CertificateSettings")]
    pub certificate: Option<CertificateSettings>,
    /// The token for later calls. Present while the host uses a different token.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "secret::expose_option")]
    #[schemars(with = "String")]
    pub next_token: Option<SecretString>,
}

/// A host's name, and the certificate authority that issues its certificate.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(inline)]
pub struct CertificateSettings {
    /// Without a name, the host keeps its self-signed certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub host_name: Option<String>,
    /// Without these settings, the host requests no certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "AcmeSettings")]
    pub acme: Option<AcmeSettings>,
}

/// A certificate authority that supports ACME (RFC 8555), whose terms of service the operator has accepted.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(inline)]
pub struct AcmeSettings {
    pub directory_url: String,
    /// An address to which the authority sends notices.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub contact: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "ExternalAccount")]
    pub external_account: Option<ExternalAccount>,
}

/// The account at the certificate authority that the host's ACME account is bound to (external account binding).
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(inline)]
pub struct ExternalAccount {
    pub key_id: String,
    /// The key, in base64url.
    #[serde(serialize_with = "secret::expose")]
    #[schemars(with = "String")]
    pub hmac_key: SecretString,
}

/// Public keys for the platform's proofs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct ProofKeys {
    pub keys: Vec<ProofKey>,
}

/// A public key: `x` is the Ed25519 key in base64url (RFC 8037).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct ProofKey {
    pub kid: String,
    pub x: String,
}

impl ComponentHealth {
    /// Whether the components that operations wait for are healthy. Code-server is not among them: the owner's settings
    /// can break it, which must not fail a resize or a recovery.
    pub fn is_ok(&self) -> bool {
        [&self.gateway, &self.database].into_iter().all(|status| status.is(ComponentStatus::Ok))
    }
}

fn attention_items(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": ["array", "null"],
        "items": {
            "type": "object",
            "properties": {
                "code": { "type": "string", "pattern": format!("^[a-z_]{{1,{MAX_ATTENTION_CODE_CHARS}}}$") },
                "detail": { "type": "string", "minLength": 1 },
            },
            "required": ["code", "detail"],
        },
        "maxItems": MAX_ATTENTION_ITEMS,
    })
}

fn proof_kids(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": ["array", "null"],
        "items": { "type": "string", "pattern": "^[^\\u0000]*$" },
        "maxItems": MAX_PROOF_KIDS,
    })
}

fn key_ids(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "items": { "type": "string", "pattern": "^[0-9A-Fa-f]{16}$" },
        "maxItems": MAX_TRUSTED_KEYS,
    })
}

fn any_u32(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "integer", "minimum": 0, "maximum": u32::MAX })
}
