//! An operation's log. Its size is bounded: a repeated failure increments a counter on its line, and only each step's
//! newest retries and location changes are kept.
//!
//! Invariant: the line that records a step's start is never changed or deleted, because the step's age is computed from
//! it.

use deadpool_postgres::GenericClient;
use jiff::Timestamp;
use tokio_postgres::Row;

use super::{DbError, execute, query, query_opt};
use svc_machine::id::OperationId;

/// The outcome of a step that failed and will be retried.
pub const RETRY: &str = "retry";
/// The outcome of a create request that is retried in another location.
pub const LOCATION_CHANGE: &str = "location";
/// Maximum number of lines shown per operation.
const MAX_SHOWN_LINES: i64 = 200;
/// Maximum number of retries, and of location changes, kept per step.
const MAX_KEPT_LINES: i64 = 200;

const COLUMNS: &str = "seq, at, step, outcome, detail, repeats, repeated_at";

#[derive(Debug)]
pub struct LogLineRow {
    pub seq: i64,
    pub at: Timestamp,
    pub step: String,
    pub outcome: String,
    pub detail: Option<String>,
    pub repeats: i32,
    pub repeated_at: Option<Timestamp>,
}

impl LogLineRow {
    fn parse(row: &Row) -> Self {
        Self {
            seq: row.get("seq"),
            at: row.get("at"),
            step: row.get("step"),
            outcome: row.get("outcome"),
            detail: row.get("detail"),
            repeats: row.get("repeats"),
            repeated_at: row.get("repeated_at"),
        }
    }
}

/// The newest lines of an operation's log, oldest first.
#[derive(Debug, Default)]
pub struct NewestLines {
    pub lines: Vec<LogLineRow>,
    /// Number of older lines that are not shown.
    pub omitted: i64,
}

pub async fn load_newest_lines(client: &impl GenericClient, id: OperationId) -> Result<NewestLines, DbError> {
    let sql = format!(
        "SELECT {COLUMNS}, count(*) OVER () AS total FROM operation_log WHERE operation_id = $1 \
         ORDER BY seq DESC LIMIT $2"
    );
    let rows = query(client, &sql, &[&id.0, &MAX_SHOWN_LINES]).await?;
    let total: i64 = rows.first().map_or(0, |row| row.get("total"));
    let lines: Vec<LogLineRow> = rows.iter().rev().map(LogLineRow::parse).collect();
    let omitted = total - i64::try_from(lines.len()).unwrap_or(total);
    Ok(NewestLines { lines, omitted })
}

/// Returns whether any line in an operation's log has this outcome.
pub async fn has_outcome(
    client: &impl GenericClient,
    id: OperationId,
    outcome: &str,
) -> Result<bool, DbError> {
    let sql = "SELECT 1 FROM operation_log WHERE operation_id = $1 AND outcome = $2 LIMIT 1";
    Ok(query_opt(client, sql, &[&id.0, &outcome]).await?.is_some())
}

/// Logs that a step failed and will be retried.
pub async fn log_retry(
    client: &impl GenericClient,
    id: OperationId,
    step: &str,
    detail: Option<&str>,
) -> Result<(), DbError> {
    let increment = "UPDATE operation_log SET repeats = repeats + 1, repeated_at = clock_timestamp() \
                  WHERE operation_id = $1 \
                  AND seq = (SELECT max(seq) FROM operation_log WHERE operation_id = $1) \
                  AND step = $2 AND outcome = $3 AND detail IS NOT DISTINCT FROM $4";
    if execute(client, increment, &[&id.0, &step, &RETRY, &detail]).await? == 1 {
        return Ok(());
    }
    super::operations::log(client, id, step, RETRY, detail).await?;
    trim(client, id, step, RETRY).await
}

/// Logs that a server is to be created in another location. The newest line is always kept, because it shows that the
/// machine's location has changed.
pub async fn log_location_change(
    client: &impl GenericClient,
    id: OperationId,
    step: &str,
    reason: &str,
) -> Result<(), DbError> {
    super::operations::log(client, id, step, LOCATION_CHANGE, Some(reason)).await?;
    trim(client, id, step, LOCATION_CHANGE).await
}

/// Deletes all but the newest [`MAX_KEPT_LINES`] of a step's lines with this outcome.
async fn trim(
    client: &impl GenericClient,
    id: OperationId,
    step: &str,
    outcome: &str,
) -> Result<(), DbError> {
    let sql = "DELETE FROM operation_log WHERE operation_id = $1 AND step = $2 AND outcome = $3 \
                AND seq <= (SELECT seq FROM operation_log WHERE operation_id = $1 AND step = $2 AND outcome = $3 \
                  ORDER BY seq DESC OFFSET $4 LIMIT 1)";
    execute(client, sql, &[&id.0, &step, &outcome, &MAX_KEPT_LINES]).await.map(drop)
}
