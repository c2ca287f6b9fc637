//! Turns of periodic tasks that one process runs for all.

use std::time::Duration;

use deadpool_postgres::GenericClient;

use super::{DbError, execute};

/// Claims a turn, unless a process has claimed one within `unless_within`.
pub async fn claim_turn(
    client: &impl GenericClient,
    task: &str,
    unless_within: Duration,
) -> Result<bool, DbError> {
    let sql = "INSERT INTO task_turns AS turn (task, last_at) VALUES ($1, clock_timestamp()) \
               ON CONFLICT (task) DO UPDATE SET last_at = clock_timestamp() \
               WHERE turn.last_at <= clock_timestamp() - make_interval(secs => $2)";
    Ok(execute(client, sql, &[&task, &unless_within.as_secs_f64()]).await? == 1)
}
