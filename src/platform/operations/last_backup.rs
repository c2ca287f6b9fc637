//! The step `last_backup`: the host that is replaced or deleted stops its writers and takes one more snapshot.
//!
//! The invariant: the step ends with a snapshot taken after the writers had stopped, or with a row that says since when
//! data is on that server alone. A host that answers and cannot make the snapshot stops the operation until an operator
//! decides; one that cannot be reached for a bounded time is passed over.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::ask_host::{self, BackupProgress, HostCallError};
use super::held::Held;
use super::predecessor::leaving;
use super::step::{Answer, Question, Record, StepError};
use crate::clock;
use crate::platform::db;
use crate::platform::db::machine_row::MachineRow;
use crate::store::key::SlotPrefix;
use crate::store::pointer_io;

const POLL: Duration = Duration::from_millis(500);
const MAX_REQUESTS: u32 = 3;
/// Where this step keeps what it knows among the operation's facts.
const FACTS: &str = "lastBackup";

/// What the step has found out, kept from one try to the next. Times are the database's, but for `requested_at`.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Progress {
    /// Since when every call to the host has failed.
    #[serde(with = "clock::wire_option")]
    unreachable_since: Option<Timestamp>,
    has_stopped: bool,
    /// Since when the host has been asked to stop its writers and has not done so.
    #[serde(with = "clock::wire_option")]
    stopping_since: Option<Timestamp>,
    /// The lowest count of running dispatches that the host has reported.
    running_dispatches: Option<u64>,
    /// By the host's clock, which also dates the snapshot.
    #[serde(with = "clock::wire_option")]
    requested_at: Option<Timestamp>,
    requests: u32,
    /// The last sign of progress, and when it changed.
    sign: String,
    #[serde(with = "clock::wire_option")]
    progress_at: Option<Timestamp>,
    /// What an operator was asked about.
    trouble: Option<String>,
}

/// How one try ended.
enum Attempt {
    Saved {
        taken_at: Timestamp,
    },
    Wait(Duration),
    /// The host answers and does not make a backup.
    Trouble(String),
}

pub async fn last_backup(held: &Held<'_>) -> Result<Answer, StepError> {
    let Some(machine) = leaving(held).await? else {
        return Ok(Answer::done_noting("no earlier machine has served"));
    };
    if let Some(note) = needs_none(held, &machine).await? {
        return Ok(note);
    }
    let mut progress = Progress::of(held);
    if held.operation.options.accept_loss && progress.trouble.is_some() {
        return Ok(accepted(&machine));
    }
    let now = held.now().await?;
    match attempt(held, &machine, &mut progress, now).await {
        Ok(Attempt::Saved { taken_at }) => Ok(Answer::Done {
            note: Some("a snapshot was taken after the writers had stopped".into()),
            record: Record::Saved { machine: machine.id, taken_at },
        }),
        Ok(Attempt::Wait(again_in)) => {
            progress.unreachable_since = None;
            Ok(progress.wait(held, again_in))
        }
        Ok(Attempt::Trouble(trouble)) => Ok(ask(held, &machine, progress, trouble).await),
        Err(HostCallError::Refused(status)) => {
            let trouble = format!("the host answers {status}");
            if progress.is_stalled(held, now) {
                Ok(ask(held, &machine, progress, trouble).await)
            } else {
                Ok(progress.wait(held, POLL))
            }
        }
        Err(HostCallError::Unreachable(error)) => {
            tracing::info!(machine = %machine.id, error = format!("{error:#}"), "no last backup yet");
            unreachable(held, &machine, progress, now).await
        }
    }
}

/// Why nothing is to be asked of the host, if so.
async fn needs_none(held: &Held<'_>, machine: &MachineRow) -> Result<Option<Answer>, StepError> {
    if machine.power_off_ordered_at.is_some() {
        return Ok(Some(Answer::done_noting("the earlier machine is out of service already")));
    }
    if !machine.has_server() {
        let since = newest_snapshot(held, machine).await;
        let note = format!("the earlier machine has no server; the newest snapshot is {}", dated(since));
        return Ok(Some(Answer::Done { note: Some(note.into()), record: Record::Nothing }));
    }
    // A deletion of that machine takes it.
    let session = held.platform.db.session().await?;
    let deleting = db::slot_operations::deleting(&session, machine.id).await?;
    Ok(deleting.filter(|other| other.id != held.operation.id).map(|_| Answer::wait(POLL)))
}

