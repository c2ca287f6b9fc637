//! A machine's states, with the data that belongs to each.

use serde::{Deserialize, Serialize};

use super::choice::must_be_one_of;
use super::epoch::Epoch;
use super::name::ServerType;

/// The status as it is stored and shown (specification, part 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(
    strum::EnumString, strum::IntoStaticStr, strum::VariantArray, strum::VariantNames, strum::Display,
)]
#[strum(serialize_all = "lowercase", parse_err_ty = String, parse_err_fn = unknown_status)]
pub enum Status {
    Provisioning,
    Running,
    Recovering,
    Resizing,
    Failed,
}

impl Status {
    pub const ALL: &'static [Self] = <Self as strum::VariantArray>::VARIANTS;
    pub const NAMES: &'static [&'static str] = <Self as strum::VariantNames>::VARIANTS;

    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Returns whether requests are routed to the machine: only while it is running.
    pub fn is_routable(self) -> bool {
        self == Self::Running
    }
}

fn unknown_status(_: &str) -> String {
    must_be_one_of(Status::NAMES)
}

/// The reason a machine is `failed`. A healthy heartbeat clears some causes: see
/// [`FailureCause::is_cleared_by_heartbeat`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(strum::EnumString, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case", parse_err_ty = String, parse_err_fn = unknown_cause)]
pub enum FailureCause {
    /// The host reported a failed boot.
    BootReported,
    RegistrationExpired,
    /// The provider permanently refused to create the server.
    ProviderRefused,
    /// The provider did not create the server within the retry limit.
    ProviderUnavailable,
    /// The object store failed, or its content cannot be read.
    StoreFailed,
    /// A machine with a higher epoch has fenced the slot.
    Fenced,
    /// The platform failed: its database, its keys, or the rendering of user-data.
    Internal,
    ServerGone,
    /// A resize failed; the server may be off.
    Resize,
    /// The machine's operation made no progress for too long, or exceeded its time limit.
    OperationHung,
    /// An operator marked the machine as failed.
    Operator,
    /// An operator abandoned the operation that created the machine.
    Abandoned,
    /// The machine has its slot back and its server is being powered on, or its missing server was found again. The
    /// first healthy heartbeat makes the machine `running`.
    Reinstating,
}

impl FailureCause {
    pub const ALL: &'static [Self] = <Self as strum::VariantArray>::VARIANTS;

    /// Returns whether a healthy heartbeat with the machine's epoch makes the machine `running` again.
    pub fn is_cleared_by_heartbeat(self) -> bool {
        matches!(self, Self::Resize | Self::Reinstating)
    }

    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

fn unknown_cause(text: &str) -> String {
    format!("{text:?} is not a failure cause")
}

/// A machine's state. [`super::event::Event::Reinstated`] can make a `Retired` or `Deleted` machine active again, so
/// those states keep the previous one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    Provisioning,
    Recovering,
    Running {
        server_type: ServerType,
    },
    Resizing {
        from: ServerType,
        to: ServerType,
    },
    Failed {
        cause: FailureCause,
    },
    /// Left its slot because it was replaced, or because its predecessor was reinstated.
    Retired {
        previous: Box<State>,
    },
    /// Soft-deleted; the row is kept, and the machine may be reinstated while its server is kept.
    Deleted {
        previous: Box<State>,
    },
}

impl State {
    /// Returns the stored status; `None` for a machine that no longer holds its slot.
    pub fn status(&self) -> Option<Status> {
        match self {
            Self::Provisioning => Some(Status::Provisioning),
            Self::Recovering => Some(Status::Recovering),
            Self::Running { .. } => Some(Status::Running),
            Self::Resizing { .. } => Some(Status::Resizing),
            Self::Failed { .. } => Some(Status::Failed),
            Self::Retired { .. } | Self::Deleted { .. } => None,
        }
    }

    /// Returns whether the machine is active, that is, holds its slot. A slot has at most one active machine.
    pub fn is_active(&self) -> bool {
        self.status().is_some()
    }
}

/// The part of a machine that transitions use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    pub state: State,
    pub epoch: Epoch,
}
