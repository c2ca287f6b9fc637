//! Requests a save and waits for it.

use std::time::{Duration, Instant};

use svc_base::clock;
use svc_base::fsx::{self, FileError};

use super::status::FilesStatus;
use crate::system::layout::Layout;

/// Save request file name, in the requests directory.
pub const SAVE_REQUEST: &str = "files";
/// Maximum time to wait. The first save of many files may take longer and continues after the timeout.
const TIMEOUT: Duration = Duration::from_secs(600);
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Error from requesting a save or waiting for it.
#[derive(Debug, thiserror::Error)]
pub enum SaveRequestError {
    #[error("{0}")]
    Failed(String),
    #[error(
        "the files were not saved within ten minutes; if svc-files is running, the save continues: run \
         `svc-sync-agent status` and `systemctl status svc-files` to see its state"
    )]
    Timeout,
    #[error(transparent)]
    File(#[from] FileError),
}

/// Requests a save, waits until everything written before the request is saved, and returns the status.
///
/// # Errors
/// `Failed` if a save fails after the request; `Timeout` if no save has succeeded or failed within ten minutes; `File`
/// if the request cannot be written or the status cannot be read.
pub async fn save_now(layout: &Layout) -> Result<FilesStatus, SaveRequestError> {
    let requested_at = clock::now_ms();
    fsx::write_atomic(&layout.request(SAVE_REQUEST), b"", 0o644)?;
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let status = FilesStatus::read(layout)?.unwrap_or_default();
        if status.saved_until.is_some_and(|at| at >= requested_at) {
            return Ok(status);
        }
        let has_failed = status.failed_at.is_some_and(|at| at >= requested_at);
        if let Some(error) = status.error.filter(|_| has_failed) {
            return Err(SaveRequestError::Failed(error));
        }
        if Instant::now() >= deadline {
            return Err(SaveRequestError::Timeout);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
