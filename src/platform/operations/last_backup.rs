//! The step `last_backup`: the host of a replaced or deleted machine stops its writers and takes a final snapshot.
//!
//! The invariant: the step ends with a snapshot taken after the writers had stopped, or with a row that records since
//! when data exists only on that server. If a reachable host cannot make the snapshot, the operation waits for an
//! operator's decision; an unreachable host is skipped after a bounded time.

mod progress;
mod saved_copy;
mod skip;

use std::fmt;
use std::time::Duration;

use http::StatusCode;
use jiff::{SignedDuration, Timestamp};
use uuid::Uuid;

use super::host_call::{self, BackupOutcome, BackupProgress, HostCallError};
use super::leased::HeldOperation;
use super::predecessor::outgoing_machine;
use super::step::{Question, StepError, StepOutcome, StepRecord, fence_of};
use crate::db::machine_row::MachineRow;
use crate::db::{self, DbError};
use progress::LastBackupProgress;
use saved_copy::HostReport;
pub use skip::{NEWER_SNAPSHOT, SNAPSHOT_CHOSEN};
use skip::{SkipReason, is_snapshot_chosen, skip_host};
use svc_base::chain::chain;
use svc_base::clock;
use svc_base::untrusted_text::bounded;
use svc_store::key::SlotPrefix;
use svc_store::pointer_io;

const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum interval between calls to a host that is working on the request.
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(4);
/// Maximum interval between calls to a silent host, where each call takes seconds.
const MAX_SILENT_POLL_INTERVAL: Duration = Duration::from_secs(10);
const MAX_REQUESTS: u32 = 3;
/// Timeout of one read of the pointer.
const POINTER_TIMEOUT: Duration = Duration::from_secs(10);
/// Code of the question about a held-back snapshot.
pub const HELD_BACK: &str = "last_backup_held_back";
/// On hosts of earlier releases, the error of a held-back snapshot contains this text.
pub const HELD_BACK_HINT: &str = "svc-db-backup accept";

/// Outcome of one attempt.
enum AttemptOutcome {
    Saved {
        taken_at: Timestamp,
    },
    Wait(Duration),
    /// The host is reachable but makes no backup.
    Failed(BackupFailure),
}

/// Why a reachable host has made no final backup.
enum BackupFailure {
    Failed(String),
    /// The database has shrunk, so its snapshot was held back. Another one would be held back, too.
    HeldBack {
        loss: String,
    },
}

impl BackupFailure {
    fn code(&self) -> &'static str {
        match self {
            Self::Failed(_) => "last_backup_missing",
            Self::HeldBack { .. } => HELD_BACK,
        }
    }

    /// The question, without the choices, which depend on the kind of the operation.
    fn question(&self, held: &HeldOperation<'_>, machine: &MachineRow, saved: &NewestCopy) -> String {
        let (id, operation) = (machine.id, held.operation.id);
        match self {
            Self::Failed(why) => format!(
                "No final backup of {id}: {why}. The newest copy is {saved}; what was written since is only on \
                 its server. `svcctl operation continue {operation}` requests the backup again, with `--accept-loss` it \
                 continues without a backup, and `svcctl operation abandon {operation}` abandons the operation."
            ),
            Self::HeldBack { loss } => format!(
                "The final backup of {id} is held back, because its database has shrunk: {loss}. The newest copy is still \
                 {saved}. If this loss is intended: `svcctl backup accept {id}`, then `svcctl operation continue \
                 {operation}`. Otherwise `svcctl operation continue {operation} --accept-loss` continues with the \
                 newest copy, and `svcctl operation abandon {operation}` abandons the operation."
            ),
        }
    }
}

impl fmt::Display for BackupFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(why) => f.write_str(why),
            Self::HeldBack { loss } => write!(f, "its snapshot is held back: {loss}"),
        }
    }
}

