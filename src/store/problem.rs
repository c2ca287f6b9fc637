//! Converts store errors to platform API problems.

use svc_http::problem::{Code, Problem, format_chain};

use crate::StoreError;

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        tracing::warn!(error = %format_chain(&error), "object store error");
        unavailable()
    }
}

/// Returns the problem for a failed or timed-out request to the object store. Its text says that nothing was changed.
pub fn unavailable() -> Problem {
    Problem::new(Code::StoreUnavailable, "A request to the object store failed; nothing was changed.")
        .retry_after(5)
}
