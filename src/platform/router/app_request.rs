//! Handles requests from an app's page. They are authenticated by the app token, in the path `/apps/<slug>/~<token>/…`
//! or as a bearer token, and never by a cookie.
//!
//! The page has an opaque origin, so the browser sends `Origin: null` and requires CORS headers. Allowing that origin
//! is safe, because credentials that a browser adds automatically are ignored here. Invariant: a request with an app
//! token is forwarded only with route `app` and that app's name.

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
use super::directory::MachineLookup;
use super::forward::Caller;
use super::identity::bearer_token;
use super::page::UnavailableReason;
use super::request_context::RequestContext;
use super::responses::rate_limited;
use super::{RouterState, builtin, frame, origin};
use crate::public_host::PublicHost;
use svc_http::problem::{Code, Problem};
use svc_http::proof::ProofError;

const TOKEN_MARKER: &str = "/~";

/// The app token of a request, and where it was found.
pub(super) enum PresentedToken {
    InPath { slug: String, token: String, rest: String },
    AsBearer(String),
}

/// A request from an app's page.
pub(super) enum AppRequest {
    /// A CORS preflight, which has no token.
    Preflight,
    WithToken(PresentedToken),
}

/// Classifies a request; `None` if it does not come from an app's page.
pub(super) fn classify(context: &RequestContext, request: &Request) -> Option<AppRequest> {
    if context.host != PublicHost::App {
        return None;
    }
    if is_preflight(request.method(), request.headers()) {
        return Some(AppRequest::Preflight);
    }
    find_token(request).map(AppRequest::WithToken)
}

/// Handles a request from an app's page.
pub(super) async fn handle(
    router: &RouterState,
    context: &RequestContext,
    app_request: AppRequest,
    request: Request,
) -> Response {
    let AppRequest::WithToken(token) = app_request else { return preflight_response() };
    let is_opaque = has_opaque_origin(request.headers());
    let mut response = serve(router, context, token, request).await;
    if is_opaque {
        allow_opaque_origin(response.headers_mut());
    }
    response
}

async fn serve(
    router: &RouterState,
    context: &RequestContext,
    token: PresentedToken,
    mut request: Request,
) -> Response {
    if !has_opaque_origin(request.headers())
        && origin::is_foreign_origin(request.headers(), context.scheme, &context.authority)
    {
        return Problem::new(Code::Forbidden, "The request comes from another origin.").into_response();
    }
    let claims = match verify_token(router, context, &token) {
        Ok(claims) => claims,
        Err(rejection) => return reject(router, context, rejection),
    };
    if let Err(wait) = router.user_rate.check(&claims.sub) {
        return rate_limited(wait).into_response();
    }
    if builtin::is_builtin_path(request.uri().path()) {
        return Problem::new(Code::Forbidden, "This route is for the owner, not for apps.").into_response();
    }
    if let PresentedToken::InPath { slug, rest, .. } = &token {
        match upstream_uri(request.uri(), slug, rest) {
            Some(uri) => *request.uri_mut() = uri,
            None => {
                return Problem::new(Code::InvalidRequest, "The request target is not valid.")
                    .into_response();
            }
        }
    }
    // The machine identifies the caller by the proof, and must not see the token.
    request.headers_mut().remove(AUTHORIZATION);
    match router.directory.find_by_id(&claims.sub, claims.aud) {
        MachineLookup::Running(machine, upstream) => {
            router.forward(context, &machine, &upstream, Caller::App(&claims), request).await
        }
        MachineLookup::NotRunning(machine) => {
            UnavailableReason::for_machine(&machine.record).respond(context.wants_page)
        }
        MachineLookup::NoMachine => TokenRejection::Expired.respond(context.wants_page),
        MachineLookup::Unknown => UnavailableReason::Unknown.respond(context.wants_page),
    }
}

