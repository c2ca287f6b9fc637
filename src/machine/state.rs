//! The states of a machine, with the data that belongs to each.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::epoch::Epoch;
use super::name::ServerType;

/// The status as it is stored and shown (specification, part 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Provisioning,
    Running,
    Recovering,
    Resizing,
    Failed,
}

impl Status {
    pub const ALL: [Self; 5] =
        [Self::Provisioning, Self::Running, Self::Recovering, Self::Resizing, Self::Failed];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Provisioning => "provisioning",
            Self::Running => "running",
            Self::Recovering => "recovering",
            Self::Resizing => "resizing",
            Self::Failed => "failed",
        }
    }

    /// Only a running machine is routed to.
    pub fn is_routable(self) -> bool {
        self == Self::Running
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Status {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|status| status.as_str() == text)
            .ok_or_else(|| "must be provisioning, running, recovering, resizing or failed".to_owned())
    }
}

/// Reason why a machine is `failed`. [`FailureCause::heals`] says which causes end with a healthy heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureCause {
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
    Resize,
    /// Its operation exceeded every time limit.
    OperationHung,
    Operator,
    /// An operator abandoned the operation that created it.
    Abandoned,
    /// It has its slot back and its server is being switched on. Its first healthy heartbeat makes it run.
    Reinstating,
}

impl FailureCause {
    pub const ALL: [Self; 13] = [
        Self::BootReported,
        Self::RegistrationExpired,
        Self::ProviderRefused,
        Self::ProviderUnavailable,
        Self::StoreFailed,
        Self::Fenced,
        Self::Internal,
        Self::ServerGone,
        Self::Resize,
        Self::OperationHung,
        Self::Operator,
        Self::Abandoned,
        Self::Reinstating,
    ];

    /// Whether a healthy heartbeat of the machine's epoch makes it run again.
    pub fn heals(self) -> bool {
        matches!(self, Self::Resize | Self::Reinstating)
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::BootReported => "boot_reported",
            Self::RegistrationExpired => "registration_expired",
            Self::ProviderRefused => "provider_refused",
            Self::ProviderUnavailable => "provider_unavailable",
            Self::StoreFailed => "store_failed",
            Self::Fenced => "fenced",
            Self::Internal => "internal",
            Self::ServerGone => "server_gone",
            Self::Resize => "resize",
            Self::OperationHung => "operation_hung",
            Self::Operator => "operator",
            Self::Abandoned => "abandoned",
            Self::Reinstating => "reinstating",
        }
    }
}

impl FromStr for FailureCause {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|cause| cause.as_str() == text)
            .ok_or_else(|| format!("{text:?} is not a failure cause"))
    }
}

/// The state of a machine. Only [`super::event::Event::Reinstated`] leads out of `Retired` and `Deleted`, so both
/// keep the previous state.
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
    /// Replaced by a later machine of its slot.
    Retired {
        was: Box<State>,
    },
    /// Soft-deleted by the operator.
    Deleted {
        was: Box<State>,
    },
}

impl State {
    /// The stored status; `None` for a machine that no longer holds its slot.
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

    /// An active machine holds its slot; a slot has at most one.
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
