//! Prevents data that one user's machine stored in a browser from acting as the browser's next user.
//!
//! All users share the origins of the two public hosts. A machine's service worker, cached script or stored data would
//! act with the cookies of the next user who signs in. A cookie records the browser's last user. A request from a
//! different user is not forwarded until the browser has been instructed to clear the origin's data (W3C Clear Site
//! Data).

use std::net::IpAddr;

use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as B64;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, SET_COOKIE, VARY};
use http::{StatusCode, Uri};
use ring::hmac;
use secrecy::{ExposeSecret, SecretSlice};

use super::RouterState;
use super::cookie::{self, RouterCookie};
use super::identity::Identity;
use super::request_context::RequestContext;
use super::responses::redirect;
use super::return_path::local_path;
use crate::public_host::PublicHost;
use svc_http::problem::{Code, Problem};
use svc_machine::name::IdpUserId;

static CLEAR_SITE_DATA: HeaderName = HeaderName::from_static("clear-site-data");
/// Excludes `"cookies"`, which would also delete the router's own cookies; the router expires those itself.
const CACHE_AND_STORAGE: HeaderValue = HeaderValue::from_static("\"cache\", \"storage\"");
/// One year. Browsers cap a cookie's lifetime at 400 days.
const LAST_USER_SECONDS: u64 = 365 * 86_400;
static SERVICE_WORKER: HeaderName = HeaderName::from_static("service-worker");
/// Scripts cannot set the `Sec-Fetch-*` headers.
static FETCH_MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");
static FETCH_DEST: HeaderName = HeaderName::from_static("sec-fetch-dest");

/// Headers in a machine's response that would affect later requests to the shared origin, or to other hosts.
static ORIGIN_WIDE_HEADERS: [HeaderName; 6] = [
    HeaderName::from_static("alt-svc"),
    HeaderName::from_static("clear-site-data"),
    HeaderName::from_static("nel"),
    HeaderName::from_static("report-to"),
    HeaderName::from_static("reporting-endpoints"),
    HeaderName::from_static("strict-transport-security"),
];
static SERVICE_WORKER_ALLOWED: HeaderName = HeaderName::from_static("service-worker-allowed");
/// Content types that a browser shows as a document, in which scripts run.
const DOCUMENT_TYPES: [&str; 5] =
    ["text/html", "application/xhtml+xml", "image/svg+xml", "application/xml", "text/xml"];

/// Computes last-user cookie values. They are digests, so that the browser's files do not reveal the user's id. They
/// depend on a key, so that a script cannot compute the next user's digest.
pub struct UserDigests {
    current: hmac::Key,
    /// Accepted during a rotation of `PLATFORM_KEY`.
    previous: Option<hmac::Key>,
}

impl UserDigests {
    pub fn new(platform_key: &SecretSlice<u8>, previous: Option<&SecretSlice<u8>>) -> Self {
        let derive = |key: &SecretSlice<u8>| {
            let key = hmac::Key::new(hmac::HMAC_SHA256, key.expose_secret());
            hmac::Key::new(hmac::HMAC_SHA256, hmac::sign(&key, b"svc router last user").as_ref())
        };
        Self { current: derive(platform_key), previous: previous.map(derive) }
    }

    fn digest(&self, user: &IdpUserId) -> String {
        user_digest(&self.current, user)
    }

    fn matches(&self, user: &IdpUserId, digest: &str) -> bool {
        digest == self.digest(user)
            || self.previous.as_ref().is_some_and(|key| digest == user_digest(key, user))
    }
}

fn user_digest(key: &hmac::Key, user: &IdpUserId) -> String {
    B64.encode(&hmac::sign(key, user.as_str().as_bytes()).as_ref()[..16])
}

/// Rejects a service worker script on `APP_HOST`: the worker would intercept every later page on the origin. The editor
/// on `CODE_HOST` needs its service worker.
///
/// # Errors
/// `forbidden` if the request is for a service worker script on `APP_HOST`.
pub(super) fn check_service_worker(context: &RequestContext, headers: &HeaderMap) -> Result<(), Problem> {
    if context.host == PublicHost::App && headers.contains_key(&SERVICE_WORKER) {
        return Err(Problem::new(Code::Forbidden, "Service workers are not allowed on this host."));
    }
    Ok(())
}