/// Returns the response to a rejected token. Only forged tokens count against the client address's rate limit.
fn reject(router: &RouterState, context: &RequestContext, rejection: TokenRejection) -> Response {
    if matches!(rejection, TokenRejection::Forged)
        && let Err(problem) = router.admit_check(context)
    {
        return problem.into_response();
    }
    rejection.respond(context.wants_page)
}

/// The reason an app token was rejected.
enum TokenRejection {
    /// Malformed, or not signed with a key for app tokens.
    Forged,
    /// Expired, not yet valid, revoked by a sign-out, or for a machine that has been replaced or deleted.
    Expired,
    AnotherApp,
}

impl TokenRejection {
    fn respond(self, wants_page: bool) -> Response {
        match self {
            Self::Forged | Self::Expired if wants_page => frame::expired_page(),
            Self::Forged | Self::Expired => {
                let detail = "The app token is invalid or has expired; request a new one.";
                Problem::new(Code::Unauthorized, detail).into_response()
            }
            Self::AnotherApp => {
                Problem::new(Code::Forbidden, "This app token belongs to another app.").into_response()
            }
        }
    }
}

fn verify_token(
    router: &RouterState,
    context: &RequestContext,
    token: &PresentedToken,
) -> Result<AppClaims, TokenRejection> {
    let (token, slug) = match token {
        PresentedToken::InPath { slug, token, .. } => (token, Some(slug)),
        PresentedToken::AsBearer(token) => (token, None),
    };
    let keys = router.signing_keys.borrow();
    let claims = app_token::verify(&keys.app.public, token, context.now);
    drop(keys);
    let claims = claims.map_err(|error| {
        tracing::debug!(%error, "app token rejected");
        if matches!(error, ProofError::OutsideValidity) {
            TokenRejection::Expired
        } else {
            TokenRejection::Forged
        }
    })?;
    if claims.generation < router.sign_outs.required_generation(&claims.sub) {
        return Err(TokenRejection::Expired);
    }
    if slug.is_some_and(|slug| *slug != claims.app) {
        return Err(TokenRejection::AnotherApp);
    }
    Ok(claims)
}

fn find_token(request: &Request) -> Option<PresentedToken> {
    if let Some(path) = request.uri().path().strip_prefix("/apps/")
        && let Some(end) = path.find(TOKEN_MARKER)
        && app_token::is_slug(&path[..end])
    {
        let (token, rest) = path[end + TOKEN_MARKER.len()..]
            .split_once('/')
            .unwrap_or((&path[end + TOKEN_MARKER.len()..], ""));
        let slug = path[..end].to_owned();
        return Some(PresentedToken::InPath { slug, token: token.to_owned(), rest: rest.to_owned() });
    }
    let token = bearer_token(request.headers()).filter(|token| app_token::is_app_token(token))?;
    Some(PresentedToken::AsBearer(token.to_owned()))
}

/// Returns the request target without the token, which the machine must not see; `None` if the result is not a valid
/// target.
fn upstream_uri(uri: &Uri, slug: &str, rest: &str) -> Option<Uri> {
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(PathAndQuery::try_from(format!("/apps/{slug}/{rest}{query}")).ok()?);
    Uri::from_parts(parts).ok()
}

fn has_opaque_origin(headers: &HeaderMap) -> bool {
    let mut origins = headers.get_all(ORIGIN).iter();
    matches!((origins.next(), origins.next()), (Some(origin), None) if origin == "null")
}

/// Returns whether this is a CORS preflight from an app's page, which carries no token.
fn is_preflight(method: &Method, headers: &HeaderMap) -> bool {
    method == Method::OPTIONS
        && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
        && has_opaque_origin(headers)
}

fn preflight_response() -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
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
    response
}

fn allow_opaque_origin(headers: &mut HeaderMap) {
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("null"));
    headers
        .insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("etag, retry-after, x-request-id"));
    headers.append(VARY, HeaderValue::from_static("Origin"));
}
