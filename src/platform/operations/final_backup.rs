//! The step `last_backup`: the host of a replaced or deleted machine stops its writers and takes a final snapshot.
//!
//! Invariant: unless an operator accepts the loss, or the server is gone or already powered off, the step ends with
//! a snapshot taken after the writers had stopped (if the host's release can stop them), or with a row that records the
//! time since which data exists only on that server. If a reachable host cannot take the snapshot, the operation waits
//! for an operator's decision; an unreachable host is skipped after a bounded time.

mod files;
mod files_key;
mod newest_copy;
mod progress;
mod skip;
mod snapshot_proof;

use std::fmt;
use std::time::Duration;

use http::StatusCode;
use jiff::{SignedDuration, Timestamp};
use uuid::Uuid;

use super::files_fence;
use super::host_call::{self, BackupOutcome, BackupProgress, HostCallError};
use super::leased::LeasedOperation;
use super::predecessor::{find_outgoing_machine, no_outgoing_machine_note};
use super::step::{Question, StepError, StepOutcome, StepRecord, build_fence};
use crate::db;
use crate::db::machine_row::MachineRow;
use files::SavedFiles;
use files_key::check_key;
use newest_copy::{NewestCopy, find_newest_copy};
use progress::FinalBackupProgress;
pub use skip::{NEWER_SNAPSHOT, SNAPSHOT_CHOSEN};
use skip::{SkipReason, is_snapshot_chosen, skip_final_backup};
use snapshot_proof::HostReport;
use svc_base::error_chain::format_chain;
use svc_base::untrusted_text::truncate_printable;
use svc_store::key::SlotPrefix;
use svc_store::pointer_io;

const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum interval between calls to a host that is working on the request.
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(4);
/// Maximum interval between calls to a silent host. Each of these calls takes seconds.
const MAX_SILENT_POLL_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of backup requests before a failed backup needs an operator's decision.
const MAX_REQUESTS: u32 = 3;
/// The code of the question about a held-back snapshot.
pub const HELD_BACK: &str = "last_backup_held_back";
/// If the host runs an earlier release, the error that it reports for a held-back snapshot contains this text.
pub const HELD_BACK_HINT: &str = "svc-db-backup accept";

/// The outcome of one attempt to take the final backup.
enum AttemptOutcome {
    Saved {
        taken_at: Timestamp,
        files: SavedFiles,
    },
    Wait(Duration),
    /// The database is saved; this text says why the step waits for the owner's files.
    WaitForFiles(String),
    /// The host is reachable but has taken no backup.
    Failed(BackupFailure),
}

/// The reason a reachable host has taken no final backup.
enum BackupFailure {
    Failed(String),
    /// The database has shrunk, so its snapshot was held back. Another snapshot would be held back, too.
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

    /// Returns the question for the operator, with the possible answers.
    fn question(&self, leased: &LeasedOperation<'_>, machine: &MachineRow, newest: &NewestCopy) -> String {
        let (id, operation) = (machine.id, leased.operation.id);
        match self {
            Self::Failed(reason) => format!(
                "No final backup of {id}: {reason}. The newest copy is {newest}; data written since then is only on \
                 its server. `svcctl operation continue {operation}` requests the backup again; with `--accept-loss`, it \
                 continues without a backup; and `svcctl operation abandon {operation}` abandons the operation."
            ),
            Self::HeldBack { loss } => format!(
                "The final backup of {id} is held back, because its database has shrunk: {loss}. The newest copy is still \
                 {newest}. If this loss is intended: `svcctl backup accept {id}`, then `svcctl operation continue \
                 {operation}`. Otherwise `svcctl operation continue {operation} --accept-loss` continues with the \
                 newest copy, and `svcctl operation abandon {operation}` abandons the operation."
            ),
        }
    }
}

impl fmt::Display for BackupFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(reason) => f.write_str(reason),
            Self::HeldBack { loss } => write!(f, "its snapshot is held back: {loss}"),
        }
    }
}

