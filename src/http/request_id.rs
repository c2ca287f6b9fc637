//! The id that ties a request's answer, log lines and onward calls together.

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use http::HeaderValue;
use tracing::Instrument;

pub const HEADER: &str = "x-request-id";

tokio::task_local! {
    static CURRENT: String;
}

/// The id of the request that this task serves; empty outside of one.
pub fn current() -> String {
    CURRENT.try_with(String::clone).unwrap_or_default()
}

/// Runs `work` under a given id; for work that is not an axum request.
pub async fn scope<T>(id: String, work: impl Future<Output = T>) -> T {
    CURRENT.scope(id, work).await
}

pub fn fresh() -> String {
    uuid::Uuid::now_v7().simple().to_string()
}

/// Takes a well-formed inbound id or makes one; puts it into the request, the log span and the answer.
pub async fn layer(mut request: Request, next: Next) -> Response {
    let inbound = request.headers().get(HEADER).and_then(|value| value.to_str().ok()).filter(|id| fits(id));
    let id = inbound.map_or_else(fresh, str::to_owned);
    let value = HeaderValue::from_str(&id).unwrap_or_else(|_| HeaderValue::from_static("invalid"));
    request.headers_mut().insert(HEADER, value.clone());
    let span = tracing::info_span!(
        "request",
        svc_request_id = %id,
        method = %request.method(),
        path = request.uri().path(),
    );
    let mut response = scope(id, next.run(request)).instrument(span).await;
    response.headers_mut().insert(HEADER, value);
    response
}

fn fits(id: &str) -> bool {
    (8..=64).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
}
