//! The platform's interface to a cloud provider: one trait, its types, and one adapter.
//!
//! This package does not depend on machine states or operations. Invariant: only the error's kind decides what may be
//! retried, and a failed call that may have created something always reports [`ErrorKind::Ambiguous`].

mod error;
pub mod hetzner;
mod price;
mod rate_budget;
mod server;

use async_trait::async_trait;

pub use self::error::{Cause, ErrorKind, ProviderError};
pub use self::price::{Amount, ServerPrices};
pub use self::rate_budget::{BudgetGrant, ObservedBudget, RateBudget};
pub use self::server::{
    Action, ActionId, ActionStatus, CreatedServer, DeleteOutcome, Server, ServerId, ServerOrder,
    ServerStatus, ServerTypeInfo,
};
use svc_machine::name::{Location, ServerType};

/// Servers at a cloud provider. Every call has a timeout and bounded retries.
#[async_trait]
pub trait Provider: Send + Sync {
    /// Orders a server. After [`ErrorKind::Ambiguous`], the server may exist: look it up by name before ordering again.
    /// [`ErrorKind::Conflict`] means that a server with this name exists.
    async fn create(&self, order: &ServerOrder) -> Result<CreatedServer, ProviderError>;

    /// Finds the server with exactly this name; `None` if there is none.
    async fn find(&self, name: &str) -> Result<Option<Server>, ProviderError>;

    /// Lists all servers that match the label selector (`key=value,key2`).
    async fn list_by_label(&self, selector: &str) -> Result<Vec<Server>, ProviderError>;

    async fn get(&self, id: ServerId) -> Result<Option<Server>, ProviderError>;

    /// Deletes a server and its disk. A missing server counts as deleted.
    async fn delete(&self, id: ServerId) -> Result<DeleteOutcome, ProviderError>;

    /// Looks up an action's progress.
    async fn get_action(&self, id: ActionId) -> Result<Action, ProviderError>;

    /// Powers the server on; a running server is unaffected.
    async fn power_on(&self, id: ServerId) -> Result<Action, ProviderError>;

    /// Cuts the power.
    async fn power_off(&self, id: ServerId) -> Result<Action, ProviderError>;

    /// Requests a restart of the operating system, which may ignore the request.
    async fn reboot(&self, id: ServerId) -> Result<Action, ProviderError>;

    /// Requests a shutdown of the operating system. The action's success does not prove that the server is off.
    async fn shutdown(&self, id: ServerId) -> Result<Action, ProviderError>;

    /// Changes the type of a server that is off. Its disk keeps its size. After [`ErrorKind::Ambiguous`], check the
    /// server's type before repeating the call.
    async fn change_type(&self, id: ServerId, to: &ServerType) -> Result<Action, ProviderError>;

    /// Whether the provider has a location with this name.
    async fn has_location(&self, name: &Location) -> Result<bool, ProviderError>;

    /// Looks up a server type; `None` if the provider does not offer it.
    async fn get_server_type(&self, name: &ServerType) -> Result<Option<ServerTypeInfo>, ProviderError>;

    /// Looks up the prices of servers of this type, and of a public IPv4 address. `servers` is empty if the provider
    /// does not sell the type.
    async fn get_prices(&self, name: &ServerType) -> Result<ServerPrices, ProviderError>;

    /// Counts the servers in the account's project, including other installations' servers.
    async fn count_servers(&self) -> Result<u64, ProviderError>;
}
