//! Responses to requests that change a machine: the machine, and the operation that carries out the change.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::copies::{NewerSnapshot, SnapshotSource};
use crate::machine::MachineKind;
use crate::text::{Time, WireString, string_enum};
use svc_machine::id::{MachineId, OperationId};
use svc_machine::name::{Handle, IdpUserId, ServerType, Slot};
use svc_machine::state::Status;

string_enum!(
    /// A command to a machine's server.
    PowerAction { On = "on", Off = "off", Reboot = "reboot" }
);

/// A slot's machine. It is being created unless the slot already had one.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct ProvisionedMachine {
    pub machine_id: WireString<MachineId>,
    #[serde(default)]
    pub idp_user_id: WireString<IdpUserId>,
    #[serde(default)]
    pub slot: WireString<Slot>,
    #[serde(default)]
    pub handle: WireString<Handle>,
    #[serde(default)]
    pub kind: WireString<MachineKind>,
    pub status: WireString<Status>,
    #[serde(default)]
    pub epoch: u64,
    pub operation_id: Option<WireString<OperationId>>,
}

/// The machine that replaces another.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct RecoveredMachine {
    #[serde(default)]
    pub old_machine_id: WireString<MachineId>,
    pub machine_id: WireString<MachineId>,
    #[serde(default)]
    pub slot: WireString<Slot>,
    #[serde(default)]
    pub kind: WireString<MachineKind>,
    pub status: WireString<Status>,
    #[serde(default)]
    pub epoch: u64,
    pub operation_id: WireString<OperationId>,
    /// A stored snapshot that is newer than the one to restore. Only in the response to the request that started the
    /// recovery.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "NewerSnapshot")]
    pub newer_snapshot: Option<NewerSnapshot>,
}

/// A deleted machine, and the remaining copies of its slot's data.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct DeletedMachine {
    pub machine_id: WireString<MachineId>,
    #[serde(default)]
    pub idp_user_id: WireString<IdpUserId>,
    #[serde(default)]
    pub slot: WireString<Slot>,
    #[serde(default)]
    pub handle: WireString<Handle>,
    #[serde(default)]
    pub kind: WireString<MachineKind>,
    pub status: WireString<Status>,
    pub registered_at: Option<Time>,
    pub deleted_at: Option<Time>,
    pub newest_snapshot_at: Option<Time>,
    pub newest_snapshot_source: Option<WireString<SnapshotSource>>,
    /// The reason the store's newest snapshot is unknown or cannot be restored.
    pub snapshot_problem: Option<String>,
    /// The end of the period in which `undelete` is possible; `null` if the machine's server is not kept.
    pub undelete_until: Option<Time>,
    /// The former name of `undeleteUntil`.
    pub undeletable_until: Option<Time>,
    pub operation_id: Option<WireString<OperationId>>,
    /// The machine that this one was to replace, which was deleted together with it.
    pub also_deleted: Option<AlsoDeletedMachine>,
}

/// A machine that was deleted together with the one that was to replace it.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct AlsoDeletedMachine {
    pub machine_id: WireString<MachineId>,
    pub operation_id: WireString<OperationId>,
    /// The end of the period in which `undelete` is possible.
    pub undelete_until: Option<Time>,
    /// The former name of `undeleteUntil`.
    pub undeletable_until: Option<Time>,
}

/// A machine that holds its slot again, because its deletion was undone.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct UndeletedMachine {
    pub machine_id: WireString<MachineId>,
    #[serde(default)]
    pub kind: WireString<MachineKind>,
    pub status: WireString<Status>,
    #[serde(default)]
    pub epoch: u64,
    pub operation_id: WireString<OperationId>,
    /// Whether an earlier request had undone the deletion.
    #[serde(default)]
    pub already_undone: bool,
}

/// An accepted command to a machine's server.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct PowerChange {
    pub machine_id: WireString<MachineId>,
    pub action: WireString<PowerAction>,
    pub status: WireString<Status>,
    /// `null` if the server was already off.
    pub operation_id: Option<WireString<OperationId>>,
}

/// A machine's change to a different server type.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct Resize {
    pub machine_id: WireString<MachineId>,
    #[serde(default)]
    pub server_type: WireString<ServerType>,
    pub status: WireString<Status>,
    /// `null` if the machine already had this type.
    pub operation_id: Option<WireString<OperationId>>,
}

/// A request that the platform has sent to a machine's host.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct HostRequest {
    pub machine_id: WireString<MachineId>,
    /// The time by the host's clock, or by the platform's if the host reports none.
    #[serde(default)]
    pub requested_at: Time,
}

/// The number of machines whose token rotation was requested.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct TokenRotations {
    pub requested: u64,
}
