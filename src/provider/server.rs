//! A provider's server and what is done to it, in our words; the provider's JSON stays in the adapter.

use std::collections::BTreeMap;
use std::fmt;
use std::net::Ipv4Addr;

use secrecy::SecretString;
use serde::{Deserialize, Serialize};

use crate::machine::name::{Location, ServerType};

macro_rules! numeric_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub i64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

numeric_id!(
    /// The provider's id of a server; never given to another one.
    ServerId
);
numeric_id!(
    /// The provider's id of an action.
    ActionId
);

/// What is ordered. The name is the order's idempotency key: unique at the provider.
#[derive(Debug, Clone)]
pub struct ServerOrder {
    pub name: String,
    pub server_type: ServerType,
    pub image: String,
    pub location: Location,
    pub labels: BTreeMap<String, String>,
    /// Carries the host's first credentials, hence secret. At most 32 KiB at the provider.
    pub user_data: SecretString,
}

/// A server as the provider reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    pub id: ServerId,
    pub name: String,
    pub status: ServerStatus,
    /// An action on it is under way: another one is refused until it has ended.
    pub locked: bool,
    pub public_ipv4: Option<Ipv4Addr>,
    pub server_type: ServerType,
    /// The size of the disk that the server really has; its type's may be larger after a change without the disk.
    pub disk_gb: u32,
    pub labels: BTreeMap<String, String>,
}

/// A server that was ordered, and the actions that make and start it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Created {
    pub server: Server,
    pub actions: Vec<ActionId>,
}

/// The state of a server's power. Running never means that its host is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ServerStatus {
    Initializing,
    Starting,
    Running,
    Stopping,
    Off,
    Deleting,
    Migrating,
    Rebuilding,
    /// The provider does not know, or named a state that we do not.
    Unknown,
}

impl ServerStatus {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Initializing => "initializing",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Stopping => "stopping",
            Self::Off => "off",
            Self::Deleting => "deleting",
            Self::Migrating => "migrating",
            Self::Rebuilding => "rebuilding",
            Self::Unknown => "unknown",
        }
    }
}

impl fmt::Display for ServerStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Something under way at the provider.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Action {
    pub id: ActionId,
    pub command: String,
    pub status: ActionStatus,
}

/// `Error` holds the provider's words, for the log only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ActionStatus {
    Running,
    Success,
    Error { code: String, message: String },
}

/// How a deletion ended; both are success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deleted {
    Done,
    WasAbsent,
}

/// One of the provider's server types.
#[derive(Debug, Clone, PartialEq)]
pub struct ServerTypeInfo {
    pub name: ServerType,
    pub cores: u32,
    pub memory_gb: f64,
    pub disk_gb: u32,
}
