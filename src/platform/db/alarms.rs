//! `fleet_alarms`: problems with the fleet as a whole, one row each.

use std::time::Duration;

use deadpool_postgres::GenericClient;
use jiff::Timestamp;
use serde_json::Value;
use tokio_postgres::Row;

use super::{DbError, execute, query, query_opt};

#[derive(Debug, Clone)]
pub struct AlarmRow {
    pub alarm: String,
    /// When the alarm became active.
    pub since: Timestamp,
    /// When the alarm was last raised.
    pub seen_at: Timestamp,
    pub detail: Value,
    /// Until this time, the alarm does not block work, because an operator has released it.
    pub released_until: Option<Timestamp>,
}

const IS_ACTIVE: &str = "(expires_at IS NULL OR expires_at > clock_timestamp())";
const COLUMNS: &str = "alarm, since, seen_at, detail, \
     CASE WHEN released_until > clock_timestamp() THEN released_until END AS released_until";

fn parse(row: &Row) -> AlarmRow {
    AlarmRow {
        alarm: row.get("alarm"),
        since: row.get("since"),
        seen_at: row.get("seen_at"),
        detail: row.get("detail"),
        released_until: row.get("released_until"),
    }
}

/// How long an alarm stays active if it is not raised again.
#[derive(Debug, Clone, Copy)]
pub enum AlarmLifetime {
    UntilCleared,
    For(Duration),
}

#[derive(Debug, Clone, Copy)]
pub struct RaiseOutcome {
    /// Whether the alarm was inactive before this call.
    pub is_new: bool,
    pub is_released: bool,
}

/// Raises an alarm. Its detail replaces the stored detail.
pub async fn raise(
    client: &impl GenericClient,
    alarm: &str,
    detail: &Value,
    lifetime: AlarmLifetime,
) -> Result<RaiseOutcome, DbError> {
    raise_with(client, alarm, (detail, "excluded.detail"), lifetime).await
}

/// Raises an alarm and merges `detail`, which must be an object, into the stored detail, unless that already has 100
/// members. The stored detail of an expired alarm is replaced instead.
pub async fn raise_and_merge(
    client: &impl GenericClient,
    alarm: &str,
    detail: &Value,
    lifetime: AlarmLifetime,
) -> Result<RaiseOutcome, DbError> {
    let merged = "CASE WHEN existing.expires_at <= clock_timestamp() THEN excluded.detail \
                  WHEN (SELECT count(*) FROM jsonb_object_keys(existing.detail)) >= 100 THEN existing.detail \
                  ELSE existing.detail || excluded.detail END";
    raise_with(client, alarm, (detail, merged), lifetime).await
}

async fn raise_with(
    client: &impl GenericClient,
    alarm: &str,
    (detail, merge_sql): (&Value, &str),
    lifetime: AlarmLifetime,
) -> Result<RaiseOutcome, DbError> {
    let sql = format!(
        "INSERT INTO fleet_alarms AS existing (alarm, detail, since, seen_at, expires_at) \
         VALUES ($1, $2, statement_timestamp(), statement_timestamp(), \
                 clock_timestamp() + make_interval(secs => $3)) \
         ON CONFLICT (alarm) DO UPDATE SET detail = {merge_sql}, seen_at = excluded.seen_at, \
         since = CASE WHEN existing.expires_at <= clock_timestamp() THEN excluded.since ELSE existing.since END, \
         expires_at = excluded.expires_at \
         RETURNING since = seen_at, coalesce(released_until > clock_timestamp(), false)"
    );
    let seconds = match lifetime {
        AlarmLifetime::UntilCleared => None,
        AlarmLifetime::For(duration) => Some(duration.as_secs_f64()),
    };
    let row = query_opt(client, &sql, &[&alarm, &detail, &seconds]).await?;
    let outcome = |row: &Row| RaiseOutcome { is_new: row.get(0), is_released: row.get(1) };
    Ok(row.as_ref().map_or(RaiseOutcome { is_new: false, is_released: false }, outcome))
}

pub async fn clear(client: &impl GenericClient, alarm: &str) -> Result<(), DbError> {
    execute(client, "DELETE FROM fleet_alarms WHERE alarm = $1", &[&alarm]).await.map(drop)
}

pub async fn find_active(client: &impl GenericClient, alarm: &str) -> Result<Option<AlarmRow>, DbError> {
    let sql = format!("SELECT {COLUMNS} FROM fleet_alarms WHERE alarm = $1 AND {IS_ACTIVE}");
    Ok(query_opt(client, &sql, &[&alarm]).await?.as_ref().map(parse))
}

/// Lists the active alarms, oldest first.
pub async fn list_active(client: &impl GenericClient) -> Result<Vec<AlarmRow>, DbError> {
    let sql = format!("SELECT {COLUMNS} FROM fleet_alarms WHERE {IS_ACTIVE} ORDER BY since, alarm");
    Ok(query(client, &sql, &[]).await?.iter().map(parse).collect())
}

/// Allows work for `duration` even though the alarm is active; returns `None` if it is not active.
pub async fn release(
    client: &impl GenericClient,
    alarm: &str,
    duration: Duration,
) -> Result<Option<AlarmRow>, DbError> {
    let sql = format!(
        "UPDATE fleet_alarms SET released_until = clock_timestamp() + make_interval(secs => $2) \
         WHERE alarm = $1 AND {IS_ACTIVE} RETURNING {COLUMNS}"
    );
    Ok(query_opt(client, &sql, &[&alarm, &duration.as_secs_f64()]).await?.as_ref().map(parse))
}
