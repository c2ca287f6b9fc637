//! What can happen to a machine, and what follows besides its new state.

use super::epoch::Epoch;
use super::name::ServerType;
use super::state::{FailureCause, Status};

/// How a new machine gets its database (contract, part 4, "Restore").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RestoreMode {
    /// A snapshot must be there and is restored.
    Required,
    /// Confirmed absence of a snapshot is accepted; a present one is restored all the same.
    Empty,
}

impl RestoreMode {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Required => "required",
            Self::Empty => "empty",
        }
    }
}

impl std::str::FromStr for RestoreMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "required" => Ok(Self::Required),
            "empty" => Ok(Self::Empty),
            _ => Err("must be required or empty".to_owned()),
        }
    }
}

/// Whether a server that was to be replaced or deleted may have been switched off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ServerPower {
    On,
    /// A power off was ordered, whether or not it took place.
    MaybeOff,
}

/// What kept a machine from being made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CreationFailure {
    ProviderRefused,
    ProviderUnavailable,
    StoreFailed,
    Fenced,
    Internal,
}

impl CreationFailure {
    pub const ALL: [Self; 5] =
        [Self::ProviderRefused, Self::ProviderUnavailable, Self::StoreFailed, Self::Fenced, Self::Internal];

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

/// One thing that happened to a machine, or that somebody asks of it.
///
/// The caller has checked what only the outside knows (entitlement, the snapshot, the token) before it makes the event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The host registered with its token; the provider made it with this type.
    Registered {
        server_type: ServerType,
    },
    /// The host said at which stage its boot failed.
    BootFailureReported,
    /// The token ran out before the host registered.
    RegistrationExpired,
    /// Its server was not created, and creating it is not retried any more.
    CreationFailed {
        why: CreationFailure,
    },
    /// The provider no longer has the server.
    ServerGone,
    /// The provider has the server of a machine that failed because it was gone.
    ServerFound,
    /// An operator asks for the slot to be provisioned; this machine is the slot's.
    ProvisionRequested {
        restore: RestoreMode,
    },
    RecoverRequested {
        restore: RestoreMode,
    },
    ResizeRequested {
        to: ServerType,
    },
    /// The provider runs the new type.
    ResizeSucceeded,
    /// The change did not happen; the server runs its old type again.
    ResizeReverted,
    /// The server could not be brought back after a change.
    ResizeFailed,
    /// The operation under way goes on longer than any may.
    OperationHung,
    /// The operator gave up the operation that makes this machine.
    OperationAbandoned,
    /// Its successor will not come, or its deletion is undone: the machine takes its slot back under a new epoch.
    Reinstated {
        epoch: Epoch,
        power: ServerPower,
    },
    /// The machine that was to replace this one is deleted, and the slot with it.
    SuccessorDeleted,
    /// An operator takes a failed machine back into service; the provider reports this type, and its host is well.
    ResumeRequested {
        server_type: ServerType,
    },
    /// The host says that it is well; the provider reports this type.
    HealthyHeartbeat {
        epoch: Epoch,
        server_type: ServerType,
    },
    OperatorFailed,
    DeleteRequested,
}

/// What is to be done with a new state, in the same transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Put a new machine of the slot in this one's place, `epoch` one higher, in this status.
    ///
    /// The new machine's operation takes a last backup, writes the fence and switches the predecessor off. Its server is
    /// deleted by the reconciler, once the new machine has proven itself.
    Replace { status: Status, restore: RestoreMode, epoch: Epoch },
    /// End the operation under way, if any, as cancelled.
    CancelOperation,
    /// Start the operation that takes a last backup and switches the server off; the reconciler deletes it after a grace.
    DeleteServer,
    /// Give the slot back to its last registered machine, if that still has a server, under a new epoch. This machine
    /// then leaves the slot.
    ReinstatePredecessor,
    /// Delete the last registered machine of the slot along with this one, if it still has a server.
    DeletePredecessor,
    /// Take this epoch, and start the operation that fences with it, switches the server on and waits for its host.
    Reinstate { epoch: Epoch },
    /// Start the operation that changes the server's type.
    ChangeType { to: ServerType },
    /// Start the operation that switches the server on: a change of its type may have left it off.
    SwitchOn,
    /// End the operation under way as failed, with the cause.
    FailOperation { cause: FailureCause },
    /// Routing ends: proxied connections to this machine close.
    CloseConnections,
}
