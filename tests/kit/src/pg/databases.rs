//! A fresh database per test, on one server per test process or per run.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use anyhow::Result;
use tokio::sync::OnceCell;
use tokio_postgres::Client;

use super::{PgAddress, PgBinaries, PgOptions, PgServer, run_server};
use crate::fetch;

/// The server of this process, which has the databases of [`test_database`]. It is started on first use and stopped
/// with the process.
///
/// # Errors
/// Fails if it cannot be started.
pub async fn process_server() -> Result<&'static PgServer> {
    static SERVER: OnceCell<PgServer> = OnceCell::const_new();
    let server = SERVER.get_or_try_init(|| async {
        let binaries =
            tokio::task::spawn_blocking(|| PgBinaries::locate_or_fetch(&fetch::target_dir())).await??;
        PgServer::start(&binaries, PgOptions::default()).await
    });
    server.await
}

/// The server of [`test_database_from`].
///
/// # Errors
/// Fails if it cannot be started.
pub async fn prepared_server() -> Result<PgAddress> {
    match run_server::address()? {
        Some(address) => Ok(address),
        None => Ok(process_server().await?.address().clone()),
    }
}

/// A test's own database, dropped at some point after the value.
#[derive(Debug)]
pub struct TestDatabase {
    server: PgAddress,
    name: String,
}

/// Creates an empty database on the server of this process. Roles belong to a server, so that those of the test's
/// applications cannot collide with another test's.
pub async fn test_database() -> Result<TestDatabase> {
    database_from(process_server().await?.address(), "template1").await
}

/// Creates a copy of a prepared database. `prepare` runs once per `key` and server, with the URL of an empty database;
/// it must close its connections, and creates the same content in each process of a run.
pub async fn test_database_from<F, Fut>(key: &str, prepare: F) -> Result<TestDatabase>
where
    F: FnOnce(String) -> Fut,
    Fut: Future<Output = Result<()>>,
{
    static TEMPLATES: LazyLock<Mutex<HashMap<String, Arc<OnceCell<String>>>>> = LazyLock::new(Mutex::default);
    let template = {
        let mut templates = TEMPLATES.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(templates.entry(key.to_owned()).or_default())
    };
    let server = prepared_server().await?;
    let name = template
        .get_or_try_init(|| async {
            run_server::drop_databases_of_ended_tests(&server).await?;
            run_server::template(&server, key, prepare).await
        })
        .await?;
    database_from(&server, name).await
}

async fn database_from(server: &PgAddress, template: &str) -> Result<TestDatabase> {
    let databases = std::mem::take(&mut *PENDING_DROPS.lock().unwrap_or_else(PoisonError::into_inner));
    for (server, name) in databases {
        server.drop_database(&name).await?;
    }
    let name = next_name();
    server.database_from_template(template, &name).await?;
    Ok(TestDatabase { server: server.clone(), name })
}

// `Drop` cannot await the server, so the next request for a database drops these.
static PENDING_DROPS: Mutex<Vec<(PgAddress, String)>> = Mutex::new(Vec::new());

/// Unique among the processes of a run.
fn next_name() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("test_{}_{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

impl TestDatabase {
    pub fn url(&self) -> String {
        self.server.url(&self.name)
    }

    pub fn server(&self) -> &PgAddress {
        &self.server
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Connects as superuser. The connection is closed when the client is dropped.
    pub async fn connect(&self) -> Result<Client> {
        self.server.connect(&self.name).await
    }
}

impl Drop for TestDatabase {
    fn drop(&mut self) {
        let mut drops = PENDING_DROPS.lock().unwrap_or_else(PoisonError::into_inner);
        drops.push((self.server.clone(), std::mem::take(&mut self.name)));
    }
}