pub async fn take_final_backup(leased: &LeasedOperation<'_>) -> Result<StepOutcome, StepError> {
    let Some(machine) = find_outgoing_machine(leased).await? else {
        return Ok(StepOutcome::done_with_note(no_outgoing_machine_note(leased.kind)));
    };
    let mut progress = FinalBackupProgress::load(leased);
    if let Some(outcome) = resolve_without_call(leased, &machine, &mut progress).await? {
        return Ok(outcome);
    }
    let (now, options) = (leased.now().await?, leased.operation.options);
    if is_snapshot_chosen(leased) {
        let reason = if options.give_up_backup { SkipReason::GivenUp } else { SkipReason::Unreachable };
        return Box::pin(skip_final_backup(leased, &machine, &mut progress, reason)).await;
    }
    if progress.problem.is_some() || progress.has_snapshot_question || options.give_up_backup {
        // An operator has decided: a held-back snapshot may have become the latest.
        if let Ok(report) = fetch_host_report(leased, &machine).await
            && let Some(taken_at) =
                snapshot_proof::find_final_backup(leased, &machine, &progress, &report, now).await
        {
            let files = SavedFiles::from_report(&report, &progress, &machine.attention);
            let files = check_key(leased, &machine, files).await;
            return Ok(finish_with_backup(leased, &machine, taken_at, &files));
        }
        if options.give_up_backup && progress.problem.is_none() {
            return Box::pin(skip_final_backup(leased, &machine, &mut progress, SkipReason::GivenUp)).await;
        }
        if options.accept_loss && progress.problem.is_some() {
            return continue_with_loss(leased, &machine).await;
        }
        progress = progress.into_restarted();
    }
    match attempt_backup(leased, &machine, &mut progress, now).await {
        Ok(AttemptOutcome::Saved { taken_at, files }) => {
            Ok(finish_with_backup(leased, &machine, taken_at, &files))
        }
        Ok(AttemptOutcome::Wait(delay)) => {
            progress.unreachable_since = None;
            Ok(progress.wait(leased, delay))
        }
        Ok(AttemptOutcome::WaitForFiles(reason)) => {
            progress.unreachable_since = None;
            Ok(progress.wait_for_files(leased, &reason))
        }
        Ok(AttemptOutcome::Failed(failure)) => handle_failure(leased, &machine, progress, failure).await,
        Err(HostCallError::ErrorStatus(status)) => {
            progress.unreachable_since = None;
            let failure = BackupFailure::Failed(format!("the host returned {status}"));
            if progress.check_stalled(leased, now) {
                handle_failure(leased, &machine, progress, failure).await
            } else {
                Ok(progress.wait(leased, progress.next_poll_delay(now)))
            }
        }
        Err(HostCallError::Unreachable(error)) => {
            tracing::info!(machine = %machine.id, error = format!("{error:#}"), "cannot call the host for its final backup");
            Box::pin(handle_unreachable(leased, &machine, progress, now)).await
        }
    }
}

/// Returns an outcome if the host need not be called.
async fn resolve_without_call(
    leased: &LeasedOperation<'_>,
    machine: &MachineRow,
    progress: &mut FinalBackupProgress,
) -> Result<Option<StepOutcome>, StepError> {
    if machine.power_off_requested_at.is_some() {
        return Box::pin(skip_final_backup(leased, machine, progress, SkipReason::OutOfService))
            .await
            .map(Some);
    }
    if !machine.has_server() && !leased.detect_returned_server(machine).await? {
        return Box::pin(skip_final_backup(leased, machine, progress, SkipReason::ServerGone))
            .await
            .map(Some);
    }
    // If a deletion of the machine is running, that operation takes the backup.
    let session = leased.platform.db.session().await?;
    let deleting = db::slot_operations::find_running_deletion(&session, machine.id).await?;
    let Some(deletion) = deleting.filter(|other| other.id != leased.operation.id) else { return Ok(None) };
    let suffix = if deletion.question.is_some() { ", which is waiting for an operator" } else { "" };
    let logged_wait = format!("waits for deletion {} of machine {}{suffix}", deletion.id, machine.id);
    if progress.logged_wait.as_ref() != Some(&logged_wait) {
        let (id, step) = (leased.operation.id, &leased.operation.step);
        db::operations::log(&session, id, step, "waits", Some(&logged_wait)).await?;
        progress.logged_wait = Some(logged_wait);
    }
    Ok(Some(progress.wait(leased, POLL_INTERVAL)))
}

