//! The reconciler: handles expired registrations and previews, stalled operations, missing and leftover servers, and
//! rows whose retention period has ended.
//!
//! The reconciler takes no input and can run at any time, in any number of processes: on a timer, or earlier when
//! notified.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::{OperationKind, OperationOptions};
use super::{inventory, leased, retention, runnable_steps};
use crate::alarms::{self, Alarm};
use crate::context::Platform;
use crate::db::operations::{OperationRow, StallLimits};
use crate::db::{self, DbError};
use crate::lifecycle::{self, Change, EventContext, LifecycleError};
use crate::listing_interval::listing_interval;
use svc_base::metrics::{RECONCILER_RUNS, RECONCILER_SUCCESS};
use svc_base::quantity::pluralize;
use svc_http::problem::format_chain;
use svc_http::request_id;
use svc_machine::event::Event;
use svc_machine::id::MachineId;

/// Minimum time between passes during a burst of notifications.
const MIN_PASS_INTERVAL: Duration = Duration::from_millis(500);

/// Runs passes until the platform stops.
pub async fn run(platform: Arc<Platform>) {
    let interval = platform.config.timing.reconcile_interval;
    loop {
        // The servers are not listed again if any process has listed them within this time.
        let mut min_interval = interval.mul_f64(0.9);
        tokio::select! {
            () = platform.stop.cancelled() => return,
            () = tokio::time::sleep(interval) => {}
            () = platform.reconciler_wake.notified() => min_interval = MIN_PASS_INTERVAL,
        }
        // Each pass has its own request id.
        request_id::run_with_new_id(run_pass(&platform, min_interval)).await;
        tokio::select! {
            () = platform.stop.cancelled() => return,
            () = tokio::time::sleep(MIN_PASS_INTERVAL) => {}
        }
    }
}

async fn run_pass(platform: &Platform, min_interval: Duration) {
    report("registrations", expire_registrations(platform).await);
    report("previews", expire_previews(platform).await);
    report("hanging_operations", end_stalled_operations(platform).await);
    report("unknown_operations", report_unknown_operations(platform).await);
    // `None`: the servers were listed too recently, so there is nothing to report.
    if let Some((inventory, outcome)) = check_servers(platform, min_interval).await {
        report("servers", outcome);
        if inventory == InventoryStatus::Recorded {
            report("leftovers", remove_leftovers(platform).await);
        }
    }
    report("retention", retention::prune(platform).await);
}

/// Records the outcome of one part in the metrics and the log.
fn report(part: &'static str, outcome: anyhow::Result<()>) {
    match outcome {
        Ok(()) => {
            RECONCILER_RUNS.add_one([part, "ok"]);
            RECONCILER_SUCCESS.set_to_now([part]);
        }
        Err(error) => {
            RECONCILER_RUNS.add_one([part, "failed"]);
            tracing::warn!(error = %format_chain(error.as_ref()), part, "a part of the reconciler failed");
        }
    }
}

/// Counts the failures of one part of a pass. One item's failure does not stop the part.
#[derive(Default)]
pub(super) struct Failures(usize);

impl Failures {
    pub fn record(&mut self, item: impl Display, outcome: anyhow::Result<()>) {
        if let Err(error) = outcome {
            self.0 += 1;
            tracing::error!(%item, error = %format_chain(error.as_ref()), "the reconciler skipped an item");
        }
    }

    /// Returns an error if any item failed.
    pub fn into_result(self) -> anyhow::Result<()> {
        anyhow::ensure!(self.0 == 0, "{} failed", pluralize(self.0 as u64, "item"));
        Ok(())
    }
}

async fn expire_registrations(platform: &Platform) -> anyhow::Result<()> {
    let session = platform.db.session().await?;
    let expired = db::machines::list_expired_registrations(&session).await?;
    drop(session);
    let mut failures = Failures::default();
    for machine in expired {
        tracing::warn!(%machine, "a registration expired");
        let outcome = leased::expire_registration(platform, machine).await;
        failures.record(machine, outcome.map_err(Into::into));
    }
    failures.into_result()
}

async fn expire_previews(platform: &Platform) -> anyhow::Result<()> {
    let session = platform.db.session().await?;
    let expired = db::machines::list_expired_previews(&session).await?;
    drop(session);
    let mut failures = Failures::default();
    for machine in expired {
        failures.record(machine, delete_expired_preview(platform, machine).await);
    }
    failures.into_result()
}

