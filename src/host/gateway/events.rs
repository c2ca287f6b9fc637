//! Answers of server-sent events: their head, and how long one goes on.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::Stream;
use http::{HeaderValue, header};

/// A listener hears something at least this often.
pub const HEARTBEAT: Duration = Duration::from_secs(15);
/// Then the listener comes again, with a credential that is still good.
pub const LONGEST: Duration = Duration::from_secs(15 * 60);
/// How long a listener waits before it comes again.
pub const RETRY_MS: u32 = 1000;

pub fn response(events: impl Stream<Item = Result<Bytes, Infallible>> + Send + 'static) -> Response {
    let mut response = Response::new(Body::from_stream(events));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // Proxies that would gather an answer before they pass it on.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