/// The newest time whose data is in a snapshot.
enum NewestCopy {
    Snapshot(Timestamp),
    /// The slot has no snapshot: nothing since its registration is saved.
    Nothing(Option<Timestamp>),
    /// The pointer cannot be read, and no host has reported a snapshot.
    Unknown(Option<Timestamp>),
}

impl NewestCopy {
    fn until(&self) -> Option<Timestamp> {
        match self {
            Self::Snapshot(at) => Some(*at),
            Self::Nothing(registered_at) | Self::Unknown(registered_at) => *registered_at,
        }
    }
}

impl fmt::Display for NewestCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Snapshot(at) => write!(f, "the snapshot of {}", clock::rfc3339_ms(*at)),
            Self::Nothing(Some(at)) => {
                write!(f, "none: there is no snapshot, and it registered at {}", clock::rfc3339_ms(*at))
            }
            Self::Nothing(None) => f.write_str("none: there is no snapshot"),
            Self::Unknown(_) => f.write_str("not known, because the snapshot pointer cannot be read"),
        }
    }
}

pub async fn last_backup(held: &HeldOperation<'_>) -> Result<StepOutcome, StepError> {
    let Some(machine) = outgoing_machine(held).await? else {
        return Ok(StepOutcome::done_noting("no earlier machine has served"));
    };
    let mut progress = LastBackupProgress::load(held);
    if let Some(outcome) = outcome_without_call(held, &machine, &mut progress).await? {
        return Ok(outcome);
    }
    let (now, options) = (held.now().await?, held.operation.options);
    if is_snapshot_chosen(held) {
        let reason = if options.give_up_backup { SkipReason::GivenUp } else { SkipReason::Unreachable };
        return Box::pin(skip_host(held, &machine, &progress, reason)).await;
    }
    if progress.problem.is_some() || options.give_up_backup {
        // An operator has answered: a held-back snapshot may have become the latest.
        if let Ok(report) = host_report(held, &machine).await
            && let Some(taken_at) =
                saved_copy::find_final_backup(held, &machine, &progress, &report, now).await
        {
            return Ok(final_backup_done(&machine, taken_at));
        }
        if options.accept_loss && progress.problem.is_none() {
            return Box::pin(skip_host(held, &machine, &progress, SkipReason::GivenUp)).await;
        }
        if options.accept_loss {
            return Ok(continue_with_loss(held, &machine).await);
        }
        progress = progress.into_restarted();
    }
    match attempt(held, &machine, &mut progress, now).await {
        Ok(AttemptOutcome::Saved { taken_at }) => Ok(final_backup_done(&machine, taken_at)),
        Ok(AttemptOutcome::Wait(again_in)) => {
            progress.unreachable_since = None;
            Ok(progress.wait(held, again_in))
        }
        Ok(AttemptOutcome::Failed(failure)) => Ok(require_decision(held, &machine, progress, failure).await),
        Err(HostCallError::Refused(status)) => {
            progress.unreachable_since = None;
            let failure = BackupFailure::Failed(format!("the host returned {status}"));
            if progress.is_stalled(held, now) {
                Ok(require_decision(held, &machine, progress, failure).await)
            } else {
                Ok(progress.wait(held, progress.next_poll(now)))
            }
        }
        Err(HostCallError::Unreachable(error)) => {
            tracing::info!(machine = %machine.id, error = format!("{error:#}"), "cannot call the host for its final backup");
            Box::pin(handle_unreachable(held, &machine, progress, now)).await
        }
    }
}

