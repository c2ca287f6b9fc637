//! Selects the operations that this process drives: claims those that are due, and releases them.
//!
//! The invariant: an operation that waits for a host does not block others. Steps that call hosts have their own
//! capacity, and steps that have not started are claimed first.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinError, JoinSet};
use tracing::Instrument;
use uuid::Uuid;

use super::runner::run_current_step;
use super::step::StepError;
use super::{Lane, Step, supported_steps_in};
use crate::context::Platform;
use crate::db::operations::OperationRow;
use crate::db::{self, DbError};
use svc_http::problem::format_chain;
use svc_http::request_id;

/// Maximum operations of the general lane that one process drives at a time.
const MAX_DRIVEN: usize = 16;
/// Maximum operations at steps that call hosts: each costs only a task, and a silent host blocks it for seconds.
const MAX_CALLING_HOSTS: usize = 64;
/// Maximum backoff of an operation whose outcome cannot be stored.
const MAX_UNSTORED_BACKOFF: Duration = Duration::from_secs(30);

/// Drives operations until `stop`, then waits for running steps.
pub async fn run(platform: Arc<Platform>) {
    let mut general = Drivers { lane: Lane::General, limit: MAX_DRIVEN, driven: JoinSet::new() };
    let mut calling = Drivers { lane: Lane::HostCalls, limit: MAX_CALLING_HOSTS, driven: JoinSet::new() };
    while !platform.stop.is_cancelled() {
        general.fill(&platform).await;
        calling.fill(&platform).await;
        tokio::select! {
            () = platform.stop.cancelled() => {}
            () = platform.nudge.notified() => {}
            () = tokio::time::sleep(platform.config.timing.poll) => {}
            Some(ended) = general.driven.join_next() => log_panic(ended),
            Some(ended) = calling.driven.join_next() => log_panic(ended),
        }
    }
    while general.driven.join_next().await.is_some() {}
    while calling.driven.join_next().await.is_some() {}
}

/// The operations of one lane that this process drives.
struct Drivers {
    lane: Lane,
    limit: usize,
    driven: JoinSet<()>,
}

impl Drivers {
    /// Claims due operations up to the capacity.
    async fn fill(&mut self, platform: &Arc<Platform>) {
        while self.driven.len() < self.limit {
            // Each claim has its own owner: a process that claims an operation again after losing it must not look like
            // the previous owner.
            let owner = Uuid::now_v7();
            match claim(platform, owner, self.lane).await {
                Ok(Some(operation)) => {
                    let platform = platform.clone();
                    self.driven
                        .spawn(async move { drive_with_request_id(&platform, operation, owner).await });
                }
                Ok(None) => break,
                Err(error) => {
                    tracing::warn!(error = %format_chain(&error), "cannot claim operations");
                    break;
                }
            }
        }
    }
}

fn log_panic(ended: Result<(), JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "a step panicked; its lease will expire");
    }
}

async fn claim(platform: &Platform, owner: Uuid, lane: Lane) -> Result<Option<OperationRow>, DbError> {
    let session = platform.db.session().await?;
    db::operations::claim(&session, owner, platform.config.timing.lease, &supported_steps_in(lane)).await
}

/// The lane of the operation's current step.
fn lane_of(operation: &OperationRow) -> Lane {
    operation.step.parse().map_or(Lane::General, Step::lane)
}

/// [`drive`] under the id of the request that created the operation, in a span with its log fields.
async fn drive_with_request_id(platform: &Platform, operation: OperationRow, owner: Uuid) {
    let id = operation.request_id.clone();
    let span = tracing::info_span!(
        "operation",
        svc_request_id = %id,
        svc_machine_id = %operation.machine,
        svc_operation_id = %operation.id,
        kind = operation.kind,
    );
    request_id::scope(id, drive(platform, operation, owner)).instrument(span).await;
}

/// Runs the steps of one operation while they are due and in this lane.
async fn drive(platform: &Platform, mut operation: OperationRow, owner: Uuid) {
    let lane = lane_of(&operation);
    let mut needs_other_lane = false;
    let is_stored = loop {
        match run_current_step(platform, &operation, owner).await {
            Ok(Some(next)) if !platform.stop.is_cancelled() => {
                needs_other_lane = lane_of(&next) != lane;
                if needs_other_lane {
                    break true;
                }
                operation = next;
            }
            Ok(_) => break true,
            Err(StepError::Lost) => {
                // The operation's server may still exist at the provider.
                platform.reconcile.notify_one();
                break true;
            }
            Err(error) => {
                // The operation is retried after a delay, because its state could not be updated.
                tracing::warn!(operation = %operation.id, error = %format_chain(&error), "cannot store the outcome of a step; retrying later");
                break false;
            }
        }
    };
    let released = async {
        let session = platform.db.session().await?;
        if !is_stored {
            db::leases::postpone(&session, operation.id, owner, MAX_UNSTORED_BACKOFF).await?;
        }
        db::operations::release(&session, operation.id, owner).await
    };
    if let Err(error) = released.await {
        tracing::warn!(operation = %operation.id, error = %format_chain(&error), "cannot release a lease");
    }
    if needs_other_lane {
        platform.nudge.notify_one();
    }
}
