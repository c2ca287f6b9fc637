//! What one user's machine left in a browser must not run as the browser's next user.
//!
//! All users share the origins of the two public hosts. A machine's service worker, cached script or stored data would act
//! with the cookies of whoever signs in next. A cookie remembers the browser's last user: a request of another one is not
//! forwarded before the browser was told to clear the origin's data (W3C Clear Site Data).

use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as B64;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, SET_COOKIE, VARY};
use http::{StatusCode, Uri};

use super::cookie::{self, RouterCookie};
use super::identity::Identity;
use super::serve::{RequestContext, redirect};
use super::session::sha256;
use super::sign_in;
use crate::public_host::PublicHost;
use svc_http::problem::{Code, Problem};
use svc_machine::name::IdpUserId;

static CLEAR_SITE_DATA: HeaderName = HeaderName::from_static("clear-site-data");
/// Not the cookies: the router's own have the same origin, and it ends them itself.
const CACHE_AND_STORAGE: HeaderValue = HeaderValue::from_static("\"cache\", \"storage\"");
/// A year. Browsers limit it to 400 days.
const LAST_USER_SECONDS: u64 = 365 * 86_400;
static SERVICE_WORKER: HeaderName = HeaderName::from_static("service-worker");

/// Headers of a machine's response that would act on the shared origin, or on other hosts, after the response.
static ORIGIN_WIDE: [HeaderName; 6] = [
    HeaderName::from_static("alt-svc"),
    HeaderName::from_static("clear-site-data"),
    HeaderName::from_static("nel"),
    HeaderName::from_static("report-to"),
    HeaderName::from_static("reporting-endpoints"),
    HeaderName::from_static("strict-transport-security"),
];
static SERVICE_WORKER_ALLOWED: HeaderName = HeaderName::from_static("service-worker-allowed");

/// Refuses the script of a service worker on `APP_HOST`: it would intercept every later page of the origin. The editor on
/// `CODE_HOST` needs one.
///
/// # Errors
/// `forbidden`.
pub(super) fn check_service_worker(context: &RequestContext, headers: &HeaderMap) -> Result<(), Problem> {
    if context.host == PublicHost::App && headers.contains_key(&SERVICE_WORKER) {
        return Err(Problem::new(Code::Forbidden, "This host allows no service workers."));
    }
    Ok(())
}

/// The response instead of the machine's, if another user was the last one in this browser: a page is requested again after
/// the data is cleared; other requests are refused, because data of the last user may have sent them.
pub(super) fn require_clean(
    context: &RequestContext,
    identity: &Identity,
    headers: &HeaderMap,
    uri: &Uri,
) -> Option<Response> {
    if matches!(identity, Identity::Bearer(_)) || !clears_data(context, headers) {
        return None;
    }
    match RouterCookie::LastUser.get(headers, context.scheme) {
        Some(last) if last == mark(identity.user()) => return None,
        // A session of an earlier release, which is opened again within hours.
        None if identity.session().is_some() => return None,
        _ => {}
    }
    let mut response = if context.wants_page {
        let path = uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
        let path = if sign_in::is_local_path(path) { path } else { "/" };
        let mut response = redirect(StatusCode::FOUND, path);
        response.headers_mut().append(SET_COOKIE, set_last_user(context, identity.user()));
        response
    } else {
        let detail = "Another account used this browser before: open the page again.";
        Problem::new(Code::Unauthorized, detail).into_response()
    };
    clear(&mut response);
    Some(response)
}

/// Adds to the response that opens a session: the browser clears its data if the last user was another one.
pub(super) fn record_user(
    response: &mut Response,
    context: &RequestContext,
    headers: &HeaderMap,
    user: &IdpUserId,
) {
    if !clears_data(context, headers) {
        return;
    }
    if RouterCookie::LastUser.get(headers, context.scheme) != Some(&mark(user)) {
        clear(response);
    }
    response.headers_mut().append(SET_COOKIE, set_last_user(context, user));
}

/// Tells the browser to clear what it stored for the origin.
pub(super) fn clear(response: &mut Response) {
    response.headers_mut().insert(&CLEAR_SITE_DATA, CACHE_AND_STORAGE);
}

/// Drops and adds headers of a machine's response to its owner, so that the browser uses it for this user only.
pub(super) fn confine(context: &RequestContext, headers: &mut HeaderMap) {
    for name in &ORIGIN_WIDE {
        headers.remove(name);
    }
    if context.host == PublicHost::App {
        headers.remove(&SERVICE_WORKER_ALLOWED);
    }
    headers.append(VARY, HeaderValue::from_static("cookie"));
    let is_document = headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/html"));
    let is_stored = |value: &HeaderValue| !value.to_str().is_ok_and(|value| value.contains("no-store"));
    if is_document && headers.get(CACHE_CONTROL).is_none_or(is_stored) {
        // Each visit asks the router, which knows the user.
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("private, no-cache"));
    }
}

/// Whether the client is a browser that honours the header: only in a secure context.
fn clears_data(context: &RequestContext, headers: &HeaderMap) -> bool {
    cookie::is_browser(headers) && (context.scheme == "https" || is_loopback(&context.authority))
}

fn is_loopback(authority: &str) -> bool {
    let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
    host == "localhost" || host.ends_with(".localhost") || host.starts_with("127.")
}

fn set_last_user(context: &RequestContext, user: &IdpUserId) -> HeaderValue {
    RouterCookie::LastUser.set_cookie(&mark(user), context.scheme, LAST_USER_SECONDS)
}

/// The cookie's value: it names no user to others who read the browser's files.
fn mark(user: &IdpUserId) -> String {
    B64.encode(&sha256(format!("last user\0{user}").as_bytes())[..16])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_loopback_accepts_only_this_machine() {
        for (authority, expected) in [
            ("localhost", true),
            ("app.localhost:8080", true),
            ("127.0.0.1:80", true),
            ("app.example.com", false),
            ("localhost.example.com:443", false),
        ] {
            assert_eq!(is_loopback(authority), expected, "{authority}");
        }
    }
}
