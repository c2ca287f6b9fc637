//! A slot's snapshots.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::text::{Time, WireString, default_unknown};
use svc_machine::id::MachineId;

/// A verified snapshot.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct Backup {
    pub key: String,
    #[serde(default)]
    pub size_bytes: u64,
    #[serde(default = "default_unknown")]
    pub sha256: String,
    #[serde(default)]
    pub taken_at: Time,
    #[serde(default)]
    pub verified_at: Time,
    #[serde(default)]
    pub epoch: u64,
    #[serde(default)]
    pub machine_id: WireString<MachineId>,
    /// Whether the pointer names this snapshot.
    #[serde(default)]
    pub latest: bool,
}

impl Backup {
    /// Returns the last part of the key.
    pub fn name(&self) -> &str {
        self.key.rsplit('/').next().unwrap_or_default()
    }
}

/// A page of snapshots, newest first.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct BackupPage {
    /// The key of the snapshot that the pointer names.
    pub latest: Option<String>,
    pub backups: Vec<Backup>,
    pub next_cursor: Option<String>,
}
