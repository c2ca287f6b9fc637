//! The server that a run's tests share if they copy a prepared database. nextest runs each test in its own process, and
//! starting a server with a migrated schema for each process would take longer than most of these tests.

use std::path::Path;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use super::{PgBinaries, PgConnectionInfo, PgOptions, PgServer};
use crate::fetch;

/// Environment variable with the port and the superuser's password of the run's server: `PORT PASSWORD`.
pub const CONNECTION_VAR: &str = "SVC_TEST_POSTGRES";
/// Enough for the processes of all tests that run concurrently.
const MAX_CONNECTIONS: &str = "400";

/// A server for the tests in a run, stopped on drop.
#[derive(Debug)]
pub struct RunServer(PgServer);

impl RunServer {
    /// # Errors
    /// Fails if PostgreSQL cannot be fetched or started.
    pub async fn start() -> Result<Self> {
        let target = fetch::target_dir();
        let binaries = tokio::task::spawn_blocking(move || PgBinaries::locate_or_fetch(&target)).await??;
        // Databases exist only for seconds, so autovacuum is unnecessary.
        let settings = [("autovacuum", "off"), ("max_connections", MAX_CONNECTIONS)];
        let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        Ok(Self(PgServer::start(&binaries, PgOptions { settings, ..PgOptions::default() }).await?))
    }

    /// Returns the variable that passes the server's port and password to the tests.
    pub fn variable(&self) -> (&'static str, String) {
        let PgConnectionInfo { port, password } = self.0.connection_info();
        (CONNECTION_VAR, format!("{port} {password}"))
    }
}

/// Returns the connection information for the run's server, if there is one.
pub(super) fn connection_info() -> Result<Option<PgConnectionInfo>> {
    let Ok(text) = std::env::var(CONNECTION_VAR) else { return Ok(None) };
    let (port, password) =
        text.split_once(' ').with_context(|| format!("{CONNECTION_VAR} must be PORT PASSWORD"))?;
    Ok(Some(PgConnectionInfo { port: port.parse()?, password: password.to_owned() }))
}

/// Returns the name of the template for `key` on a server that several processes share. The first process prepares it.
pub(super) async fn prepare_template<F, Fut>(
    server: &PgConnectionInfo,
    key: &str,
    prepare: F,
) -> Result<String>
where
    F: FnOnce(String) -> Fut,
    Fut: Future<Output = Result<()>>,
{
    let digest = hex::encode(Sha256::digest(key));
    let name = format!("template_{}", &digest[..12]);
    let session = server.connect("postgres").await?;
    let lock = i64::from_str_radix(&digest[..15], 16)?;
    // The lock is held until the session ends.
    session.execute("SELECT pg_advisory_lock($1)", &[&lock]).await?;
    if !server.list_databases().await?.contains(&name) {
        // The template gets its final name only once it is complete.
        let unfinished = format!("unfinished_{name}");
        server.drop_database(&unfinished).await?;
        server.create_database(&unfinished).await?;
        prepare(server.url(&unfinished)).await?;
        server.rename_database(&unfinished, &name).await?;
    }
    Ok(name)
}

/// Drops the databases of tests that have ended.
pub(super) async fn drop_databases_of_ended_tests(server: &PgConnectionInfo) -> Result<()> {
    for name in server.list_databases().await? {
        let pid = name.strip_prefix("test_").and_then(|rest| rest.split('_').next());
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            server.drop_database(&name).await?;
        }
    }
    Ok(())
}
