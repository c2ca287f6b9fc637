//! The reconciler: sees to what no operation sees to — registrations and previews that ran out, operations that hang,
//! servers that are gone or that nobody is deleting, answers that nobody will ask for again.
//!
//! It takes no input and can run at any time, in any number of processes: by its timer, or sooner when nudged.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::{OperationKind, OperationOptions};
use super::{census, held, retention, vocabulary};
use crate::http::problem::chain;
use crate::http::request_id;
use crate::machine::event::Event;
use crate::machine::id::MachineId;
use crate::metrics::{RECONCILER_RUNS, RECONCILER_SUCCESS};
use crate::platform::alarms::{self, Alarm};
use crate::platform::context::Platform;
use crate::platform::db::kept_servers::ServerRetention;
use crate::platform::db::operations::OperationRow;
use crate::platform::db::{self, DbError};
use crate::platform::lifecycle::{self, Circumstances, LifecycleError};

/// A storm of nudges looks no more often.
const SHORTEST_PAUSE: Duration = Duration::from_millis(500);

/// Runs every so often until `stop`.
pub async fn run(platform: Arc<Platform>) {
    let every = platform.config.timing.reconcile;
    loop {
        // What the other processes have looked at a moment ago needs no second look.
        let mut unless_within = every.mul_f64(0.9);
        tokio::select! {
            () = platform.stop.cancelled() => return,
            () = tokio::time::sleep(every) => {}
            () = platform.reconcile.notified() => unless_within = SHORTEST_PAUSE,
        }
        // What a round does, it does under an id of its own.
        request_id::run_with_new_id(pass(&platform, unless_within)).await;
        tokio::select! {
            () = platform.stop.cancelled() => return,
            () = tokio::time::sleep(SHORTEST_PAUSE) => {}
        }
    }
}

async fn pass(platform: &Platform, unless_within: Duration) {
    report("registrations", registrations(platform).await);
    report("previews", previews(platform).await);
    report("hanging_operations", hanging(platform).await);
    report("unknown_operations", unknown_operations(platform).await);
    let (census, end) = servers(platform, unless_within).await;
    report("servers", end);
    if census == Census::Taken {
        report("leftovers", leftovers(platform).await);
    }
    report("retention", retention::prune(platform).await);
}

fn report(part: &'static str, end: anyhow::Result<()>) {
    match end {
        Ok(()) => {
            RECONCILER_RUNS.add_one([part, "ok"]);
            RECONCILER_SUCCESS.set_to_now([part]);
        }
        Err(error) => {
            RECONCILER_RUNS.add_one([part, "failed"]);
            tracing::warn!(error = %chain(error.as_ref()), part, "the reconciler could not do its part");
        }
    }
}

/// The failures of one part: one machine's error does not keep the part from the others.
#[derive(Default)]
pub(super) struct Failures(usize);

impl Failures {
    pub fn note(&mut self, about: impl Display, outcome: anyhow::Result<()>) {
        if let Err(error) = outcome {
            self.0 += 1;
            tracing::error!(%about, error = %chain(error.as_ref()), "the reconciler skips what it could not process");
        }
    }

    /// Whether the part succeeded as a whole.
    pub fn end(self) -> anyhow::Result<()> {
        anyhow::ensure!(self.0 == 0, "{} could not be processed", self.0);
        Ok(())
    }
}

async fn registrations(platform: &Platform) -> anyhow::Result<()> {
    let session = platform.db.session().await?;
    let expired = db::machines::expired(&session).await?;
    drop(session);
    let mut failures = Failures::default();
    for machine in expired {
        tracing::warn!(%machine, "the registration ran out");
        let expired = held::expire(platform, machine).await;
        failures.note(machine, expired.map_err(Into::into));
    }
    failures.end()
}

async fn previews(platform: &Platform) -> anyhow::Result<()> {
    let session = platform.db.session().await?;
    let expired = db::machines::expired_previews(&session).await?;
    drop(session);
    let mut failures = Failures::default();
    for machine in expired {
        failures.note(machine, end_preview(platform, machine).await);
    }
    failures.end()
}

