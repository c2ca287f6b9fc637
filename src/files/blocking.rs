//! Runs blocking work off the runtime's worker threads.

use crate::error::FilesError;

/// Runs `work` on the runtime's blocking thread pool.
///
/// # Errors
/// Any error from `work`; [`FilesError::Stopped`] if `work` panics or the runtime shuts down before it starts.
pub(crate) async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, FilesError> + Send + 'static,
) -> Result<T, FilesError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| FilesError::Stopped)?
}
