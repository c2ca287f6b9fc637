//! Deletes rows whose retention period has ended: once per interval in the whole installation, in batches, with a limit
//! per pass.

use std::time::Duration;

use deadpool_postgres::Object;

use crate::context::Platform;
use crate::db::retention::{ExpiringTable, RetentionRule};
use crate::db::{self, DbError};
use svc_base::error_chain::format_chain;
use svc_base::metrics::RETENTION_DELETED;
use svc_router::signed_lifetimes::SIGN_OUT_TTL;

/// Interval between passes across all processes.
const PRUNE_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum number of batches per table and pass: 1,200,000 rows an hour (6,000 rollouts, whose batches are smaller),
/// which exceeds any table's insert rate.
const MAX_BATCHES: u32 = 20;

/// Tolerates clock skew, so that no row is deleted while it is still valid.
const SESSION_GRACE: Duration = Duration::from_secs(3600);
/// Counted from the key's first use.
const IDEMPOTENCY_KEY_RETENTION: Duration = Duration::from_secs(7 * 86_400);

/// Deletes expired rows from all tables, if no process has done so recently.
///
/// # Errors
/// The first database error. An error in one table does not stop the others, and the next pass retries the failed ones.
pub async fn prune(platform: &Platform) -> anyhow::Result<()> {
    let session = platform.db.session().await?;
    let min_interval = PRUNE_INTERVAL.min(platform.config.timing.reconcile_interval * 2).mul_f64(0.9);
    if !db::tasks::claim_turn(&session, "retention", min_interval).await? {
        return Ok(());
    }
    let retention = platform.config.timing.retention;
    let mut first_error = None;
    for rule in [
        RetentionRule::new(ExpiringTable::Sessions, SESSION_GRACE),
        RetentionRule::new(ExpiringTable::SessionCodes, SESSION_GRACE),
        RetentionRule::new(ExpiringTable::SignOuts, SIGN_OUT_TTL),
        RetentionRule::new(ExpiringTable::IdempotencyKeys, IDEMPOTENCY_KEY_RETENTION),
        RetentionRule::new(ExpiringTable::Operations, retention.operations),
        RetentionRule::new(ExpiringTable::Rollouts, retention.operations),
        RetentionRule::new(ExpiringTable::Audit, retention.audit),
        // Operators are kept as long as the audit log names them, so that a name in the audit log never refers to two
        // operators.
        RetentionRule::new(ExpiringTable::Operators, retention.audit),
    ] {
        if let Err(error) = prune_table(&session, &rule).await {
            tracing::warn!(table = rule.table, error = %format_chain(&error), "cannot delete expired rows");
            first_error = first_error.or(Some(error));
        }
    }
    first_error.map_or(Ok(()), |error| Err(error.into()))
}

async fn prune_table(session: &Object, rule: &RetentionRule) -> Result<(), DbError> {
    for _ in 0..MAX_BATCHES {
        let deleted = db::retention::delete_batch(session, rule).await?;
        RETENTION_DELETED.add([rule.table], deleted);
        if deleted < rule.batch_rows.unsigned_abs() {
            break;
        }
    }
    Ok(())
}