fn finish_with_backup(
    leased: &LeasedOperation<'_>,
    machine: &MachineRow,
    taken_at: Timestamp,
    files: &SavedFiles,
) -> StepOutcome {
    let id = machine.id;
    let record = match files.unsaved_since().map(|since| since.or(machine.registered_at)) {
        None => StepRecord::Saved { machine: id, taken_at },
        Some(since) if leased.operation.options.accept_loss => {
            StepRecord::LossAccepted { machine: id, since }
        }
        // The server may hold the only copy of some files.
        Some(since) => StepRecord::Unsaved { machine: id, since },
    };
    let mut note = format!("the final snapshot was taken{files}");
    if matches!(record, StepRecord::Unsaved { .. }) {
        note += &format!(", which is kept until `svcctl discard {id} --accept-loss`");
    }
    StepOutcome::Done { note: Some(note.into()), record }
}

async fn attempt_backup(
    leased: &LeasedOperation<'_>,
    machine: &MachineRow,
    progress: &mut FinalBackupProgress,
    now: Timestamp,
) -> Result<AttemptOutcome, HostCallError> {
    progress.progress_at.get_or_insert(now);
    progress.started_at.get_or_insert(now);
    if !progress.is_quiesce_done {
        let can_take_snapshot = stop_writers(leased, machine, progress, now).await?;
        // The host has responded, even if the next call fails.
        progress.unreachable_since = None;
        if !can_take_snapshot {
            let is_overdue = progress.is_stop_overdue(leased, now);
            let reason = "its dispatches and apps did not stop within the time limit";
            let failure = BackupFailure::Failed(reason.to_owned());
            return Ok(if is_overdue {
                AttemptOutcome::Failed(failure)
            } else {
                AttemptOutcome::Wait(progress.next_poll_delay(now))
            });
        }
    }
    let Some(requested_at) = progress.requested_at else {
        replace_implausible_fence(leased, machine).await;
        files_fence::restore(leased.platform, machine).await;
        let host_requested_at = host_call::request_backup(leased.platform, machine).await?;
        progress.record_request(host_requested_at.unwrap_or(now), now);
        return Ok(AttemptOutcome::Wait(POLL_INTERVAL));
    };
    let report = fetch_host_report(leased, machine).await?;
    if let Some(taken_at) = snapshot_proof::find_final_backup(leased, machine, progress, &report, now).await {
        let files = SavedFiles::from_report(&report, progress, &machine.attention);
        let files = check_key(leased, machine, files).await;
        return Ok(match files.wait_reason(progress, now) {
            Some(reason) => AttemptOutcome::WaitForFiles(reason),
            None => AttemptOutcome::Saved { taken_at, files },
        });
    }
    if let HostReport::Backups(host) = &report {
        progress.record_report(host, now);
        match find_failure_since(host, requested_at) {
            Some(BackupFailure::Failed(error)) => return Ok(progress.retry_request(error)),
            Some(failure @ BackupFailure::HeldBack { .. }) => return Ok(AttemptOutcome::Failed(failure)),
            None => {}
        }
    }
    if progress.check_stalled(leased, now) {
        return Ok(AttemptOutcome::Failed(BackupFailure::Failed("its backup has stalled".to_owned())));
    }
    if progress.check_overdue(leased, now) {
        let hours = leased.platform.config.timing.final_backup_limit.as_secs_f64() / 3600.0;
        return Ok(AttemptOutcome::Failed(BackupFailure::Failed(format!(
            "its backup has not ended within {hours:.1} h"
        ))));
    }
    Ok(AttemptOutcome::Wait(progress.next_poll_delay(now)))
}

