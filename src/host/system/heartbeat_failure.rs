//! Records why the platform does not accept heartbeats, for `svcctl doctor host`.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::system::layout::Layout;
use svc_base::fsx::{self, FileError};

const FORMAT_VERSION: u32 = 1;

/// An uninterrupted series of failed heartbeats.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeartbeatFailure {
    version: u32,
    /// The time of the first failure.
    pub since: Timestamp,
    /// The latest error. The record is rewritten only if the error changes.
    pub error: String,
}

impl HeartbeatFailure {
    /// Reads the record; `None` if the last heartbeat was accepted, or if the record cannot be parsed.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(layout: &Layout) -> Result<Option<Self>, FileError> {
        let text = fsx::read_if_exists(&layout.heartbeat_failure())?;
        Ok(text.and_then(|text| serde_json::from_slice(&text).ok()))
    }
}

/// Updates the record when the heartbeats' result changes.
pub struct FailureLog<'a> {
    layout: &'a Layout,
    recorded: Option<HeartbeatFailure>,
}

impl<'a> FailureLog<'a> {
    /// Continues the record of an earlier process.
    pub fn open(layout: &'a Layout) -> Self {
        Self { layout, recorded: HeartbeatFailure::read(layout).ok().flatten() }
    }

    /// Records the result of a heartbeat: its error, or `None` if it was accepted. A failed write is only logged.
    pub fn record(&mut self, error: Option<String>) {
        let path = self.layout.heartbeat_failure();
        let written = match error {
            None if self.recorded.is_none() => return,
            None => {
                self.recorded = None;
                fsx::remove_if_exists(&path)
            }
            Some(error) if self.recorded.as_ref().is_some_and(|recorded| recorded.error == error) => return,
            Some(error) => {
                let since = self.recorded.take().map_or_else(Timestamp::now, |recorded| recorded.since);
                let failure =
                    self.recorded.insert(HeartbeatFailure { version: FORMAT_VERSION, since, error });
                let text = serde_json::to_vec(failure).expect("plain fields serialize to JSON");
                fsx::write_atomic(&path, &text, 0o644)
            }
        };
        if let Err(error) = written {
            tracing::warn!(%error, "cannot record the result of the heartbeat");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_keeps_time_of_first_failure_until_success() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        std::fs::create_dir_all(layout.heartbeat_failure().parent().unwrap()).unwrap();
        let read = || HeartbeatFailure::read(&layout).unwrap();
        let mut log = FailureLog::open(&layout);
        log.record(None);
        assert_eq!(read(), None);
        log.record(Some("timeout".to_owned()));
        let first = read().unwrap();
        let mut restarted = FailureLog::open(&layout);
        restarted.record(Some("401 Unauthorized".to_owned()));
        let second = read().unwrap();
        assert_eq!((second.since, second.error.as_str()), (first.since, "401 Unauthorized"));
        restarted.record(None);
        assert_eq!(read(), None);
    }
}
