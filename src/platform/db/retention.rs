//! Deletes expired rows in batches. Each statement uses an index on a time column, except for rollouts, which are few.
//!
//! Machines, slots, handles and signing keys never expire, because their epochs, names and sealed keys stay in use.
//! Platform key and process rows are deleted where they are written (`db::platform_keys`).

use std::time::Duration;

use deadpool_postgres::GenericClient;

use super::{DbError, execute};

const BATCH_ROWS: i64 = 1000;
/// Rollouts are deleted in small batches, because each may have thousands of rows in `rollout_machines`.
const ROLLOUT_BATCH_ROWS: i64 = 5;

/// A table whose rows are deleted after a retention period.
#[derive(Debug, Clone, Copy)]
pub struct RetentionRule {
    /// The table's name in metrics. Dependent rows in other tables are deleted with its rows.
    pub table: &'static str,
    /// Deletes at most `$2` rows that expired, ended, or were revoked or written more than `$1` seconds ago.
    statement: &'static str,
    /// The retention period, counted from the time in `statement`.
    retention: Duration,
    /// Maximum number of rows of `table` that one statement deletes.
    pub batch_rows: i64,
}

impl RetentionRule {
    pub fn new(table: ExpiringTable, retention: Duration) -> Self {
        let (name, statement) = table.name_and_statement();
        let batch_rows = if table == ExpiringTable::Rollouts { ROLLOUT_BATCH_ROWS } else { BATCH_ROWS };
        Self { table: name, statement, retention, batch_rows }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpiringTable {
    Sessions,
    SessionCodes,
    SignOuts,
    IdempotencyKeys,
    /// Operations with their logs.
    Operations,
    /// Rollouts with their machines.
    Rollouts,
    Audit,
    /// Operators that have been revoked, or whose tokens have all expired.
    Operators,
}

impl ExpiringTable {
    fn name_and_statement(self) -> (&'static str, &'static str) {
        match self {
            Self::Sessions => (
                "sessions",
                "DELETE FROM sessions WHERE token_hash IN (SELECT token_hash FROM sessions \
                 WHERE expires_at < now() - make_interval(secs => $1) ORDER BY expires_at LIMIT $2 \
                 FOR UPDATE SKIP LOCKED)",
            ),
            // Includes used codes: each code expires one minute after its creation.
            Self::SessionCodes => (
                "session_codes",
                "DELETE FROM session_codes WHERE code_hash IN (SELECT code_hash FROM session_codes \
                 WHERE expires_at < now() - make_interval(secs => $1) ORDER BY expires_at LIMIT $2 \
                 FOR UPDATE SKIP LOCKED)",
            ),
            Self::SignOuts => (
                "sign_outs",
                "DELETE FROM sign_outs WHERE idp_user_id IN (SELECT idp_user_id FROM sign_outs \
                 WHERE changed_at < now() - make_interval(secs => $1) ORDER BY changed_at LIMIT $2 \
                 FOR UPDATE SKIP LOCKED)",
            ),
            Self::IdempotencyKeys => (
                "idempotency_keys",
                "DELETE FROM idempotency_keys WHERE (actor, key) IN (SELECT actor, key FROM idempotency_keys \
                 WHERE created_at < now() - make_interval(secs => $1) ORDER BY created_at LIMIT $2 \
                 FOR UPDATE SKIP LOCKED)",
            ),
            // The order of the deletions does not matter: all parts of the statement see the same snapshot, and foreign
            // keys are checked at its end.
            Self::Operations => (
                "operations",
                "WITH expired AS (SELECT operation_id FROM operations \
                   WHERE ended_at < now() - make_interval(secs => $1) ORDER BY ended_at LIMIT $2 \
                   FOR UPDATE SKIP LOCKED), \
                 lines AS (DELETE FROM operation_log WHERE operation_id IN (SELECT operation_id FROM expired)) \
                 DELETE FROM operations WHERE operation_id IN (SELECT operation_id FROM expired)",
            ),
            Self::Rollouts => (
                "rollouts",
                "WITH expired AS (SELECT rollout_id FROM rollouts \
                   WHERE ended_at < now() - make_interval(secs => $1) ORDER BY ended_at LIMIT $2 \
                   FOR UPDATE SKIP LOCKED), \
                 machines AS (DELETE FROM rollout_machines WHERE rollout_id IN (SELECT rollout_id FROM expired)) \
                 DELETE FROM rollouts WHERE rollout_id IN (SELECT rollout_id FROM expired)",
            ),
            Self::Audit => (
                "operator_audit",
                "DELETE FROM operator_audit WHERE audit_id IN (SELECT audit_id FROM operator_audit \
                 WHERE at < now() - make_interval(secs => $1) ORDER BY at LIMIT $2 FOR UPDATE SKIP LOCKED)",
            ),
            // The name must not be reused while the audit log may still contain the operator's actions.
            Self::Operators => (
                "operators",
                "DELETE FROM operators WHERE name IN (SELECT name FROM operators \
                 WHERE coalesce(revoked_at, greatest(expires_at, previous_expires_at)) \
                   < now() - make_interval(secs => $1) \
                 ORDER BY coalesce(revoked_at, greatest(expires_at, previous_expires_at)) LIMIT $2 \
                 FOR UPDATE SKIP LOCKED)",
            ),
        }
    }
}

/// Deletes at most one batch of rows and returns the number of deleted rows.
pub async fn delete_batch(client: &impl GenericClient, rule: &RetentionRule) -> Result<u64, DbError> {
    execute(client, rule.statement, &[&rule.retention.as_secs_f64(), &rule.batch_rows]).await
}
