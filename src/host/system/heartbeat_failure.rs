//! Records heartbeat failures for `svcctl doctor` on the host.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::system::layout::Layout;
use svc_base::fsx::{self, FileError};

const FORMAT_VERSION: u32 = 1;

/// A streak of failed heartbeats.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeartbeatFailure {
    version: u32,
    /// Time of the first failure.
    pub since: Timestamp,
    /// Error from the last heartbeat.
    pub error: String,
    /// Whether the platform rejected this machine's token.
    pub is_refused: bool,
}

impl HeartbeatFailure {
    /// Reads the record. Returns `None` if no failure is recorded or the record is invalid.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(layout: &Layout) -> Result<Option<Self>, FileError> {
        let text = fsx::read_if_exists(&layout.heartbeat_failure())?;
        let failure = text.and_then(|text| serde_json::from_slice::<Self>(&text).ok());
        Ok(failure.filter(|failure| failure.version == FORMAT_VERSION))
    }
}

/// Writes the record when the heartbeat result changes. Disk errors are only logged; the next heartbeat retries the
/// write.
pub struct FailureRecorder<'a> {
    layout: &'a Layout,
    /// Current failure, whether or not it was persisted.
    failure: Option<HeartbeatFailure>,
    /// File contents, if known.
    written: Option<HeartbeatFailure>,
    file_may_exist: bool,
}

impl<'a> FailureRecorder<'a> {
    /// Resumes the record left by an earlier process.
    pub fn open(layout: &'a Layout) -> Self {
        let failure = HeartbeatFailure::read(layout).ok().flatten();
        Self { layout, written: failure.clone(), failure, file_may_exist: true }
    }

    /// Records a heartbeat accepted by the platform.
    pub fn record_success(&mut self) {
        self.failure = None;
        if self.file_may_exist {
            let removed = fsx::remove_if_exists(&self.layout.heartbeat_failure());
            self.file_may_exist = log_error(removed).is_none();
            self.written = None;
        }
    }

    /// Records a failed heartbeat. `is_refused` means the platform rejected this machine's token.
    pub fn record_failure(&mut self, error: String, is_refused: bool) {
        let since = self.failure.take().map_or_else(Timestamp::now, |failure| failure.since);
        let failure = HeartbeatFailure { version: FORMAT_VERSION, since, error, is_refused };
        let failure = self.failure.insert(failure);
        if self.written.as_ref() != Some(failure) {
            let text = serde_json::to_vec(failure).expect("plain fields serialize to JSON");
            self.file_may_exist = true;
            let written = fsx::write_atomic_or_in_place(&self.layout.heartbeat_failure(), &text, 0o644);
            self.written = log_error(written).map(|()| failure.clone());
        }
    }
}

fn log_error(result: Result<(), FileError>) -> Option<()> {
    result.inspect_err(|error| tracing::warn!(%error, "cannot record heartbeat result")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_keeps_first_failure_time_until_success() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        std::fs::create_dir_all(layout.heartbeat_failure().parent().unwrap()).unwrap();
        let read = || HeartbeatFailure::read(&layout).unwrap();
        let mut recorder = FailureRecorder::open(&layout);
        recorder.record_success();
        assert_eq!(read(), None);
        recorder.record_failure("timeout".to_owned(), false);
        let first = read().unwrap();
        let mut restarted = FailureRecorder::open(&layout);
        restarted.record_failure("401 Unauthorized".to_owned(), true);
        let second = read().unwrap();
        assert_eq!((second.since, second.error.as_str()), (first.since, "401 Unauthorized"));
        restarted.record_success();
        assert_eq!(read(), None);
    }

    #[test]
    fn failed_write_and_removal_are_retried() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let mut recorder = FailureRecorder::open(&layout);
        // The directory doesn't exist yet.
        recorder.record_failure("timeout".to_owned(), false);
        std::fs::create_dir_all(layout.heartbeat_failure().parent().unwrap()).unwrap();
        recorder.record_failure("timeout".to_owned(), false);
        assert!(HeartbeatFailure::read(&layout).unwrap().is_some());
        // A directory in place of the file cannot be removed.
        std::fs::remove_file(layout.heartbeat_failure()).unwrap();
        std::fs::create_dir(layout.heartbeat_failure()).unwrap();
        recorder.record_success();
        std::fs::remove_dir(layout.heartbeat_failure()).unwrap();
        std::fs::write(layout.heartbeat_failure(), "{}").unwrap();
        recorder.record_success();
        assert!(!layout.heartbeat_failure().exists());
    }
}
