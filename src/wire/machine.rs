//! Machines, with what their hosts report.

use std::net::Ipv4Addr;
use std::ops::Deref;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::copies::{Copies, UnsavedData};
use crate::host::{
    ComponentStatus, FileBackupReport, HostCertificate, LastBackup, LastUpdate, SnapshotChecks,
};
use crate::operation::Operation;
use crate::text::{Time, WireString, default_unknown, string_enum};
use svc_machine::event::RestoreMode;
use svc_machine::id::{MachineId, OperationId};
use svc_machine::name::{Handle, IdpUserId, ImageVersion, Location, ServerType, Slot};
use svc_machine::state::{FailureCause, Status};

string_enum!(
    /// Whether a machine is a customer's, or a preview, which is not billed and expires.
    MachineKind { Customer = "customer", Preview = "preview" }
);

/// A machine, which may have left its slot.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Machine {
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
    /// The reason the machine has failed.
    pub failure: Option<Failure>,
    #[serde(default)]
    pub epoch: u64,
    #[serde(default)]
    pub restore_mode: WireString<RestoreMode>,
    /// Whether it restores the owner's files at its first boot. Older platforms omit it.
    #[serde(default = "default_true")]
    pub restore_files: bool,
    #[serde(default)]
    pub server_type: WireString<ServerType>,
    #[serde(default)]
    pub location: WireString<Location>,
    #[serde(default)]
    pub image_version: WireString<ImageVersion>,
    pub provider_server_id: Option<String>,
    #[schemars(with = "Option<String>")]
    pub public_ipv4: Option<Ipv4Addr>,
    #[serde(default)]
    pub https_port: u64,
    /// SHA-256 of its host's public key, in hexadecimal digits.
    pub tls_spki_sha256: Option<String>,
    /// Its host's certificate, as last reported.
    #[serde(default)]
    pub certificate: Option<HostCertificate>,
    pub registered_at: Option<Time>,
    pub heartbeat_at: Option<Time>,
    pub health: Option<Health>,
    pub last_backup: Option<LastBackup>,
    /// The state of its host's file backup, as last reported.
    #[serde(default)]
    pub files: Option<FileBackupReport>,
    pub last_update: Option<LastUpdate>,
    /// The last checks of the machine's snapshots.
    pub checks: Option<SnapshotChecks>,
    /// The progress of its first boot; `null` before the host's first report.
    pub boot: Option<Boot>,
    pub boot_progress: Option<BootProgress>,
    /// When the first healthy heartbeat after the registration arrived.
    pub proven_at: Option<Time>,
    /// When the final backup was taken, after the writers had stopped.
    pub final_backup_at: Option<Time>,
    /// Data written since this time may exist only on the machine's server.
    pub unsaved_since: Option<Time>,
    /// What that data is; `null` if `unsavedSince` is. Older platforms omit it.
    #[serde(default)]
    pub unsaved_data: Option<WireString<UnsavedData>>,
    /// When an operator powered off its server.
    pub powered_off_at: Option<Time>,
    /// The problems that its host last reported.
    #[serde(default)]
    pub attention: Vec<Attention>,
    /// The locations to try, in this order, when the provider has no capacity in `location`.
    #[serde(default)]
    pub fallback_locations: Vec<WireString<Location>>,
    /// Older platforms omit it.
    #[serde(default)]
    #[schemars(with = "UpgradeToken")]
    pub upgrade_token: Option<UpgradeToken>,
    pub replaced_by: Option<WireString<MachineId>>,
    pub retired_at: Option<Time>,
    pub deleted_at: Option<Time>,
    #[serde(default)]
    pub created_at: Time,
    #[serde(default)]
    pub updated_at: Time,
}

/// A machine with its operations, newest first, and the copies of its slot's data.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct MachineDetail {
    #[serde(flatten)]
    pub machine: Machine,
    #[serde(default)]
    pub operations: Vec<Operation>,
    #[serde(default)]
    #[schemars(with = "Copies")]
    pub copies: Option<Copies>,
}

impl Deref for MachineDetail {
    type Target = Machine;

    fn deref(&self) -> &Machine {
        &self.machine
    }
}

/// A page of machines, newest first.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct MachinePage {
    pub machines: Vec<Machine>,
    pub next_cursor: Option<String>,
}

/// A machine whose server is being discarded, and the operation that deletes the server.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct DiscardedMachine {
    #[serde(flatten)]
    pub machine: Machine,
    /// `null` until the platform has created the operation.
    pub operation_id: Option<WireString<OperationId>>,
    /// Whether the server's deletion had already been requested or started.
    #[serde(default)]
    pub already_ordered: bool,
}

/// The reason a machine has failed.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct Failure {
    pub cause: WireString<FailureCause>,
    /// The stage of the boot that failed.
    pub stage: Option<String>,
    pub message: Option<String>,
}

/// A machine's health, as its host last reported it.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct Health {
    #[serde(default)]
    pub gateway: WireString<ComponentStatus>,
    #[serde(default)]
    pub database: WireString<ComponentStatus>,
    /// Absent while code-server is starting, and if the machine's release has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<WireString<ComponentStatus>>,
    /// `null` if its host cannot measure it.
    pub disk: Option<Disk>,
}

/// A host's disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct Disk {
    pub total_bytes: u64,
    pub free_bytes: u64,
}

/// A host's first boot: its current stage, and all stages, oldest first.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct Boot {
    #[serde(default = "default_unknown")]
    pub stage: String,
    #[serde(default)]
    pub at: Time,
    #[serde(default)]
    pub stages: Vec<BootStage>,
}

/// The start of a stage of the first boot.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct BootStage {
    pub stage: String,
    #[serde(default)]
    pub at: Time,
}

/// A stage's progress: the bytes or rows that its current phase has processed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct BootProgress {
    pub stage: String,
    pub bytes: Option<u64>,
    pub total_bytes: Option<u64>,
    pub rows: Option<u64>,
    pub total_rows: Option<u64>,
}

/// A problem that a host reported and that needs an operator's attention.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct Attention {
    pub code: String,
    #[serde(default = "default_unknown")]
    pub detail: String,
}

/// The token with which a machine's host authenticates to the platform.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct UpgradeToken {
    pub generation: u64,
    #[serde(default)]
    pub rotated_at: Time,
    /// When an operator requested a rotation that is pending.
    pub requested_at: Option<Time>,
}

impl Machine {
    /// Returns the status, or `deleted` or `replaced` after the machine has left its slot.
    pub fn display_state(&self) -> &str {
        if self.deleted_at.is_some() {
            "deleted"
        } else if self.replaced_by.is_some() {
            "replaced"
        } else {
            &self.status
        }
    }

    /// Whether the machine holds its slot.
    pub fn is_active(&self) -> bool {
        self.deleted_at.is_none() && self.replaced_by.is_none()
    }

    /// Returns when the machine left its slot.
    pub fn left_slot_at(&self) -> Option<&Time> {
        self.retired_at.as_ref().or(self.deleted_at.as_ref())
    }
}

fn default_true() -> bool {
    true
}
