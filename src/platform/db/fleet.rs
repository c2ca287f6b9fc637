//! Reads the state of every active machine, for the fleet view.
//!
//! Invariant: one statement reads everything; operations and backups are never queried per machine.

use deadpool_postgres::GenericClient;
use jiff::Timestamp;

use super::{DbError, query};
use svc_machine::id::{MachineId, OperationId};

/// One active machine. Ages are in seconds, by the database's clock.
#[derive(Debug, Clone)]
pub struct FleetRow {
    pub machine: MachineId,
    pub user: String,
    pub slot: String,
    pub handle: String,
    pub status: String,
    pub failure_cause: Option<String>,
    pub image_version: String,
    /// Age of the machine's row.
    pub age: f64,
    pub heartbeat_age: Option<f64>,
    /// `ok` or `failing`; `None` before the first heartbeat.
    pub gateway: Option<String>,
    pub database: Option<String>,
    /// Also `None` while code-server is starting, or if the release has none.
    pub code: Option<String>,
    /// Whether the last heartbeat lacked a disk measurement.
    pub is_disk_unknown: bool,
    /// Age of the slot's last verified snapshot, from any of its machines.
    pub backup_age: Option<f64>,
    /// Outcome of the last backup: `success` or `error`.
    pub backup_status: Option<String>,
    /// Error of a failed backup, truncated.
    pub backup_error: Option<String>,
    /// Outcome of the last update.
    pub update_outcome: Option<String>,
    /// Whether the last verification of stored snapshots found damage.
    pub is_snapshot_damaged: bool,
    /// Whether the last drill failed.
    pub has_drill_failed: bool,
    /// Time since the running operation was created.
    pub operation_age: Option<f64>,
    /// Number of consecutive failures of the running operation's current step.
    pub operation_attempts: i32,
    /// The running operation, if it is waiting for an operator's decision.
    pub waiting_operation: Option<OperationId>,
    /// Whether the running operation is blocked by a problem with the provider account.
    pub is_operation_blocked_by_account: bool,
    /// Time since an operator requested that the server be powered off.
    pub powered_off_age: Option<f64>,
    /// Time since the last rotation of the upgrade token.
    pub token_age: f64,
    /// Time since an operator requested a rotation of the upgrade token.
    pub token_request_age: Option<f64>,
    /// Codes of the problems that the host last reported for an operator.
    pub attention: Vec<String>,
    /// Time since the registration.
    pub registered_age: Option<f64>,
    /// The certificate that the host last reported; also `None` if its times cannot be parsed.
    pub certificate: Option<ReportedCertificate>,
    /// The last reported set of keys that the host verifies releases with: its sequence number and the keys' ids.
    pub bundle_keys: Option<(i64, Vec<String>)>,
}

/// A certificate as the host last reported it. Times are in seconds; `expires_in` counts from now.
#[derive(Debug, Clone, PartialEq)]
pub struct ReportedCertificate {
    /// The name for which the certificate was verified.
    pub host_name: Option<String>,
    pub is_trusted: bool,
    pub expires_in: f64,
    pub lifetime: f64,
}

impl ReportedCertificate {
    /// Parses the stored report here, not in SQL: a single time that PostgreSQL cannot cast would fail the whole
    /// statement.
    fn parse(
        host_name: Option<String>,
        is_trusted: bool,
        issued_at: Option<&str>,
        expires_at: Option<&str>,
        now: f64,
    ) -> Option<Self> {
        let seconds = |text: Option<&str>| {
            let time: Timestamp = text?.parse().ok()?;
            Some(time.as_second() as f64)
        };
        let (issued_at, expires_at) = (seconds(issued_at)?, seconds(expires_at)?);
        Some(Self { host_name, is_trusted, expires_in: expires_at - now, lifetime: expires_at - issued_at })
    }
}

