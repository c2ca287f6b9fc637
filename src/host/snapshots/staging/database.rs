//! Scratch database naming, lookup and cleanup.

use std::time::{Duration, Instant};

use jiff::SignedDuration;
use tokio_postgres::{Client, Error};

use crate::system::postgres::quote_ident;
use svc_base::error_chain::format_chain;

/// Purpose of a scratch database. A lock limits each purpose to one running program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScratchPurpose {
    /// Restore or import: the database becomes the owner's, and its roles are retained.
    Restore,
    /// Drill or side database: its roles are dropped with it, by [`super::drop_temporary_roles`].
    Check,
}

impl ScratchPurpose {
    /// Name prefix, followed by a number.
    pub(super) fn name_prefix(self) -> &'static str {
        match self {
            Self::Restore => "svc_restore_",
            Self::Check => "svc_check_",
        }
    }
}

/// Age after which scratch databases with the other purpose are treated as leftovers from a killed run.
const MAX_SCRATCH_AGE: SignedDuration = SignedDuration::from_hours(48);

/// A database that a snapshot is loaded into.
#[derive(Debug)]
pub struct ScratchDatabase {
    pub name: String,
    pub oid: u32,
    /// Number in the name: the creation time in milliseconds since the Unix epoch. Also used to rename the database it
    /// replaces.
    pub number: i64,
}

/// Finds a database's oid, which is stable across renames.
///
/// # Errors
/// If a query fails.
pub async fn find_oid(client: &Client, database: &str) -> Result<Option<u32>, Error> {
    let row = client.query_opt("SELECT oid FROM pg_database WHERE datname = $1", &[&database]).await?;
    row.map(|row| row.try_get(0)).transpose()
}

/// How long to wait for terminated sessions to disconnect.
const SESSION_END_TIMEOUT: Duration = Duration::from_secs(30);

/// Terminates sessions left behind by killed runs, since the server completes a statement even after its client has
/// exited. Once they're gone, their work is committed or rolled back, so the caller sees every database they created.
/// The caller holds a lock, so any other session with this application name belongs to a killed run. Gives up after
/// `SESSION_END_TIMEOUT` without an error.
///
/// # Errors
/// If a query fails.
pub async fn end_application_sessions(client: &Client, application: &str) -> Result<(), Error> {
    let terminate = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                     WHERE application_name = $1 AND pid <> pg_backend_pid()";
    let deadline = Instant::now() + SESSION_END_TIMEOUT;
    loop {
        let remaining: i64 = client.query_one(terminate, &[&application]).await?.try_get(0)?;
        if remaining == 0 || Instant::now() > deadline {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Drops scratch databases left behind by killed runs: all with this purpose, since the caller holds its lock, and
/// stale ones with the other purpose.
///
/// # Errors
/// If a query fails.
pub async fn drop_scratch_databases(client: &Client, purpose: ScratchPurpose) -> Result<(), Error> {
    let cutoff =
        svc_base::clock::now_ms().saturating_sub(MAX_SCRATCH_AGE).unwrap_or_default().as_millisecond();
    let sql = "SELECT datname::text FROM pg_database \
               WHERE datname ~ '^svc_(restore|check)_[0-9]{1,15}$' \
                 AND (starts_with(datname, $1) OR split_part(datname, '_', 3)::bigint < $2)";
    for row in client.query(sql, &[&purpose.name_prefix(), &cutoff]).await? {
        let name: String = row.try_get(0)?;
        client.batch_execute(&build_drop_statement(&name)).await?;
    }
    Ok(())
}

/// Drops a scratch database. Best effort: if this fails, the next run drops it.
pub async fn drop_scratch(client: &Client, name: &str) {
    if let Err(error) = client.batch_execute(&build_drop_statement(name)).await {
        tracing::warn!(error = %format_chain(&error), database = name, "could not drop the scratch database");
    }
}

fn build_drop_statement(name: &str) -> String {
    format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", quote_ident(name))
}
