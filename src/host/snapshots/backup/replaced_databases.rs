//! Databases replaced by restores and imports, kept as `svc_before_<n>` so that a wrong replacement can be reverted.
//! They are dropped only after a successful backup: immediately if they have no rows, after seven days, or, oldest
//! first, when space is short.

use std::path::Path;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tokio_postgres::Client;

use crate::snapshots::row_counts;
use crate::system::postgres;
use crate::system::postgres::PostgresServer;
use svc_http::problem::format_chain;

use super::snapshot::SnapshotError;

/// Retention of a replaced database.
const RETENTION: SignedDuration = SignedDuration::from_hours(7 * 24);
/// Percentage of free space below which space counts as short.
const MIN_FREE_PERCENT: u64 = 10;
/// Timeout for the whole pass, because the backup is recorded only after it.
const PASS_TIMEOUT: Duration = Duration::from_secs(300);
/// Timeout for a lock, because the owner may have locked a replaced database's tables.
const LOCK_TIMEOUT_SECONDS: u32 = 5;
/// Timeout for a query: reading a table with many deleted rows takes a long time.
const READ_TIMEOUT_SECONDS: u32 = 30;

/// A replaced database.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ReplacedDatabase {
    name: String,
    replaced_at: Timestamp,
}

impl ReplacedDatabase {
    /// Parses a database name. Its number is the creation time of the database that replaced it, in milliseconds since
    /// 1970, which counts as the time of the replacement.
    fn parse(name: String) -> Option<Self> {
        let millis = name.strip_prefix("svc_before_")?.parse().ok()?;
        Some(Self { replaced_at: Timestamp::from_millisecond(millis).ok()?, name })
    }

    fn is_expired(&self, now: Timestamp) -> bool {
        now.duration_since(self.replaced_at) > RETENTION
    }
}

/// Drops the replaced databases that are expired or empty and, while space is short, the oldest of the others. After an
/// error (for example, because a database has open sessions) or a timeout, the next backup tries again. Neither fails
/// the backup.
pub async fn drop_replaced_databases(server: &PostgresServer, disk: &Path) {
    match tokio::time::timeout(PASS_TIMEOUT, try_drop(server, disk)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::warn!(error = %format_chain(&error), "could not drop the replaced databases; the next backup tries again");
        }
        Err(_) => {
            tracing::warn!("timed out dropping the replaced databases; the next backup tries again");
        }
    }
}

async fn try_drop(server: &PostgresServer, disk: &Path) -> Result<(), SnapshotError> {
    let client = connect(server, postgres::MAINTENANCE_DATABASE).await?;
    let query = "SELECT datname::text FROM pg_database WHERE datname ~ '^svc_before_[0-9]+$'";
    let mut databases = Vec::new();
    for row in client.query(query, &[]).await? {
        databases.extend(ReplacedDatabase::parse(row.try_get(0)?));
    }
    databases.sort_by_key(|database| database.replaced_at);
    for database in databases {
        let is_due = database.is_expired(Timestamp::now())
            || is_short_of_space(disk)
            || is_empty(server, &database).await;
        if is_due {
            client
                .batch_execute(&format!("DROP DATABASE IF EXISTS {}", postgres::quote_ident(&database.name)))
                .await?;
            tracing::info!(database = database.name, "dropped a replaced database");
        }
    }
    Ok(())
}

/// Returns whether the database has no rows of the owner, so that it is not worth keeping. A database that cannot be
/// read, for example because a table is locked, counts as not empty.
async fn is_empty(server: &PostgresServer, database: &ReplacedDatabase) -> bool {
    find_table_with_rows(server, database).await.is_ok_and(|table| table.is_none())
}

async fn find_table_with_rows(
    server: &PostgresServer,
    database: &ReplacedDatabase,
) -> Result<Option<String>, SnapshotError> {
    let client = connect(server, &database.name).await?;
    client.batch_execute(&format!("SET statement_timeout = '{READ_TIMEOUT_SECONDS}s'")).await?;
    Ok(row_counts::find_table_with_rows(&client).await?)
}

async fn connect(server: &PostgresServer, database: &str) -> Result<Client, SnapshotError> {
    let client = server.connect(database, "svc-db-backup").await?;
    client.batch_execute(&format!("SET lock_timeout = '{LOCK_TIMEOUT_SECONDS}s'")).await?;
    Ok(client)
}

fn is_short_of_space(disk: &Path) -> bool {
    fs4::statvfs(disk).is_ok_and(|stats| is_short(stats.available_space(), stats.total_space()))
}

fn is_short(free: u64, total: u64) -> bool {
    free < total / 100 * MIN_FREE_PERCENT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaced_database_expires_after_seven_days() {
        let now: Timestamp = "2026-01-10T00:00:00Z".parse().unwrap();
        let replaced_at = |text: &str| {
            let at: Timestamp = text.parse().unwrap();
            ReplacedDatabase::parse(format!("svc_before_{}", at.as_millisecond())).unwrap()
        };
        assert!(!replaced_at("2026-01-03T00:00:01Z").is_expired(now));
        assert!(replaced_at("2026-01-02T23:59:59Z").is_expired(now));
        assert_eq!(ReplacedDatabase::parse("svc_before_x".to_owned()), None);
    }

    #[test]
    fn space_is_short_below_min_percent() {
        assert!(is_short(9 << 30, 100 << 30));
        assert!(!is_short(11 << 30, 100 << 30));
    }
}