/// Returns a response to send instead of handling the request if the browser may hold another user's data: its last
/// user was a different one or, in a browser without a session, is unknown. A navigation is redirected to the same
/// page, which the browser requests after it has cleared the data. Any other request is rejected, because the last
/// user's script may have sent it. `None` for a request with a bearer token, and for a client that does not honor
/// `Clear-Site-Data`.
pub(super) fn require_cleared_data(
    router: &RouterState,
    context: &RequestContext,
    identity: &Identity,
    headers: &HeaderMap,
    uri: &Uri,
) -> Option<Response> {
    if matches!(identity, Identity::Bearer(_)) || !honors_clear_site_data(context, headers) {
        return None;
    }
    match RouterCookie::LastUser.get(headers, context.scheme) {
        Some(last) if router.user_digests.matches(identity.user(), last) => return None,
        // An earlier release opened this session without the cookie. Sessions expire after 12 hours.
        None if identity.session().is_some() => return None,
        _ => {}
    }
    let mut response = if context.wants_page && is_navigation(headers) {
        let mut response = redirect(StatusCode::FOUND, local_path(uri));
        response.headers_mut().append(SET_COOKIE, last_user_cookie_header(router, context, identity.user()));
        response
    } else {
        let detail = "This browser may hold data from another account; reload the page.";
        Problem::new(Code::Unauthorized, detail).into_response()
    };
    clear_data(&mut response);
    Some(response)
}

/// Records the user in the response that opens a session. Unless the same user was the browser's last one, the response
/// also instructs the browser to clear its data. Does nothing for a client that does not honor `Clear-Site-Data`.
pub(super) fn record_user(
    router: &RouterState,
    response: &mut Response,
    context: &RequestContext,
    headers: &HeaderMap,
    user: &IdpUserId,
) {
    if !honors_clear_site_data(context, headers) {
        return;
    }
    let last = RouterCookie::LastUser.get(headers, context.scheme);
    if !last.is_some_and(|last| router.user_digests.matches(user, last)) {
        clear_data(response);
    }
    response.headers_mut().append(SET_COOKIE, last_user_cookie_header(router, context, user));
}

/// Instructs the browser to clear the origin's cache and storage.
pub(super) fn clear_data(response: &mut Response) {
    response.headers_mut().insert(&CLEAR_SITE_DATA, CACHE_AND_STORAGE);
}

/// Removes and sets headers in a machine's response, so that it affects neither later requests to the origin nor other
/// users.
pub(super) fn sanitize_response_headers(context: &RequestContext, headers: &mut HeaderMap) {
    for name in &ORIGIN_WIDE_HEADERS {
        headers.remove(name);
    }
    if context.host == PublicHost::App {
        headers.remove(&SERVICE_WORKER_ALLOWED);
    }
    headers.append(VARY, HeaderValue::from_static("cookie"));
    if context.wants_page || is_document(headers) {
        // The browser must revalidate the page on each visit, so that the router can check the user. The machine's
        // value is always replaced: `no-store` in it may be part of a quoted string and have no effect.
        let value = if has_no_store(headers) { "no-store" } else { "private, no-cache" };
        headers.insert(CACHE_CONTROL, HeaderValue::from_static(value));
    }
}

fn is_document(headers: &HeaderMap) -> bool {
    let content_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let media_type = content_type.split(';').next().unwrap_or_default().trim();
    DOCUMENT_TYPES.iter().any(|document| media_type.eq_ignore_ascii_case(document))
}

fn has_no_store(headers: &HeaderMap) -> bool {
    let lines = headers.get_all(CACHE_CONTROL).iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).any(|directive| directive.trim().eq_ignore_ascii_case("no-store"))
}

