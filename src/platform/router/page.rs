//! What people and programs see when the router itself answers: a page for browsers, problem+json for all others.

use axum::response::{IntoResponse, Response};
use http::header::{
    ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, RETRY_AFTER,
    X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};

use super::machine::Row;
use crate::http::problem::{Code, Problem};
use crate::machine::state::Status;

const TEMPLATE: &str = include_str!("page.html");
/// What all our pages look like.
const BASE_STYLE: &str = include_str!("base.css");
const OPENER_POLICY: HeaderName = HeaderName::from_static("cross-origin-opener-policy");
const PERMISSIONS_POLICY: HeaderName = HeaderName::from_static("permissions-policy");
/// How soon a waiting page asks again.
pub(super) const REFRESH_SECONDS: u64 = 5;

/// Whether a person looks at the answer in a browser.
pub(super) fn is_wanted(method: &Method, headers: &HeaderMap) -> bool {
    let html = |value: &HeaderValue| value.to_str().is_ok_and(|value| value.contains("text/html"));
    matches!(*method, Method::GET | Method::HEAD) && headers.get_all(ACCEPT).iter().any(html)
}

/// Why there is no machine to forward to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Absence {
    NoMachine,
    NotRunning(Status),
    /// An operator has switched it off.
    PoweredOff,
    /// It is `running`, and its row changed while the request was under way.
    JustLeft,
    /// The database has not been seen for too long.
    Unknown,
}

impl Absence {
    /// Why this machine is not forwarded to.
    pub(super) fn of(row: &Row) -> Self {
        if row.status.is_routable() && row.is_powered_off {
            return Self::PoweredOff;
        }
        Self::NotRunning(row.status)
    }

    fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::NoMachine => {
                ("You have no computer yet", "As soon as one is set up for you, it appears here.")
            }
            Self::NotRunning(Status::Provisioning) => {
                ("Your computer is being set up", "This takes a few minutes. The page opens it by itself.")
            }
            Self::NotRunning(Status::Recovering) => (
                "Your computer is being recovered",
                "A new one is being restored from your latest backup. The page opens it by itself.",
            ),
            Self::NotRunning(Status::Resizing) => (
                "Your computer is being resized",
                "It restarts with its files and its database as they are. The page opens it by itself.",
            ),
            Self::NotRunning(Status::Failed) => (
                "Your computer is not running",
                "Something went wrong with it. Your backups are kept. Support can bring it back.",
            ),
            Self::NotRunning(Status::Running) | Self::JustLeft => {
                ("Your computer is changing", "The page tries again in a moment.")
            }
            Self::PoweredOff => (
                "Your computer is switched off",
                "Its files and its database are as they were. Support can switch it on again.",
            ),
            Self::Unknown => ("We cannot find your computer right now", "The page tries again in a moment."),
        }
    }

    /// The machine's status as programs read it.
    fn status(self) -> &'static str {
        match self {
            Self::NoMachine => "none",
            Self::NotRunning(status) => status.as_str(),
            Self::JustLeft => Status::Running.as_str(),
            Self::PoweredOff => "powered_off",
            Self::Unknown => "unknown",
        }
    }

    pub(super) fn answer(self, page: bool) -> Response {
        let (title, text) = self.words();
        if page {
            return Page { code: StatusCode::SERVICE_UNAVAILABLE, title, text, mark: self.status() }
                .into_response();
        }
        Problem::new(Code::Unavailable, format!("{title}."))
            .with("machineStatus", self.status().into())
            .retry_after(REFRESH_SECONDS)
            .into_response()
    }
}

/// The machine did not answer.
pub(super) fn upstream_down(page: bool) -> Response {
    let (title, text) =
        ("Your computer does not answer", "It may be restarting. The page tries again in a moment.");
    if page {
        return Page { code: StatusCode::BAD_GATEWAY, title, text, mark: "unreachable" }.into_response();
    }
    Problem::new(Code::UpstreamUnavailable, "The machine did not answer.")
        .retry_after(REFRESH_SECONDS)
        .into_response()
}

/// The machine took the request and answered nothing in time.
pub(super) fn upstream_slow(page: bool) -> Response {
    let (title, text) = ("Your computer takes too long", "It may be busy. The page tries again in a moment.");
    if page {
        return Page { code: StatusCode::GATEWAY_TIMEOUT, title, text, mark: "slow" }.into_response();
    }
    Problem::new(Code::DeadlineExceeded, "The machine did not answer in time.").into_response()
}

/// Refreshes itself.
struct Page {
    code: StatusCode,
    title: &'static str,
    text: &'static str,
    /// The state in one word.
    mark: &'static str,
}

impl IntoResponse for Page {
    fn into_response(self) -> Response {
        let body = styled(TEMPLATE)
            .replace("{{title}}", self.title)
            .replace("{{text}}", self.text)
            .replace("{{mark}}", self.mark)
            .replace("{{refresh}}", &REFRESH_SECONDS.to_string());
        let mut response = html(self.code, body);
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(REFRESH_SECONDS));
        response
    }
}

/// A template with the style of all our pages, before any value is in it.
pub(super) fn styled(template: &str) -> String {
    template.replacen("{{base}}", BASE_STYLE, 1)
}

/// A page of ours: never stored, loads nothing, told to nobody.
pub(super) fn html(code: StatusCode, body: String) -> Response {
    let mut response = (code, body).into_response();
    let headers = response.headers_mut();
    for (name, value) in [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CACHE_CONTROL, "no-store"),
        (REFERRER_POLICY, "no-referrer"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (OPENER_POLICY, "same-origin"),
        (PERMISSIONS_POLICY, "camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
        (
            CONTENT_SECURITY_POLICY,
            "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'; frame-ancestors 'self'",
        ),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}