/// Replaces an implausible fence, which no machine in the slot could have set, with this machine's, because every
/// backup is rejected under an implausible fence. If the store fails, the backup reports the failure.
async fn replace_implausible_fence(leased: &LeasedOperation<'_>, machine: &MachineRow) {
    let (bucket, slot) = (&leased.platform.bucket, SlotPrefix::new(&machine.user, &machine.slot));
    let Ok(Some(pointer)) = pointer_io::read(bucket, &slot).await else { return };
    let fence_epoch = pointer.value.fence_epoch;
    if fence_epoch <= machine.epoch.max_plausible() {
        return;
    }
    if let Err(error) = pointer_io::fence(bucket, &slot, &build_fence(leased, machine)).await {
        tracing::warn!(machine = %machine.id, error = %format_chain(&error), "cannot replace an implausible fence");
        return;
    }
    tracing::warn!(machine = %machine.id, %fence_epoch, "replaced a fence that no machine could have set");
}

/// Requests that the host stop its writers. Returns whether the snapshot can be taken: all writers have stopped, or the
/// host's release cannot stop them, in which case the snapshot is taken while they are running.
async fn stop_writers(
    leased: &LeasedOperation<'_>,
    machine: &MachineRow,
    progress: &mut FinalBackupProgress,
    now: Timestamp,
) -> Result<bool, HostCallError> {
    match host_call::quiesce(leased.platform, machine, leased.operation.id).await {
        Ok(quiesced) => {
            progress.is_quiesce_done = quiesced.quiesced_at.is_some();
            progress.quiesced_at = quiesced.quiesced_at;
            if !progress.is_quiesce_done {
                progress.record_running_dispatches(quiesced.running_dispatches, now);
            }
        }
        Err(HostCallError::ErrorStatus(status)) if is_unsupported(status) => {
            tracing::warn!(machine = %machine.id, "the host's release cannot stop its writers before the final backup");
            progress.is_quiesce_done = true;
        }
        Err(error) => return Err(error),
    }
    if progress.is_quiesce_done {
        progress.progress_at = Some(now);
    }
    Ok(progress.is_quiesce_done)
}

async fn fetch_host_report(
    leased: &LeasedOperation<'_>,
    machine: &MachineRow,
) -> Result<HostReport, HostCallError> {
    match host_call::fetch_backup_progress(leased.platform, machine).await {
        Ok(host) => Ok(HostReport::Backups(host)),
        Err(HostCallError::ErrorStatus(status)) if is_unsupported(status) => Ok(HostReport::Unsupported),
        Err(error) => Err(error),
    }
}

/// Returns whether a status indicates that the release does not have the route.
fn is_unsupported(status: StatusCode) -> bool {
    matches!(status, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED)
}

fn find_failure_since(host: &BackupProgress, since: Timestamp) -> Option<BackupFailure> {
    let last = host.last.as_ref().filter(|last| !host.is_running && last.status == "error")?;
    last.began_at.filter(|began| *began >= since)?;
    Some(classify_failure(last))
}

fn classify_failure(last: &BackupOutcome) -> BackupFailure {
    let error = || last.error.as_deref().map_or_else(|| "its backup failed".to_owned(), truncate_printable);
    match &last.held {
        Some(snapshot) => BackupFailure::HeldBack { loss: truncate_printable(&snapshot.loss) },
        None if last.error.as_ref().is_some_and(|error| error.contains(HELD_BACK_HINT)) => {
            BackupFailure::HeldBack { loss: error() }
        }
        None => BackupFailure::Failed(error()),
    }
}

