//! Builds responses and problems that several of the router's parts use.

use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::header::LOCATION;
use http::{HeaderValue, StatusCode};

use super::page;
use super::session::SessionError;
use svc_http::problem::{Code, Problem, format_chain};

/// Returns the problem for an unauthenticated request.
pub(super) fn sign_in_required() -> Problem {
    Problem::new(
        Code::Unauthorized,
        "Sign in first, or send the identity provider's token as a bearer token.",
    )
}

pub(super) fn session_problem(error: &SessionError) -> Problem {
    if let SessionError::RateLimited(wait) = error {
        return rate_limited(*wait);
    }
    if matches!(error, SessionError::ParentEnded) {
        return Problem::new(Code::Unauthorized, "The session has ended; sign in again.");
    }
    tracing::warn!(error = %format_chain(error), "cannot read or change sessions");
    Problem::new(Code::DatabaseUnavailable, "The session database is unavailable.")
        .retry_after(page::REFRESH_SECONDS)
}

pub(super) fn rate_limited(wait: Duration) -> Problem {
    Problem::new(Code::RateLimited, "Too many requests. Retry after the number of seconds in Retry-After.")
        .retry_after(wait.as_secs() + 1)
}

/// Returns a redirect that browsers do not cache, because its target depends on the caller.
pub(super) fn redirect(status: StatusCode, to: &str) -> Response {
    let mut response = status.into_response();
    match HeaderValue::from_str(to) {
        Ok(to) => {
            response.headers_mut().insert(LOCATION, to);
            response.headers_mut().insert(http::header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
            response
        }
        Err(_) => Problem::new(Code::InvalidRequest, "The request target is not valid.").into_response(),
    }
}
