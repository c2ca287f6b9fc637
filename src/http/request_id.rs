//! The id that ties a request's answer, log lines and onward calls together.

use http::HeaderMap;
use tracing::Instrument;

pub const HEADER: &str = "x-request-id";

tokio::task_local! {
    static CURRENT: String;
}

/// The id of the request that this task serves; empty outside of one.
pub fn current() -> String {
    CURRENT.try_with(String::clone).unwrap_or_default()
}

/// Runs `work` under a given id.
pub async fn scope<T>(id: String, work: impl Future<Output = T>) -> T {
    CURRENT.scope(id, work).await
}

/// Runs work that no request asked for under an id of its own, which its log lines and calls carry.
pub async fn own<T>(work: impl Future<Output = T>) -> T {
    under(fresh(), work).await
}

/// Runs what a request left to be done later under that request's id.
pub async fn under<T>(id: String, work: impl Future<Output = T>) -> T {
    let span = tracing::info_span!("run", svc_request_id = %id);
    scope(id, work).instrument(span).await
}

pub fn fresh() -> String {
    uuid::Uuid::now_v7().simple().to_string()
}

/// A call of ours that is made for the request of now carries its id; one that is made for none gets its own.
pub fn onward(call: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
    let current = current();
    call.header(HEADER, if current.is_empty() { fresh() } else { current })
}

/// What the client calls its request, where that is well formed.
pub fn inbound(headers: &HeaderMap) -> Option<&str> {
    headers.get(HEADER).and_then(|value| value.to_str().ok()).filter(|id| fits(id))
}

/// Whether a text has the form of an id.
pub fn fits(id: &str) -> bool {
    (8..=64).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
}
