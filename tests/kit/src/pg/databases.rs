//! A new database for each test, on one server per test process or per run.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use anyhow::Result;
use tokio::sync::OnceCell;
use tokio_postgres::Client;

use super::{PgBinaries, PgConnectionInfo, PgOptions, PgServer, run_server};
use crate::fetch;

/// Returns this process's server, on which [`test_database`] creates databases. It is started on first use, and stopped
/// when the process ends.
pub async fn process_server() -> Result<&'static PgServer> {
    static SERVER: OnceCell<PgServer> = OnceCell::const_new();
    let server = SERVER.get_or_try_init(|| async {
        let binaries =
            tokio::task::spawn_blocking(|| PgBinaries::locate_or_fetch(&fetch::target_dir())).await??;
        PgServer::start(&binaries, PgOptions::default()).await
    });
    server.await
}

/// Returns the server on which [`test_database_from`] creates databases.
///
/// # Errors
/// Fails if the server cannot be started, or if the variable that names the run's server is malformed.
pub async fn template_server() -> Result<PgConnectionInfo> {
    match run_server::connection_info()? {
        Some(connection_info) => Ok(connection_info),
        None => Ok(process_server().await?.connection_info().clone()),
    }
}

/// A test's own database. It is dropped from the server some time after this value is dropped.
#[derive(Debug)]
pub struct TestDatabase {
    server: PgConnectionInfo,
    name: String,
}

/// Creates an empty database on this process's server. Roles belong to a server, so this test's app roles cannot
/// collide with those of another process.
pub async fn test_database() -> Result<TestDatabase> {
    create_test_database(process_server().await?.connection_info(), "template1").await
}

/// Creates a copy of a prepared database. `prepare` runs once per `key` and server, with the URL of an empty database.
/// It must close its connections, and must create the same content in every process of a run.
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
    let server = template_server().await?;
    let name = template
        .get_or_try_init(|| async {
            run_server::drop_databases_of_ended_tests(&server).await?;
            run_server::prepare_template(&server, key, prepare).await
        })
        .await?;
    create_test_database(&server, name).await
}

async fn create_test_database(server: &PgConnectionInfo, template: &str) -> Result<TestDatabase> {
    let pending_drops = std::mem::take(&mut *PENDING_DROPS.lock().unwrap_or_else(PoisonError::into_inner));
    for (server, name) in pending_drops {
        server.drop_database(&name).await?;
    }
    let name = generate_name();
    server.create_database_from_template(template, &name).await?;
    Ok(TestDatabase { server: server.clone(), name })
}

// `Drop` cannot await the server, so the next request for a database drops these databases.
static PENDING_DROPS: Mutex<Vec<(PgConnectionInfo, String)>> = Mutex::new(Vec::new());

/// Generates a name that is unique among the processes in a run.
fn generate_name() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("test_{}_{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

impl TestDatabase {
    pub fn url(&self) -> String {
        self.server.url(&self.name)
    }

    pub fn server(&self) -> &PgConnectionInfo {
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
        let mut pending_drops = PENDING_DROPS.lock().unwrap_or_else(PoisonError::into_inner);
        pending_drops.push((self.server.clone(), std::mem::take(&mut self.name)));
    }
}
