//! Swaps in the scratch database: a single transaction renames the owner's database to `svc_before_<n>` and gives its
//! name to the scratch database. The replaced database is retained until a later backup drops it
//! (`backup/replaced_databases.rs`).

use std::time::{Duration, Instant};

use tokio_postgres::{Client, Error};

use crate::snapshots::staging::{ScratchDatabase, drop_scratch, find_oid};
use crate::system::postgres;
use crate::system::postgres::{ConnectError, PostgresServer, quote_ident};
use svc_base::applet::Exit;
use svc_base::failpoint::{self, InjectedFailure};
use svc_base::quantity::pluralize;
use svc_http::problem::format_chain;

/// How long to wait for terminated sessions to disconnect.
const SESSION_END_TIMEOUT: Duration = Duration::from_secs(30);

/// Errors from a swap. Unless it was committed, both databases keep their names.
#[derive(Debug, thiserror::Error)]
pub enum SwapError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("cannot inspect or swap the databases")]
    Query(#[from] Error),
    #[error(
        "{} still connected to database {database} after {} s",
        pluralize(sessions.unsigned_abs(), "session"),
        SESSION_END_TIMEOUT.as_secs()
    )]
    InUse { database: String, sessions: i64 },
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

impl SwapError {
    pub fn exit(&self) -> Exit {
        match self {
            Self::Connect(_) => Exit::Unavailable,
            Self::Query(error) => postgres::to_exit(error),
            Self::InUse { .. } | Self::Injected(_) => Exit::Internal,
        }
    }
}

/// Terminates all sessions on both databases, then renames them.
pub async fn swap(server: &PostgresServer, scratch: &ScratchDatabase) -> Result<(), SwapError> {
    let client = server.connect(postgres::MAINTENANCE_DATABASE, "svc-restore").await?;
    let database = server.database();
    let exists = find_oid(&client, database).await?.is_some();
    if exists {
        let block_connections = format!("ALTER DATABASE {} ALLOW_CONNECTIONS false", quote_ident(database));
        client.batch_execute(&block_connections).await?;
        failpoint::trigger("restore.closed")?;
        end_sessions(&client, database).await?;
    }
    end_sessions(&client, &scratch.name).await?;
    let replaced = format!("svc_before_{}", scratch.number);
    let rename_replaced = if exists {
        format!("ALTER DATABASE {} RENAME TO {};", quote_ident(database), quote_ident(&replaced))
    } else {
        String::new()
    };
    client
        .batch_execute(&format!(
            "BEGIN; {rename_replaced} ALTER DATABASE {} RENAME TO {}; COMMIT",
            quote_ident(&scratch.name),
            quote_ident(database)
        ))
        .await?;
    failpoint::trigger("restore.renamed")?;
    open_databases(&client, database).await?;
    failpoint::trigger("restore.opened")?;
    Ok(())
}

/// Reopens the owner's database and all replaced ones for connections. An interrupted swap leaves them closed.
///
/// # Errors
/// If a query fails.
pub async fn open_databases(client: &Client, database: &str) -> Result<(), SwapError> {
    allow_connections(client, database).await?;
    let closed = "SELECT datname::text FROM pg_database \
                  WHERE datname ~ '^svc_before_[0-9]+$' AND NOT datallowconn";
    for row in client.query(closed, &[]).await? {
        allow_connections(client, row.try_get(0)?).await?;
    }
    Ok(())
}

/// Cleans up after a failed swap: reopens the owner's database and, unless the swap was committed, drops the scratch
/// database.
pub async fn clean_up(server: &PostgresServer, scratch: &ScratchDatabase) {
    match server.connect(postgres::MAINTENANCE_DATABASE, "svc-restore").await {
        Ok(client) => {
            if let Err(error) = open_databases(&client, server.database()).await {
                tracing::error!(error = %format_chain(&error), "could not reopen the owner's database");
            }
            drop_scratch(&client, &scratch.name).await;
        }
        Err(error) => tracing::error!(error = %format_chain(&error), "could not reopen the owner's database"),
    }
}

async fn end_sessions(client: &Client, database: &str) -> Result<(), SwapError> {
    let deadline = Instant::now() + SESSION_END_TIMEOUT;
    loop {
        let row = client
            .query_one(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = $1",
                &[&database],
            )
            .await?;
        let sessions: i64 = row.try_get(0)?;
        if sessions == 0 {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(SwapError::InUse { database: database.to_owned(), sessions });
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Allows connections to a database, if it exists.
///
/// # Errors
/// If a query fails.
async fn allow_connections(client: &Client, database: &str) -> Result<(), SwapError> {
    if find_oid(client, database).await?.is_some() {
        client
            .batch_execute(&format!("ALTER DATABASE {} ALLOW_CONNECTIONS true", quote_ident(database)))
            .await?;
    }
    Ok(())
}
