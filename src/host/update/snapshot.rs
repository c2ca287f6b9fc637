//! Takes a snapshot before the switch to a new release: starts the unit for requested backups repeatedly, until there
//! is a snapshot that was taken after the update began.
//!
//! The backup runs in the unit, with its own lock and user. Root treats the backup's records as untrusted. The wait
//! ends with an error if no backup makes progress for the whole timeout. An operator can waive the snapshot.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::journal::Journal;
use super::protocol::SnapshotWait;
use super::request::read_untrusted;
use super::services::Services;
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
/// A failed unit is restarted with exponential backoff; systemd ignores the call while the unit is running.
const MIN_START_BACKOFF: Duration = Duration::from_secs(5);
const MAX_START_BACKOFF: Duration = Duration::from_secs(60);
/// A snapshot older than this is not used, even if it was taken after the update began: an update can be resumed much
/// later.
const MAX_SNAPSHOT_AGE: SignedDuration = SignedDuration::from_hours(1);
/// A waiver older than this is ignored.
const MAX_WAIVER_AGE: SignedDuration = SignedDuration::from_hours(1);

/// The reason there is no snapshot.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    // The advice comes before the reason, because an outcome keeps only the beginning of a long error.
    #[error(
        "no snapshot was taken, and no backup made progress for {} s (`svc-update apply --version {version} --without-snapshot` updates without one): {why}",
        .timeout.as_secs()
    )]
    Timeout { timeout: Duration, why: String, version: ImageVersion },
    #[error(transparent)]
    File(#[from] FileError),
}

/// The fields of the last backup record that this module reads.
#[derive(Debug, Deserialize)]
struct LastRun {
    /// When the run started.
    #[serde(with = "clock::wire")]
    timestamp: Timestamp,
    status: String,
    key: Option<String>,
    error: Option<String>,
}

impl LastRun {
    fn read(layout: &Layout) -> Option<Self> {
        serde_json::from_slice(&read_untrusted(&layout.last_backup())?).ok()
    }

    /// Returns when the run's snapshot was taken, if the snapshot became the latest.
    fn taken_at(&self) -> Option<Timestamp> {
        (self.status == "success").then(|| self.key.as_deref().and_then(key::taken_at))?
    }
}

/// Waits for an update's snapshot.
pub struct SnapshotWaiter<'a, S> {
    layout: &'a Layout,
    services: &'a S,
    timeout: Duration,
}

impl<'a, S: Services> SnapshotWaiter<'a, S> {
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
        let (mut last_checked, mut max_bytes) = (Timestamp::now(), 0);
        let since = clock::now_ms();
        loop {
            if is_waived(self.layout, &journal.plan.to) {
                tracing::warn!(to = %journal.plan.to, "an operator waived the snapshot before this update");
                return Ok(());
            }
            let last = LastRun::read(self.layout);
            if last.as_ref().and_then(LastRun::taken_at).is_some_and(|taken_at| is_recent(taken_at, journal))
            {
                return Ok(());
            }
            // A run that started earlier has already been recorded, or is older than this wait.
            let ended = last.filter(|last| last.timestamp >= last_checked);
            if let Some(ended) = &ended {
                last_checked = Timestamp::now();
                let result = match &ended.error {
                    Some(error) => format!("svc-db-backup failed: {error}"),
                    None => {
                        "svc-db-backup ended, but did not take a snapshot after the update began".to_owned()
                    }
                };
                self.record_wait(journal, since, &result)?;
            }
            if Instant::now() >= next_start {
                next_start = Instant::now() + start_backoff;
                start_backoff = (start_backoff * 2).min(MAX_START_BACKOFF);
                if let Err(error) = self.services.start(BACKUP_UNIT).await {
                    self.record_wait(journal, since, &format_chain(&error))?;
                } else if journal.waiting.is_none() {
                    self.record_wait(journal, since, "")?;
                }
            }
            let bytes = self.read_progress_bytes();
            // Only exceeding every earlier run counts as progress, because each run may fail at the same position.
            if bytes > max_bytes {
                max_bytes = bytes;
                backoff.record_progress();
            }
            if let Err(DeadlinePassed) = backoff.pause().await {
                return Err(self.timeout_error(journal));
            }
        }
    }

    /// Reads the number of bytes that the current or last backup run has dumped and uploaded.
    fn read_progress_bytes(&self) -> u64 {
        let progress = read_untrusted(&self.layout.backup_progress())
            .and_then(|text| serde_json::from_slice::<BackupProgress>(&text).ok());
        progress.map_or(0, |progress| progress.dumped_bytes.saturating_add(progress.uploaded_bytes))
    }

    fn record_wait(&self, journal: &mut Journal, since: Timestamp, why: &str) -> Result<(), FileError> {
        let why: String = why.chars().take(MAX_ERROR_CHARS).collect();
        let waiting = Some(SnapshotWait { since, why });
        if journal.waiting == waiting {
            return Ok(());
        }
        if let Some(SnapshotWait { why, .. }) = waiting.as_ref().filter(|waiting| !waiting.why.is_empty()) {
            tracing::warn!(why, "the update is waiting for a snapshot");
        }
        journal.waiting = waiting;
        journal.save(self.layout)
    }

    fn timeout_error(&self, journal: &Journal) -> SnapshotError {
        let why = journal.waiting.as_ref().map(|waiting| waiting.why.clone()).filter(|why| !why.is_empty());
        SnapshotError::Timeout {
            timeout: self.timeout,
            why: why.unwrap_or_else(|| format!("no run of {BACKUP_UNIT} has ended")),
            version: journal.plan.to.clone(),
        }
    }
}

/// Returns whether a snapshot was taken after the update began and at most [`MAX_SNAPSHOT_AGE`] ago.
fn is_recent(taken_at: Timestamp, journal: &Journal) -> bool {
    taken_at >= journal.started_at && Timestamp::now().duration_since(taken_at) <= MAX_SNAPSHOT_AGE
}

/// An operator's waiver of the snapshot for an update to this release. Only root can write the file.
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

/// Returns whether an operator recently waived the snapshot for an update to this release.
pub fn is_waived(layout: &Layout, version: &ImageVersion) -> bool {
    let text = fsx::read_if_exists(&waiver_path(layout)).ok().flatten();
    let waiver = text.and_then(|text| serde_json::from_slice::<Waiver>(&text).ok());
    waiver.is_some_and(|waiver| {
        waiver.version == *version && Timestamp::now().duration_since(waiver.at) <= MAX_WAIVER_AGE
    })
}

pub fn remove_waiver(layout: &Layout) -> Result<(), FileError> {
    fsx::remove_if_exists(&waiver_path(layout))
}