/// Whether the request is a top-level navigation; `false` for requests from scripts and frames.
fn is_navigation(headers: &HeaderMap) -> bool {
    let has_value = |name: &HeaderName, expected: &[u8]| {
        headers.get(name).is_some_and(|value| value.as_bytes() == expected)
    };
    has_value(&FETCH_MODE, b"navigate") && has_value(&FETCH_DEST, b"document")
}

/// Whether the client is a browser that honors `Clear-Site-Data`. Browsers do so only in a secure context.
fn honors_clear_site_data(context: &RequestContext, headers: &HeaderMap) -> bool {
    cookie::is_browser(headers) && (context.scheme == "https" || is_loopback(&context.authority))
}

fn is_loopback(authority: &str) -> bool {
    let port_colon = authority.rfind(':').filter(|colon| !authority[*colon..].contains(']'));
    let host = port_colon.map_or(authority, |colon| &authority[..colon]);
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    host == "localhost" || host.ends_with(".localhost") || address.is_ok_and(|address| address.is_loopback())
}

fn last_user_cookie_header(router: &RouterState, context: &RequestContext, user: &IdpUserId) -> HeaderValue {
    RouterCookie::LastUser.set_cookie_header(
        &router.user_digests.digest(user),
        context.scheme,
        LAST_USER_SECONDS,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_loopback_accepts_only_loopback_hosts() {
        for (authority, expected) in [
            ("localhost", true),
            ("app.localhost:8080", true),
            ("127.0.0.1:80", true),
            ("[::1]:8080", true),
            ("[::1]", true),
            ("127.0.0.1.nip.io:8080", false),
            ("app.example.com", false),
            ("localhost.example.com:443", false),
        ] {
            assert_eq!(is_loopback(authority), expected, "{authority}");
        }
    }

    #[test]
    fn digest_depends_on_user_and_key() {
        let key = |byte: u8| SecretSlice::from(vec![byte; 32]);
        let (first, second) = (UserDigests::new(&key(1), None), UserDigests::new(&key(2), Some(&key(1))));
        let (ada, bob): (IdpUserId, IdpUserId) = ("a".parse().unwrap(), "b".parse().unwrap());
        assert!(first.matches(&ada, &first.digest(&ada)) && !first.matches(&bob, &first.digest(&ada)));
        assert!(second.matches(&ada, &first.digest(&ada)), "a digest made with the previous key is accepted");
        assert!(!first.matches(&ada, &second.digest(&ada)));
    }

    #[test]
    fn sanitize_response_headers_replaces_cache_control_of_pages() {
        let context = RequestContext {
            host: PublicHost::App,
            authority: "app.example".to_owned(),
            scheme: "https",
            peer_address: std::net::Ipv4Addr::LOCALHOST.into(),
            client_address: None,
            wants_page: true,
            now: jiff::Timestamp::UNIX_EPOCH,
        };
        for (sent, expected) in [
            ("max-age=31536000", "private, no-cache"),
            ("No-Store", "no-store"),
            ("max-age=31536000, x=\"a, no-store, b\"", "no-store"),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(CACHE_CONTROL, HeaderValue::from_static(sent));
            sanitize_response_headers(&context, &mut headers);
            assert_eq!(headers[CACHE_CONTROL], expected, "{sent}");
        }
    }

    #[test]
    fn header_checks_recognize_documents_and_no_store() {
        let header = |name: HeaderName, values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(&name, HeaderValue::from_static(value));
            }
            headers
        };
        for kind in ["Text/HTML", "text/html; charset=utf-8", "application/xhtml+xml", "image/svg+xml"] {
            assert!(is_document(&header(CONTENT_TYPE, &[kind])), "{kind}");
        }
        assert!(!is_document(&header(CONTENT_TYPE, &["text/javascript"])));
        assert!(has_no_store(&header(CACHE_CONTROL, &["private", "max-age=0, No-Store"])));
        assert!(!has_no_store(&header(CACHE_CONTROL, &["max-age=31536000, x=\"no-store\""])));
    }
}
