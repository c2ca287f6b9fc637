//! Skips the final backup if the host cannot take it, or if an operator has stopped waiting for it. The host may still
//! have stored a snapshot that the pointer does not name, for example with its outage session; an operator decides
//! whether to restore it to the new machine.
//!
//! Invariant: the pointer is unchanged, and a machine is never silently restored from a snapshot older than the
//! newest one.

use std::time::Duration;

use super::newest_copy::{NewestCopy, find_newest_copy};
use super::progress::FinalBackupProgress;
use crate::db::machine_row::MachineRow;
use crate::operations::OperationKind;
use crate::operations::leased::LeasedOperation;
use crate::operations::predecessor::outgoing_machine_label;
use crate::operations::step::{Question, StepError, StepOutcome, StepRecord};
use svc_base::clock::rfc3339_ms;
use svc_store::key::SlotPrefix;
use svc_store::snapshot::{self, Sidecar, SnapshotUnusable};
use svc_store::{StoreError, newer_snapshot, pointer_io};

/// The code of the question that asks which snapshot to restore to the new machine.
pub const NEWER_SNAPSHOT: &str = "newer_snapshot";
/// Key in an operation's facts, set when an operator has answered the question.
pub const SNAPSHOT_CHOSEN: &str = "newerSnapshotAnswered";
/// Timeout for all store requests in one search.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(15);

/// The reason the final backup is skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SkipReason {
    ServerGone,
    /// An earlier operation has already requested that the server be powered off.
    OutOfService,
    Unreachable,
    /// An operator gave up waiting for the backup.
    GivenUp,
}

impl SkipReason {
    fn note(self, kind: OperationKind) -> String {
        let machine = outgoing_machine_label(kind);
        match self {
            Self::ServerGone => format!("{machine} has no server"),
            Self::OutOfService => format!("{machine} is already out of service"),
            Self::Unreachable => "the host cannot be reached".to_owned(),
            Self::GivenUp => "no final backup; the operator stopped waiting for it".to_owned(),
        }
    }
}

/// Returns whether an operator has chosen the snapshot. If so, the host is not called again.
pub fn is_snapshot_chosen(leased: &LeasedOperation<'_>) -> bool {
    leased.facts().contains_key(SNAPSHOT_CHOSEN)
}

/// Continues without a final backup, or waits until an operator chooses the snapshot to restore.
///
/// # Errors
/// [`StepError`] if the database fails, the lease is lost, or the store cannot be searched for a newer
/// snapshot.
pub async fn skip_final_backup(
    leased: &LeasedOperation<'_>,
    machine: &MachineRow,
    progress: &mut FinalBackupProgress,
    reason: SkipReason,
) -> Result<StepOutcome, StepError> {
    let latest = find_newest_copy(leased, machine).await;
    let Some(newer) = Box::pin(find_newer_snapshot(leased, machine)).await? else {
        return Ok(finish_without_backup(leased, machine, reason, &latest, ""));
    };
    let newer_description = format!("{} (taken at {})", newer.key, rfc3339_ms(newer.taken_at));
    let newest = latest.with_snapshot(newer.taken_at);
    if leased.kind == OperationKind::Delete {
        let suffix = format!("; that snapshot is {}, which is stored but not the latest", newer.key);
        return Ok(finish_without_backup(leased, machine, reason, &newest, &suffix));
    }
    let chosen = leased.machine().await?.restore_snapshot;
    let suffix = match &chosen {
        Some(key) if *key == newer.key => {
            format!("; the new machine is restored from {newer_description}, which was not the latest")
        }
        None if !is_snapshot_chosen(leased) => {
            let detail = format_question(leased, machine, reason, &newer, &latest);
            progress.has_snapshot_question = true;
            let (snapshot, facts) = (Some(newer.key), progress.facts(leased));
            return Ok(StepOutcome::NeedsDecision(Question {
                code: NEWER_SNAPSHOT,
                detail,
                snapshot,
                facts,
            }));
        }
        _ => {
            leased.record_unrestored_snapshot(newer.key.clone()).await?;
            let chosen = chosen.unwrap_or_else(|| latest.snapshot.to_string());
            format!("; the operator chose {chosen}, and {newer_description} is not restored")
        }
    };
    Ok(finish_without_backup(leased, machine, reason, &newest, &suffix))
}

