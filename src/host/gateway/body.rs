//! Request bodies: read within a size and time limit, and drained when the request is refused.

use std::time::Duration;

use axum::body::Body;
use bytes::{BufMut, Bytes, BytesMut};
use futures_util::StreamExt;
use http::{HeaderMap, header};
use serde_json::Value;

use svc_http::fields::Fields;
use svc_http::problem::{Code, Problem};

/// Timeout of reading a request body.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Limits of draining a refused body: a client that is still sending when the connection closes would not read the
/// refusal.
const MAX_DRAINED_BYTES: usize = 4 * 1024 * 1024;
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

pub fn too_large(max_bytes: usize) -> Problem {
    Problem::new(Code::RequestTooLarge, format!("The request body exceeds {max_bytes} bytes."))
}

/// # Errors
/// The content type is not `application/json`.
pub fn require_json(headers: &HeaderMap) -> Result<(), Problem> {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    Err(Problem::new(Code::UnsupportedMediaType, "Send the request as application/json."))
}

/// # Errors
/// The body is larger than `max_bytes`, slow or incomplete.
pub async fn read(body: Body, max_bytes: usize) -> Result<Bytes, Problem> {
    let mut chunks = body.into_data_stream();
    let reading = async {
        let mut whole = BytesMut::new();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|_| Problem::field("", "could not be read completely"))?;
            if whole.len() + chunk.len() > max_bytes {
                return Err(too_large(max_bytes));
            }
            whole.put(chunk);
        }
        Ok(whole.freeze())
    };
    let slow = || Problem::new(Code::DeadlineExceeded, "Timeout reading the request body.");
    let read = tokio::time::timeout(READ_TIMEOUT, reading).await.unwrap_or_else(|_| Err(slow()));
    if read.is_err() {
        drain(Body::from_stream(chunks)).await;
    }
    read
}

/// Reads a body that is a JSON object.
///
/// # Errors
/// As [`require_json`] and [`read`], or the body is not a JSON object.
pub async fn fields(headers: &HeaderMap, body: Body, max_bytes: usize) -> Result<Fields, Problem> {
    require_json(headers)?;
    match serde_json::from_slice(&read(body, max_bytes).await?) {
        Ok(Value::Object(map)) => Ok(Fields::of_body(map)),
        _ => Err(Problem::field("", "must be a JSON object")),
    }
}

/// Reads and discards the rest of a refused body, within limits.
pub async fn drain(body: Body) {
    let mut chunks = body.into_data_stream();
    let draining = async {
        let mut drained = 0;
        while let Some(Ok(chunk)) = chunks.next().await {
            drained += chunk.len();
            if drained > MAX_DRAINED_BYTES {
                break;
            }
        }
    };
    // A slower client does not receive the refusal.
    let _ = tokio::time::timeout(DRAIN_TIMEOUT, draining).await;
}
