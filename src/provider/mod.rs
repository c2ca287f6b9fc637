//! The platform's interface to a cloud provider: one trait, its types, and one adapter.
//!
//! This package does not depend on machine states or operations. Invariant: only the error's kind decides what may be
//! retried, and a call that may have created something never reports a clean failure.

mod allowance;
mod error;
pub mod hetzner;
mod price;
mod server;

use async_trait::async_trait;

pub use self::allowance::{Allowance, BudgetGrant, ObservedBudget};
pub use self::error::{Cause, ErrorKind, ProviderError};
pub use self::price::{Amount, ServerPrices};
pub use self::server::{
    Action, ActionId, ActionStatus, Created, Deleted, Server, ServerId, ServerOrder, ServerStatus,
    ServerTypeInfo,
};
use svc_machine::name::{Location, ServerType};

/// Servers at a cloud provider. Every call has a deadline and bounded retries.
#[async_trait]
pub trait Provider: Send + Sync {
    /// Orders a server. After [`ErrorKind::Ambiguous`] the server may exist: look it up by name before another order.
    /// [`ErrorKind::Conflict`] means that a server of this name exists.
    async fn create(&self, order: &ServerOrder) -> Result<Created, ProviderError>;

    /// The server with exactly this name.
    async fn find(&self, name: &str) -> Result<Option<Server>, ProviderError>;

    /// All servers that match the label selector (`key=value,key2`).
    async fn find_by_label(&self, selector: &str) -> Result<Vec<Server>, ProviderError>;

    async fn get(&self, id: ServerId) -> Result<Option<Server>, ProviderError>;

    /// Deletes a server with its disk. A missing server counts as deleted.
    async fn delete(&self, id: ServerId) -> Result<Deleted, ProviderError>;

    /// The progress of an action.
    async fn action(&self, id: ActionId) -> Result<Action, ProviderError>;

    /// Switches the power on; a running server is unaffected.
    async fn power_on(&self, id: ServerId) -> Result<Action, ProviderError>;

    /// Cuts the power.
    async fn power_off(&self, id: ServerId) -> Result<Action, ProviderError>;

    /// Requests a restart from the operating system, which may ignore it.
    async fn reboot(&self, id: ServerId) -> Result<Action, ProviderError>;

    /// Requests a shutdown from the operating system. The action's success does not prove that the server is off.
    async fn shutdown(&self, id: ServerId) -> Result<Action, ProviderError>;

    /// Changes the type of a server that is off. Its disk always keeps its size. After an ambiguous failure, check
    /// the server's type.
    async fn change_type(&self, id: ServerId, to: &ServerType) -> Result<Action, ProviderError>;

    /// Whether the provider has a location of this name.
    async fn has_location(&self, name: &Location) -> Result<bool, ProviderError>;

    /// The provider's data about this server type, or `None`.
    async fn server_type(&self, name: &ServerType) -> Result<Option<ServerTypeInfo>, ProviderError>;

    /// The prices of servers of this type.
    async fn prices(&self, name: &ServerType) -> Result<ServerPrices, ProviderError>;

    /// The number of servers in the account's project, including servers of other installations.
    async fn count_servers(&self) -> Result<u64, ProviderError>;
}
