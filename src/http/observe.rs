//! Gives each request on every listener an id and a log span, then logs and counts the request.
//!
//! Invariant: a credential in a path, such as the token of an app's page, is neither logged nor part of a metric.

use std::borrow::Cow;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::Method;
use tracing::Instrument;

use super::request_id::{self, RequestId};
use svc_base::metrics::{HTTP_DURATION, HTTP_REQUESTS, intern_label};

/// The listener, for logs and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum Listener {
    /// The platform's control API.
    Api,
    /// The platform's public hosts.
    Router,
    /// The public port of a machine's gateway.
    Gateway,
    /// A Unix socket on a machine.
    Socket,
}

impl Listener {
    fn as_str(self) -> &'static str {
        self.into()
    }

    /// Returns whether to log all requests at the info level. The control API has few; other listeners log only server
    /// errors at that level.
    fn should_log_all_requests(self) -> bool {
        self == Self::Api
    }
}

/// [`observe`] as a router layer.
pub async fn layer(State(listener): State<Listener>, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map(|matched| intern_label(matched.as_str()));
    observe(listener, route, request, |request| next.run(request)).await
}

/// Responds to a request within a log span. The request is logged and counted, even if it ends without a response.
/// `route` is the template of the matched route, if any. Uses the inbound request id if it is well formed, or generates
/// one, and adds it to the request, the span and the response.
pub async fn observe<F: Future<Output = Response>>(
    listener: Listener,
    route: Option<&'static str>,
    mut request: Request,
    respond: impl FnOnce(Request) -> F,
) -> Response {
    let start = Instant::now();
    let method = method_label(request.method());
    let route = route.unwrap_or_else(|| unmatched_label(listener, request.uri().path()));
    let id = RequestId::from_headers_or_new(request.headers());
    let value = id.header_value();
    request.headers_mut().insert(request_id::HEADER_NAME.clone(), value.clone());
    let span = tracing::info_span!(
        "request",
        svc_request_id = %id.as_str(),
        method = %request.method(),
        path = %redact_token(request.uri().path()),
    );
    let work = async {
        let mut observation = Observation { listener, method, route, start, status: None };
        let response = respond(request).await;
        observation.status = Some(response.status().as_u16());
        response
    };
    let mut response = request_id::scope(id, work).instrument(span).await;
    response.headers_mut().insert(request_id::HEADER_NAME.clone(), value);
    response
}

/// A request in progress. Logs and counts the request when dropped, because the server drops the request's future if
/// the client disconnects.
struct Observation {
    listener: Listener,
    method: &'static str,
    route: &'static str,
    start: Instant,
    /// `None` until there is a response.
    status: Option<u16>,
}

impl Drop for Observation {
    fn drop(&mut self) {
        let Self { listener, method, route, start, status } = *self;
        let elapsed = start.elapsed();
        let ms = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        let outcome = if status.is_some() { "request completed" } else { "request ended without a response" };
        if listener.should_log_all_requests() || status.is_some_and(|status| status >= 500) {
            tracing::info!(status, ms, "{outcome}");
        } else {
            tracing::debug!(status, ms, "{outcome}");
        }
        let class = status.map_or("cancelled", status_class);
        HTTP_REQUESTS.add_one([listener.as_str(), method, route, class]);
        HTTP_DURATION.record([listener.as_str(), route], elapsed);
    }
}

fn method_label(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::OPTIONS => "OPTIONS",
        _ => "other",
    }
}

fn status_class(status: u16) -> &'static str {
    match status {
        100..=199 => "1xx",
        200..=299 => "2xx",
        300..=399 => "3xx",
        400..=499 => "4xx",
        _ => "5xx",
    }
}

/// Returns the label for a request without a matching route.
fn unmatched_label(listener: Listener, path: &str) -> &'static str {
    let is_below = |prefix: &str| path.starts_with(prefix);
    match listener {
        Listener::Api => "none",
        Listener::Gateway | Listener::Socket => "upstream",
        Listener::Router if is_below("/_svc/") => "own",
        Listener::Router if is_below("/apps/") => "apps",
        Listener::Router if is_below("/api/") => "api",
        Listener::Router => "page",
    }
}

/// Replaces the token in a path such as `/apps/<slug>/~<token>/…` with `~…`.
fn redact_token(path: &str) -> Cow<'_, str> {
    let is_token = |segment: &str| {
        segment.starts_with('~')
            || segment.get(..3).is_some_and(|start| start.eq_ignore_ascii_case("%7e"))
            || segment.contains("svca_")
    };
    if !path.split('/').any(is_token) {
        return Cow::Borrowed(path);
    }
    let redacted = path.split('/').map(|segment| if is_token(segment) { "~…" } else { segment });
    Cow::Owned(redacted.collect::<Vec<_>>().join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redact_token_hides_tokens_in_paths() {
        assert_eq!(redact_token("/apps/notes/~eyJx.y.z/index.html"), "/apps/notes/~…/index.html");
        assert_eq!(redact_token("/apps/notes/~eyJx.y.z"), "/apps/notes/~…");
        assert_eq!(redact_token("/apps/notes/%7Esvca_eyJx.y.z/"), "/apps/notes/~…/");
        assert_eq!(redact_token("/apps/notes/x-svca_eyJx.y.z"), "/apps/notes/~…");
        assert_eq!(redact_token("/api/apps"), "/api/apps");
        assert_eq!(redact_token("/a~b"), "/a~b");
    }

    #[test]
    fn metric_labels_are_bounded() {
        assert_eq!(unmatched_label(Listener::Api, "/wp-login.php"), "none");
        assert_eq!(unmatched_label(Listener::Router, "/apps/notes/~t/x"), "apps");
        assert_eq!(unmatched_label(Listener::Router, "/anything"), "page");
        assert_eq!(unmatched_label(Listener::Gateway, "/anything"), "upstream");
        assert_eq!(method_label(&Method::from_bytes(b"BREW").unwrap()), "other");
    }
}
