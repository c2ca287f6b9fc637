//! Work that waits for the disk, away from the threads that serve.

use std::error::Error;

use crate::http::problem::Problem;

/// # Errors
/// The work's own, and its panic, as one of ours.
pub async fn blocking<T: Send + 'static, E: Error + Send + 'static>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, Problem> {
    let done = tokio::task::spawn_blocking(work).await.map_err(|error| Problem::internal(&error))?;
    done.map_err(|error| Problem::internal(&error))
}
