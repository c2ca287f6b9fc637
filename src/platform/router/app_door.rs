//! Requests of an app's page: by its token, in the path `/apps/<slug>/~<token>/…` or as bearer, never by a cookie.
//!
//! The page has an opaque origin, so the browser sends `Origin: null` and asks for leave to read the answers
//! (CORS); that is safe to give, because nothing that a browser adds by itself counts here. Invariant: what comes by
//! an app token is forwarded as route `app` of that app and as nothing else.

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_METHOD, AUTHORIZATION,
    ORIGIN, VARY,
};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri};

use super::app_token::{self, AppClaims};
use super::directory::Found;
use super::door::Door;
use super::identity::bearer;
use super::page::Absence;
use super::serve::{Caller, Visit, too_many};
use super::{Site, frame, origin, own};
use crate::http::problem::{Code, Problem};
use crate::http::proof::ProofError;

const MARK: &str = "/~";

/// How an app token came.
pub(super) enum Shown {
    InPath { slug: String, token: String, rest: String },
    AsBearer(String),
}

/// What an app's page asks for.
pub(super) enum Asked {
    /// Whether it may ask at all.
    Leave,
    InItsName(Shown),
}

/// What this request is, if an app's page sent it.
pub(super) fn asked(visit: &Visit, request: &Request) -> Option<Asked> {
    if visit.door != Door::App {
        return None;
    }
    if is_preflight(request.method(), request.headers()) {
        return Some(Asked::Leave);
    }
    shown(request).map(Asked::InItsName)
}

/// Answers what an app's page asks.
pub(super) async fn answer(site: &Site, visit: &Visit, asked: Asked, request: Request) -> Response {
    let Asked::InItsName(shown) = asked else { return preflight() };
    let opaque = from_opaque_origin(request.headers());
    let mut answer = serve(site, visit, shown, request).await;
    if opaque {
        allow_opaque_origin(answer.headers_mut());
    }
    answer
}

async fn serve(site: &Site, visit: &Visit, shown: Shown, mut request: Request) -> Response {
    if !from_opaque_origin(request.headers())
        && origin::is_foreign_origin(request.headers(), visit.scheme, &visit.authority)
    {
        return Problem::new(Code::Forbidden, "The request comes from another origin.").into_response();
    }
    let claims = match believed(site, visit, &shown) {
        Ok(claims) => claims,
        Err(refusal) => return refused(site, visit, refusal),
    };
    if let Err(wait) = site.users.check(&claims.sub) {
        return too_many(wait).into_response();
    }
    if own::is_ours(request.uri().path()) {
        return Problem::new(Code::Forbidden, "This is for the owner, not for an app.").into_response();
    }
    if let Shown::InPath { slug, rest, .. } = &shown {
        match onward_uri(request.uri(), slug, rest) {
            Some(uri) => *request.uri_mut() = uri,
            None => return Problem::new(Code::InvalidRequest, "The target is not one.").into_response(),
        }
    }
    // The token has done its part; the machine learns who asks by the proof.
    request.headers_mut().remove(AUTHORIZATION);
    match site.directory.of_machine(&claims.sub, claims.aud) {
        Found::Running(machine, way) => {
            site.forward(visit, &machine, &way, Caller::App(&claims), request).await
        }
        Found::Waiting(machine) => Absence::of(&machine.row).answer(visit.page),
        Found::Nothing => Refusal::Ended.answer(visit.page),
        Found::Unknown => Absence::Unknown.answer(visit.page),
    }
}

/// The answer to a token that opens nothing. A forged one counts against its address, and a good one never does.
fn refused(site: &Site, visit: &Visit, refusal: Refusal) -> Response {
    if matches!(refusal, Refusal::Forged)
        && let Err(problem) = site.admit_check(visit)
    {
        return problem.into_response();
    }
    refusal.answer(visit.page)
}