/// Returns an outcome if the host needs no call.
async fn outcome_without_call(
    held: &HeldOperation<'_>,
    machine: &MachineRow,
    progress: &mut LastBackupProgress,
) -> Result<Option<StepOutcome>, StepError> {
    if machine.power_off_ordered_at.is_some() {
        return Box::pin(skip_host(held, machine, progress, SkipReason::OutOfService)).await.map(Some);
    }
    if !machine.server_exists() && !held.detect_returned_server(machine).await? {
        return Box::pin(skip_host(held, machine, progress, SkipReason::ServerGone)).await.map(Some);
    }
    // The running deletion of that machine takes the backup.
    let session = held.platform.db.session().await?;
    let deleting = db::slot_operations::find_running_deletion(&session, machine.id).await?;
    let Some(deletion) = deleting.filter(|other| other.id != held.operation.id) else { return Ok(None) };
    let suffix = if deletion.question.is_some() { ", which waits for an operator" } else { "" };
    let logged_wait = format!("waits for the deletion {} of machine {}{suffix}", deletion.id, machine.id);
    if progress.logged_wait.as_ref() != Some(&logged_wait) {
        let (id, step) = (held.operation.id, &held.operation.step);
        db::operations::log(&session, id, step, "waits", Some(&logged_wait)).await?;
        progress.logged_wait = Some(logged_wait);
    }
    Ok(Some(progress.wait(held, POLL_INTERVAL)))
}

fn final_backup_done(machine: &MachineRow, taken_at: Timestamp) -> StepOutcome {
    StepOutcome::Done {
        note: Some("a snapshot was taken after the writers had stopped".into()),
        record: StepRecord::Saved { machine: machine.id, taken_at },
    }
}

async fn attempt(
    held: &HeldOperation<'_>,
    machine: &MachineRow,
    progress: &mut LastBackupProgress,
    now: Timestamp,
) -> Result<AttemptOutcome, HostCallError> {
    progress.progress_at.get_or_insert(now);
    progress.started_at.get_or_insert(now);
    if !progress.has_stopped_writers && !stop_writers(held, machine, progress, now).await? {
        let is_overdue = progress.is_stop_overdue(held, now);
        let failure = BackupFailure::Failed("its dispatches and apps did not stop in time".to_owned());
        return Ok(if is_overdue {
            AttemptOutcome::Failed(failure)
        } else {
            AttemptOutcome::Wait(progress.next_poll(now))
        });
    }
    let Some(requested_at) = progress.requested_at else {
        replace_invented_fence(held, machine).await;
        let taken = host_call::request_backup(held.platform, machine).await?;
        progress.record_request(taken.unwrap_or(now), now);
        return Ok(AttemptOutcome::Wait(POLL_INTERVAL));
    };
    let report = host_report(held, machine).await?;
    if let Some(taken_at) = saved_copy::find_final_backup(held, machine, progress, &report, now).await {
        return Ok(AttemptOutcome::Saved { taken_at });
    }
    if let HostReport::Backups(host) = &report {
        progress.record_report(host, now);
        match failure_since(host, requested_at) {
            Some(BackupFailure::Failed(error)) => return Ok(progress.retry_request(error)),
            Some(failure @ BackupFailure::HeldBack { .. }) => return Ok(AttemptOutcome::Failed(failure)),
            None => {}
        }
    }
    if progress.is_stalled(held, now) {
        return Ok(AttemptOutcome::Failed(BackupFailure::Failed("its backup makes no progress".to_owned())));
    }
    if progress.is_overdue(held, now) {
        let hours = held.platform.config.timing.last_backup_limit.as_secs_f64() / 3600.0;
        return Ok(AttemptOutcome::Failed(BackupFailure::Failed(format!(
            "its backup has not ended within {hours:.1} h"
        ))));
    }
    Ok(AttemptOutcome::Wait(progress.next_poll(now)))
}

/// Replaces a fence that no machine of the slot can have had by this machine's: such a fence makes the pointer refuse
/// every backup. A store failure is left to the backup to report.
async fn replace_invented_fence(held: &HeldOperation<'_>, machine: &MachineRow) {
    let (bucket, slot) = (&held.platform.bucket, SlotPrefix::new(&machine.user, &machine.slot));
    let Ok(Some(read)) = pointer_io::read(bucket, &slot).await else { return };
    let invented = read.value.fence_epoch;
    if invented <= machine.epoch.max_plausible() {
        return;
    }
    if let Err(error) = pointer_io::fence(bucket, &slot, &fence_of(held, machine)).await {
        tracing::warn!(machine = %machine.id, error = %chain(&error), "cannot replace an invented fence");
        return;
    }
    tracing::warn!(machine = %machine.id, %invented, "replaced a fence that no machine can have had");
}

