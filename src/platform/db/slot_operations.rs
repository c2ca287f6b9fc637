//! `operations` across the machines of one slot: which of them concern a machine that left it.

use deadpool_postgres::GenericClient;

use super::operations::{COLUMNS, OperationRow};
use super::{DbError, row};
use crate::machine::id::{MachineId, OperationId};

/// Whether an operation of any machine of the slot is at work in some process, besides this one.
///
/// # Errors
/// [`DbError`].
pub async fn slot_lease_lingers(
    client: &impl GenericClient,
    of: MachineId,
    besides: OperationId,
) -> Result<bool, DbError> {
    let sql = "SELECT 1 FROM operations o JOIN user_machines m USING (machine_id) \
               JOIN user_machines mine ON mine.machine_id = $1 AND mine.idp_user_id = m.idp_user_id \
               AND mine.slot = m.slot WHERE o.operation_id <> $2 AND o.lease_until > clock_timestamp() LIMIT 1";
    Ok(row(client, sql, &[&of.0, &besides.0]).await?.is_some())
}

/// The newest operation that took this machine out of service: its own deletion, or the making of its successor.
///
/// # Errors
/// [`DbError`].
pub async fn took_out_of_service(
    client: &impl GenericClient,
    machine: MachineId,
) -> Result<Option<OperationId>, DbError> {
    let sql = "SELECT o.operation_id FROM operations o JOIN user_machines m USING (machine_id) \
               JOIN user_machines mine ON mine.machine_id = $1 AND mine.idp_user_id = m.idp_user_id \
               AND mine.slot = m.slot \
               WHERE (m.machine_id = $1 AND o.kind = 'delete') \
                  OR ((mine.replaced_by = m.machine_id OR m.replaced_by = $1) AND o.kind IN ('provision', 'recover')) \
               ORDER BY o.operation_id DESC LIMIT 1";
    Ok(row(client, sql, &[&machine.0]).await?.map(|row| OperationId(row.get(0))))
}

/// The deletion of a machine that is still taking its last backup or switching its server off.
///
/// # Errors
/// [`DbError`].
pub async fn deleting(
    client: &impl GenericClient,
    machine: MachineId,
) -> Result<Option<OperationRow>, DbError> {
    let sql = format!(
        "SELECT {COLUMNS} FROM operations WHERE machine_id = $1 AND kind = 'delete' AND state = 'running' LIMIT 1"
    );
    Ok(row(client, &sql, &[&machine.0]).await?.as_ref().map(OperationRow::parse))
}
