//! What the step `last_backup` has found out, kept from one try to the next among the operation's facts.

use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{Attempt, MAX_REQUESTS, Trouble, signed};
use crate::clock;
use crate::platform::operations::ask_host::BackupProgress;
use crate::platform::operations::held::Held;
use crate::platform::operations::step::Answer;

/// Where this step keeps what it knows among the operation's facts.
const FACTS: &str = "lastBackup";

/// Times are the database's, but for those of requests: these are the host's, which also dates the snapshot.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Progress {
    /// Since when every call to the host has failed.
    #[serde(with = "clock::wire_option")]
    pub unreachable_since: Option<Timestamp>,
    pub has_stopped: bool,
    /// Since when the host has been asked to stop its writers and has not done so.
    #[serde(with = "clock::wire_option")]
    stopping_since: Option<Timestamp>,
    /// The lowest count of running dispatches that the host has reported.
    running_dispatches: Option<u64>,
    /// The request that is under way.
    #[serde(with = "clock::wire_option")]
    pub requested_at: Option<Timestamp>,
    /// The first one, made when the writers had stopped.
    #[serde(with = "clock::wire_option")]
    first_requested_at: Option<Timestamp>,
    requests: u32,
    /// The last sign of progress, and when it changed.
    sign: String,
    #[serde(with = "clock::wire_option")]
    pub progress_at: Option<Timestamp>,
    /// What an operator was asked about.
    pub trouble: Option<String>,
    /// The operation that this one waits for, as the log has it.
    pub waits_for: Option<String>,
}

impl Progress {
    pub fn of(held: &Held<'_>) -> Self {
        let known = held.operation.facts.get(FACTS).cloned();
        known.and_then(|known| serde_json::from_value(known).ok()).unwrap_or_default()
    }

    pub fn facts(&self, held: &Held<'_>) -> Map<String, Value> {
        let mut facts = held.facts();
        facts.insert(FACTS.to_owned(), serde_json::to_value(self).unwrap_or_default());
        facts
    }

    pub fn wait(&self, held: &Held<'_>, again_in: Duration) -> Answer {
        Answer::Wait { again_in, facts: Some(self.facts(held)) }
    }

    /// Notes a request that the host has taken.
    pub fn requested(&mut self, at: Timestamp, now: Timestamp) {
        self.requested_at = Some(at);
        self.first_requested_at.get_or_insert(at);
        self.requests += 1;
        self.progress_at = Some(now);
    }

    /// From when on a snapshot of the host holds all. An earlier release noted only the latest request.
    pub fn first_requested_at(&self) -> Option<Timestamp> {
        self.first_requested_at.or(self.requested_at)
    }

    /// The step begins again: an operator has asked for that. What was requested before still counts when it arrives.
    pub fn again_from_the_start(self) -> Self {
        Self { first_requested_at: self.first_requested_at(), ..Self::default() }
    }

    pub fn note(&mut self, host: &BackupProgress, now: Timestamp) {
        let sign = format!("{:?} {:?} {:?}", host.stage, host.dumped_bytes, host.uploaded_bytes);
        self.changed(sign, now);
    }

    /// Only a falling count is progress: a host can report growing ones for ever.
    pub fn note_running(&mut self, count: u64, now: Timestamp) {
        self.stopping_since.get_or_insert(now);
        if self.running_dispatches.is_none_or(|lowest| count < lowest) {
            self.running_dispatches = Some(count);
            self.progress_at = Some(now);
        }
    }

    /// Whether the deadline for stopping writers has passed. The host's reports do not extend it.
    pub fn is_stop_overdue(&self, held: &Held<'_>, now: Timestamp) -> bool {
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
    pub fn is_stalled(&mut self, held: &Held<'_>, now: Timestamp) -> bool {
        let since = *self.progress_at.get_or_insert(now);
        now.duration_since(since) >= signed(held.platform.config.timing.last_backup_stall)
    }

    /// A failed backup is requested again, a few times.
    pub fn again(&mut self, error: String) -> Attempt {
        if self.requests >= MAX_REQUESTS {
            return Attempt::Trouble(Trouble::Failed(error));
        }
        self.requested_at = None;
        Attempt::Wait(Duration::from_secs(u64::from(self.requests)))
    }
}
