//! Runs blocking work off the async worker threads.

use std::error::Error;

use svc_http::problem::Problem;

/// Runs `work` on the blocking thread pool.
///
/// # Errors
/// An internal problem if `work` fails or panics.
pub async fn run_blocking<T: Send + 'static, E: Error + Send + 'static>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, Problem> {
    let result = tokio::task::spawn_blocking(work).await.map_err(|error| Problem::internal(&error))?;
    result.map_err(|error| Problem::internal(&error))
}
