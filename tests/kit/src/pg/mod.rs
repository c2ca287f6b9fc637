//! PostgreSQL 16, the real one.
//!
//! A test takes a database of its own from the server that its process shares:
//!
//! ```no_run
//! # async fn f() -> anyhow::Result<()> {
//! let database = kit::pg::test_database().await?;
//! let client = database.connect().await?;
//! client.batch_execute("CREATE TABLE t (id int)").await?;
//! // To pay for a schema once and have it in each test's database:
//! let prepared = kit::pg::test_database_from("my schema", |url| async move { migrate(&url).await }).await?;
//! # async fn migrate(_: &str) -> anyhow::Result<()> { Ok(()) }
//! # Ok(()) }
//! ```
//!
//! Whoever needs a server that can be stopped and killed starts one:
//!
//! ```no_run
//! # async fn f() -> anyhow::Result<()> {
//! use kit::pg::{PgBinaries, PgOptions, PgServer};
//! let server = PgServer::start(&PgBinaries::locate_or_fetch(&kit::fetch::target_dir())?, PgOptions::default()).await?;
//! server.create_database("svc").await?;
//! server.kill9().await?;
//! server.start_again().await?; // same data, same port, same password
//! # Ok(()) }
//! ```

mod admin;
mod binaries;
pub mod copy;
mod databases;
mod server;

pub use binaries::PgBinaries;
pub use databases::{TestDatabase, shared, test_database, test_database_from};
pub use server::{Durability, PgOptions, PgServer};

#[cfg(test)]
mod tests;