/// Whether all writers of the host have stopped.
async fn stop_writers(
    held: &HeldOperation<'_>,
    machine: &MachineRow,
    progress: &mut LastBackupProgress,
    now: Timestamp,
) -> Result<bool, HostCallError> {
    match host_call::quiesce(held.platform, machine, held.operation.id).await {
        Ok(quiesced) => {
            progress.has_stopped_writers = quiesced.quiesced_at.is_some();
            if !progress.has_stopped_writers {
                progress.record_running_dispatches(quiesced.running_dispatches, now);
            }
        }
        Err(HostCallError::Refused(status)) if is_unsupported(status) => {
            tracing::warn!(machine = %machine.id, "its release cannot stop its writers before the final backup");
            progress.has_stopped_writers = true;
        }
        Err(error) => return Err(error),
    }
    if progress.has_stopped_writers {
        progress.progress_at = Some(now);
    }
    Ok(progress.has_stopped_writers)
}

async fn host_report(held: &HeldOperation<'_>, machine: &MachineRow) -> Result<HostReport, HostCallError> {
    match host_call::backup_progress(held.platform, machine).await {
        Ok(host) => Ok(HostReport::Backups(host)),
        Err(HostCallError::Refused(status)) if is_unsupported(status) => Ok(HostReport::Unsupported),
        Err(error) => Err(error),
    }
}

/// Whether a status means that the release does not have the route.
fn is_unsupported(status: StatusCode) -> bool {
    matches!(status, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED)
}

/// The time from the pointer or, if it is unreadable, from the hosts' reports.
async fn newest_copy(held: &HeldOperation<'_>, machine: &MachineRow) -> NewestCopy {
    let slot = SlotPrefix::new(&machine.user, &machine.slot);
    let (bucket, key) = (&held.platform.bucket, slot.pointer());
    match bucket.run_with_timeout(&key, POINTER_TIMEOUT, pointer_io::read(bucket, &slot)).await {
        Ok(pointer) => {
            let newest = pointer.and_then(|pointer| pointer.value.snapshot).map(|named| named.taken_at);
            newest.map_or(NewestCopy::Nothing(machine.registered_at), NewestCopy::Snapshot)
        }
        Err(error) => {
            tracing::warn!(machine = %machine.id, error = %chain(&error), "cannot read the snapshot pointer");
            let newest = newest_reported(held, machine).await.unwrap_or_default();
            newest.map_or(NewestCopy::Unknown(machine.registered_at), NewestCopy::Snapshot)
        }
    }
}

async fn newest_reported(
    held: &HeldOperation<'_>,
    machine: &MachineRow,
) -> Result<Option<Timestamp>, DbError> {
    let session = held.platform.db.session().await?;
    db::machines::newest_backup_time(&session, &machine.user, &machine.slot).await
}

fn failure_since(host: &BackupProgress, since: Timestamp) -> Option<BackupFailure> {
    let last = host.last.as_ref().filter(|last| !host.running && last.status == "error")?;
    last.began_at.filter(|began| *began >= since)?;
    Some(failure_of(last))
}

fn failure_of(last: &BackupOutcome) -> BackupFailure {
    let error = || last.error.as_deref().map_or_else(|| "its backup failed".to_owned(), bounded);
    match &last.held {
        Some(held) => BackupFailure::HeldBack { loss: bounded(&held.loss) },
        None if last.error.as_ref().is_some_and(|error| error.contains(HELD_BACK_HINT)) => {
            BackupFailure::HeldBack { loss: error() }
        }
        None => BackupFailure::Failed(error()),
    }
}

