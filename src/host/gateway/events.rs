//! Server-sent event responses: headers and timing.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::Stream;
use http::{HeaderValue, header};

/// Maximum interval between messages to a client, including heartbeats.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(15);
/// Maximum stream duration, after which the client reconnects with a fresh credential.
pub const MAX_STREAM_DURATION: Duration = Duration::from_secs(15 * 60);
/// Client reconnect delay, sent as `retry`.
pub const RETRY_DELAY_MS: u32 = 1000;

pub fn stream_response(events: impl Stream<Item = Result<Bytes, Infallible>> + Send + 'static) -> Response {
    let mut response = Response::new(Body::from_stream(events));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // Disables buffering in proxies.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
