//! Request bodies: read within a size and a time, and heard out when they are refused.

use std::time::Duration;

use axum::body::Body;
use bytes::{BufMut, Bytes, BytesMut};
use futures_util::StreamExt;
use http::{HeaderMap, header};
use serde_json::Value;

use crate::http::fields::Fields;
use crate::http::problem::{Code, Problem};

/// The longest that a request's body may take to come.
const READ: Duration = Duration::from_secs(30);
/// How much of a refused body is heard out, and for how long: a client that is still writing when the connection closes
/// would not read the refusal.
const HEARD_OUT: usize = 4 * 1024 * 1024;
const HEARING: Duration = Duration::from_secs(5);

pub fn too_large(most: usize) -> Problem {
    Problem::new(Code::RequestTooLarge, format!("A request has at most {most} bytes."))
}

/// # Errors
/// Where the body is said to be anything else.
pub fn require_json(headers: &HeaderMap) -> Result<(), Problem> {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    Err(Problem::new(Code::UnsupportedMediaType, "Send the request as application/json."))
}

/// # Errors
/// When it is larger than `most`, slow, or cut off.
pub async fn read(body: Body, most: usize) -> Result<Bytes, Problem> {
    let mut chunks = body.into_data_stream();
    let reading = async {
        let mut whole = BytesMut::new();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|_| Problem::field("", "could not be read to its end"))?;
            if whole.len() + chunk.len() > most {
                return Err(too_large(most));
            }
            whole.put(chunk);
        }
        Ok(whole.freeze())
    };
    let slow = || Problem::new(Code::DeadlineExceeded, "The body did not come in time.");
    let read = tokio::time::timeout(READ, reading).await.unwrap_or_else(|_| Err(slow()));
    if read.is_err() {
        hear_out(Body::from_stream(chunks)).await;
    }
    read
}

/// A body that is a JSON object, by its fields.
///
/// # Errors
/// As [`require_json`] and [`read`], and where it is no JSON object.
pub async fn fields(headers: &HeaderMap, body: Body, most: usize) -> Result<Fields, Problem> {
    require_json(headers)?;
    match serde_json::from_slice(&read(body, most).await?) {
        Ok(Value::Object(map)) => Ok(Fields::of_body(map)),
        _ => Err(Problem::field("", "must be a JSON object")),
    }
}

/// Takes the rest of a body that is refused, within bounds.
pub async fn hear_out(body: Body) {
    let mut chunks = body.into_data_stream();
    let hearing = async {
        let mut heard = 0;
        while let Some(Ok(chunk)) = chunks.next().await {
            heard += chunk.len();
            if heard > HEARD_OUT {
                break;
            }
        }
    };
    // Whoever is slower than that does not get to read the refusal.
    let _ = tokio::time::timeout(HEARING, hearing).await;
}
