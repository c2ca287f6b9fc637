//! Extracts path parameters; invalid ones are rejected with a problem.

use axum::extract::{FromRequestParts, Path};
use http::request::Parts;
use serde::de::DeserializeOwned;

use super::problem::Problem;

/// [`Path`] with a [`Problem`] as its rejection.
pub struct PathParams<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for PathParams<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let Path(parameters) = Path::from_request_parts(parts, state).await.map_err(|error| {
            tracing::debug!(%error, "invalid path parameters");
            invalid_path()
        })?;
        Ok(Self(parameters))
    }
}

/// The problem for a path that cannot be decoded.
pub fn invalid_path() -> Problem {
    Problem::field("", "the path must be valid percent-encoded UTF-8")
}
