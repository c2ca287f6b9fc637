//! The machine's own PostgreSQL: the administrator's connections, a bounded pool of connections for each app's role,
//! and the change outbox.

mod budget;
mod cluster;
mod connect;
mod connection;
mod lease;
mod occupancy;
pub mod outbox;
mod pool;
mod role;
mod schema_lock;

pub use budget::ConnectionBudget;
pub use cluster::{fetch_connection_budget, prepare};
pub use connect::{Database, DatabaseError};
pub use connection::Connection;
pub use lease::Lease;
pub use pool::{Pool, PoolError};
pub use role::{enable_login, generate_password};
pub use schema_lock::lock_schemas;