async fn handle_unreachable(
    held: &HeldOperation<'_>,
    machine: &MachineRow,
    mut progress: LastBackupProgress,
    now: Timestamp,
) -> Result<StepOutcome, StepError> {
    let since = *progress.unreachable_since.get_or_insert(now);
    let deadline = signed_duration(held.platform.config.timing.last_backup_deadline);
    let silent_for = now.duration_since(since);
    if silent_for < deadline {
        let remaining = Duration::try_from(deadline - silent_for).unwrap_or_default();
        return Ok(progress.wait(
            held,
            poll_interval(silent_for, MAX_SILENT_POLL_INTERVAL).min(remaining.max(POLL_INTERVAL)),
        ));
    }
    if machine.heartbeat_at.is_some_and(|beat| beat > since) {
        let failure = "the host sends heartbeats, and the platform cannot call it".to_owned();
        return Ok(require_decision(held, machine, progress, BackupFailure::Failed(failure)).await);
    }
    Box::pin(skip_host(held, machine, &progress, SkipReason::Unreachable)).await
}

/// Continues if the operator has accepted the loss; otherwise the operation waits for a decision.
async fn require_decision(
    held: &HeldOperation<'_>,
    machine: &MachineRow,
    mut progress: LastBackupProgress,
    failure: BackupFailure,
) -> StepOutcome {
    if held.operation.options.accept_loss {
        return continue_with_loss(held, machine).await;
    }
    let detail = failure.question(held, machine, &newest_copy(held, machine).await);
    progress.problem = Some(failure.to_string());
    StepOutcome::NeedsDecision(Question {
        code: failure.code(),
        detail,
        snapshot: None,
        facts: progress.facts(held),
    })
}

/// Continues without a final backup, and records since when data is lost.
async fn continue_with_loss(held: &HeldOperation<'_>, machine: &MachineRow) -> StepOutcome {
    let saved = newest_copy(held, machine).await;
    let stored = skip::record_unrestored(held, machine).await;
    let note = format!(
        "no final backup; the operator accepted the loss of what was written since the newest copy, which is {saved}{stored}"
    );
    let record = StepRecord::LossAccepted { machine: machine.id, since: saved.until() };
    StepOutcome::Done { note: Some(note.into()), record }
}

/// Grows with the time waited, from [`POLL_INTERVAL`] to the limit. Jitter spreads the calls to hosts that fell silent
/// together.
fn poll_interval(waited: SignedDuration, limit: Duration) -> Duration {
    let waited = Duration::try_from(waited).unwrap_or_default();
    let spread = f64::from(Uuid::new_v4().as_bytes()[0]) / 255.0;
    (waited / 8).clamp(POLL_INTERVAL, limit).mul_f64(0.75 + spread / 4.0)
}

fn signed_duration(duration: Duration) -> SignedDuration {
    SignedDuration::try_from(duration).unwrap_or(SignedDuration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poll_intervals_grow_to_limit_with_jitter() {
        let at = |seconds: i64, limit| poll_interval(SignedDuration::from_secs(seconds), limit);
        for (seconds, limit, max) in [
            (0, MAX_POLL_INTERVAL, POLL_INTERVAL),
            (16, MAX_POLL_INTERVAL, Duration::from_secs(2)),
            (3600, MAX_POLL_INTERVAL, MAX_POLL_INTERVAL),
        ] {
            for _ in 0..100 {
                let interval = at(seconds, limit);
                assert!(interval <= max && interval >= max.mul_f64(0.74), "{seconds} s: {interval:?}");
            }
        }
        let many: std::collections::BTreeSet<_> =
            (0..50).map(|_| at(3600, MAX_SILENT_POLL_INTERVAL)).collect();
        assert!(many.len() > 10, "{many:?}");
    }
}
