//! A database that nobody uses yet: what it is called, and its end.

use std::time::{Duration, Instant};

use tokio_postgres::{Client, Error};

use crate::host::system::postgres::ident;

/// One that a snapshot is loaded into.
#[derive(Debug)]
pub struct Scratch {
    pub name: String,
    pub oid: u32,
    /// Its number, which the replaced database gets, too.
    pub number: i64,
}

/// The oid of a database, which a rename keeps.
///
/// # Errors
/// The database's.
pub async fn oid(client: &Client, database: &str) -> Result<Option<u32>, Error> {
    let row = client.query_opt("SELECT oid FROM pg_database WHERE datname = $1", &[&database]).await?;
    row.map(|row| row.try_get(0)).transpose()
}

/// How long a session may take to end.
const SESSION: Duration = Duration::from_secs(30);

/// Ends the sessions that killed runs of this program left in the server, where a statement goes on without its client. Once
/// they are gone, what they had begun is done or undone: a database that is being made is not overlooked. The caller holds
/// the lock by which all other sessions of that name are of killed runs.
///
/// # Errors
/// The database's.
pub async fn end_sessions_of(client: &Client, application: &str) -> Result<(), Error> {
    let others = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                  WHERE application_name = $1 AND pid <> pg_backend_pid()";
    let end = Instant::now() + SESSION;
    loop {
        let left: i64 = client.query_one(others, &[&application]).await?.try_get(0)?;
        if left == 0 || Instant::now() > end {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// What runs that were killed left behind.
///
/// # Errors
/// The database's.
pub async fn drop_scratches(client: &Client) -> Result<(), Error> {
    let left = "SELECT datname::text FROM pg_database WHERE datname ~ '^svc_restore_[0-9]+$'";
    for row in client.query(left, &[]).await? {
        let name: String = row.try_get(0)?;
        client.batch_execute(&drop_statement(&name)).await?;
    }
    Ok(())
}

/// Best effort: the next run drops what stays.
pub async fn drop_scratch(client: &Client, name: &str) {
    if let Err(error) = client.batch_execute(&drop_statement(name)).await {
        tracing::warn!(%error, database = name, "could not drop the scratch database");
    }
}

fn drop_statement(name: &str) -> String {
    format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", ident(name))
}