pub async fn list_active_machines(client: &impl GenericClient) -> Result<Vec<FleetRow>, DbError> {
    let sql = "SELECT m.machine_id, m.idp_user_id, m.slot, m.handle, m.status, m.failure_cause, m.image_version, \
               extract(epoch FROM now() - m.created_at)::float8, \
               extract(epoch FROM now() - m.heartbeat_at)::float8, \
               m.health ->> 'gateway', m.health ->> 'database', \
               extract(epoch FROM now() - b.taken_at)::float8, \
               m.last_backup ->> 'status', extract(epoch FROM now() - o.created_at)::float8, \
               coalesce(o.attempts, 0), m.last_update ->> 'outcome', \
               coalesce(jsonb_array_length(m.checks #> '{verify,damaged}') > 0, false), \
               coalesce(m.checks #>> '{drill,status}' = 'error', false), o.waiting, \
               coalesce(o.error_code = 'provider_account', false), \
               extract(epoch FROM now() - m.powered_off_at)::float8, \
               ARRAY(SELECT item ->> 'code' FROM jsonb_array_elements(m.attention) item), \
               left(m.last_backup ->> 'error', 500), \
               extract(epoch FROM now() - m.upgrade_token_rotated_at)::float8, \
               extract(epoch FROM now() - m.upgrade_token_requested_at)::float8, \
               m.bundle_keys_sequence, m.bundle_key_ids, \
               coalesce(m.health -> 'disk' = 'null'::jsonb, false), m.health ->> 'code', \
               extract(epoch FROM now() - m.registered_at)::float8, \
               coalesce(m.certificate -> 'isTrusted' = 'true'::jsonb, false), \
               m.certificate ->> 'issuedAt', m.certificate ->> 'expiresAt', extract(epoch FROM now())::float8, m.certificate ->> 'hostName' \
               FROM user_machines m \
               LEFT JOIN (SELECT DISTINCT ON (machine_id) machine_id, created_at, attempts, error_code, \
                   CASE WHEN question IS NOT NULL THEN operation_id END AS waiting FROM operations \
                   WHERE state = 'running' ORDER BY machine_id, created_at) o ON o.machine_id = m.machine_id \
               LEFT JOIN (SELECT idp_user_id, slot, max(greatest(backup_taken_at, final_backup_at)) AS taken_at \
                   FROM user_machines GROUP BY idp_user_id, slot) b \
                   ON b.idp_user_id = m.idp_user_id AND b.slot = m.slot \
               WHERE m.deleted_at IS NULL AND m.retired_at IS NULL ORDER BY m.machine_id";
    let rows = query(client, sql, &[]).await?;
    Ok(rows
        .iter()
        .map(|row| FleetRow {
            machine: MachineId(row.get(0)),
            user: row.get(1),
            slot: row.get(2),
            handle: row.get(3),
            status: row.get(4),
            failure_cause: row.get(5),
            image_version: row.get(6),
            age: row.get(7),
            heartbeat_age: row.get(8),
            gateway: row.get(9),
            database: row.get(10),
            backup_age: row.get(11),
            backup_status: row.get(12),
            operation_age: row.get(13),
            operation_attempts: row.get(14),
            update_outcome: row.get(15),
            is_snapshot_damaged: row.get(16),
            has_drill_failed: row.get(17),
            waiting_operation: row.get::<_, Option<_>>(18).map(OperationId),
            is_operation_blocked_by_account: row.get(19),
            powered_off_age: row.get(20),
            attention: row.get(21),
            backup_error: row.get(22),
            token_age: row.get(23),
            token_request_age: row.get(24),
            bundle_keys: row.get::<_, Option<_>>(25).zip(row.get(26)),
            is_disk_unknown: row.get(27),
            code: row.get(28),
            registered_age: row.get(29),
            certificate: ReportedCertificate::parse(
                row.get(34),
                row.get(30),
                row.get(31),
                row.get(32),
                row.get(33),
            ),
        })
        .collect())
}
