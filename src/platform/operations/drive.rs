//! Which operations this process drives at a time: it claims those that are due, and gives them back.
//!
//! The invariant: an operation that waits for a host does not keep others from running. Steps that call hosts have places
//! of their own, and steps that have not started are claimed first.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinError, JoinSet};
use tracing::Instrument;
use uuid::Uuid;

use super::runner::one_step;
use super::step::StepError;
use super::{Lane, Step, vocabulary_of};
use crate::http::problem::chain;
use crate::http::request_id;
use crate::platform::context::Platform;
use crate::platform::db::operations::OperationRow;
use crate::platform::db::{self, DbError};

/// Operations that one process drives at a time.
const MAX_DRIVEN: usize = 16;
/// The same, at steps that call hosts: a place costs a task, and a silent host holds it for seconds.
const MAX_CALLING_HOSTS: usize = 64;
/// Between two tries of an operation whose outcome cannot be stored.
const MAX_UNSTORED_BACKOFF: Duration = Duration::from_secs(30);

/// Drives operations until `stop`, then lets the steps under way end.
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
            Some(ended) = general.driven.join_next() => note_panic(ended),
            Some(ended) = calling.driven.join_next() => note_panic(ended),
        }
    }
    while general.driven.join_next().await.is_some() {}
    while calling.driven.join_next().await.is_some() {}
}

/// The operations that this process drives at steps of one kind.
struct Drivers {
    lane: Lane,
    limit: usize,
    driven: JoinSet<()>,
}

impl Drivers {
    /// Claims what is due while places are free.
    async fn fill(&mut self, platform: &Arc<Platform>) {
        while self.driven.len() < self.limit {
            // Of this claim alone: a process that claims again what it has lost is another owner.
            let owner = Uuid::now_v7();
            match claim(platform, owner, self.lane).await {
                Ok(Some(operation)) => {
                    let platform = platform.clone();
                    self.driven.spawn(async move { drive_as_asked(&platform, operation, owner).await });
                }
                Ok(None) => break,
                Err(error) => {
                    tracing::warn!(error = %chain(&error), "operations cannot be claimed");
                    break;
                }
            }
        }
    }
}

fn note_panic(ended: Result<(), JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "a step panicked; its lease runs out");
    }
}

async fn claim(platform: &Platform, owner: Uuid, lane: Lane) -> Result<Option<OperationRow>, DbError> {
    let session = platform.db.session().await?;
    db::operations::claim(&session, owner, platform.config.timing.lease, &vocabulary_of(lane)).await
}

/// Of the step that the operation has come to.
fn lane_of(operation: &OperationRow) -> Lane {
    operation.step.parse().map_or(Lane::General, Step::lane)
}

/// [`drive`] under the id of the request that it was filed for, with the names that the log is searched by.
async fn drive_as_asked(platform: &Platform, operation: OperationRow, owner: Uuid) {
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

/// Takes one operation as far as it goes now, in the lane that it was claimed for.
async fn drive(platform: &Platform, mut operation: OperationRow, owner: Uuid) {
    let lane = lane_of(&operation);
    let mut needs_other_lane = false;
    let is_stored = loop {
        match one_step(platform, &operation, owner).await {
            Ok(Some(next)) if !platform.stop.is_cancelled() => {
                needs_other_lane = lane_of(&next) != lane;
                if needs_other_lane {
                    break true;
                }
                operation = next;
            }
            Ok(_) => break true,
            Err(StepError::Lost) => {
                // Ended under way: what it was about may stand at the provider all the same.
                platform.reconcile.notify_one();
                break true;
            }
            Err(error) => {
                // Not even the failure could be stored: the operation is retried after a pause.
                tracing::warn!(operation = %operation.id, error = %chain(&error), "an operation is left");
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
        tracing::warn!(operation = %operation.id, error = %chain(&error), "a lease was not given back");
    }
    if needs_other_lane {
        platform.nudge.notify_one();
    }
}
