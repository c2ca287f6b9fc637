//! Finds operation leases, and delays operations whose step's outcome could not be stored.

use std::time::Duration;

use deadpool_postgres::GenericClient;
use uuid::Uuid;

use super::{DbError, execute, query_opt};
use svc_machine::id::{MachineId, OperationId};

/// Returns whether a process may still be running another operation on this machine, even if that operation is already
/// recorded as ended.
pub async fn has_other_lease_on_machine(
    client: &impl GenericClient,
    machine: MachineId,
    except: OperationId,
) -> Result<bool, DbError> {
    let sql = "SELECT 1 FROM operations WHERE machine_id = $1 AND operation_id <> $2 \
               AND lease_until > clock_timestamp() LIMIT 1";
    Ok(query_opt(client, sql, &[&machine.0, &except.0]).await?.is_some())
}

/// Returns whether a process may still be running another operation on any machine in this machine's slot.
pub async fn has_other_lease_in_slot(
    client: &impl GenericClient,
    machine: MachineId,
    except: OperationId,
) -> Result<bool, DbError> {
    let sql = "SELECT 1 FROM operations o JOIN user_machines m USING (machine_id) \
               JOIN user_machines mine ON mine.machine_id = $1 AND mine.idp_user_id = m.idp_user_id \
               AND mine.slot = m.slot WHERE o.operation_id <> $2 AND o.lease_until > clock_timestamp() LIMIT 1";
    Ok(query_opt(client, sql, &[&machine.0, &except.0]).await?.is_some())
}

/// Delays an operation whose step's outcome could not be stored, with exponential backoff: by 2^`attempts` seconds, but
/// at most 2^10 seconds and at most `max`. `attempts` is the number of earlier failed attempts at the step; it is then
/// incremented. Has no effect unless `owner` is the last holder of the operation's lease.
pub async fn postpone_operation(
    client: &impl GenericClient,
    id: OperationId,
    owner: Uuid,
    max: Duration,
) -> Result<(), DbError> {
    let sql = "UPDATE operations SET attempts = least(attempts, 1000000) + 1, updated_at = clock_timestamp(), \
               due_at = clock_timestamp() + make_interval(secs => least($3, power(2, least(attempts, 10)))) \
               WHERE operation_id = $1 AND lease_owner = $2 AND state = 'running'";
    execute(client, sql, &[&id.0, &owner, &max.as_secs_f64()]).await.map(drop)
}