/// Requests the deletion; an operation then carries it out.
async fn delete_expired_preview(platform: &Platform, machine: MachineId) -> anyhow::Result<()> {
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    let Some(row) = db::machines::lock(&tx, machine).await? else { return Ok(()) };
    let context = EventContext::default();
    let change = lifecycle::apply(&tx, &platform.mint, &row, &Event::DeleteRequested, context).await?;
    // The machine has been deleted since it was listed.
    if change == Change::Unchanged {
        return Ok(());
    }
    let target = machine.to_string();
    let entry = db::audit::AuditEntry {
        actor: "platform",
        action: "preview.expired",
        target: &target,
        before: Some(&row.audit_record()),
        after: None,
        request_id: &request_id::current(),
    };
    db::audit::write(&tx, &entry).await?;
    db::commit(tx).await?;
    tracing::info!(%machine, "requested the deletion of an expired preview");
    Ok(())
}

/// Ends operations that have made no progress for too long or are too old, for example because a step crashes every
/// process that runs it.
async fn end_stalled_operations(platform: &Platform) -> anyhow::Result<()> {
    let session = platform.db.session().await?;
    let timing = &platform.config.timing;
    let limits = StallLimits::new(timing.operation_stall_timeout, timing.operation_limit, runnable_steps());
    let stalled = db::operations::list_stalled(&session, &limits).await?;
    drop(session);
    let mut failures = Failures::default();
    for operation in stalled {
        failures.record(operation.id, end_stalled_operation(platform, &operation, &limits).await);
    }
    failures.into_result()
}

/// Raises an alarm if there are operations that only a different release can run.
async fn report_unknown_operations(platform: &Platform) -> anyhow::Result<()> {
    let session = platform.db.session().await?;
    let unknown = db::operations::count_unsupported(&session, &runnable_steps()).await?;
    drop(session);
    if unknown > 0 {
        alarms::raise_or_log(platform, Alarm::UnknownOperations, &json!({"operations": unknown})).await;
    }
    Ok(())
}

async fn end_stalled_operation(
    platform: &Platform,
    operation: &OperationRow,
    limits: &StallLimits<'_>,
) -> anyhow::Result<()> {
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    let Some(row) = db::machines::lock(&tx, operation.machine).await? else { return Ok(()) };
    if !db::operations::lock_stalled(&tx, operation.id, limits).await? {
        return Ok(());
    }
    tracing::error!(operation = %operation.id, kind = operation.kind, step = operation.step, "ending a stalled operation");
    let context = EventContext {
        failure: Some((&operation.step, "the operation did not end in time")),
        ..EventContext::default()
    };
    match lifecycle::apply(&tx, &platform.mint, &row, &Event::OperationHung, context).await {
        Ok(_) | Err(LifecycleError::Refused(_)) => {}
        Err(error) => return Err(error.into()),
    }
    // The operation ends even if the machine is not waiting for it.
    db::operations::end(&tx, operation.id, "failed", Some("operation_hung")).await?;
    Ok(db::commit(tx).await?)
}

/// Whether a pass has recorded the provider's servers that belong to no known machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InventoryStatus {
    Recorded,
    NotRecorded,
}

/// Compares the provider's servers with the database. Returns `None` if any process has started to do so within
/// `min_interval` or, if that is longer, the listing interval.
async fn check_servers(
    platform: &Platform,
    min_interval: Duration,
) -> Option<(InventoryStatus, anyhow::Result<()>)> {
    match claim_turn(platform, min_interval).await {
        Ok(true) => Some(inventory::take_inventory(platform).await),
        Ok(false) => None,
        Err(error) => Some((InventoryStatus::NotRecorded, Err(error.into()))),
    }
}

async fn claim_turn(platform: &Platform, min_interval: Duration) -> Result<bool, DbError> {
    let session = platform.db.session().await?;
    let servers = db::servers::count_own(&session).await?.existing;
    db::tasks::claim_turn(&session, "servers", min_interval.max(listing_interval(servers))).await
}

/// Requests the deletion of servers whose retention has ended, unless the database may have lost machines. Only the
/// pass that took the inventory may do this: another process's inventory may still be running, and the stored list of
/// unknown servers may come from a restored copy of the database.
async fn remove_leftovers(platform: &Platform) -> anyhow::Result<()> {
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    db::lock(&tx, "leftover servers").await?;
    if db::unknown_servers::is_any_held(&tx).await? {
        return Ok(());
    }
    let retention = platform.config.timing.server_retention();
    let removable = db::kept_servers::list_removable(&tx, &retention).await?;
    for machine in &removable {
        db::operations::create(&tx, *machine, OperationKind::RemoveServer, OperationOptions::default())
            .await?;
        tracing::info!(%machine, "the retention of a machine's server has ended: removing the server");
    }
    db::commit(tx).await?;
    if !removable.is_empty() {
        platform.runner_wake.notify_one();
    }
    Ok(())
}
