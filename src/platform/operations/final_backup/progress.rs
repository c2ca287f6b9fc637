//! Tracks the progress of the step `last_backup`, which is stored in the operation's facts between attempts.

use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::snapshot_proof::SnapshotWindow;
use super::{
    AttemptOutcome, BackupFailure, MAX_POLL_INTERVAL, MAX_REQUESTS, POLL_INTERVAL, poll_interval,
    signed_duration,
};
use crate::operations::host_call::BackupProgress;
use crate::operations::leased::LeasedOperation;
use crate::operations::step::StepOutcome;
use svc_base::clock;
use svc_base::untrusted_text::truncate_printable;

/// Key in an operation's facts for the progress of this step.
const PROGRESS_KEY: &str = "lastBackup";
/// Minimum number of additional bytes that counts as progress.
const MIN_PROGRESS_BYTES: u64 = 1 << 20;

/// The progress of the step. Times are by the database's clock, except where a field says otherwise. Request times are
/// by the host's clock, like those of snapshots, if the host reports them.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FinalBackupProgress {
    /// When the wait for a backup started: at the first attempt, or when an operator restarted the step.
    #[serde(with = "clock::wire_option")]
    pub started_at: Option<Timestamp>,
    /// When the host became unreachable: every call since then has failed.
    #[serde(with = "clock::wire_option")]
    pub unreachable_since: Option<Timestamp>,
    /// The writers have stopped, or the host's release cannot stop them.
    #[serde(rename = "hasStopped")]
    pub is_quiesce_done: bool,
    /// When the host first reported that it was stopping its writers.
    #[serde(with = "clock::wire_option")]
    stopping_since: Option<Timestamp>,
    /// The lowest count of running dispatches that the host has reported.
    running_dispatches: Option<u64>,
    /// The time of the pending request.
    #[serde(with = "clock::wire_option")]
    pub requested_at: Option<Timestamp>,
    /// The time of the first request, which was made after the writers had stopped.
    #[serde(with = "clock::wire_option")]
    pub first_requested_at: Option<Timestamp>,
    /// When all writers had stopped, by the host's clock.
    #[serde(with = "clock::wire_option")]
    pub quiesced_at: Option<Timestamp>,
    /// When the step started waiting for the owner's files: the database was saved, but the files were not.
    #[serde(with = "clock::wire_option")]
    pub files_awaited_since: Option<Timestamp>,
    /// The time of the latest request, by the host's clock; the next field is the same time, by the database's clock.
    #[serde(with = "clock::wire_option")]
    host_clock_at: Option<Timestamp>,
    #[serde(with = "clock::wire_option")]
    host_clock_noted_at: Option<Timestamp>,
    /// Number of accepted requests since `started_at`.
    requests: u32,
    /// The stage and bytes when progress was last recorded; `progress_at` is the time.
    stage: Option<String>,
    bytes: u64,
    #[serde(with = "clock::wire_option")]
    pub progress_at: Option<Timestamp>,
    /// The problem that requires an operator's decision.
    #[serde(rename = "trouble")]
    pub problem: Option<String>,
    /// Whether an operator must choose the snapshot to restore: the question `newer_snapshot`.
    pub has_snapshot_question: bool,
    /// The last logged wait for another operation, so that each wait is logged only once.
    #[serde(rename = "waitsFor")]
    pub logged_wait: Option<String>,
}

impl FinalBackupProgress {
    pub fn load(leased: &LeasedOperation<'_>) -> Self {
        let stored = leased.operation.facts.get(PROGRESS_KEY).cloned();
        stored.and_then(|stored| serde_json::from_value(stored).ok()).unwrap_or_default()
    }

    /// Returns the operation's facts with this progress inserted.
    pub fn facts(&self, leased: &LeasedOperation<'_>) -> Map<String, Value> {
        let mut facts = leased.facts();
        facts.insert(PROGRESS_KEY.to_owned(), serde_json::to_value(self).unwrap_or_default());
        facts
    }

    /// Returns the delay before the next call to a host that is stopping its writers or taking its backup.
    pub fn next_poll_delay(&self, now: Timestamp) -> Duration {
        poll_interval(now.duration_since(self.started_at.unwrap_or(now)), MAX_POLL_INTERVAL)
    }

    pub fn wait(&self, leased: &LeasedOperation<'_>, delay: Duration) -> StepOutcome {
        StepOutcome::Wait { delay, facts: Some(self.facts(leased)) }
    }

    /// Waits for the owner's files. The operation shows why, from the second poll on.
    pub fn wait_for_files(&self, leased: &LeasedOperation<'_>, reason: &str) -> StepOutcome {
        let facts = self.facts(leased);
        if facts != leased.facts() {
            // `WaitFor` cannot change the facts.
            return StepOutcome::Wait { delay: POLL_INTERVAL, facts: Some(facts) };
        }
        let hint = format!(
            "after 3 min, the operation continues and keeps the old server. `svcctl operation continue {} --accept-loss` \
             continues now: what is only on that server is lost when it is deleted",
            leased.operation.id
        );
        StepOutcome::wait_for(POLL_INTERVAL, "files_unsaved", format!("{reason}; {hint}"))
    }

    /// Records a request that the host has accepted.
    pub fn record_request(&mut self, requested_at: Timestamp, now: Timestamp) {
        self.requested_at = Some(requested_at);
        self.first_requested_at.get_or_insert(requested_at);
        (self.host_clock_at, self.host_clock_noted_at) = (Some(requested_at), Some(now));
        self.requests += 1;
        self.progress_at = Some(now);
    }

