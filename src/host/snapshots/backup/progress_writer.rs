//! Writes the progress of a backup (`host::snapshots::backup_progress`): at each stage, at the end of the dump, and
//! otherwise at most every two seconds.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use bytes::Bytes;
use jiff::Timestamp;

use super::dump::{DumpError, Sink};
use super::stage::Stage;
use crate::snapshots::backup_progress::BackupProgress;
use crate::system::layout::Layout;
use svc_base::clock;
use svc_base::error_chain::format_chain;
use svc_base::fsx;
use svc_store::upload::Upload;

const WRITE_INTERVAL: Duration = Duration::from_secs(2);

/// Tracks the progress of one run, and writes it for other programs to read.
pub struct ProgressTracker {
    layout: Layout,
    state: Mutex<TrackerState>,
}

struct TrackerState {
    progress: BackupProgress,
    written_at: Instant,
}

impl ProgressTracker {
    /// Starts tracking a run. The caller holds the backup's lock.
    pub fn begin(layout: &Layout, began_at: Timestamp) -> Self {
        // A killed run may leave a temporary file.
        if let Err(error) = fsx::remove_leftover_temps(&layout.backup_progress()) {
            tracing::warn!(error = %format_chain(&error), "could not remove a temporary file of a killed backup");
        }
        let progress = BackupProgress::new(began_at, Stage::Gate.name());
        let state = Mutex::new(TrackerState { progress, written_at: Instant::now() });
        let tracker = Self { layout: layout.clone(), state };
        tracker.update(Urgency::Immediate, |_| {});
        tracker
    }

    pub fn enter(&self, stage: Stage) {
        self.update(Urgency::Immediate, |progress| progress.stage = stage.name());
    }

    fn update(&self, urgency: Urgency, change: impl FnOnce(&mut BackupProgress)) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut state.progress);
        if urgency == Urgency::Throttled && state.written_at.elapsed() < WRITE_INTERVAL {
            return;
        }
        state.written_at = Instant::now();
        state.progress.updated_at = clock::now_ms();
        // The backup does not depend on its progress being visible.
        if let Err(error) = tokio::task::block_in_place(|| state.progress.write(&self.layout)) {
            tracing::warn!(error = %format_chain(&error), "could not write the progress of the backup");
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Urgency {
    Immediate,
    /// Skip the write if the last one was less than [`WRITE_INTERVAL`] ago.
    Throttled,
}

/// An upload whose progress is tracked.
pub struct TrackedUpload<'a> {
    pub upload: &'a mut Upload,
    pub tracker: &'a ProgressTracker,
}

impl Sink for TrackedUpload<'_> {
    fn max_chunk_bytes(&self) -> usize {
        self.upload.max_chunk_bytes()
    }

    async fn push(&mut self, chunk: Bytes) -> Result<(), DumpError> {
        let chunk_bytes = chunk.len() as u64;
        self.upload.push(chunk).await?;
        let uploaded_bytes = self.upload.acknowledged_bytes();
        self.tracker.update(Urgency::Throttled, |progress| {
            progress.dumped_bytes += chunk_bytes;
            progress.uploaded_bytes = uploaded_bytes;
        });
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), DumpError> {
        self.upload.flush().await?;
        let uploaded_bytes = self.upload.acknowledged_bytes();
        self.tracker.update(Urgency::Immediate, |progress| progress.uploaded_bytes = uploaded_bytes);
        Ok(())
    }
}
