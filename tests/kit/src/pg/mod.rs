//! Real PostgreSQL 16 servers.
//!
//! A test gets its own database on a server shared by its process, or by the whole `cargo xtask test` run:
//!
//! ```no_run
//! # async fn f() -> anyhow::Result<()> {
//! let database = kit::pg::test_database().await?;
//! let client = database.connect().await?;
//! client.batch_execute("CREATE TABLE t (id int)").await?;
//! // Prepare a schema once and copy it for each test:
//! let prepared = kit::pg::test_database_from("my schema", |url| async move { migrate(&url).await }).await?;
//! # async fn migrate(_: &str) -> anyhow::Result<()> { Ok(()) }
//! # Ok(()) }
//! ```
//!
//! Tests that stop or kill a server start their own:
//!
//! ```no_run
//! # async fn f() -> anyhow::Result<()> {
//! use kit::pg::{PgBinaries, PgOptions, PgServer};
//! let server = PgServer::start(&PgBinaries::locate_or_fetch(&kit::fetch::target_dir())?, PgOptions::default()).await?;
//! server.create_database("svc").await?;
//! server.kill9().await?;
//! server.restart().await?; // same data, same port, same password
//! # Ok(()) }
//! ```

mod admin;
mod binaries;
mod cluster;
pub mod copy;
mod databases;
mod run_server;
mod server;

pub use admin::PgConnectionInfo;
pub use binaries::PgBinaries;
pub use databases::{TestDatabase, process_server, template_server, test_database, test_database_from};
pub use run_server::RunServer;
pub use server::{Durability, PgOptions, PgServer};

#[cfg(test)]
mod tests;
