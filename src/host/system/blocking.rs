//! Runs blocking work outside the async worker threads.

use std::error::Error;

use svc_http::problem::Problem;

/// Runs the work on a thread where blocking is allowed.
///
/// # Errors
/// The error that the work returned, or its panic, as an internal problem.
pub async fn run_blocking<T: Send + 'static, E: Error + Send + 'static>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, Problem> {
    let result = tokio::task::spawn_blocking(work).await.map_err(|error| Problem::internal(&error))?;
    result.map_err(|error| Problem::internal(&error))
}
