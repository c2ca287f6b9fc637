//! A slot's snapshot pointer.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::text::{Time, WireString, default_unknown, string_enum};
use svc_machine::id::MachineId;
use svc_machine::name::{IdpUserId, Slot};

string_enum!(
    /// Whether a pointer can be used.
    PointerState {
        Sound = "sound",
        Unsound = "unsound",
        Absent = "absent",
        Unreadable = "unreadable",
    }
);

/// A slot's pointer, and the one that a rebuild would write.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct PointerInspection {
    #[serde(default)]
    pub idp_user_id: WireString<IdpUserId>,
    #[serde(default)]
    pub slot: WireString<Slot>,
    pub state: WireString<PointerState>,
    pub problem: Option<String>,
    /// Number of snapshots in the store that have a sidecar.
    #[serde(default)]
    pub snapshots: u64,
    pub current: Option<Pointer>,
    pub rebuilt: Option<Pointer>,
}

/// A slot's pointer after a rebuild.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct RebuiltPointer {
    #[serde(default)]
    pub idp_user_id: WireString<IdpUserId>,
    #[serde(default)]
    pub slot: WireString<Slot>,
    pub pointer: Pointer,
}

/// A snapshot pointer.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct Pointer {
    pub seq: u64,
    #[serde(default)]
    pub fence_epoch: u64,
    pub fence_machine_id: Option<WireString<MachineId>>,
    /// When an operator accepted a pointer without a snapshot.
    pub emptied_at: Option<Time>,
    pub snapshot: Option<NamedSnapshot>,
}

/// The snapshot that a pointer names.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct NamedSnapshot {
    pub key: String,
    #[serde(default)]
    pub size_bytes: u64,
    #[serde(default = "default_unknown")]
    pub sha256: String,
    #[serde(default)]
    pub epoch: u64,
    #[serde(default)]
    pub machine_id: WireString<MachineId>,
    #[serde(default)]
    pub taken_at: Time,
    #[serde(default)]
    pub verified_at: Time,
}
