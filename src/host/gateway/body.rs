//! Reads request bodies with size and time limits, and drains the bodies of rejected requests.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::HeaderMap;
use serde_json::Value;

use svc_http::body::{BodyLimits, RequestBodyError, has_media_type};
use svc_http::fields::Fields;
use svc_http::problem::{Code, Problem};

pub const LIMITS: BodyLimits = BodyLimits {
    read_timeout: Duration::from_secs(30),
    max_drained_bytes: 4 * 1024 * 1024,
    drain_timeout: Duration::from_secs(5),
};

pub fn too_large_problem(max_bytes: usize) -> Problem {
    Problem::new(Code::RequestTooLarge, format!("The request body exceeds {max_bytes} bytes."))
}

/// Checks the content type.
///
/// # Errors
/// The content type is not `application/json`.
pub fn require_json(headers: &HeaderMap) -> Result<(), Problem> {
    if has_media_type(headers, "application/json") {
        return Ok(());
    }
    Err(Problem::new(Code::UnsupportedMediaType, "Send the request as application/json."))
}

/// Reads a body, and drains the rest after an error.
///
/// # Errors
/// The body is larger than `max_bytes`, slow or incomplete.
pub async fn read(mut body: Body, max_bytes: usize) -> Result<Bytes, Problem> {
    let error = match LIMITS.read(&mut body, max_bytes).await {
        Ok(bytes) => return Ok(bytes),
        Err(error) => error,
    };
    LIMITS.drain(body).await;
    Err(match error {
        RequestBodyError::TooLarge => too_large_problem(max_bytes),
        RequestBodyError::Timeout => {
            Problem::new(Code::DeadlineExceeded, "The request body was not received in time.")
        }
        RequestBodyError::Incomplete => Problem::field("", "could not be read completely"),
    })
}

/// Reads a JSON object from a body.
///
/// # Errors
/// As for [`require_json`] and [`read`], or if the body isn't a JSON object.
pub async fn read_fields(headers: &HeaderMap, body: Body, max_bytes: usize) -> Result<Fields, Problem> {
    require_json(headers)?;
    match serde_json::from_slice(&read(body, max_bytes).await?) {
        Ok(Value::Object(map)) => Ok(Fields::from_body(map)),
        _ => Err(Problem::field("", "must be a JSON object")),
    }
}
