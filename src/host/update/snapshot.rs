//! Takes a snapshot before the switch to a new release: starts the unit for requested backups repeatedly, until there
//! is a snapshot that was taken after the update began.
//!
//! The backup runs in the unit, with its own lock and user. Root treats the backup's records as untrusted. The wait
//! ends with an error if no backup makes progress for the whole timeout. An operator can waive the snapshot. Once
//! a snapshot is held back, the unit is not started again, because its next snapshot would also be held back.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::journal::Journal;
use super::protocol::SnapshotWait;
use super::request::read_untrusted;
use super::services::ServiceManager;
use super::state::MAX_ERROR_CHARS;
use crate::snapshots::backup_progress::BackupProgress;
use crate::system::backoff::{Backoff, DeadlinePassed};
use crate::system::layout::Layout;
use svc_base::clock;
use svc_base::error_chain::format_chain;
use svc_base::fsx::{self, FileError};
use svc_machine::name::ImageVersion;
use svc_store::key;

/// The unit waits for any running backup to end before it takes its own snapshot.
const BACKUP_UNIT: &str = "svc-db-backup-request.service";
/// The unit is started repeatedly during the wait, with exponential backoff; systemd ignores the call while the unit is
/// running.
const MIN_START_BACKOFF: Duration = Duration::from_secs(5);
const MAX_START_BACKOFF: Duration = Duration::from_secs(60);
/// A snapshot whose run ended longer ago than this is not used, even if it was taken after the update began: an update
/// can be resumed much later. The age counts from the end of the run, because a backup can take hours.
const MAX_SNAPSHOT_AGE: SignedDuration = SignedDuration::from_hours(1);
/// A waiver older than this is ignored.
const MAX_WAIVER_AGE: SignedDuration = SignedDuration::from_hours(1);
/// Maximum number of bytes read from a backup's record or progress. A record contains the whole error of a failed run.
const MAX_BACKUP_FILE_BYTES: u64 = 64 * 1024;

/// The reason there is no snapshot.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    // The advice comes before the reason, because an outcome keeps only the beginning of a long error.
    #[error(
        "no snapshot was taken, and no backup made progress for {} s (to update without a snapshot, run `svc-update apply --version {version} --without-snapshot`): {reason}",
        .timeout.as_secs()
    )]
    Timeout { timeout: Duration, reason: String, version: ImageVersion },
    #[error(transparent)]
    File(#[from] FileError),
}

/// The fields of the last backup record that this module reads.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct LastRun {
    /// When the run started.
    #[serde(with = "clock::wire")]
    timestamp: Timestamp,
    #[serde(default)]
    duration_ms: u64,
    status: String,
    key: Option<String>,
    error: Option<String>,
    /// Set if the snapshot is complete but was held back.
    held: Option<HeldBackReason>,
}

#[derive(Debug, Deserialize)]
struct HeldBackReason {
    loss: String,
}

impl LastRun {
    fn read(layout: &Layout) -> Option<Self> {
        serde_json::from_slice(&read_untrusted(&layout.last_backup(), MAX_BACKUP_FILE_BYTES)?).ok()
    }

    fn ended_at(&self) -> Timestamp {
        let duration = SignedDuration::from_millis(i64::try_from(self.duration_ms).unwrap_or(i64::MAX));
        self.timestamp.saturating_add(duration).unwrap_or(Timestamp::MAX)
    }

    /// Returns when the run's snapshot was taken, if the snapshot became the latest.
    fn taken_at(&self) -> Option<Timestamp> {
        (self.status == "success").then(|| self.key.as_deref().and_then(key::taken_at))?
    }

    /// Returns whether the run's snapshot was taken after the update began, and the run ended at most
    /// [`MAX_SNAPSHOT_AGE`] ago.
    fn has_recent_snapshot(&self, update_began_at: Timestamp, now: Timestamp) -> bool {
        self.taken_at().is_some_and(|taken_at| taken_at >= update_began_at)
            && now.duration_since(self.ended_at()) <= MAX_SNAPSHOT_AGE
    }

