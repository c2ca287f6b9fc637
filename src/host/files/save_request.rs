//! Requests a save, and waits for it.

use std::time::{Duration, Instant};

use svc_base::clock;
use svc_base::fsx::{self, FileError};

use super::status::FilesStatus;
use crate::system::layout::Layout;

/// The name of a file that requests a save, in the directory of requests.
pub const SAVE_REQUEST: &str = "files";
/// How long to wait. A first save of many files takes longer; it continues after that.
const TIMEOUT: Duration = Duration::from_secs(600);
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Why the files are not saved.
#[derive(Debug, thiserror::Error)]
pub enum SaveRequestError {
    #[error("{0}")]
    Failed(String),
    #[error(
        "not saved within ten minutes; if svc-files is running, the save continues: `svc-sync-agent status` and \
         `systemctl status svc-files` show its state"
    )]
    Timeout,
    #[error(transparent)]
    File(#[from] FileError),
}

/// Requests a save, waits until everything written before is saved, and returns the status.
///
/// # Errors
/// [`SaveRequestError`].
pub async fn save_now(layout: &Layout) -> Result<FilesStatus, SaveRequestError> {
    let requested_at = clock::now_ms();
    fsx::write_atomic(&layout.request(SAVE_REQUEST), b"", 0o644)?;
    let end = Instant::now() + TIMEOUT;
    loop {
        let status = FilesStatus::read(layout)?.unwrap_or_default();
        if status.saved_until.is_some_and(|at| at >= requested_at) {
            return Ok(status);
        }
        let has_failed = status.failed_at.is_some_and(|at| at >= requested_at);
        if let Some(error) = status.error.filter(|_| has_failed) {
            return Err(SaveRequestError::Failed(error));
        }
        if Instant::now() >= end {
            return Err(SaveRequestError::Timeout);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
