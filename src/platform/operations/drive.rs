//! Selects the operations that this process drives: claims those that are due, and releases them.
//!
//! Invariant: an operation that is waiting for a host does not block others. Steps that call hosts have their own
//! capacity, and steps that have not started are claimed first.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinError, JoinSet};
use tracing::Instrument;
use uuid::Uuid;

use super::runner::run_current_step;
use super::step::StepError;
use super::{Lane, Step, runnable_steps, runnable_steps_in};
use crate::context::Platform;
use crate::db::operations::{OperationRow, RunnableSteps};
use crate::db::{self, DbError};
use svc_http::problem::format_chain;
use svc_http::request_id;

/// Maximum number of general-lane operations that one process drives at once.
const MAX_GENERAL_OPERATIONS: usize = 16;
/// Maximum number of operations at steps that call hosts: each costs only a task, which a silent host blocks for
/// seconds.
const MAX_HOST_CALL_OPERATIONS: usize = 64;
/// Maximum backoff for an operation whose outcome cannot be stored.
const MAX_UNSTORED_BACKOFF: Duration = Duration::from_secs(30);
/// Minimum time between two rounds of claims, so that an operation that is due but locked by another transaction does
/// not cause a busy loop.
const MIN_CLAIM_INTERVAL: Duration = Duration::from_millis(20);

/// Drives operations until `stop`, then waits for running steps.
pub async fn run(platform: Arc<Platform>) {
    let mut drivers = Drivers::default();
    while !platform.stop.is_cancelled() {
        let wait = drivers.claim_due(&platform).await.unwrap_or_else(|error| {
            tracing::warn!(error = %format_chain(&error), "cannot claim operations");
            None
        });
        let poll = platform.config.timing.poll_interval;
        tokio::select! {
            () = platform.stop.cancelled() => {}
            () = platform.runner_wake.notified() => {}
            () = tokio::time::sleep(wait.map_or(poll, |wait| wait.clamp(MIN_CLAIM_INTERVAL.min(poll), poll))) => {}
            Some(result) = drivers.general.join_next() => log_panic(result),
            Some(result) = drivers.host_calls.join_next() => log_panic(result),
        }
    }
    while drivers.general.join_next().await.is_some() {}
    while drivers.host_calls.join_next().await.is_some() {}
}

/// The operations that this process is driving, by lane.
#[derive(Default)]
struct Drivers {
    general: JoinSet<()>,
    host_calls: JoinSet<()>,
}

impl Drivers {
    /// Claims due operations up to the capacity of each lane. Returns the time until the next one is due in a lane with
    /// capacity, if there is one.
    async fn claim_due(&mut self, platform: &Arc<Platform>) -> Result<Option<Duration>, DbError> {
        while let Some(runnable) = self.claimable_steps() {
            // Each claim has its own owner: a process that claims an operation again after losing it must not be
            // mistaken for the previous owner.
            let owner = Uuid::now_v7();
            let session = platform.db.session().await?;
            let lease = platform.config.timing.lease_ttl;
            let Some(operation) = db::operations::claim(&session, owner, lease, &runnable).await? else {
                return db::operations::load_time_until_due(&session, &runnable).await;
            };
            drop(session);
            let lane = match current_lane(&operation) {
                Lane::General => &mut self.general,
                Lane::HostCalls => &mut self.host_calls,
            };
            let platform = platform.clone();
            lane.spawn(async move { drive_with_request_id(&platform, operation, owner).await });
        }
        Ok(None)
    }

    /// Returns the steps of the lanes with capacity.
    fn claimable_steps(&self) -> Option<RunnableSteps<'static>> {
        match (self.general.len() < MAX_GENERAL_OPERATIONS, self.host_calls.len() < MAX_HOST_CALL_OPERATIONS)
        {
            (true, true) => Some(runnable_steps()),
            (true, false) => Some(runnable_steps_in(Lane::General)),
            (false, true) => Some(runnable_steps_in(Lane::HostCalls)),
            (false, false) => None,
        }
    }
}

fn log_panic(result: Result<(), JoinError>) {
    if let Err(error) = result {
        tracing::error!(%error, "a step panicked; its operation's lease will expire");
    }
}

/// Returns the lane of the operation's current step.
fn current_lane(operation: &OperationRow) -> Lane {
    operation.step.parse().map_or(Lane::General, Step::lane)
}

/// Runs [`drive`] under the id of the request that created the operation, in a span with the operation's log fields.
async fn drive_with_request_id(platform: &Platform, operation: OperationRow, owner: Uuid) {
    let id = operation.request_id.clone();
    let span = tracing::info_span!(
        "operation",
        svc_request_id = %id,
        svc_machine_id = %operation.machine,
        svc_operation_id = %operation.id,
        kind = operation.kind,
    );
    request_id::scope(id.into(), drive(platform, operation, owner)).instrument(span).await;
}

/// Runs the steps of one operation while they are due and in the lane of the first one.
async fn drive(platform: &Platform, mut operation: OperationRow, owner: Uuid) {
    let lane = current_lane(&operation);
    let mut needs_other_lane = false;
    let is_stored = loop {
        match run_current_step(platform, &operation, owner).await {
            Ok(Some(next)) if !platform.stop.is_cancelled() => {
                needs_other_lane = current_lane(&next) != lane;
                if needs_other_lane {
                    break true;
                }
                operation = next;
            }
            Ok(_) => break true,
            Err(StepError::LeaseLost) => {
                // The operation may have left a server at the provider, which the reconciler removes.
                platform.reconciler_wake.notify_one();
                break true;
            }
            Err(error) => {
                // The operation is retried after a delay, because its state could not be updated.
                tracing::warn!(operation = %operation.id, error = %format_chain(&error), "cannot store the outcome of a step; retrying later");
                break false;
            }
        }
    };
    let release = async {
        let session = platform.db.session().await?;
        if !is_stored {
            db::leases::postpone_operation(&session, operation.id, owner, MAX_UNSTORED_BACKOFF).await?;
        }
        db::operations::release(&session, operation.id, owner).await
    };
    if let Err(error) = release.await {
        tracing::warn!(operation = %operation.id, error = %format_chain(&error), "cannot release a lease");
    }
    if needs_other_lane {
        platform.runner_wake.notify_one();
    }
}