    /// Describes why the update is still waiting after this run.
    fn describe_wait_reason(&self) -> String {
        match (&self.held, &self.error) {
            // The advice comes before the loss, because the wait keeps only the beginning of a long reason.
            (Some(held), _) => format!(
                "svc-db-backup held back its snapshot (if the loss is intended, run `svc-db-backup accept`): {}",
                held.loss
            ),
            (None, Some(error)) => format!("svc-db-backup failed: {error}"),
            (None, None) => {
                "svc-db-backup ended, but did not take a snapshot after the update began".to_owned()
            }
        }
    }
}

/// Detects whether backups make progress during a wait.
struct ProgressDetector {
    /// Start of the run whose progress was stored when the wait began; `None` if there was none, or once another run
    /// has stored its progress.
    earlier_run: Option<Timestamp>,
    max_bytes: u64,
}

impl ProgressDetector {
    /// Starts with the stored progress, which belongs to a run that is still in progress, or to the last one.
    fn new(stored: Option<&BackupProgress>) -> Self {
        Self {
            earlier_run: stored.map(|progress| progress.began_at),
            max_bytes: stored.map_or(0, count_bytes),
        }
    }

    /// Records the stored progress, and returns whether a backup has advanced. A run counts as advancing only if it
    /// exceeds every earlier run of this wait, because each run may fail at the same position. Runs from before the
    /// wait are ignored: otherwise, a backup that is as large as the last one would not count as advancing until its
    /// end.
    fn record(&mut self, progress: &BackupProgress) -> bool {
        if self.earlier_run.take_if(|began_at| *began_at != progress.began_at).is_some() {
            self.max_bytes = 0;
        }
        let bytes = count_bytes(progress);
        let has_advanced = bytes > self.max_bytes;
        self.max_bytes = self.max_bytes.max(bytes);
        has_advanced
    }
}

fn count_bytes(progress: &BackupProgress) -> u64 {
    progress.dumped_bytes.saturating_add(progress.uploaded_bytes)
}

/// Waits for an update's snapshot.
pub struct SnapshotWaiter<'a, S> {
    layout: &'a Layout,
    services: &'a S,
    timeout: Duration,
}

impl<'a, S: ServiceManager> SnapshotWaiter<'a, S> {
    pub fn new(layout: &'a Layout, services: &'a S, timeout: Duration) -> Self {
        Self { layout, services, timeout }
    }

    /// Waits until there is a snapshot, or until an operator waives it. Meanwhile, the journal records the reason for
    /// the wait.
    ///
    /// # Errors
    /// `Timeout` if no backup makes progress within the timeout; `File` if the journal cannot be written.
    pub async fn wait_for_snapshot(&self, journal: &mut Journal) -> Result<(), SnapshotError> {
        let mut backoff = Backoff::new(self.timeout);
        let (mut next_start, mut start_backoff) = (Instant::now(), MIN_START_BACKOFF);
        let mut last_recorded_at = Timestamp::now();
        let mut detector = ProgressDetector::new(self.read_progress().as_ref());
        let since = clock::now_ms();
        let mut is_held_back = false;
        loop {
            if journal.plan.allow.without_snapshot || is_waived(self.layout, journal) {
                tracing::warn!(to = %journal.plan.to, "an operator waived the snapshot before this update");
                return Ok(());
            }
            let last = LastRun::read(self.layout);
            let has_snapshot =
                |last: &LastRun| last.has_recent_snapshot(journal.started_at, Timestamp::now());
            if last.as_ref().is_some_and(has_snapshot) {
                return Ok(());
            }
            // A run that started earlier has already been recorded, or is older than this wait.
            let ended_run = last.filter(|last| last.timestamp >= last_recorded_at);
            if let Some(ended_run) = &ended_run {
                last_recorded_at = Timestamp::now();
                is_held_back = ended_run.held.is_some();
                self.record_wait(journal, since, &ended_run.describe_wait_reason())?;
            }
            // An accepted snapshot, or the next hourly one, can still end the wait.
            if !is_held_back && Instant::now() >= next_start {
                next_start = Instant::now() + start_backoff;
                start_backoff = (start_backoff * 2).min(MAX_START_BACKOFF);
                if let Err(error) = self.services.start(BACKUP_UNIT).await {
                    self.record_wait(journal, since, &format_chain(&error))?;
                } else if journal.waiting.is_none() {
                    self.record_wait(journal, since, "")?;
                }
            }
            if self.read_progress().is_some_and(|progress| detector.record(&progress)) {
                backoff.record_progress();
            }
            if let Err(DeadlinePassed) = backoff.pause().await {
                return Err(self.timeout_error(journal));
            }
        }
    }

