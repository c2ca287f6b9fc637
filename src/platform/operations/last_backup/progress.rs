//! What the step `last_backup` has found out, kept from one try to the next among the operation's facts.

use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::saved_copy::Window;
use super::{Attempt, MAX_POLL, MAX_REQUESTS, Trouble, poll_interval, signed};
use crate::clock;
use crate::platform::operations::ask_host::BackupProgress;
use crate::platform::operations::held::Held;
use crate::platform::operations::step::Answer;
use crate::untrusted_text::bounded;

/// Where this step keeps what it knows among the operation's facts.
const FACTS: &str = "lastBackup";
/// A backup that gets on by less within the time for a stall is as good as stalled.
const MIN_PROGRESS_BYTES: u64 = 1 << 20;

/// Times are the database's, but for those of requests: these are the host's, which also dates the snapshot.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Progress {
    /// Since when a backup is waited for, from the first one or since an operator had the step begin again.
    #[serde(with = "clock::wire_option")]
    pub started_at: Option<Timestamp>,
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
    /// The latest request by the host's clock, and when that was noted by the database's.
    #[serde(with = "clock::wire_option")]
    host_clock_at: Option<Timestamp>,
    #[serde(with = "clock::wire_option")]
    host_clock_noted_at: Option<Timestamp>,
    requests: u32,
    /// The stage and the bytes of the last progress, and when that was.
    stage: Option<String>,
    bytes: u64,
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

    /// How long until the host is called again while it stops its writers or takes its backup.
    pub fn next_poll(&self, now: Timestamp) -> Duration {
        poll_interval(now.duration_since(self.started_at.unwrap_or(now)), MAX_POLL)
    }

    pub fn wait(&self, held: &Held<'_>, again_in: Duration) -> Answer {
        Answer::Wait { again_in, facts: Some(self.facts(held)) }
    }

    /// Notes a request that the host has taken.
    pub fn requested(&mut self, at: Timestamp, now: Timestamp) {
        self.requested_at = Some(at);
        self.first_requested_at.get_or_insert(at);
        (self.host_clock_at, self.host_clock_noted_at) = (Some(at), Some(now));
        self.requests += 1;
        self.progress_at = Some(now);
    }

    /// When a snapshot that holds all can have been taken; `None` before the first request.
    pub fn snapshot_window(&self, now: Timestamp) -> Option<Window> {
        let since = self.first_requested_at()?;
        let noted = self.host_clock_at.zip(self.host_clock_noted_at);
        let host_now = noted.and_then(|(at, noted)| at.checked_add(now.duration_since(noted)).ok());
        Some(Window { since, now: host_now.unwrap_or(now) })
    }

    /// From when on a snapshot of the host holds all. An earlier release noted only the latest request.
    fn first_requested_at(&self) -> Option<Timestamp> {
        self.first_requested_at.or(self.requested_at)
    }

    /// The step begins again: an operator has asked for that. What was requested before still counts when it arrives.
    pub fn again_from_the_start(self) -> Self {
        Self {
            first_requested_at: self.first_requested_at(),
            host_clock_at: self.host_clock_at,
            host_clock_noted_at: self.host_clock_noted_at,
            ..Self::default()
        }
    }

    /// Another stage, fewer bytes (another run has begun), or enough more of them are progress. A host that lies about
    /// them is bounded by [`Self::is_overdue`].
    pub fn note(&mut self, host: &BackupProgress, now: Timestamp) {
        let bytes = host.dumped_bytes.unwrap_or(0).saturating_add(host.uploaded_bytes.unwrap_or(0));
        let stage = host.stage.as_deref().map(bounded);
        let enough = self.bytes.saturating_add(MIN_PROGRESS_BYTES);
        if stage != self.stage || bytes < self.bytes || bytes >= enough {
            (self.stage, self.bytes, self.progress_at) = (stage, bytes, Some(now));
        }
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

    /// Whether the time limit of a last backup has passed. The host's reports do not extend it.
    pub fn is_overdue(&mut self, held: &Held<'_>, now: Timestamp) -> bool {
        let since = *self.started_at.get_or_insert(now);
        now.duration_since(since) >= signed(held.platform.config.timing.last_backup_limit)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + seconds).unwrap()
    }

    fn host(stage: &str, dumped: u64) -> BackupProgress {
        let (stage, dumped_bytes) = (Some(stage.to_owned()), Some(dumped));
        BackupProgress { running: true, stage, dumped_bytes, ..BackupProgress::default() }
    }

    #[test]
    fn counting_up_is_no_progress() {
        let mut progress = Progress::default();
        progress.note(&host("dump", 1), at(0));
        for poll in 1..1000 {
            progress.note(&host("dump", u64::try_from(poll).unwrap()), at(poll));
        }
        assert_eq!(progress.progress_at, Some(at(0)));
        progress.note(&host("dump", 1 + MIN_PROGRESS_BYTES), at(1000));
        assert_eq!(progress.progress_at, Some(at(1000)));
        progress.note(&host("verify", 1 + MIN_PROGRESS_BYTES), at(1001));
        assert_eq!(progress.progress_at, Some(at(1001)), "another stage");
        progress.note(&host("verify", 5), at(1002));
        assert_eq!(progress.progress_at, Some(at(1002)), "another run");
    }

    #[test]
    fn window_follows_the_clock_of_the_host() {
        let mut progress = Progress::default();
        assert!(progress.snapshot_window(at(0)).is_none());
        progress.requested(at(-500), at(0));
        let window = progress.snapshot_window(at(60)).unwrap();
        assert_eq!((window.since, window.now), (at(-500), at(-440)));
        progress.requested(at(100), at(100));
        let window = progress.again_from_the_start().snapshot_window(at(130)).unwrap();
        assert_eq!(
            (window.since, window.now),
            (at(-500), at(130)),
            "the first request, and the newest clock"
        );
    }
}