/// Why a token opens nothing.
enum Refusal {
    /// Signed by no key of ours.
    Forged,
    /// Expired, or for a machine that has been replaced.
    Ended,
    AnotherApp,
}

impl Refusal {
    fn answer(self, page: bool) -> Response {
        match self {
            Self::Forged | Self::Ended if page => frame::ended(),
            Self::Forged | Self::Ended => {
                let detail = "The app token is not valid, or not any more; ask for a new one.";
                Problem::new(Code::Unauthorized, detail).into_response()
            }
            Self::AnotherApp => {
                Problem::new(Code::Forbidden, "This app token is another app's.").into_response()
            }
        }
    }
}

fn believed(site: &Site, visit: &Visit, shown: &Shown) -> Result<AppClaims, Refusal> {
    let (token, slug) = match shown {
        Shown::InPath { slug, token, .. } => (token, Some(slug)),
        Shown::AsBearer(token) => (token, None),
    };
    let keys = site.proof.borrow();
    let claims = app_token::verify(&keys.app.public, token, visit.now);
    drop(keys);
    let claims = claims.map_err(|error| {
        tracing::debug!(%error, "app token refused");
        if matches!(error, ProofError::Stale) { Refusal::Ended } else { Refusal::Forged }
    })?;
    if claims.generation < site.sign_outs.required(&claims.sub) {
        return Err(Refusal::Ended);
    }
    if slug.is_some_and(|slug| *slug != claims.app) {
        return Err(Refusal::AnotherApp);
    }
    Ok(claims)
}

fn shown(request: &Request) -> Option<Shown> {
    if let Some(below) = request.uri().path().strip_prefix("/apps/")
        && let Some(end) = below.find(MARK)
        && app_token::is_slug(&below[..end])
    {
        let (token, rest) =
            below[end + MARK.len()..].split_once('/').unwrap_or((&below[end + MARK.len()..], ""));
        let own = |text: &str| text.to_owned();
        return Some(Shown::InPath { slug: own(&below[..end]), token: own(token), rest: own(rest) });
    }
    let token = bearer(request.headers()).filter(|token| app_token::looks_like_one(token))?;
    Some(Shown::AsBearer(token.to_owned()))
}

/// The target as the machine knows it: the token is the router's alone.
fn onward_uri(uri: &Uri, slug: &str, rest: &str) -> Option<Uri> {
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(PathAndQuery::try_from(format!("/apps/{slug}/{rest}{query}")).ok()?);
    Uri::from_parts(parts).ok()
}

fn from_opaque_origin(headers: &HeaderMap) -> bool {
    let mut origins = headers.get_all(ORIGIN).iter();
    matches!((origins.next(), origins.next()), (Some(origin), None) if origin == "null")
}

/// A browser asks for leave before it sends what a form could not; it shows no token then.
fn is_preflight(method: &Method, headers: &HeaderMap) -> bool {
    method == Method::OPTIONS
        && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
        && from_opaque_origin(headers)
}

fn preflight() -> Response {
    let mut answer = Response::new(Body::empty());
    *answer.status_mut() = StatusCode::NO_CONTENT;
    let headers = answer.headers_mut();
    let fixed: [(HeaderName, &'static str); 3] = [
        (ACCESS_CONTROL_ALLOW_METHODS, "GET, HEAD, POST, PUT, PATCH, DELETE"),
        (
            ACCESS_CONTROL_ALLOW_HEADERS,
            "authorization, content-type, if-none-match, last-event-id, x-request-id",
        ),
        (ACCESS_CONTROL_MAX_AGE, "600"),
    ];
    for (name, value) in fixed {
        headers.insert(name, HeaderValue::from_static(value));
    }
    allow_opaque_origin(headers);
    answer
}

fn allow_opaque_origin(headers: &mut HeaderMap) {
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("null"));
    headers
        .insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("etag, retry-after, x-request-id"));
    headers.append(VARY, HeaderValue::from_static("Origin"));
}