    /// Returns the window in which a final snapshot could have been taken; `None` before the first request.
    pub fn snapshot_window(&self, now: Timestamp) -> Option<SnapshotWindow> {
        let since = self.first_requested_at()?;
        let reading = self.host_clock_at.zip(self.host_clock_noted_at);
        let host_now =
            reading.and_then(|(clock_at, noted_at)| clock_at.checked_add(now.duration_since(noted_at)).ok());
        Some(SnapshotWindow { since, now: host_now.unwrap_or(now) })
    }

    /// Returns the start of the snapshot window. An earlier release recorded only the latest request.
    fn first_requested_at(&self) -> Option<Timestamp> {
        self.first_requested_at.or(self.requested_at)
    }

    /// Resets the progress after an operator has restarted the step. Snapshots from earlier requests still count.
    pub fn into_restarted(self) -> Self {
        Self {
            first_requested_at: self.first_requested_at(),
            host_clock_at: self.host_clock_at,
            host_clock_noted_at: self.host_clock_noted_at,
            ..Self::default()
        }
    }

    /// Records the host's report. A new stage, fewer bytes (a new backup attempt) or enough additional bytes count as
    /// progress. [`Self::check_overdue`] limits a host that reports false progress.
    pub fn record_report(&mut self, host: &BackupProgress, now: Timestamp) {
        let bytes = host.dumped_bytes.unwrap_or(0).saturating_add(host.uploaded_bytes.unwrap_or(0));
        let stage = host.stage.as_deref().map(truncate_printable);
        let threshold = self.bytes.saturating_add(MIN_PROGRESS_BYTES);
        if stage != self.stage || bytes < self.bytes || bytes >= threshold {
            (self.stage, self.bytes, self.progress_at) = (stage, bytes, Some(now));
        }
    }

    /// Records the count of running dispatches. Only a new minimum counts as progress: a host could report rising
    /// counts forever.
    pub fn record_running_dispatches(&mut self, count: u64, now: Timestamp) {
        self.stopping_since.get_or_insert(now);
        if self.running_dispatches.is_none_or(|lowest| count < lowest) {
            self.running_dispatches = Some(count);
            self.progress_at = Some(now);
        }
    }

    /// Returns whether the deadline for stopping the writers has passed. The host's reports do not extend it.
    pub fn is_stop_overdue(&self, leased: &LeasedOperation<'_>, now: Timestamp) -> bool {
        let limit = signed_duration(leased.platform.config.timing.final_backup_stall_timeout);
        self.stopping_since.is_some_and(|since| now.duration_since(since) >= limit)
    }

    /// Returns whether the time limit for a final backup has passed since `started_at`, which is set to `now` if it is
    /// not set. The host's reports do not extend the limit.
    pub fn check_overdue(&mut self, leased: &LeasedOperation<'_>, now: Timestamp) -> bool {
        let since = *self.started_at.get_or_insert(now);
        now.duration_since(since) >= signed_duration(leased.platform.config.timing.final_backup_limit)
    }

    /// Returns whether there has been no progress for the stall timeout since `progress_at`, which is set to `now` if
    /// it is not set.
    pub fn check_stalled(&mut self, leased: &LeasedOperation<'_>, now: Timestamp) -> bool {
        let since = *self.progress_at.get_or_insert(now);
        now.duration_since(since) >= signed_duration(leased.platform.config.timing.final_backup_stall_timeout)
    }

    /// Schedules a new request after a failed backup, up to `MAX_REQUESTS` in total.
    pub fn retry_request(&mut self, error: String) -> AttemptOutcome {
        if self.requests >= MAX_REQUESTS {
            return AttemptOutcome::Failed(BackupFailure::Failed(error));
        }
        self.requested_at = None;
        AttemptOutcome::Wait(Duration::from_secs(u64::from(self.requests)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time_at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + seconds).unwrap()
    }

    fn host(stage: &str, dumped: u64) -> BackupProgress {
        let (stage, dumped_bytes) = (Some(stage.to_owned()), Some(dumped));
        BackupProgress { is_running: true, stage, dumped_bytes, ..BackupProgress::default() }
    }

    #[test]
    fn progress_requires_new_stage_new_run_or_enough_bytes() {
        let mut progress = FinalBackupProgress::default();
        progress.record_report(&host("dump", 1), time_at(0));
        for poll in 1..1000 {
            progress.record_report(&host("dump", u64::try_from(poll).unwrap()), time_at(poll));
        }
        assert_eq!(progress.progress_at, Some(time_at(0)));
        progress.record_report(&host("dump", 1 + MIN_PROGRESS_BYTES), time_at(1000));
        assert_eq!(progress.progress_at, Some(time_at(1000)));
        progress.record_report(&host("verify", 1 + MIN_PROGRESS_BYTES), time_at(1001));
        assert_eq!(progress.progress_at, Some(time_at(1001)), "a new stage counts as progress");
        progress.record_report(&host("verify", 5), time_at(1002));
        assert_eq!(progress.progress_at, Some(time_at(1002)), "a new run counts as progress");
    }

    #[test]
    fn window_follows_host_clock() {
        let mut progress = FinalBackupProgress::default();
        assert!(progress.snapshot_window(time_at(0)).is_none());
        progress.record_request(time_at(-500), time_at(0));
        let window = progress.snapshot_window(time_at(60)).unwrap();
        assert_eq!((window.since, window.now), (time_at(-500), time_at(-440)));
        progress.record_request(time_at(100), time_at(100));
        let window = progress.into_restarted().snapshot_window(time_at(130)).unwrap();
        assert_eq!(
            (window.since, window.now),
            (time_at(-500), time_at(130)),
            "the window starts at the first request, and its end follows the newest clock reading"
        );
    }
}