    /// Reads the progress of the current or last backup run.
    fn read_progress(&self) -> Option<BackupProgress> {
        let text = read_untrusted(&self.layout.backup_progress(), MAX_BACKUP_FILE_BYTES)?;
        serde_json::from_slice(&text).ok()
    }

    fn record_wait(&self, journal: &mut Journal, since: Timestamp, reason: &str) -> Result<(), FileError> {
        let reason: String = reason.chars().take(MAX_ERROR_CHARS).collect();
        let waiting = Some(SnapshotWait { since, why: reason });
        if journal.waiting == waiting {
            return Ok(());
        }
        if let Some(SnapshotWait { why: reason, .. }) =
            waiting.as_ref().filter(|waiting| !waiting.why.is_empty())
        {
            tracing::warn!(reason, "the update is waiting for a snapshot");
        }
        journal.waiting = waiting;
        journal.save(self.layout)
    }

    fn timeout_error(&self, journal: &Journal) -> SnapshotError {
        let reason =
            journal.waiting.as_ref().map(|waiting| waiting.why.clone()).filter(|reason| !reason.is_empty());
        SnapshotError::Timeout {
            timeout: self.timeout,
            reason: reason.unwrap_or_else(|| format!("no run of {BACKUP_UNIT} has ended")),
            version: journal.plan.to.clone(),
        }
    }
}

/// An operator's waiver of the snapshot for an update to this release. The file passes the waiver to another run that
/// is already waiting; the operator's own run records it in the journal. Only root can write the file.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Waiver {
    version: ImageVersion,
    #[serde(with = "clock::wire")]
    at: Timestamp,
}

fn waiver_path(layout: &Layout) -> PathBuf {
    layout.update_state().join("without-snapshot.json")
}

/// Records that an operator waives the snapshot for an update to this release.
pub fn waive(layout: &Layout, version: &ImageVersion) -> Result<(), FileError> {
    let waiver = Waiver { version: version.clone(), at: clock::now_ms() };
    let text = serde_json::to_vec(&waiver).expect("plain fields serialize to JSON");
    fsx::write_atomic(&waiver_path(layout), &text, 0o644)
}

fn read_waiver(layout: &Layout) -> Option<Waiver> {
    let text = fsx::read_if_exists(&waiver_path(layout)).ok().flatten()?;
    serde_json::from_slice(&text).ok()
}

/// Returns whether an operator recently waived the snapshot for this update. A waiver from before the update began was
/// for another update, such as one that ended before it had a journal.
fn is_waived(layout: &Layout, journal: &Journal) -> bool {
    read_waiver(layout).is_some_and(|waiver| {
        waiver.version == journal.plan.to
            && waiver.at >= journal.started_at
            && Timestamp::now().duration_since(waiver.at) <= MAX_WAIVER_AGE
    })
}

