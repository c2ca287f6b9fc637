//! The provider's servers and actions in our own types; the provider's JSON stays in the adapter.

use std::collections::BTreeMap;
use std::fmt;
use std::net::Ipv4Addr;

use secrecy::SecretString;
use serde::{Deserialize, Serialize};

use svc_machine::name::{Location, ServerType};

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
    /// The provider's id for a server; never reused.
    ServerId
);
numeric_id!(
    /// The provider's id for an action.
    ActionId
);

/// An order for a server. Its name is unique at the provider and serves as the idempotency key.
#[derive(Debug, Clone)]
pub struct ServerOrder {
    pub name: String,
    pub server_type: ServerType,
    pub image: String,
    pub location: Location,
    pub labels: BTreeMap<String, String>,
    /// Secret, because it contains the host's initial credentials. The provider accepts at most 32 KiB.
    pub user_data: SecretString,
}

/// A server as the provider reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    pub id: ServerId,
    pub name: String,
    pub status: ServerStatus,
    /// Whether an action is in progress; the provider rejects other actions until it ends.
    pub is_locked: bool,
    pub public_ipv4: Option<Ipv4Addr>,
    pub server_type: ServerType,
    /// The server's actual disk size. After a type change, it may be smaller than the disk size of the type.
    pub disk_gb: u32,
    pub labels: BTreeMap<String, String>,
}

/// An ordered server, with the actions that create and start it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreatedServer {
    pub server: Server,
    pub actions: Vec<ActionId>,
}

/// The status of a server. `Running` does not mean that its host is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum ServerStatus {
    Initializing,
    Starting,
    Running,
    Stopping,
    Off,
    Deleting,
    Migrating,
    Rebuilding,
    /// The provider reports the status as unknown, or reports one that this release does not support.
    Unknown,
}

impl ServerStatus {
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// An action at the provider.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Action {
    pub id: ActionId,
    pub command: String,
    pub status: ActionStatus,
}

/// The status of an action. `Error` holds the provider's text, for the log only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ActionStatus {
    Running,
    Success,
    Error { code: String, message: String },
}

/// The outcome of a successful deletion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeleteOutcome {
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
