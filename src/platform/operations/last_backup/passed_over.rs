//! A host that cannot be asked for a last backup is passed over. It may have stored a snapshot that no pointer names, as with
//! its outage session: an operator decides whether the new machine begins with that one.
//!
//! The invariant: the pointer stays as it is, and no machine silently begins with an older snapshot than there is.

use std::time::Duration;

use super::progress::Progress;
use super::{Saved, saved_until};
use crate::clock::rfc3339_ms;
use crate::platform::db::machine_row::MachineRow;
use crate::platform::operations::OperationKind;
use crate::platform::operations::held::Held;
use crate::platform::operations::step::{Answer, Question, Record, StepError};
use crate::store::key::SlotPrefix;
use crate::store::snapshot::{self, SideRecord, SnapshotUnusable};
use crate::store::{StoreError, newer_snapshot, pointer_io};

/// The code of the question which snapshot the new machine begins with.
pub const NEWER_SNAPSHOT: &str = "newer_snapshot";
/// The fact that an operator has answered it.
pub const ANSWERED: &str = "newerSnapshotAnswered";
/// Of all requests to the store together.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(15);

/// Why the host is passed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    ServerGone,
    OutOfService,
    Silent,
    /// An operator did not wait for its backup any longer.
    GivenUp,
}

impl Reason {
    fn note(self) -> &'static str {
        match self {
            Self::ServerGone => "the earlier machine has no server",
            Self::OutOfService => "the earlier machine is out of service already",
            Self::Silent => "the host cannot be reached",
            Self::GivenUp => "no last backup; the operator did not wait for it",
        }
    }
}

/// Whether an operator has chosen the snapshot: the host is not asked again.
pub fn is_answered(held: &Held<'_>) -> bool {
    held.facts().contains_key(ANSWERED)
}

/// Goes ahead without a last backup, or asks which snapshot is restored.
///
/// # Errors
/// [`StepError`], also where the store does not say whether there is a newer snapshot.
pub async fn pass_over(
    held: &Held<'_>,
    machine: &MachineRow,
    progress: &Progress,
    reason: Reason,
) -> Result<Answer, StepError> {
    let latest = saved_until(held, machine).await;
    let Some(newer) = Box::pin(find(held, machine)).await? else {
        return Ok(done(held, machine, reason, &latest, ""));
    };
    let stored = format!("{} of {}", newer.key, rfc3339_ms(newer.taken_at));
    let saved = Saved::Snapshot(newer.taken_at);
    if held.kind == OperationKind::Delete {
        let more = format!("; it is {}, stored and not the latest", newer.key);
        return Ok(done(held, machine, reason, &saved, &more));
    }
    let chosen = held.machine().await?.restore_snapshot;
    let more = match &chosen {
        Some(key) if *key == newer.key => {
            format!("; the new machine begins with {stored}, which was not the latest")
        }
        None if !is_answered(held) => {
            let detail = question(held, machine, reason, &newer, &latest);
            let (snapshot, facts) = (Some(newer.key), progress.facts(held));
            return Ok(Answer::Ask(Question { code: NEWER_SNAPSHOT, detail, snapshot, facts }));
        }
        _ => {
            held.not_restored(newer.key.clone()).await?;
            let begins = chosen.unwrap_or_else(|| latest.to_string());
            format!("; the operator chose {begins}, and {stored} is not restored")
        }
    };
    Ok(done(held, machine, reason, &saved, &more))
}

/// After a host that answers has made no last backup, and an operator accepted that: what the log says of a newer snapshot.
pub async fn note_unrestored(held: &Held<'_>, machine: &MachineRow) -> String {
    let Ok(Some(newer)) = Box::pin(find(held, machine)).await else { return String::new() };
    if held.kind != OperationKind::Delete && held.not_restored(newer.key.clone()).await.is_err() {
        tracing::warn!(key = newer.key, "it is not noted that a newer snapshot is not restored");
    }
    format!("; {} of {} is stored and not the latest", newer.key, rfc3339_ms(newer.taken_at))
}

fn question(
    held: &Held<'_>,
    machine: &MachineRow,
    reason: Reason,
    newer: &SideRecord,
    latest: &Saved,
) -> String {
    let (operation, key) = (held.operation.id, &newer.key);
    format!(
        "No last backup of {}: {}. It stored a snapshot of {} that was not made the latest ({key}); the latest is {latest}. \
         `svcctl operation continue {operation} --snapshot {key}` begins the new machine with the newer one, with \
         `--accept-loss` it begins with the latest, and the newer one stays in the store; `svcctl operation abandon {operation}` \
         gives it up.",
        machine.id,
        reason.note(),
        rfc3339_ms(newer.taken_at),
    )
}

fn done(held: &Held<'_>, machine: &MachineRow, reason: Reason, saved: &Saved, more: &str) -> Answer {
    let (id, since, why) = (machine.id, saved.until(), reason.note());
    let accepts = held.operation.options.accept_loss;
    let (note, record) = match reason {
        Reason::OutOfService => (why.to_owned(), Record::Nothing),
        Reason::ServerGone => (format!("{why}; the newest copy is {saved}"), Record::Nothing),
        Reason::Silent | Reason::GivenUp if accepts => (
            format!(
                "no last backup; the operator accepted the loss of what was written since the newest copy, which is {saved}"
            ),
            Record::LossAccepted { machine: id, since },
        ),
        Reason::Silent | Reason::GivenUp => (
            format!("{why}; its server alone holds what was written since the newest copy, which is {saved}"),
            Record::Unsaved { machine: id, since },
        ),
    };
    Answer::Done { note: Some((note + more).into()), record }
}

/// A whole snapshot that is newer than the latest one: of this machine, or where it has made none, one of an earlier machine
/// that was not restored to it. An unreadable pointer is the next step's business, and a deletion restores nothing.
async fn find(held: &Held<'_>, machine: &MachineRow) -> Result<Option<SideRecord>, StepError> {
    let (bucket, slot) = (&held.platform.bucket, SlotPrefix::new(&machine.user, &machine.slot));
    let search = async {
        let pointer = pointer_io::read(bucket, &slot).await?;
        let Some(named) = pointer.and_then(|read| read.value.snapshot) else { return Ok(None) };
        let own = newer_snapshot::find(bucket, &slot, (machine.id, machine.epoch), &named).await?;
        if own.is_some() || named.machine_id == machine.id {
            return Ok(own);
        }
        let Some(key) = machine.unrestored_snapshot.as_ref().filter(|key| **key > named.key) else {
            return Ok(None);
        };
        match snapshot::by_key(bucket, &slot, key).await {
            Ok(side) => Ok(Some(side)),
            Err(SnapshotUnusable::Store(error)) => Err(error),
            Err(SnapshotUnusable::Absent | SnapshotUnusable::Damaged { .. }) => Ok(None),
        }
    };
    match bucket.within(&slot.snapshots(), SEARCH_TIMEOUT, Box::pin(search)).await {
        Ok(found) => Ok(found),
        Err(StoreError::Corrupt { .. }) => Ok(None),
        Err(_) if held.kind == OperationKind::Delete => Ok(None),
        Err(error) => Err(StepError::transient("the object store does not list the slot's snapshots", error)),
    }
}