async fn attempt(
    held: &Held<'_>,
    machine: &MachineRow,
    progress: &mut Progress,
    now: Timestamp,
) -> Result<Attempt, HostCallError> {
    progress.progress_at.get_or_insert(now);
    if !progress.has_stopped && !stop_writers(held, machine, progress, now).await? {
        let is_overdue = progress.is_stop_overdue(held, now);
        let what = "its dispatches and apps do not end".to_owned();
        return Ok(if is_overdue { Attempt::Trouble(what) } else { Attempt::Wait(POLL) });
    }
    let Some(requested_at) = progress.requested_at else {
        let taken = ask_host::request_backup(held.platform, machine).await?;
        progress.requested_at = Some(taken.unwrap_or(now));
        progress.requests += 1;
        progress.progress_at = Some(now);
        return Ok(Attempt::Wait(POLL));
    };
    if let Some(taken_at) = snapshot_since(held, machine, requested_at).await {
        return Ok(Attempt::Saved { taken_at });
    }
    match ask_host::backup_progress(held.platform, machine).await {
        Ok(host) => {
            progress.note(&host, now);
            if let Some(error) = failure_since(&host, requested_at) {
                return Ok(progress.again(error));
            }
        }
        // A release that does not say how far it is.
        Err(HostCallError::Refused(_)) => {}
        Err(error) => return Err(error),
    }
    if progress.is_stalled(held, now) {
        return Ok(Attempt::Trouble("its backup makes no progress".to_owned()));
    }
    Ok(Attempt::Wait(POLL))
}

/// Whether no writer is left on the host.
async fn stop_writers(
    held: &Held<'_>,
    machine: &MachineRow,
    progress: &mut Progress,
    now: Timestamp,
) -> Result<bool, HostCallError> {
    match ask_host::quiesce(held.platform, machine, held.operation.id).await {
        Ok(quiesced) => {
            progress.has_stopped = quiesced.quiesced_at.is_some();
            if !progress.has_stopped {
                progress.note_running(quiesced.running_dispatches, now);
            }
        }
        Err(HostCallError::Refused(status)) if status.as_u16() == 404 || status.as_u16() == 405 => {
            tracing::warn!(machine = %machine.id, "its release cannot stop its writers before the last backup");
            progress.has_stopped = true;
        }
        Err(error) => return Err(error),
    }
    if progress.has_stopped {
        progress.progress_at = Some(now);
    }
    Ok(progress.has_stopped)
}

/// When the snapshot was taken that the pointer names, if this machine took it since.
async fn snapshot_since(held: &Held<'_>, machine: &MachineRow, since: Timestamp) -> Option<Timestamp> {
    let slot = SlotPrefix::new(&machine.user, &machine.slot);
    let pointer = pointer_io::read(&held.platform.bucket, &slot).await.ok()??;
    let named = pointer.value.snapshot?;
    (named.machine_id == machine.id && named.taken_at >= since).then_some(named.taken_at)
}

async fn newest_snapshot(held: &Held<'_>, machine: &MachineRow) -> Option<Timestamp> {
    let slot = SlotPrefix::new(&machine.user, &machine.slot);
    let pointer = pointer_io::read(&held.platform.bucket, &slot).await.ok()??;
    pointer.value.snapshot.map(|named| named.taken_at)
}

fn failure_since(host: &BackupProgress, since: Timestamp) -> Option<String> {
    let last = host.last.as_ref().filter(|last| !host.running && last.status == "error")?;
    let began = last.began_at.filter(|began| *began >= since);
    began.map(|_| last.error.clone().unwrap_or_else(|| "its backup failed".to_owned()))
}

