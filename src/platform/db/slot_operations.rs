//! Reads from `operations` for a slot, or for a machine that has left its slot: an operation on one machine can affect
//! other machines in the slot.

use std::time::Duration;

use deadpool_postgres::GenericClient;

use super::machine_row::{MachineRow, sql_epoch};
use super::operations::{COLUMNS, OperationRow};
use super::{DbError, Params, query_opt};
use svc_machine::id::{MachineId, OperationId};
use svc_machine::name::{IdpUserId, Slot};

/// Finds the newest operation that takes this machine out of service: its deletion, or the creation of its successor.
/// For a reinstated machine, this includes the creation of the successor that its reinstatement removed from the slot.
pub async fn find_retiring_operation(
    client: &impl GenericClient,
    machine: MachineId,
) -> Result<Option<OperationId>, DbError> {
    let sql = "SELECT o.operation_id FROM operations o JOIN user_machines m USING (machine_id) \
               JOIN user_machines mine ON mine.machine_id = $1 AND mine.idp_user_id = m.idp_user_id \
               AND mine.slot = m.slot \
               WHERE (m.machine_id = $1 AND o.kind = 'delete') \
                  OR ((mine.replaced_by = m.machine_id OR m.replaced_by = $1) AND o.kind IN ('provision', 'recover')) \
               ORDER BY o.operation_id DESC LIMIT 1";
    Ok(query_opt(client, sql, &[&machine.0]).await?.map(|row| OperationId(row.get(0))))
}

/// Finds the running deletion of a machine.
pub async fn find_running_deletion(
    client: &impl GenericClient,
    machine: MachineId,
) -> Result<Option<OperationRow>, DbError> {
    let sql = format!(
        "SELECT {COLUMNS} FROM operations WHERE machine_id = $1 AND kind = 'delete' AND state = 'running' LIMIT 1"
    );
    Ok(query_opt(client, &sql, &[&machine.0]).await?.as_ref().map(OperationRow::parse))
}

/// Finds a running deletion whose final backup is pending and whose machine has served traffic in this slot.
pub async fn find_deletion_awaiting_backup(
    client: &impl GenericClient,
    user: &IdpUserId,
    slot: &Slot,
) -> Result<Option<OperationRow>, DbError> {
    let sql = format!(
        "SELECT {COLUMNS} FROM operations WHERE kind = 'delete' AND state = 'running' AND step = 'last_backup' \
         AND machine_id IN (SELECT machine_id FROM user_machines WHERE idp_user_id = $1 AND slot = $2 \
           AND registered_at IS NOT NULL) ORDER BY operation_id LIMIT 1"
    );
    Ok(query_opt(client, &sql, &[&user.as_str(), &slot.as_str()]).await?.as_ref().map(OperationRow::parse))
}

/// Finds a running operation that still needs the server of a machine that is leaving or has left its slot: an
/// operation on the machine itself, or the creation of a later machine that is waiting for this machine's final backup.
pub async fn find_operation_needing_server(
    client: &impl GenericClient,
    machine: &MachineRow,
) -> Result<Option<OperationRow>, DbError> {
    // If another machine registered in between, the later operation is waiting for that machine's final backup instead.
    let sql = format!(
        "SELECT {COLUMNS} FROM operations WHERE state = 'running' AND (machine_id = $1 \
         OR (step = 'last_backup' AND machine_id IN (SELECT later.machine_id FROM user_machines later \
           WHERE later.idp_user_id = $2 AND later.slot = $3 AND later.epoch > $4 \
           AND NOT EXISTS (SELECT 1 FROM user_machines between_them WHERE between_them.idp_user_id = $2 \
             AND between_them.slot = $3 AND between_them.epoch > $4 AND between_them.epoch < later.epoch \
             AND between_them.registered_at IS NOT NULL)))) ORDER BY operation_id LIMIT 1"
    );
    let epoch = sql_epoch(machine.epoch);
    let params: Params<'_> = &[&machine.id.0, &machine.user.as_str(), &machine.slot.as_str(), &epoch];
    Ok(query_opt(client, &sql, params).await?.as_ref().map(OperationRow::parse))
}

/// Returns whether an operation that was running less than `period` before `operation` was created may have requested a
/// shutdown of this machine's server. A resize or a power-off that succeeded does not count: its shutdown has taken
/// effect. Other operations count even if they succeeded, because they continue even if the server stays on. The
/// operation that created this machine does not count: it shut down the predecessor's server.
pub async fn may_have_pending_shutdown(
    client: &impl GenericClient,
    machine: MachineId,
    operation: &OperationRow,
    period: Duration,
) -> Result<bool, DbError> {
    let sql = "SELECT 1 FROM operations o JOIN user_machines m USING (machine_id) \
               JOIN user_machines mine ON mine.machine_id = $1 AND mine.idp_user_id = m.idp_user_id \
               AND mine.slot = m.slot \
               WHERE (o.machine_id = $1) <> (o.kind IN ('provision', 'recover')) \
               AND (o.ended_at IS NULL OR o.ended_at > $2::timestamptz - make_interval(secs => $3)) \
               AND EXISTS (SELECT 1 FROM operation_log l WHERE l.operation_id = o.operation_id AND l.outcome = 'begun' \
                 AND (l.step = 'power_off_server' OR l.step IN ('shut_down', 'stop_server') AND o.state <> 'succeeded')) \
               LIMIT 1";
    let params: Params<'_> = &[&machine.0, &operation.created_at, &period.as_secs_f64()];
    Ok(query_opt(client, sql, params).await?.is_some())
}

/// Returns whether an operator accepted the loss of unsaved data when this machine was taken out of service.
pub async fn is_loss_accepted(client: &impl GenericClient, machine: MachineId) -> Result<bool, DbError> {
    let Some(id) = find_retiring_operation(client, machine).await? else { return Ok(false) };
    let operation = super::operations::get(client, id).await?;
    Ok(operation.is_some_and(|operation| operation.options.accept_loss))
}
