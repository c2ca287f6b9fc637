//! Finds machines that have left their slots and still need an operator, because of a kept server with unsaved changes,
//! an abandoned removal, or an operation that is waiting for a decision.

use deadpool_postgres::GenericClient;

use super::{DbError, query};
use svc_machine::id::{MachineId, OperationId};

/// A machine that has left its slot and needs an operator.
#[derive(Debug, Clone)]
pub struct FormerMachineRow {
    pub machine: MachineId,
    pub user: String,
    pub slot: String,
    pub handle: String,
    pub status: String,
    pub is_deleted: bool,
    /// Whether its server may hold the only copy of some data whose loss no operator has accepted.
    pub has_unsaved_changes: bool,
    pub is_removal_abandoned: bool,
    pub waiting_operation: Option<OperationId>,
}

/// Lists the machines that have left their slots and need an operator, oldest first. Only machines whose servers may
/// still exist are read, so that the cost does not grow with the history.
pub async fn list_needing_attention(client: &impl GenericClient) -> Result<Vec<FormerMachineRow>, DbError> {
    let sql = "SELECT * FROM (SELECT m.machine_id, m.idp_user_id, m.slot, m.handle, m.status, m.deleted_at IS NOT NULL, \
                   m.unsaved_since IS NOT NULL AND m.discard_ordered_at IS NULL AS unsaved, \
                   m.removal_abandoned_at IS NOT NULL AS abandoned, o.operation_id AS waiting \
               FROM user_machines m \
               LEFT JOIN (SELECT DISTINCT ON (machine_id) machine_id, operation_id FROM operations \
                   WHERE state = 'running' AND question IS NOT NULL ORDER BY machine_id, created_at) o \
                   ON o.machine_id = m.machine_id \
               WHERE m.server_deleted_at IS NULL \
                   AND (m.deleted_at IS NOT NULL OR m.retired_at IS NOT NULL)) ended \
               WHERE unsaved OR abandoned OR waiting IS NOT NULL ORDER BY machine_id";
    let rows = query(client, sql, &[]).await?;
    Ok(rows
        .iter()
        .map(|row| FormerMachineRow {
            machine: MachineId(row.get(0)),
            user: row.get(1),
            slot: row.get(2),
            handle: row.get(3),
            status: row.get(4),
            is_deleted: row.get(5),
            has_unsaved_changes: row.get(6),
            is_removal_abandoned: row.get(7),
            waiting_operation: row.get::<_, Option<_>>(8).map(OperationId),
        })
        .collect())
}
