//! The events that a machine can receive, and a transition's effects other than the new state.

use super::choice::must_be_one_of;
use super::epoch::Epoch;
use super::name::ServerType;
use super::state::{FailureCause, Status};

/// Whether a new machine may start without a snapshot.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, strum::EnumString, strum::IntoStaticStr, strum::VariantNames,
)]
#[strum(serialize_all = "lowercase", parse_err_ty = String, parse_err_fn = unknown_mode)]
pub enum RestoreMode {
    /// A snapshot must exist and is restored.
    Required,
    /// The machine may start empty if it is confirmed that there is no snapshot; an existing one is still restored.
    Empty,
}

impl RestoreMode {
    pub const ALL: [Self; 2] = [Self::Required, Self::Empty];

    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

fn unknown_mode(_: &str) -> String {
    must_be_one_of(<RestoreMode as strum::VariantNames>::VARIANTS)
}

/// The power state of a machine's server when the machine's replacement or deletion is undone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ServerPower {
    On,
    /// A power-off was requested, whether or not it took effect.
    MaybeOff,
}

/// The reason a server could not be created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::VariantArray)]
pub enum CreationFailure {
    ProviderRefused,
    ProviderUnavailable,
    StoreFailed,
    Fenced,
    Internal,
}

impl CreationFailure {
    pub const ALL: &'static [Self] = <Self as strum::VariantArray>::VARIANTS;

    pub fn cause(self) -> FailureCause {
        match self {
            Self::ProviderRefused => FailureCause::ProviderRefused,
            Self::ProviderUnavailable => FailureCause::ProviderUnavailable,
            Self::StoreFailed => FailureCause::StoreFailed,
            Self::Fenced => FailureCause::Fenced,
            Self::Internal => FailureCause::Internal,
        }
    }
}

/// Something that happened to a machine, or a request to change it.
///
/// The caller must check everything outside the machine (entitlement, snapshot, token) before it creates the event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The host registered with its token. The provider created the server with this type.
    Registered {
        server_type: ServerType,
    },
    /// The host reported a failed boot.
    BootFailureReported,
    /// The token expired before the host registered.
    RegistrationExpired,
    /// The server was not created: the error is permanent, or the retries are exhausted.
    CreationFailed {
        failure: CreationFailure,
    },
    /// The provider no longer has the server.
    ServerGone,
    /// The provider once again has the server of a machine that failed because its server was missing.
    ServerFound,
    /// An operator provisions the slot that this machine holds.
    ProvisionRequested {
        restore: RestoreMode,
    },
    RecoverRequested {
        restore: RestoreMode,
    },
    ResizeRequested {
        to: ServerType,
    },
    /// The server is running with the new type.
    ResizeSucceeded,
    /// The resize failed; the server is running and still has its old type.
    ResizeReverted,
    /// The server did not return to service after a resize.
    ResizeFailed,
    /// The current operation made no progress for too long, or exceeded its time limit.
    OperationHung,
    /// An operator abandoned the operation that was creating this machine.
    OperationAbandoned,
    /// The successor failed, or the deletion was undone: the machine takes its slot back under a new epoch.
    Reinstated {
        epoch: Epoch,
        power: ServerPower,
    },
    /// The machine that was to replace this one was deleted before its host registered, so this one is deleted as well.
    SuccessorDeleted,
    /// An operator returns a failed machine to service. The provider reports this server type, and the host is healthy.
    ResumeRequested {
        server_type: ServerType,
    },
    /// The host reports that it is healthy. The provider reports this server type.
    HealthyHeartbeat {
        epoch: Epoch,
        server_type: ServerType,
    },
    /// An operator marks the machine as failed.
    FailRequested,
    DeleteRequested,
}

/// An effect of a transition, applied in the same transaction as the new state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Replace this machine with a new one in the same slot, with this status and at least this epoch: the new epoch
    /// must also be above every epoch in the object store.
    ///
    /// The new machine's operation takes a final backup, writes the fence and powers the predecessor off. The
    /// reconciler deletes the predecessor's server once the new machine is healthy.
    Replace { status: Status, restore: RestoreMode, epoch: Epoch },
    /// Cancel the current operation, if any.
    CancelOperation,
    /// Start the operation that takes a final backup and powers the server off. The reconciler deletes the server after
    /// a grace period.
    DeleteServer,
    /// Return the slot, under a new epoch, to the latest registered machine that still has a server, unless that
    /// machine or a later one was deleted, or a later one has stored a snapshot. This machine then leaves the slot.
    ReinstatePredecessor,
    /// If this machine has never registered, also delete the slot's last registered machine, if that machine still has
    /// a server.
    DeletePredecessor,
    /// Adopt this epoch, and start the operation that writes the fence, powers the server on and waits for the host.
    Reinstate { epoch: Epoch },
    /// Start the operation that changes the server's type.
    ChangeType { to: ServerType },
    /// Start the operation that powers on the server, which may be off, for example because of a resize. Has no effect
    /// if an operator powered the server off.
    PowerOn,
    /// Fail the current operation with this cause.
    FailOperation { cause: FailureCause },
    /// Close the proxied connections to this machine, because requests are no longer routed to it.
    CloseConnections,
}