async fn end_preview(platform: &Platform, machine: MachineId) -> anyhow::Result<()> {
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    let Some(row) = db::machines::locked(&tx, machine).await? else { return Ok(()) };
    let with = Circumstances::default();
    lifecycle::apply(&tx, &platform.mint, &row, &Event::DeleteRequested, with).await?;
    let target = machine.to_string();
    let entry = db::audit::Entry {
        actor: "platform",
        action: "preview.expired",
        target: &target,
        before: Some(&row.record()),
        after: None,
        request_id: &request_id::current(),
    };
    db::audit::write(&tx, &entry).await?;
    db::commit(tx).await?;
    tracing::info!(%machine, "a preview ran out and is deleted");
    Ok(())
}

/// Ends operations that exceed every bound of their own, such as one whose step ends each process that runs it.
async fn hanging(platform: &Platform) -> anyhow::Result<()> {
    let session = platform.db.session().await?;
    let timing = &platform.config.timing;
    let (deadline, limit) = (timing.operation_deadline, timing.operation_limit);
    let found = db::operations::hanging(&session, deadline, limit, &vocabulary()).await?;
    drop(session);
    let mut failures = Failures::default();
    for operation in found {
        tracing::error!(operation = %operation.id, kind = operation.kind, step = operation.step, "an operation hangs");
        failures.note(operation.id, end_hanging(platform, &operation).await);
    }
    failures.end()
}

/// What this release cannot run is left to a newer one, and said.
async fn unknown_operations(platform: &Platform) -> anyhow::Result<()> {
    let session = platform.db.session().await?;
    let unknown = db::operations::unknown(&session, &vocabulary()).await?;
    drop(session);
    if unknown > 0 {
        alarms::inform(platform, Alarm::UnknownOperations, &json!({"operations": unknown})).await;
    }
    Ok(())
}

async fn end_hanging(platform: &Platform, operation: &OperationRow) -> anyhow::Result<()> {
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    let Some(row) = db::machines::locked(&tx, operation.machine).await? else { return Ok(()) };
    let with = Circumstances {
        failed_at: Some((&operation.step, "the operation did not end in time")),
        ..Circumstances::default()
    };
    match lifecycle::apply(&tx, &platform.mint, &row, &Event::OperationHung, with).await {
        Ok(_) | Err(LifecycleError::Refused(_)) => {}
        Err(error) => return Err(error.into()),
    }
    // Where the machine does not wait for it, the operation ends all the same.
    db::operations::end_one(&tx, operation.id, "failed", Some("operation_hung")).await?;
    Ok(db::commit(tx).await?)
}

/// Whether a pass has noted which servers at the provider this database does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Census {
    Taken,
    NotTaken,
}

/// One process at a time asks the provider for all servers.
async fn servers(platform: &Platform, unless_within: Duration) -> (Census, anyhow::Result<()>) {
    match is_our_turn(platform, unless_within).await {
        Ok(true) => census::take(platform).await,
        Ok(false) => (Census::NotTaken, Ok(())),
        Err(error) => (Census::NotTaken, Err(error.into())),
    }
}

async fn is_our_turn(platform: &Platform, unless_within: Duration) -> Result<bool, DbError> {
    let session = platform.db.session().await?;
    db::tasks::take_turn(&session, "servers", unless_within).await
}

/// Deletes servers that are no longer kept; none while the database may have forgotten machines. Only a pass that took the
/// census itself can tell: another process's census may still be running, and the stored list may come from a restored copy.
async fn leftovers(platform: &Platform) -> anyhow::Result<()> {
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    db::lock(&tx, "leftover servers").await?;
    if db::unknown_servers::is_any_held(&tx).await? {
        return Ok(());
    }
    let retention = ServerRetention::of(&platform.config.timing);
    let found = db::kept_servers::removable(&tx, &retention).await?;
    for machine in &found {
        db::operations::file(&tx, *machine, OperationKind::RemoveServer, OperationOptions::default()).await?;
        tracing::info!(%machine, "its server is no longer kept");
    }
    db::commit(tx).await?;
    if !found.is_empty() {
        platform.nudge.notify_one();
    }
    Ok(())
}