async fn unreachable(
    held: &Held<'_>,
    machine: &MachineRow,
    mut progress: Progress,
    now: Timestamp,
) -> Result<Answer, StepError> {
    let since = *progress.unreachable_since.get_or_insert(now);
    if now.duration_since(since) < signed(held.platform.config.timing.last_backup_deadline) {
        return Ok(progress.wait(held, POLL));
    }
    if machine.heartbeat_at.is_some_and(|beat| beat > since) {
        let trouble = "the host sends heartbeats, and the platform cannot call it".to_owned();
        return Ok(ask(held, machine, progress, trouble).await);
    }
    if held.operation.options.accept_loss {
        return Ok(accepted(machine));
    }
    let unsaved = newest_snapshot(held, machine).await.or(machine.registered_at);
    let note = format!(
        "the host cannot be reached; its server alone holds what was written since {}",
        dated(unsaved)
    );
    let record = Record::Unsaved { machine: machine.id, since: unsaved };
    Ok(Answer::Done { note: Some(note.into()), record })
}

/// The operator accepted beforehand, or is asked now.
async fn ask(held: &Held<'_>, machine: &MachineRow, mut progress: Progress, trouble: String) -> Answer {
    if held.operation.options.accept_loss {
        return accepted(machine);
    }
    let newest = newest_snapshot(held, machine).await;
    let detail = format!(
        "No last backup of {}: {trouble}. The newest snapshot is {}; what was written since is on its server alone. \
         Continue with acceptLoss, or abandon.",
        machine.id,
        dated(newest)
    );
    progress.trouble = Some(trouble);
    Answer::Ask(Question { code: "last_backup_missing", detail, facts: progress.facts(held) })
}

fn accepted(machine: &MachineRow) -> Answer {
    Answer::Done {
        note: Some("no last backup; the operator accepted the loss".into()),
        record: Record::Unsaved { machine: machine.id, since: None },
    }
}

fn dated(at: Option<Timestamp>) -> String {
    at.map_or_else(|| "missing".to_owned(), clock::rfc3339_ms)
}

fn signed(duration: Duration) -> SignedDuration {
    SignedDuration::try_from(duration).unwrap_or(SignedDuration::MAX)
}

impl Progress {
    fn of(held: &Held<'_>) -> Self {
        let known = held.operation.facts.get(FACTS).cloned();
        known.and_then(|known| serde_json::from_value(known).ok()).unwrap_or_default()
    }

    fn facts(&self, held: &Held<'_>) -> Map<String, Value> {
        let mut facts = held.facts();
        facts.insert(FACTS.to_owned(), serde_json::to_value(self).unwrap_or_default());
        facts
    }

    fn wait(&self, held: &Held<'_>, again_in: Duration) -> Answer {
        Answer::Wait { again_in, facts: Some(self.facts(held)) }
    }

    fn note(&mut self, host: &BackupProgress, now: Timestamp) {
        let sign = format!("{:?} {:?} {:?}", host.stage, host.dumped_bytes, host.uploaded_bytes);
        self.changed(sign, now);
    }

    /// Only a falling count is progress: a host can report growing ones for ever.
    fn note_running(&mut self, count: u64, now: Timestamp) {
        self.stopping_since.get_or_insert(now);
        if self.running_dispatches.is_none_or(|lowest| count < lowest) {
            self.running_dispatches = Some(count);
            self.progress_at = Some(now);
        }
    }

    /// Whether the deadline for stopping writers has passed. The host's reports do not extend it.
    fn is_stop_overdue(&self, held: &Held<'_>, now: Timestamp) -> bool {
        let limit = signed(held.platform.config.timing.last_backup_stall);
        self.stopping_since.is_some_and(|since| now.duration_since(since) >= limit)
    }

    fn changed(&mut self, sign: String, now: Timestamp) {
        if sign != self.sign {
            self.sign = sign;
            self.progress_at = Some(now);
        }
    }

    /// Whether nothing has changed for longer than a backup may stand still.
    fn is_stalled(&mut self, held: &Held<'_>, now: Timestamp) -> bool {
        let since = *self.progress_at.get_or_insert(now);
        now.duration_since(since) >= signed(held.platform.config.timing.last_backup_stall)
    }

    /// A failed backup is requested again, a few times.
    fn again(&mut self, error: String) -> Attempt {
        if self.requests >= MAX_REQUESTS {
            return Attempt::Trouble(error);
        }
        self.requested_at = None;
        Attempt::Wait(Duration::from_secs(u64::from(self.requests)))
    }
}
