//! Collects metrics for the whole fleet from the database, and for this process's connection pools, when `/metrics` is
//! read.
//!
//! Invariant: if the database is unavailable, the scrape still succeeds. The fleet's metrics then keep the values from
//! the last successful read, whose time is `FLEET_READ_AT`.

use std::time::Duration;

use deadpool_postgres::Status;

use super::alarms::Alarm;
use super::context::Platform;
use super::db::{self, Db, DbError};
use super::operations::runnable_steps;
use super::{certificates, fleet, former_machines};
use svc_base::metrics::{
    ALARMS, BACKUP_AGE, FLEET_READ_AT, MACHINES, MACHINES_BY_CERTIFICATE, MACHINES_BY_HEALTH,
    MACHINES_NEEDING_ATTENTION, OPERATIONS_IN_PROGRESS, OPERATIONS_OVERDUE, OPERATIONS_UNSUPPORTED,
    POOL_CONNECTIONS, POOL_WAITING, PROVIDER_BUDGET, SLOTS_WITH_FAILED_PRUNE, SLOTS_WITHOUT_BACKUP,
    intern_label,
};
use svc_http::problem::format_chain;
use svc_machine::operation::OperationKind;
use svc_router::host_trust::HostTrust;

/// Timeout for collecting the fleet's metrics: shorter than a scraper's usual timeout of ten seconds.
const COLLECT_TIMEOUT: Duration = Duration::from_secs(4);
/// The age from which a running operation counts as overdue.
const OVERDUE_AGE: Duration = Duration::from_secs(1800);

/// Collects the metrics that are updated only for a scrape.
pub async fn collect(platform: &Platform) {
    collect_pool_metrics(&[&platform.db, &platform.host_db, &platform.report_db]);
    match tokio::time::timeout(
        COLLECT_TIMEOUT,
        collect_fleet_metrics(
            &platform.report_db,
            platform.config.timing.tokens.rotation_age,
            &platform.config.trust,
        ),
    )
    .await
    {
        Ok(Ok(())) => FLEET_READ_AT.set_to_now([]),
        Ok(Err(error)) => tracing::warn!(error = %format_chain(&error), "cannot collect the fleet metrics"),
        Err(_) => tracing::warn!("collecting the fleet metrics timed out"),
    }
}

fn collect_pool_metrics(pools: &[&Db]) {
    let statuses: Vec<_> = pools.iter().map(|db| db.pool().status()).collect();
    let sum = |field: fn(&Status) -> usize| statuses.iter().map(field).sum::<usize>() as f64;
    POOL_CONNECTIONS.set(["open"], sum(|status| status.size));
    POOL_CONNECTIONS.set(["idle"], sum(|status| status.available));
    POOL_CONNECTIONS.set(["limit"], sum(|status| status.max_size));
    POOL_WAITING.set([], sum(|status| status.waiting));
}

async fn collect_fleet_metrics(db: &Db, token_rotation: Duration, trust: &HostTrust) -> Result<(), DbError> {
    // All queries run before any gauge is set: a failure must not mix new values with old ones.
    let session = db.session().await?;
    let rows = db::fleet::list_active_machines(&session).await?;
    let former = db::former_machines::list_needing_attention(&session).await?;
    let failed_prunes = db::files_keys::count_failed_prunes(&session).await?;
    let in_progress = db::operations::count_running_by_kind(&session).await?;
    let (_, overdue) = db::operations::list_long_running(&session, OVERDUE_AGE, 1).await?;
    let alarms = db::alarms::list_active(&session).await?;
    let unsupported = db::operations::count_unsupported(&session, &runnable_steps()).await?;
    let remaining_budget = db::budget::load_remaining(&session).await?;

    let mut summary = fleet::summarize(&rows, token_rotation, trust);
    former_machines::add_to_attention(&mut summary, &former);
    if let Some(certificates) = certificates::summarize(&rows, trust) {
        MACHINES_BY_CERTIFICATE.set(["trusted"], certificates.trusted as f64);
        MACHINES_BY_CERTIFICATE.set(["expiring"], certificates.expiring as f64);
        MACHINES_BY_CERTIFICATE.set(["missing"], certificates.missing as f64);
    }
    for (status, count) in &summary.totals.by_status {
        MACHINES.set([intern_label(status)], *count as f64);
    }
    for (health, count) in &summary.totals.by_health {
        MACHINES_BY_HEALTH.set([intern_label(health)], *count as f64);
    }
    MACHINES_NEEDING_ATTENTION.set([], summary.attention_total as f64);
    BACKUP_AGE.set(["max"], seconds_or_nan(summary.backups.max_age_seconds));
    BACKUP_AGE.set(["p50"], seconds_or_nan(summary.backups.p50_age_seconds));
    SLOTS_WITHOUT_BACKUP.set([], summary.backups.never as f64);
    SLOTS_WITH_FAILED_PRUNE.set([], failed_prunes as f64);
    for kind in OperationKind::ALL {
        let row = in_progress.iter().find(|(name, _)| name == kind.as_str());
        OPERATIONS_IN_PROGRESS.set([kind.as_str()], row.map_or(0.0, |(_, count)| *count as f64));
    }
    OPERATIONS_OVERDUE.set([], overdue as f64);
    for alarm in Alarm::ALL {
        let is_active = alarms.iter().any(|row| row.alarm == alarm.as_str());
        ALARMS.set([alarm.as_str()], f64::from(u8::from(is_active)));
    }
    OPERATIONS_UNSUPPORTED.set([], unsupported as f64);
    if let Some(remaining) = remaining_budget {
        PROVIDER_BUDGET.set([], remaining);
    }
    Ok(())
}

/// Converts an age for a gauge. A missing age is NaN: without a value, the gauge would keep the age from an earlier
/// scrape.
fn seconds_or_nan(age: Option<u64>) -> f64 {
    age.map_or(f64::NAN, |seconds| seconds as f64)
}
