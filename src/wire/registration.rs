//! A host's first boot: its stage and failure reports, and its registration.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::text::{Time, WireString, string_enum};
use svc_machine::epoch::Epoch;
use svc_machine::id::MachineId;
use svc_machine::name::ImageVersion;
use svc_machine::state::Status;

/// Maximum number of characters in a failed boot's stage.
pub const MAX_STAGE_CHARS: usize = 64;

const CODE_PREFIX: &str = "code ";

string_enum!(
    /// The name of a stage of the first boot.
    BootStageName {
        Bundle = "bundle",
        Database = "database",
        Restore = "restore",
        Gateway = "gateway",
        Register = "register",
    }
);

string_enum!(
    /// Why a restore at boot failed, for causes that require a specific action by the operator. A host embeds the code
    /// in the message of its failed boot, because the report passes through the journal and a shell script as text.
    RestoreFailureCode {
        /// The disk is too small for the database.
        NoSpace = "no_space",
        /// The snapshot comes from a newer PostgreSQL than the one in the release.
        NewerPostgres = "newer_postgres",
        /// The object store could not be read.
        StoreUnavailable = "store_unavailable",
        /// The disk is too small for the owner's files.
        FilesNoSpace = "files_no_space",
        /// The owner's files could not be restored for another reason.
        Files = "files",
    }
);

impl RestoreFailureCode {
    /// Returns the code as it appears in a message, such as `code no_space`.
    pub fn marker(self) -> String {
        format!("{CODE_PREFIX}{self}")
    }

    /// Finds the code in a message; `None` if the message contains no code that this release supports, as with messages
    /// from older hosts.
    pub fn find(message: &str) -> Option<Self> {
        message.split(CODE_PREFIX).skip(1).find_map(|rest| {
            let end = rest.find(|c: char| !(c.is_ascii_lowercase() || c == '_')).unwrap_or(rest.len());
            rest[..end].parse().ok()
        })
    }
}

/// A new host's registration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct Registration {
    #[schemars(with = "WireString<MachineId>")]
    pub machine_id: MachineId,
    /// The installed release.
    #[schemars(with = "WireString<ImageVersion>")]
    pub image_version: ImageVersion,
    /// SHA-256 of the release's bundle: 64 hexadecimal digits.
    #[schemars(schema_with = "sha256")]
    pub bundle_sha256: String,
    /// SHA-256 of the gateway certificate's public key: 64 hexadecimal digits.
    #[schemars(schema_with = "sha256")]
    pub tls_spki_sha256: String,
    /// Milliseconds from the time when cloud-init wrote `boot.env` until the gateway was ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_ms: Option<u64>,
    /// The result of restoring the owner's files; absent if there was nothing to restore.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restored_files: Option<RestoredFiles>,
}

/// The result of restoring the owner's files.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct RestoredFiles {
    /// Everything written before this time was restored; absent if nothing was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub as_of: Option<Time>,
    /// Why the files were not restored. The platform truncates it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The response to a registration.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct RegistrationResponse {
    #[schemars(schema_with = "running")]
    pub status: WireString<Status>,
    #[schemars(with = "u64")]
    pub epoch: Epoch,
}

/// The start of a stage, or its progress.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct BootStageReport {
    pub stage: WireString<BootStageName>,
    /// Absent at the start of a stage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<StageProgress>,
}

/// Progress within the current phase of a stage. The numbers restart with each phase.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct StageProgress {
    /// Bytes that the current phase has processed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// Rows that have been counted to verify the restored database.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_rows: Option<u64>,
}

/// A failed boot.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct BootFailureReport {
    /// At most 64 characters; hosts send the name of a boot stage.
    #[schemars(schema_with = "stage")]
    pub stage: String,
    /// A message without the host's secrets. The platform truncates a long one.
    #[schemars(schema_with = "non_empty_text")]
    pub message: String,
}

/// The response to a failed-boot report.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct BootFailureResponse {
    pub machine_id: WireString<MachineId>,
    pub status: WireString<Status>,
}

impl StageProgress {
    pub fn of_bytes(bytes: u64, total_bytes: Option<u64>) -> Self {
        Self { bytes: Some(bytes), total_bytes, ..Self::default() }
    }

    pub fn of_rows(rows: u64, total_rows: u64) -> Self {
        Self { rows: Some(rows), total_rows: Some(total_rows), ..Self::default() }
    }
}

fn sha256(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "pattern": "^[0-9A-Fa-f]{64}$" })
}

fn running(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "enum": [Status::Running.as_str()] })
}

fn stage(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "minLength": 1, "maxLength": MAX_STAGE_CHARS, "pattern": "^[^\\u0000]*$" })
}

fn non_empty_text(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "minLength": 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn find_returns_the_code_in_a_message() {
        for code in RestoreFailureCode::ALL {
            let message = format!("exit code 70: svc-restore: {}: details", code.marker());
            assert_eq!(RestoreFailureCode::find(&message), Some(code));
        }
        for other in ["", "code", "code someday: x", "no_space", "exit code 70"] {
            assert_eq!(RestoreFailureCode::find(other), None, "{other}");
        }
    }
}