/// Schedules another call to the silent host until the timeout for unreachable hosts has passed. After that, the host
/// is skipped or, if it has sent a heartbeat since it became unreachable, an operator decides.
async fn handle_unreachable(
    leased: &LeasedOperation<'_>,
    machine: &MachineRow,
    mut progress: FinalBackupProgress,
    now: Timestamp,
) -> Result<StepOutcome, StepError> {
    let since = *progress.unreachable_since.get_or_insert(now);
    let timeout = signed_duration(leased.platform.config.timing.final_backup_unreachable_timeout);
    let silent_for = now.duration_since(since);
    if silent_for < timeout {
        let remaining = Duration::try_from(timeout - silent_for).unwrap_or_default();
        return Ok(progress.wait(
            leased,
            poll_interval(silent_for, MAX_SILENT_POLL_INTERVAL).min(remaining.max(POLL_INTERVAL)),
        ));
    }
    if machine.heartbeat_at.is_some_and(|at| at > since) {
        let failure = "the host is sending heartbeats, but the platform cannot call it".to_owned();
        return handle_failure(leased, machine, progress, BackupFailure::Failed(failure)).await;
    }
    Box::pin(skip_final_backup(leased, machine, &mut progress, SkipReason::Unreachable)).await
}

/// Continues if the operator has accepted the loss; otherwise the operation waits for a decision.
async fn handle_failure(
    leased: &LeasedOperation<'_>,
    machine: &MachineRow,
    mut progress: FinalBackupProgress,
    failure: BackupFailure,
) -> Result<StepOutcome, StepError> {
    if leased.operation.options.accept_loss {
        return continue_with_loss(leased, machine).await;
    }
    let detail = failure.question(leased, machine, &find_newest_copy(leased, machine).await);
    progress.problem = Some(failure.to_string());
    Ok(StepOutcome::NeedsDecision(Question {
        code: failure.code(),
        detail,
        snapshot: None,
        facts: progress.facts(leased),
    }))
}

/// Continues without a final backup, and records the time since which data is lost.
async fn continue_with_loss(
    leased: &LeasedOperation<'_>,
    machine: &MachineRow,
) -> Result<StepOutcome, StepError> {
    let newest = find_newest_copy(leased, machine).await;
    let suffix = skip::record_unrestored_snapshot(leased, machine).await?;
    let note = format!(
        "no final backup; the operator accepted the loss of data written since the newest copy, which is {newest}{suffix}"
    );
    let record = StepRecord::LossAccepted { machine: machine.id, since: newest.saved_until() };
    Ok(StepOutcome::Done { note: Some(note.into()), record })
}

/// Returns the delay before the next call, which grows with the time waited, from [`POLL_INTERVAL`] to the limit.
/// Jitter shortens it by up to a quarter, which spreads out calls to hosts that became silent at the same time.
fn poll_interval(waited: SignedDuration, limit: Duration) -> Duration {
    let waited = Duration::try_from(waited).unwrap_or_default();
    let jitter = f64::from(Uuid::new_v4().as_bytes()[0]) / 255.0;
    (waited / 8).clamp(POLL_INTERVAL, limit).mul_f64(0.75 + jitter / 4.0)
}

fn signed_duration(duration: Duration) -> SignedDuration {
    SignedDuration::try_from(duration).unwrap_or(SignedDuration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poll_interval_grows_to_limit_with_jitter() {
        let interval_after = |seconds: i64, limit| poll_interval(SignedDuration::from_secs(seconds), limit);
        for (seconds, limit, max) in [
            (0, MAX_POLL_INTERVAL, POLL_INTERVAL),
            (16, MAX_POLL_INTERVAL, Duration::from_secs(2)),
            (3600, MAX_POLL_INTERVAL, MAX_POLL_INTERVAL),
        ] {
            for _ in 0..100 {
                let interval = interval_after(seconds, limit);
                assert!(interval <= max && interval >= max.mul_f64(0.74), "{seconds} s: {interval:?}");
            }
        }
        let distinct: std::collections::BTreeSet<_> =
            (0..50).map(|_| interval_after(3600, MAX_SILENT_POLL_INTERVAL)).collect();
        assert!(distinct.len() > 10, "{distinct:?}");
    }
}
