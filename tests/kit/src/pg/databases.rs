//! A fresh database for each test, on one server for the whole test process.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use anyhow::Result;
use tokio::sync::OnceCell;
use tokio_postgres::Client;

use super::{PgBinaries, PgOptions, PgServer};
use crate::fetch;

/// The server that all tests of this process share, started by the first who asks, ended with the process.
pub async fn shared() -> Result<&'static PgServer> {
    static SHARED: OnceCell<PgServer> = OnceCell::const_new();
    SHARED
        .get_or_try_init(|| async {
            let binaries =
                tokio::task::spawn_blocking(|| PgBinaries::locate_or_fetch(&fetch::target_dir())).await??;
            PgServer::start(&binaries, PgOptions::default()).await
        })
        .await
}

/// A database of one test's own, on the shared server; dropped some time after the value is.
#[derive(Debug)]
pub struct TestDatabase {
    server: &'static PgServer,
    name: String,
}

/// A fresh, empty database.
pub async fn test_database() -> Result<TestDatabase> {
    database_from("template1").await
}

/// A fresh copy of the database that `prepare` has made. `prepare` runs once per `key` in this process, with the URL of an
/// empty database, and has to close its connections.
pub async fn test_database_from<F, Fut>(key: &str, prepare: F) -> Result<TestDatabase>
where
    F: FnOnce(String) -> Fut,
    Fut: Future<Output = Result<()>>,
{
    static TEMPLATES: LazyLock<Mutex<HashMap<String, Arc<OnceCell<String>>>>> = LazyLock::new(Mutex::default);
    let server = shared().await?;
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
    let server = shared().await?;
    let forsaken = std::mem::take(&mut *FORSAKEN.lock().unwrap_or_else(PoisonError::into_inner));
    for name in forsaken {
        server.drop_database(&name).await?;
    }
    let name = next_name("test");
    server.database_from_template(template, &name).await?;
    Ok(TestDatabase { server, name })
}

// A `Drop` cannot wait for the server, so the next test that wants a database drops what the last ones left.
static FORSAKEN: Mutex<Vec<String>> = Mutex::new(Vec::new());

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

    /// A connection as superuser; it ends with the client.
    pub async fn connect(&self) -> Result<Client> {
        self.server.connect(&self.name).await
    }
}

impl Drop for TestDatabase {
    fn drop(&mut self) {
        FORSAKEN.lock().unwrap_or_else(PoisonError::into_inner).push(std::mem::take(&mut self.name));
    }
}
