//! The cloud provider as the platform needs it: a short port, its types, and the one adapter.
//!
//! Nothing here knows machines' states or operations. The invariant: an error's kind alone says what may be tried again,
//! and a call that may have created something never says that it failed cleanly.

mod allowance;
mod error;
pub mod hetzner;
mod server;

use async_trait::async_trait;

pub use self::allowance::{Allowance, Grant, Seen};
pub use self::error::{Cause, ErrorKind, ProviderError};
pub use self::server::{
    Action, ActionId, ActionStatus, Created, Deleted, Server, ServerId, ServerOrder, ServerStatus,
    ServerTypeInfo,
};
use crate::machine::name::{Location, ServerType};

/// Servers at a cloud provider. Every call has a deadline and bounded retries of its own.
#[async_trait]
pub trait Provider: Send + Sync {
    /// Orders a server. Of kind [`ErrorKind::Ambiguous`], the error says that the server may exist: look it up by
    /// name before another order. Of kind [`ErrorKind::Conflict`], a server of this name exists.
    async fn create(&self, order: &ServerOrder) -> Result<Created, ProviderError>;

    /// The server of this exact name.
    async fn find(&self, name: &str) -> Result<Option<Server>, ProviderError>;

    /// Every server that the label selector (`key=value,key2`) chooses.
    async fn find_by_label(&self, selector: &str) -> Result<Vec<Server>, ProviderError>;

    async fn get(&self, id: ServerId) -> Result<Option<Server>, ProviderError>;

    /// Deletes a server with its disk; one that is not there counts as deleted.
    async fn delete(&self, id: ServerId) -> Result<Deleted, ProviderError>;

    /// How far an action is.
    async fn action(&self, id: ActionId) -> Result<Action, ProviderError>;

    /// Switches the power on; a server that runs stays as it is.
    async fn power_on(&self, id: ServerId) -> Result<Action, ProviderError>;

    /// Cuts the power.
    async fn power_off(&self, id: ServerId) -> Result<Action, ProviderError>;

    /// Requests a restart from the operating system, which may ignore it.
    async fn reboot(&self, id: ServerId) -> Result<Action, ProviderError>;

    /// Asks the operating system to shut down; the action's success is no proof that it did.
    async fn shutdown(&self, id: ServerId) -> Result<Action, ProviderError>;

    /// Changes the type of a server that is off; its disk keeps its size, always. After an ambiguous failure, look at
    /// the server's type.
    async fn change_type(&self, id: ServerId, to: &ServerType) -> Result<Action, ProviderError>;

    /// Whether the provider has a location of this name.
    async fn has_location(&self, name: &Location) -> Result<bool, ProviderError>;

    /// What the provider offers under this name, or `None`.
    async fn server_type(&self, name: &ServerType) -> Result<Option<ServerTypeInfo>, ProviderError>;
}
