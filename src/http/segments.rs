//! The parameters of a path. One that is no text is refused as everything else is: as a problem.

use axum::extract::{FromRequestParts, Path};
use http::request::Parts;
use serde::de::DeserializeOwned;

use super::problem::Problem;

/// [`Path`] with our refusal.
pub struct Segments<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Segments<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let Path(parameters) = Path::from_request_parts(parts, state).await.map_err(|error| {
            tracing::debug!(%error, "a path that cannot be read");
            Problem::field("", "the path must be UTF-8 behind its percent signs")
        })?;
        Ok(Self(parameters))
    }
}
