//! A fresh database per test, on one server per test process.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use anyhow::Result;
use tokio::sync::OnceCell;
use tokio_postgres::Client;

use super::{PgBinaries, PgOptions, PgServer};
use crate::fetch;

/// The server shared by all tests of this process. It is started on first use and stopped with the process.
pub async fn shared_server() -> Result<&'static PgServer> {
    static SHARED: OnceCell<PgServer> = OnceCell::const_new();
    SHARED
        .get_or_try_init(|| async {
            let binaries =
                tokio::task::spawn_blocking(|| PgBinaries::locate_or_fetch(&fetch::target_dir())).await??;
            PgServer::start(&binaries, PgOptions::default()).await
        })
        .await
}

/// A test's own database on the shared server, dropped at some point after the value.
#[derive(Debug)]
pub struct TestDatabase {
    server: &'static PgServer,
    name: String,
}

/// Creates an empty database.
pub async fn test_database() -> Result<TestDatabase> {
    database_from("template1").await
}

/// Creates a copy of a prepared database. `prepare` runs once per `key` and process, with the URL of an empty database;
/// it must close its connections.
pub async fn test_database_from<F, Fut>(key: &str, prepare: F) -> Result<TestDatabase>
where
    F: FnOnce(String) -> Fut,
    Fut: Future<Output = Result<()>>,
{
    static TEMPLATES: LazyLock<Mutex<HashMap<String, Arc<OnceCell<String>>>>> = LazyLock::new(Mutex::default);
    let server = shared_server().await?;
    let template = {
        let mut templates = TEMPLATES.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(templates.entry(key.to_owned()).or_default())
    };
    let name = template
        .get_or_try_init(|| async {
            let name = next_name("template");
            server.create_database(&name).await?;
            prepare(server.url(&name)).await?;
            anyhow::Ok(name)
        })
        .await?;
    database_from(name).await
}

async fn database_from(template: &str) -> Result<TestDatabase> {
    let server = shared_server().await?;
    let names = std::mem::take(&mut *PENDING_DROPS.lock().unwrap_or_else(PoisonError::into_inner));
    for name in names {
        server.drop_database(&name).await?;
    }
    let name = next_name("test");
    server.database_from_template(template, &name).await?;
    Ok(TestDatabase { server, name })
}

// `Drop` cannot await the server, so the next request for a database drops these.
static PENDING_DROPS: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn next_name(kind: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("{kind}_{}", COUNT.fetch_add(1, Ordering::Relaxed))
}

impl TestDatabase {
    pub fn url(&self) -> String {
        self.server.url(&self.name)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn server(&self) -> &'static PgServer {
        self.server
    }

    /// Connects as superuser. The connection is closed when the client is dropped.
    pub async fn connect(&self) -> Result<Client> {
        self.server.connect(&self.name).await
    }
}

impl Drop for TestDatabase {
    fn drop(&mut self) {
        PENDING_DROPS.lock().unwrap_or_else(PoisonError::into_inner).push(std::mem::take(&mut self.name));
    }
}
