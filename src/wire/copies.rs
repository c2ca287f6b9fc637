//! The copies of a slot's data.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::text::{Time, WireString, string_enum};
use svc_machine::id::{MachineId, OperationId};

string_enum!(
    /// How the platform learned of a snapshot.
    SnapshotSource {
        /// The store's pointer names it.
        Store = "store",
        /// A host reported it. Used if the store cannot be read, or if the snapshot that its pointer names is damaged.
        Reported = "reported",
    }
);
string_enum!(
    /// Why the machine of a kept server left its slot.
    KeptReason { Replaced = "replaced", Deleted = "deleted" }
);
string_enum!(
    /// What may exist only on a machine's server.
    UnsavedData {
        /// Changes that are in no snapshot of the database or of the files.
        Changes = "changes",
        /// The owner's files: a later machine started without them.
        Files = "files",
    }
);

/// The copies of a slot's data, and what would be lost with the live server.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct Copies {
    pub live: Option<LiveServer>,
    #[serde(default)]
    pub kept: Vec<KeptServer>,
    pub newest_snapshot_at: Option<Time>,
    pub newest_snapshot: Option<NewestSnapshot>,
    /// The reason the store's newest snapshot is unknown or cannot be restored.
    pub snapshot_problem: Option<String>,
    /// How many seconds of changes may be lost with the live server.
    pub exposed_seconds: Option<u64>,
    /// A complete snapshot that is newer than the one that the pointer names.
    pub newer_snapshot: Option<NewerSnapshot>,
    /// A snapshot from the previous machine that is newer than the one that was restored.
    pub unrestored_snapshot: Option<UnrestoredSnapshot>,
}

/// The server of the machine that serves the slot.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct LiveServer {
    pub machine_id: WireString<MachineId>,
    pub provider_server_id: Option<String>,
    /// When the server was first found missing at the provider.
    pub missing_since: Option<Time>,
}

/// The server of a machine that left the slot.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct KeptServer {
    pub machine_id: WireString<MachineId>,
    pub provider_server_id: Option<String>,
    #[serde(default)]
    pub reason: WireString<KeptReason>,
    /// When the server may be deleted. `null` until a successor is proven or an operator decides, and while an
    /// operation deletes the server.
    pub until: Option<Time>,
    /// The running operation that deletes the server.
    pub deleted_by: Option<WireString<OperationId>>,
    /// Data written since this time may exist only on this server.
    pub unsaved_since: Option<Time>,
    /// What that data is; `null` if `unsavedSince` is. Older platforms omit it.
    #[serde(default)]
    pub unsaved_data: Option<WireString<UnsavedData>>,
    /// When the server was first found missing at the provider.
    pub missing_since: Option<Time>,
    /// When an operator abandoned the server's removal.
    pub removal_abandoned_at: Option<Time>,
}

/// The slot's newest snapshot.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct NewestSnapshot {
    pub taken_at: Time,
    #[serde(default)]
    pub machine_id: WireString<MachineId>,
    /// `null` if a host reported it.
    pub key: Option<String>,
    #[serde(default)]
    pub source: WireString<SnapshotSource>,
}

/// A complete snapshot that is newer than the pointer's or, in a recovery, than the one to restore.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct NewerSnapshot {
    #[serde(default)]
    pub taken_at: Time,
    #[serde(default)]
    pub machine_id: WireString<MachineId>,
    pub key: String,
}

/// A newer snapshot that was not restored.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct UnrestoredSnapshot {
    pub key: String,
    pub taken_at: Option<Time>,
}
