//! Claims turns for periodic tasks: each task runs once per interval in the whole installation, in the process that
//! claims the turn.

use std::time::Duration;

use deadpool_postgres::GenericClient;

use super::{DbError, execute};

/// Claims a turn unless any process has claimed one within the last `interval`. Returns whether the turn was claimed.
/// The previous turn may still be running.
pub async fn claim_turn(
    client: &impl GenericClient,
    task: &str,
    interval: Duration,
) -> Result<bool, DbError> {
    let sql = "INSERT INTO task_turns AS turn (task, last_at) VALUES ($1, clock_timestamp()) \
               ON CONFLICT (task) DO UPDATE SET last_at = clock_timestamp() \
               WHERE turn.last_at <= clock_timestamp() - make_interval(secs => $2)";
    Ok(execute(client, sql, &[&task, &interval.as_secs_f64()]).await? == 1)
}