/// Records a newer snapshot as not restored, except in a deletion, which restores nothing. Called after an operator has
/// accepted that a reachable host will not take a final backup. Returns a suffix for the note in the log.
///
/// # Errors
/// [`StepError`] if the database fails, the lease is lost, or the store cannot be searched for a newer
/// snapshot.
pub async fn record_unrestored_snapshot(
    leased: &LeasedOperation<'_>,
    machine: &MachineRow,
) -> Result<String, StepError> {
    let Some(newer) = Box::pin(find_newer_snapshot(leased, machine)).await? else { return Ok(String::new()) };
    if leased.kind != OperationKind::Delete {
        leased.record_unrestored_snapshot(newer.key.clone()).await?;
    }
    Ok(format!("; {} (taken at {}) is stored but not the latest", newer.key, rfc3339_ms(newer.taken_at)))
}

fn format_question(
    leased: &LeasedOperation<'_>,
    machine: &MachineRow,
    reason: SkipReason,
    newer: &Sidecar,
    latest: &NewestCopy,
) -> String {
    let (operation, key) = (leased.operation.id, &newer.key);
    format!(
        "No final backup of {}: {}. The store has a newer snapshot, taken at {}, that was not made the latest ({key}); the latest is \
         {latest}. `svcctl operation continue {operation} --snapshot {key}` restores the newer snapshot to the new machine; \
         with `--accept-loss`, the command restores the latest, and the newer snapshot stays in the store. `svcctl operation \
         abandon {operation}` abandons the operation.",
        machine.id,
        reason.note(leased.kind),
        rfc3339_ms(newer.taken_at),
    )
}

fn finish_without_backup(
    leased: &LeasedOperation<'_>,
    machine: &MachineRow,
    reason: SkipReason,
    newest: &NewestCopy,
    suffix: &str,
) -> StepOutcome {
    let (id, since, explanation) = (machine.id, newest.saved_until(), reason.note(leased.kind));
    let is_loss_accepted = leased.operation.options.accept_loss;
    let (note, record) = match reason {
        SkipReason::OutOfService => (explanation, StepRecord::Nothing),
        SkipReason::ServerGone => {
            (format!("{explanation}; the newest copy is {newest}"), StepRecord::Nothing)
        }
        SkipReason::Unreachable | SkipReason::GivenUp if is_loss_accepted => (
            format!(
                "no final backup; the operator accepted the loss of data written since the newest copy, which is {newest}"
            ),
            StepRecord::LossAccepted { machine: id, since },
        ),
        SkipReason::Unreachable | SkipReason::GivenUp => (
            format!(
                "{explanation}; only its server holds data written since the newest copy, which is {newest}"
            ),
            StepRecord::Unsaved { machine: id, since },
        ),
    };
    StepOutcome::Done { note: Some((note + suffix).into()), record }
}

/// Finds a complete snapshot that is newer than the latest one. Prefers a snapshot that this machine took. If there is
/// none, and another machine took the latest one, falls back to the recorded snapshot of an earlier machine that was
/// not restored to this one.
///
/// Also returns `None` if the pointer names no snapshot, if the pointer is unreadable (which the next step reports), or
/// if the search fails during a deletion, which restores nothing.
async fn find_newer_snapshot(
    leased: &LeasedOperation<'_>,
    machine: &MachineRow,
) -> Result<Option<Sidecar>, StepError> {
    let (bucket, slot) = (&leased.platform.bucket, SlotPrefix::new(&machine.user, &machine.slot));
    let search = async {
        let pointer = pointer_io::read(bucket, &slot).await?;
        let Some(latest) = pointer.and_then(|read| read.value.snapshot) else { return Ok(None) };
        let own_snapshot = newer_snapshot::find(bucket, &slot, (machine.id, machine.epoch), &latest).await?;
        if own_snapshot.is_some() || latest.machine_id == machine.id {
            return Ok(own_snapshot);
        }
        let Some(key) = machine.unrestored_snapshot.as_ref().filter(|key| **key > latest.key) else {
            return Ok(None);
        };
        match snapshot::load(bucket, &slot, key).await {
            Ok(sidecar) => Ok(Some(sidecar)),
            Err(SnapshotUnusable::Store(error)) => Err(error),
            Err(SnapshotUnusable::Absent | SnapshotUnusable::Damaged { .. }) => Ok(None),
        }
    };
    match bucket.run_with_timeout(&slot.snapshots(), SEARCH_TIMEOUT, Box::pin(search)).await {
        Ok(newer) => Ok(newer),
        Err(StoreError::Corrupt { .. }) => Ok(None),
        Err(_) if leased.kind == OperationKind::Delete => Ok(None),
        Err(error) => Err(StepError::transient("cannot list the slot's snapshots", error)),
    }
}
