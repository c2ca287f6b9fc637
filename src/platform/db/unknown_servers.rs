//! `unknown_servers`: servers with this installation's label that belong to no machine in the database.
//!
//! Invariant: a server is deleted only after an operator has released that particular server and its own grace period
//! has ended.

use std::time::Duration;

use deadpool_postgres::GenericClient;
use jiff::Timestamp;

use super::{DbError, execute, query, query_opt};

/// Counts of the unknown servers, by whether an operator has released them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UnknownServerCounts {
    /// Waiting for an operator's decision.
    pub held: i64,
    /// Released for deletion by an operator.
    pub released: i64,
    /// When the last grace period of the released servers ends.
    pub last_grace_end: Option<Timestamp>,
}

impl UnknownServerCounts {
    /// Returns when the last unknown server may be deleted; `None` while any server is held.
    pub fn released_until(&self) -> Option<Timestamp> {
        self.last_grace_end.filter(|_| self.held == 0)
    }
}

/// Replaces the recorded servers with these; servers that are already recorded keep their times.
pub async fn replace(client: &impl GenericClient, servers: &[i64]) -> Result<(), DbError> {
    execute(client, "DELETE FROM unknown_servers WHERE server_id <> ALL($1)", &[&servers]).await?;
    let sql = "INSERT INTO unknown_servers (server_id) SELECT unnest($1::bigint[]) ON CONFLICT DO NOTHING";
    execute(client, sql, &[&servers]).await.map(drop)
}

/// Releases the recorded servers: each may be deleted when its own grace period ends.
pub async fn release(client: &impl GenericClient) -> Result<(), DbError> {
    let sql = "UPDATE unknown_servers SET released_at = clock_timestamp() WHERE released_at IS NULL";
    execute(client, sql, &[]).await.map(drop)
}

/// Lists the released servers whose grace period, counted from when each was first seen, has ended.
pub async fn list_due(client: &impl GenericClient, grace: Duration) -> Result<Vec<i64>, DbError> {
    let sql = "SELECT server_id FROM unknown_servers WHERE released_at IS NOT NULL \
               AND first_seen <= clock_timestamp() - make_interval(secs => $1)";
    Ok(query(client, sql, &[&grace.as_secs_f64()]).await?.iter().map(|row| row.get(0)).collect())
}

pub async fn count(client: &impl GenericClient, grace: Duration) -> Result<UnknownServerCounts, DbError> {
    let sql = "SELECT count(*) FILTER (WHERE released_at IS NULL), count(released_at), \
               max(first_seen) FILTER (WHERE released_at IS NOT NULL) + make_interval(secs => $1) \
               FROM unknown_servers";
    let row = query_opt(client, sql, &[&grace.as_secs_f64()]).await?;
    Ok(row.map_or_else(UnknownServerCounts::default, |row| UnknownServerCounts {
        held: row.get(0),
        released: row.get(1),
        last_grace_end: row.get(2),
    }))
}

/// Returns whether any unknown server is waiting for an operator's decision.
pub async fn is_any_held(client: &impl GenericClient) -> Result<bool, DbError> {
    let sql = "SELECT 1 FROM unknown_servers WHERE released_at IS NULL LIMIT 1";
    Ok(query_opt(client, sql, &[]).await?.is_some())
}
