//! Renders the router's own responses: HTML pages for browsers, problem+json for other clients.

use axum::response::{IntoResponse, Response};
use http::header::{
    ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, RETRY_AFTER,
    X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};

use super::machine::MachineRecord;
use svc_http::problem::{Code, Problem};
use svc_machine::state::Status;

const TEMPLATE: &str = include_str!("page.html");
/// The style shared by the router's pages.
const BASE_STYLE: &str = include_str!("base.css");
const OPENER_POLICY: HeaderName = HeaderName::from_static("cross-origin-opener-policy");
const PERMISSIONS_POLICY: HeaderName = HeaderName::from_static("permissions-policy");
/// Interval at which a waiting page reloads; also the `Retry-After` of temporary failures.
pub(super) const REFRESH_SECONDS: u64 = 5;

/// Whether the client is a browser that shows the response to a person.
pub(super) fn wants_page(method: &Method, headers: &HeaderMap) -> bool {
    let accepts_html = |value: &HeaderValue| value.to_str().is_ok_and(|value| value.contains("text/html"));
    matches!(*method, Method::GET | Method::HEAD) && headers.get_all(ACCEPT).iter().any(accepts_html)
}

/// The reason the request cannot be forwarded to a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UnavailableReason {
    NoMachine,
    NotRunning(Status),
    /// An operator has powered off the machine.
    PoweredOff,
    /// The machine is `running`, but its route changed while the request was in flight.
    RouteChanged,
    /// The routes have not been loaded yet, or are too old because the database has been unreachable.
    Unknown,
}

impl UnavailableReason {
    /// Returns the reason this machine receives no requests.
    pub(super) fn for_machine(record: &MachineRecord) -> Self {
        if record.status.is_routable() && record.is_powered_off {
            return Self::PoweredOff;
        }
        Self::NotRunning(record.status)
    }

    fn page_text(self) -> (&'static str, &'static str) {
        match self {
            Self::NoMachine => ("You have no computer yet", "It will appear here once it has been set up."),
            Self::NotRunning(Status::Provisioning) => (
                "Your computer is being set up",
                "This takes a few minutes. This page will open it automatically.",
            ),
            Self::NotRunning(Status::Recovering) => (
                "Your computer is being recovered",
                "A new one is being restored from your latest backup. This page will open it automatically.",
            ),
            Self::NotRunning(Status::Resizing) => (
                "Your computer is being resized",
                "Its files and its database are kept. This page will open it automatically.",
            ),
            Self::NotRunning(Status::Failed) => (
                "Your computer is not running",
                "Something went wrong. Your backups are safe. Please contact support.",
            ),
            Self::NotRunning(Status::Running) | Self::RouteChanged => {
                ("Your computer is reconnecting", "This page will try again in a moment.")
            }
            Self::PoweredOff => (
                "Your computer is powered off",
                "Its files and its database are kept. Support can power it on again.",
            ),
            Self::Unknown => {
                ("Your computer cannot be found right now", "This page will try again in a moment.")
            }
        }
    }

    /// Returns the machine's status for problem+json and pages.
    fn status(self) -> &'static str {
        match self {
            Self::NoMachine => "none",
            Self::NotRunning(status) => status.as_str(),
            Self::RouteChanged => Status::Running.as_str(),
            Self::PoweredOff => "powered_off",
            Self::Unknown => "unknown",
        }
    }

    pub(super) fn respond(self, wants_page: bool) -> Response {
        let (title, text) = self.page_text();
        if wants_page {
            return Page { status: StatusCode::SERVICE_UNAVAILABLE, title, text, state: self.status() }
                .into_response();
        }
        Problem::new(Code::Unavailable, format!("{title}."))
            .with("machineStatus", self.status().into())
            .retry_after(REFRESH_SECONDS)
            .into_response()
    }
}

/// Returns the response to a request that could not be sent to the machine, or that the machine did not answer.
pub(super) fn upstream_unreachable(wants_page: bool) -> Response {
    let (title, text) =
        ("Your computer is not responding", "It may be restarting. This page will try again in a moment.");
    if wants_page {
        return Page { status: StatusCode::BAD_GATEWAY, title, text, state: "unreachable" }.into_response();
    }
    Problem::new(Code::UpstreamUnavailable, "The machine did not respond.")
        .retry_after(REFRESH_SECONDS)
        .into_response()
}

/// Returns the response to a request that the machine accepted but did not answer before the proxy's timeout.
pub(super) fn upstream_timeout(wants_page: bool) -> Response {
    let (title, text) = (
        "Your computer is taking too long to respond",
        "It may be busy. This page will try again in a moment.",
    );
    if wants_page {
        return Page { status: StatusCode::GATEWAY_TIMEOUT, title, text, state: "slow" }.into_response();
    }
    Problem::new(Code::DeadlineExceeded, "The machine did not respond in time.").into_response()
}

/// A page that reloads periodically.
struct Page {
    status: StatusCode,
    title: &'static str,
    text: &'static str,
    /// A one-word state, for support.
    state: &'static str,
}

impl IntoResponse for Page {
    fn into_response(self) -> Response {
        let body = insert_style(TEMPLATE)
            .replace("{{title}}", self.title)
            .replace("{{text}}", self.text)
            .replace("{{state}}", self.state)
            .replace("{{refresh}}", &REFRESH_SECONDS.to_string());
        let mut response = html_response(self.status, body);
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(REFRESH_SECONDS));
        response
    }
}

/// Inserts the shared style into a template. Must be called before any value is inserted.
pub(super) fn insert_style(template: &str) -> String {
    template.replacen("{{base}}", BASE_STYLE, 1)
}

/// Returns an HTML response that is not cached, loads no resources and sends no referrer, because the page's URL may
/// contain an app token. A page with a form needs [`form_response`].
pub(super) fn html_response(status: StatusCode, body: String) -> Response {
    let mut response = (status, body).into_response();
    let headers = response.headers_mut();
    for (name, value) in [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CACHE_CONTROL, "no-store"),
        (REFERRER_POLICY, "no-referrer"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (OPENER_POLICY, "same-origin"),
        (PERMISSIONS_POLICY, "camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    set_csp(&mut response, "'none'");
    response
}

/// Returns the response for a page with a form, whose submission may redirect to this host and to `redirect_origins`.
///
/// Browsers send `Origin: null` with a form from a page with `no-referrer`, and the router rejects that as
/// cross-origin. Chrome applies `form-action` to the redirects that follow the submission, too.
pub(super) fn form_response(status: StatusCode, body: String, redirect_origins: &[String]) -> Response {
    let mut response = html_response(status, body);
    response.headers_mut().insert(REFERRER_POLICY, HeaderValue::from_static("same-origin"));
    set_csp(&mut response, &format!("'self' {}", redirect_origins.join(" ")));
    response
}

fn set_csp(response: &mut Response, form_action: &str) {
    let policy = format!(
        "default-src 'none'; style-src 'unsafe-inline'; form-action {form_action}; base-uri 'none'; \
         frame-ancestors 'self'"
    );
    let policy = HeaderValue::from_str(&policy).expect("origins are ASCII");
    response.headers_mut().insert(CONTENT_SECURITY_POLICY, policy);
}
