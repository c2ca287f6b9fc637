//! Determines how long the servers of machines that have left their slots are kept.
//!
//! Invariant: the reconciler's deletions and the API use the same SQL expression for the end of the retention period.

use std::time::Duration;

use deadpool_postgres::GenericClient;
use jiff::Timestamp;
use tokio_postgres::Row;

use super::{DbError, Params, query};
use svc_machine::id::{MachineId, OperationId};
use svc_machine::name::{IdpUserId, Slot};

/// How long the servers of machines that have left their slots are kept.
#[derive(Debug, Clone, Copy)]
pub struct ServerRetention {
    /// Period after a later machine in the slot was proven.
    pub replaced: Duration,
    /// Period after the deletion or, if later, after the request to power off the server: a deletion may first wait for
    /// an operator.
    pub deleted: Duration,
    /// Period after a machine that never registered left its slot. It is long enough for the host to send a heartbeat,
    /// in case it did register but the database has lost the registration.
    pub unregistered: Duration,
}

/// The server of a machine that has left its slot; it may hold data.
#[derive(Debug, Clone)]
pub struct KeptServerRow {
    pub machine: MachineId,
    /// The server's id at the provider.
    pub server: i64,
    /// Whether the machine was deleted, not replaced.
    pub is_deleted: bool,
    /// When the reconciler deletes the server; `None` while the deletion waits for a proven successor or an operator.
    pub until: Option<Timestamp>,
    /// Data written after this time may exist only on this server.
    pub unsaved_since: Option<Timestamp>,
    /// Whether `unsaved_since` is set only because a later machine started without the owner's files.
    pub has_unsaved_files_only: bool,
    /// When an operator abandoned the server's removal.
    pub removal_abandoned_at: Option<Timestamp>,
    /// The time since which the provider has reported the server missing.
    pub missing_since: Option<Timestamp>,
    /// The running deletion that removes the server without a retention period.
    pub deleted_by: Option<OperationId>,
}

/// SQL expression for the end of the retention period for machine `m`'s server; `$1` to `$3` are the retention periods.
/// `NULL` if the server is kept until an operator decides, or until a later machine in the slot is proven. A later
/// machine without a server counts only if it was deleted; the period then starts with the deletion of its server.
const KEPT_UNTIL: &str = "CASE WHEN m.removal_abandoned_at IS NULL THEN least(m.discard_ordered_at, \
    CASE WHEN m.unsaved_since IS NULL THEN least( \
        CASE WHEN m.registered_at IS NULL \
            THEN coalesce(m.deleted_at, m.retired_at) + make_interval(secs => $3) END, \
        CASE WHEN m.deleted_at IS NOT NULL \
            THEN greatest(m.deleted_at, m.power_off_ordered_at) + make_interval(secs => $2) \
            ELSE (SELECT min(CASE WHEN later.server_deleted_at IS NULL \
                        AND later.failure_cause IS DISTINCT FROM 'server_gone' THEN later.proven_at \
                    WHEN later.deleted_at IS NOT NULL THEN coalesce(later.server_deleted_at, later.deleted_at) END) \
                FROM user_machines later WHERE later.idp_user_id = m.idp_user_id AND later.slot = m.slot \
                AND later.epoch > m.epoch AND later.registered_at IS NOT NULL) + make_interval(secs => $1) END) \
    END) END";

/// SQL condition for a machine that has left its slot and may have a server.
const LEFT_SLOT: &str =
    "m.server_deleted_at IS NULL AND (m.deleted_at IS NOT NULL OR m.retired_at IS NOT NULL)";

/// Lists at most 100 machines whose servers' retention period has ended and that have no running operation.
pub async fn list_removable(
    client: &impl GenericClient,
    retention: &ServerRetention,
) -> Result<Vec<MachineId>, DbError> {
    let sql = format!(
        "SELECT m.machine_id FROM user_machines m WHERE {LEFT_SLOT} AND {KEPT_UNTIL} <= clock_timestamp() \
         AND NOT EXISTS (SELECT 1 FROM operations o WHERE o.machine_id = m.machine_id AND o.state = 'running') \
         ORDER BY m.machine_id LIMIT 100"
    );
    let (replaced, deleted, unregistered) = retention_seconds(retention);
    let params: Params<'_> = &[&replaced, &deleted, &unregistered];
    Ok(query(client, &sql, params).await?.iter().map(|row| MachineId(row.get(0))).collect())
}

/// Lists at most 50 of the slot's kept servers that may hold data, newest machine first.
pub async fn list_in_slot(
    client: &impl GenericClient,
    user: &IdpUserId,
    slot: &Slot,
    retention: &ServerRetention,
) -> Result<Vec<KeptServerRow>, DbError> {
    let sql = format!(
        "SELECT m.machine_id, m.provider_server_id, m.deleted_at IS NOT NULL AS is_deleted, \
             {KEPT_UNTIL} AS kept_until, m.unsaved_since, m.unsaved_files, m.removal_abandoned_at, m.server_missing_since, \
             (SELECT o.operation_id FROM operations o WHERE o.machine_id = m.machine_id AND o.kind = 'delete' \
                AND o.state = 'running' AND (o.options ->> 'now')::boolean LIMIT 1) AS deleted_by \
         FROM user_machines m WHERE m.idp_user_id = $4 AND m.slot = $5 AND {LEFT_SLOT} \
         AND m.provider_server_id IS NOT NULL AND m.failure_cause IS DISTINCT FROM 'server_gone' \
         AND (m.registered_at IS NOT NULL OR m.unsaved_since IS NOT NULL) ORDER BY m.epoch DESC LIMIT 50"
    );
    let (replaced, deleted, unregistered) = retention_seconds(retention);
    let params: Params<'_> = &[&replaced, &deleted, &unregistered, &user.as_str(), &slot.as_str()];
    let parse = |row: &Row| KeptServerRow {
        machine: MachineId(row.get("machine_id")),
        server: row.get("provider_server_id"),
        is_deleted: row.get("is_deleted"),
        until: row.get("kept_until"),
        unsaved_since: row.get("unsaved_since"),
        has_unsaved_files_only: row.get("unsaved_files"),
        removal_abandoned_at: row.get("removal_abandoned_at"),
        missing_since: row.get("server_missing_since"),
        deleted_by: row.get::<_, Option<_>>("deleted_by").map(OperationId),
    };
    Ok(query(client, &sql, params).await?.iter().map(parse).collect())
}

fn retention_seconds(retention: &ServerRetention) -> (f64, f64, f64) {
    let ServerRetention { replaced, deleted, unregistered } = retention;
    (replaced.as_secs_f64(), deleted.as_secs_f64(), unregistered.as_secs_f64())
}
