//! Deletes rows whose retention has ended: one process at a time, in batches, with a bound per pass.

use std::time::Duration;

use crate::context::Platform;
use crate::db;
use crate::db::retention::{Expiring, ExpiringTable};
use crate::signed_lifetimes::SIGN_OUT_TTL;
use svc_base::metrics::RETENTION_DELETED;

/// Interval between passes across all processes.
const PRUNE_INTERVAL: Duration = Duration::from_secs(60);
const BATCH_ROWS: i64 = 1000;
/// Per table and pass: 1,200,000 rows an hour, above the insert rate of any table.
const MAX_BATCHES: u32 = 20;

/// Tolerates differing clocks: rows that still count are not deleted.
const SESSION_GRACE: Duration = Duration::from_secs(3600);
const IDEMPOTENCY_KEY_RETENTION: Duration = Duration::from_secs(7 * 86_400);

/// # Errors
/// On a database error; the next pass resumes.
pub async fn prune(platform: &Platform) -> anyhow::Result<()> {
    let session = platform.db.session().await?;
    let pause = PRUNE_INTERVAL.min(platform.config.timing.reconcile * 2).mul_f64(0.9);
    if !db::tasks::claim_turn(&session, "retention", pause).await? {
        return Ok(());
    }
    let retention = platform.config.timing.retention;
    for expiring in [
        Expiring::new(ExpiringTable::Sessions, SESSION_GRACE),
        Expiring::new(ExpiringTable::SessionCodes, SESSION_GRACE),
        Expiring::new(ExpiringTable::SignOuts, SIGN_OUT_TTL),
        Expiring::new(ExpiringTable::IdempotencyKeys, IDEMPOTENCY_KEY_RETENTION),
        Expiring::new(ExpiringTable::Operations, retention.operations),
        Expiring::new(ExpiringTable::Rollouts, retention.operations),
        Expiring::new(ExpiringTable::Audit, retention.audit),
        // Operators are kept as long as the audit names them, so that a name never means two people in it.
        Expiring::new(ExpiringTable::Operators, retention.audit),
    ] {
        for _ in 0..MAX_BATCHES {
            let deleted = db::retention::delete_batch(&session, &expiring, BATCH_ROWS).await?;
            RETENTION_DELETED.add([expiring.table], deleted);
            if deleted < BATCH_ROWS.unsigned_abs() {
                break;
            }
        }
    }
    Ok(())
}