/// Removes the waiver after an update to this release, unless it is for a different one.
pub fn remove_waiver(layout: &Layout, version: &ImageVersion) -> Result<(), FileError> {
    match read_waiver(layout) {
        Some(waiver) if waiver.version != *version => Ok(()),
        _ => fsx::remove_if_exists(&waiver_path(layout)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::journal::{Allowances, UpdateKind, UpdatePlan};
    use super::*;

    fn timestamp(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_795_000_000 + seconds).unwrap()
    }

    fn successful_run(began_at: Timestamp, duration_ms: u64) -> LastRun {
        let key = key::snapshot_key(began_at, svc_machine::epoch::Epoch(1));
        let status = "success".to_owned();
        LastRun { timestamp: began_at, duration_ms, status, key: Some(key), error: None, held: None }
    }

    #[test]
    fn snapshot_age_counts_from_end_of_its_run() {
        let run = successful_run(timestamp(10), 3 * 3_600_000);
        let ended_at = 10 + 3 * 3600;
        assert!(run.has_recent_snapshot(timestamp(0), timestamp(ended_at)));
        assert!(run.has_recent_snapshot(timestamp(0), timestamp(ended_at + 3600)));
        assert!(!run.has_recent_snapshot(timestamp(0), timestamp(ended_at + 3601)));
        assert!(
            !run.has_recent_snapshot(timestamp(11), timestamp(ended_at)),
            "it was taken before the update began"
        );
        let forged = successful_run(timestamp(10), u64::MAX);
        assert_eq!(forged.ended_at(), Timestamp::MAX);
    }

    fn progress(began_at: Timestamp, dumped_bytes: u64) -> BackupProgress {
        let mut progress = BackupProgress::new(began_at, "dump".to_owned());
        progress.dumped_bytes = dumped_bytes;
        progress
    }

    #[test]
    fn detector_ignores_runs_before_the_wait() {
        let mut detector = ProgressDetector::new(Some(&progress(timestamp(0), 1000)));
        assert!(!detector.record(&progress(timestamp(0), 1000)), "the last run has ended");
        assert!(!detector.record(&progress(timestamp(60), 0)));
        assert!(detector.record(&progress(timestamp(60), 10)), "the new run need not exceed the last one");
        assert!(!detector.record(&progress(timestamp(60), 10)));
        assert!(!detector.record(&progress(timestamp(120), 10)), "the next run has not exceeded this one");
        assert!(detector.record(&progress(timestamp(120), 11)));
    }

    #[test]
    fn detector_counts_progress_of_run_in_progress() {
        let mut detector = ProgressDetector::new(Some(&progress(timestamp(0), 1000)));
        assert!(detector.record(&progress(timestamp(0), 1001)));
        let mut detector = ProgressDetector::new(None);
        assert!(!detector.record(&progress(timestamp(0), 0)));
        assert!(detector.record(&progress(timestamp(0), 1)));
    }

    #[test]
    fn last_run_reads_record_with_long_error() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let error = "x".repeat(20_000);
        let last = serde_json::json!({"timestamp": "2026-01-02T03:04:05.678Z", "status": "error", "key": null,
            "durationMs": 7, "error": error});
        fsx::write_atomic(&layout.last_backup(), last.to_string().as_bytes(), 0o644).unwrap();
        let last = LastRun::read(&layout).unwrap();
        assert_eq!((last.error, last.duration_ms), (Some(error), 7));
    }

    fn update_to(version: &ImageVersion, started_at: Timestamp) -> Journal {
        let plan = UpdatePlan {
            kind: UpdateKind::Apply,
            from: "0".parse().unwrap(),
            to: version.clone(),
            allow: Allowances::default(),
            running: Vec::new(),
            was_ready: true,
            request_id: String::new(),
        };
        Journal::new(plan, started_at)
    }

    #[test]
    fn remove_waiver_keeps_waiver_for_other_release() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let (one, two): (ImageVersion, ImageVersion) = ("1".parse().unwrap(), "2".parse().unwrap());
        waive(&layout, &two).unwrap();
        remove_waiver(&layout, &one).unwrap();
        assert!(waiver_path(&layout).exists());
        remove_waiver(&layout, &two).unwrap();
        assert!(!waiver_path(&layout).exists());
    }

    #[test]
    fn waiver_applies_only_to_update_in_progress() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let (one, two): (ImageVersion, ImageVersion) = ("1".parse().unwrap(), "2".parse().unwrap());
        waive(&layout, &two).unwrap();
        let waived_at = read_waiver(&layout).unwrap().at;
        let later = waived_at.checked_add(SignedDuration::from_millis(1)).unwrap();
        assert!(is_waived(&layout, &update_to(&two, waived_at)));
        assert!(!is_waived(&layout, &update_to(&one, waived_at)));
        assert!(!is_waived(&layout, &update_to(&two, later)), "the update began after the waiver");
    }
}
