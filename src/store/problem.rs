//! Failures of the store, as the platform's API reports them.

use svc_http::problem::{Code, Problem, chain};

use crate::StoreError;

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        tracing::warn!(error = %chain(&error), "object store error");
        unavailable()
    }
}

pub fn unavailable() -> Problem {
    Problem::new(Code::StoreUnavailable, "The object store is unreachable; nothing was changed.")
        .retry_after(5)
}
