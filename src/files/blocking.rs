//! Runs blocking work outside the runtime's async threads.

use crate::error::FilesError;

/// Runs `work` on one of the runtime's threads for blocking work.
///
/// # Errors
/// The errors from `work`; [`FilesError::Stopped`] if it panics, or if the runtime shuts down before it starts.
pub(crate) async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, FilesError> + Send + 'static,
) -> Result<T, FilesError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| FilesError::Stopped)?
}
