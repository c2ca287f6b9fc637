//! Finds the newest recovery and the newest rollback on a test slot. Exercises have no table: other tables record them.

use deadpool_postgres::GenericClient;
use jiff::Timestamp;

use super::{DbError, query_opt};
use svc_machine::id::MachineId;

/// The newest exercise of a kind.
#[derive(Debug, Clone, Copy)]
pub struct ExerciseRow {
    pub at: Timestamp,
    pub machine: MachineId,
}

/// Joins all slots with their machines; a query must filter for test slots with `s.is_test`.
const SLOTS_JOIN_MACHINES: &str =
    "slots s JOIN user_machines m ON m.idp_user_id = s.idp_user_id AND m.slot = s.slot";

/// Finds the newest successful recovery of a test slot.
pub async fn find_recovery(client: &impl GenericClient) -> Result<Option<ExerciseRow>, DbError> {
    let sql = format!(
        "SELECT o.ended_at, o.machine_id FROM {SLOTS_JOIN_MACHINES} JOIN operations o ON o.machine_id = m.machine_id \
         WHERE s.is_test AND o.kind = 'recover' AND o.state = 'succeeded' ORDER BY o.ended_at DESC LIMIT 1"
    );
    find(client, &sql).await
}

/// Finds the newest rollback on a test slot: an operator marked its machine as failed or deleted it, or its host rolled
/// back a release.
pub async fn find_rollback(client: &impl GenericClient) -> Result<Option<ExerciseRow>, DbError> {
    let sql = format!(
        "SELECT a.at, m.machine_id FROM {SLOTS_JOIN_MACHINES} JOIN operator_audit a ON a.target = m.machine_id::text \
         WHERE s.is_test AND a.action = 'fail' \
         UNION ALL \
         SELECT o.ended_at, o.machine_id FROM {SLOTS_JOIN_MACHINES} JOIN operations o ON o.machine_id = m.machine_id \
         WHERE s.is_test AND o.kind = 'delete' AND o.state = 'succeeded' \
         UNION ALL \
         SELECT r.ended_at, m.machine_id FROM {SLOTS_JOIN_MACHINES} JOIN rollout_machines r ON r.machine_id = m.machine_id \
         WHERE s.is_test AND r.state = 'failed' AND r.error LIKE 'rolled_back%' ORDER BY 1 DESC LIMIT 1"
    );
    find(client, &sql).await
}

async fn find(client: &impl GenericClient, sql: &str) -> Result<Option<ExerciseRow>, DbError> {
    let row = query_opt(client, sql, &[]).await?;
    Ok(row.map(|row| ExerciseRow { at: row.get(0), machine: MachineId(row.get(1)) }))
}
