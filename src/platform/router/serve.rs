//! Handles a request: determines the public host, identifies the caller, finds the machine, and forwards the request.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::body::HttpBody;
use axum::extract::{ConnectInfo, Request};
use axum::response::{IntoResponse, Response};
use http::header::{CONTENT_LENGTH, HOST, LOCATION, SET_COOKIE, STRICT_TRANSPORT_SECURITY, UPGRADE};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use super::app_token::{AppClaims, MintedToken};
use super::cookie::RouterCookie;
use super::directory::MachineLookup;
use super::headers::{ForwardHeaders, prepare_headers};
use super::identity::{AuthError, Identity};
use super::machine::{Machine, Upstream};
use super::page::{self, UnavailableReason};
use super::session::SessionError;
use super::{
    RouterState, account, app_request, app_token, browser_data, builtin, cookie, frame, origin, sign_in,
};
use crate::public_host::PublicHost;
use crate::signed_lifetimes::SESSION_SECONDS;
use svc_base::metrics::UPSTREAM_FAILURES;
use svc_http::problem::{Code, Problem, format_chain};
use svc_http::proof::{LEEWAY_SECONDS, Route};
use svc_http::proxy::{ProxyError, TimeLimit};
use svc_http::request_id;
use svc_http::server::Scheme;

/// Omits `includeSubDomains`, because other hosts on the operator's domain may not support HTTPS.
const HSTS_ONE_YEAR: &str = "max-age=31536000";

/// The properties of a request, except its caller.
pub(super) struct RequestContext {
    pub(super) host: PublicHost,
    /// The request's host name and port.
    pub(super) authority: String,
    pub(super) scheme: &'static str,
    /// The peer's address; `None` behind a proxy, because all of the proxy's clients share one address.
    pub(super) client_address: Option<IpAddr>,
    /// Whether a browser shows the response to a person.
    pub(super) wants_page: bool,
    pub(super) now: Timestamp,
}

/// The caller for whom a request is forwarded.
#[derive(Clone, Copy)]
pub(super) enum Caller<'a> {
    /// The owner, with the generation of their last sign-out at the time of authentication.
    Owner(&'a Identity, i64),
    App(&'a AppClaims),
}

impl RouterState {
    pub(super) async fn respond(&self, request: Request) -> Response {
        let scheme = self.scheme(&request);
        let mut response = self.serve(request).await.unwrap_or_else(IntoResponse::into_response);
        if scheme == Scheme::Https.as_str() {
            response.headers_mut().insert(STRICT_TRANSPORT_SECURITY, HeaderValue::from_static(HSTS_ONE_YEAR));
        }
        response
    }

    /// Returns the scheme that the browser used.
    fn scheme(&self, request: &Request) -> &'static str {
        let listener = request.extensions().get::<Scheme>().copied().unwrap_or(Scheme::Http);
        self.config.public_scheme.unwrap_or(listener.as_str())
    }

    fn client_address(&self, request: &Request) -> Option<IpAddr> {
        let ConnectInfo(peer) = request.extensions().get::<ConnectInfo<SocketAddr>>()?;
        let is_proxy = self.config.trusted_proxies.contains(peer.ip());
        let is_behind_proxy = is_proxy || self.config.public_scheme.is_some();
        (!is_behind_proxy).then(|| peer.ip())
    }

    async fn serve(&self, mut request: Request) -> Result<Response, Problem> {
        let context = self.request_context(&mut request)?;
        if request.method() == Method::CONNECT {
            return Err(Problem::new(Code::MethodNotAllowed, "This server is not a forward proxy."));
        }
        browser_data::check_service_worker(&context, request.headers())?;
        // Rare branches are boxed, because every request's future is as large as its largest branch.
        if let Some(app_request) = app_request::classify(&context, &request) {
            return Ok(Box::pin(app_request::handle(self, &context, app_request, request)).await);
        }
        let is_upgrade = request.headers().contains_key(UPGRADE);
        if origin::must_check(request.method(), is_upgrade)
            && origin::is_cross_origin(request.headers(), context.scheme, &context.authority)
        {
            return Err(Problem::new(Code::Forbidden, "The request comes from another origin."));
        }
        if builtin::is_builtin_path(request.uri().path()) {
            return Box::pin(builtin::handle(self, &context, request)).await;
        }
        let Some(identity) = self.identify(&context, request.headers()).await? else {
            return sign_in::start_sign_in(self, &context, request.uri());
        };
        if let Some(page) = account::choice_page(self, &context, &identity, request.headers(), request.uri())
        {
            return Ok(page);
        }
        if let Some(response) =
            browser_data::require_cleared_data(self, &context, &identity, request.headers(), request.uri())
        {
            return Ok(response);
        }
        self.user_rate.check(identity.user()).map_err(rate_limited)?;
        let generation = self.sign_outs.generation(identity.user());
        let session_cookie = match &identity {
            Identity::Cookie(_) if context.wants_page => {
                Box::pin(self.open_session(&context, &identity)).await
            }
            _ => None,
        };
        let mut response = match self.directory.find(identity.user(), identity.slot()) {
            MachineLookup::Running(machine, upstream) => {
                match self.app_frame(&context, &machine, &identity, &request) {
                    Some(frame) => frame,
                    None => {
                        let caller = Caller::Owner(&identity, generation);
                        self.forward(&context, &machine, &upstream, caller, request).await
                    }
                }
            }
            MachineLookup::NotRunning(machine) => self.respond_unavailable(
                &context,
                UnavailableReason::for_machine(&machine.record),
                request.uri(),
            ),
            MachineLookup::NoMachine => {
                self.respond_unavailable(&context, UnavailableReason::NoMachine, request.uri())
            }
            MachineLookup::Unknown => UnavailableReason::Unknown.respond(context.wants_page),
        };
        if let Some(set_cookie) = session_cookie {
            response.headers_mut().append(SET_COOKIE, set_cookie);
        }
        Ok(response)
    }

    /// Reads the request's properties, and rejects unknown hosts. An absolute target overrides `Host` (RFC 9112,
    /// section 3.2.2).
    fn request_context(&self, request: &mut Request) -> Result<RequestContext, Problem> {
        if let Some(authority) = request.uri().authority() {
            let host = HeaderValue::from_str(authority.as_str());
            let host =
                host.map_err(|_| Problem::new(Code::InvalidRequest, "The request target is not valid."))?;
            request.headers_mut().insert(HOST, host);
        }
        let mut hosts = request.headers().get_all(HOST).iter();
        let unknown = || Problem::new(Code::NotFound, "The router does not serve this host.");
        let (Some(host), None) = (hosts.next(), hosts.next()) else { return Err(unknown()) };
        let authority = host.to_str().map_err(|_| unknown())?.to_owned();
        let host = self.config.find_host(&authority).ok_or_else(unknown)?;
        Ok(RequestContext {
            host,
            authority,
            scheme: self.scheme(request),
            client_address: self.client_address(request),
            wants_page: page::wants_page(request.method(), request.headers()),
            now: Timestamp::now(),
        })
    }

    /// Counts a credential check against the client address's limit.
    pub(super) fn admit_check(&self, context: &RequestContext) -> Result<(), Problem> {
        self.authenticator.admit_check(context).map_err(auth_problem)
    }

    pub(super) async fn identify(
        &self,
        context: &RequestContext,
        headers: &HeaderMap,
    ) -> Result<Option<Identity>, Problem> {
        self.authenticator.identify(context, headers).await.map_err(auth_problem)
    }

    /// Identifies the caller.
    ///
    /// # Errors
    /// `unauthorized` if the request has no valid session or token.
    pub(super) async fn require_identity(
        &self,
        context: &RequestContext,
        headers: &HeaderMap,
    ) -> Result<Identity, Problem> {
        self.identify(context, headers).await?.ok_or_else(sign_in::sign_in_required)
    }

    /// Opens a session for a request with the provider's cookie, so that the browser stays signed in after the cookie
    /// has expired. The request itself does not need the session, so a failure is only logged.
    async fn open_session(&self, context: &RequestContext, identity: &Identity) -> Option<HeaderValue> {
        match self.sessions.open(context.host, identity.user(), None).await {
            Ok((token, _)) => Some(RouterCookie::Session(context.host).set_cookie_header(
                &token,
                context.scheme,
                SESSION_SECONDS,
            )),
            Err(error) => {
                tracing::warn!(error = %format_chain(&error), "cannot open a session");
                None
            }
        }
    }

    /// Renders the frame around an app's page; `None` if the request is not for an app's page.
    fn app_frame(
        &self,
        context: &RequestContext,
        machine: &Machine,
        identity: &Identity,
        request: &Request,
    ) -> Option<Response> {
        if context.host != PublicHost::App || !context.wants_page {
            return None;
        }
        let uri = request.uri();
        let (app, rest) = frame::parse_target(uri.path())?;
        let Some(minted) = self.mint(context, machine, identity, app) else {
            // The session has ended, so the same request now starts a sign-in.
            return Some(redirect(StatusCode::FOUND, uri.path_and_query().map_or("/", |path| path.as_str())));
        };
        let origin = format!("{}://{}", context.scheme, context.authority);
        Some(frame::render(app, rest, uri, &origin, &minted))
    }

    /// Issues an app token for this machine; `None` if the session has ended since the caller was authenticated.
    pub(super) fn mint(
        &self,
        context: &RequestContext,
        machine: &Machine,
        identity: &Identity,
        app: &str,
    ) -> Option<MintedToken> {
        let record = &machine.record;
        let generation = self.sign_outs.generation(&record.user);
        // The session is checked after the generation is read: a sign-out ends the sessions before it raises the
        // generation.
        if let Some(session) = identity.session()
            && !self.sessions.is_open(session)
        {
            return None;
        }
        let proof = self.proof.borrow();
        Some(app_token::mint(&proof.app.current, &record.user, record.id, app, generation, context.now))
    }

    pub(super) async fn forward(
        &self,
        context: &RequestContext,
        machine: &Machine,
        upstream: &Upstream,
        caller: Caller<'_>,
        mut request: Request,
    ) -> Response {
        let (route, app) = match caller {
            Caller::Owner(..) => (context.host.route(), None),
            Caller::App(claims) => (Route::App, Some(claims.app.as_str())),
        };
        let proof = machine.proof(route, app, &self.proof.borrow(), context.now);
        let peer = request.extensions().get::<ConnectInfo<SocketAddr>>().map(|ConnectInfo(peer)| *peer);
        let request_id = request_id::current();
        let values = ForwardHeaders { peer, scheme: context.scheme, proof, request_id: &request_id };
        if prepare_headers(request.headers_mut(), values)
            && let Some(limit) = self.stream_limit(caller, context.now)
        {
            request.extensions_mut().insert(limit);
        }
        match upstream.proxy.forward(request).await {
            Ok(mut response) => {
                cookie::drop_reserved_cookies(response.headers_mut());
                browser_data::sanitize_response_headers(context, response.headers_mut());
                self.limit_stream(caller, context.now, response)
            }
            Err(error) => {
                tracing::warn!(svc_machine_id = %machine.record.id, error = %format_chain(&error), "request to the machine failed");
                UPSTREAM_FAILURES.add_one([error.kind()]);
                match error {
                    ProxyError::Closed => UnavailableReason::RouteChanged.respond(context.wants_page),
                    ProxyError::HeadTimeout => page::upstream_timeout(context.wants_page),
                    ProxyError::Full => {
                        Problem::new(Code::Unavailable, "The machine has too many open connections.")
                            .retry_after(page::REFRESH_SECONDS)
                            .into_response()
                    }
                    _ => page::upstream_unreachable(context.wants_page),
                }
            }
        }
    }

    /// Limits a response of unknown length, which may stream for hours, to the lifetime of the caller's credential.
    fn limit_stream(&self, caller: Caller<'_>, now: Timestamp, response: Response) -> Response {
        if response.body().size_hint().exact().is_some() || response.headers().contains_key(CONTENT_LENGTH) {
            return response;
        }
        match self.stream_limit(caller, now) {
            Some(limit) => response.map(|body| limit.limit_body(body)),
            None => response,
        }
    }

    /// Returns when this caller's streams end; `None` for a bearer token, which a sign-out does not revoke.
    fn stream_limit(&self, caller: Caller<'_>, now: Timestamp) -> Option<TimeLimit> {
        let (user, expires_at) = match caller {
            Caller::Owner(Identity::Bearer(_), _) => return None,
            // The lifetime of a session that is opened now.
            Caller::Owner(Identity::Cookie(subject), _) => {
                (&subject.user, now.as_second() + SESSION_SECONDS.cast_signed())
            }
            Caller::Owner(Identity::Session(session) | Identity::Disputed(session, _), _) => {
                (&session.user, session.expires_at.as_second())
            }
            Caller::App(claims) => (&claims.sub, claims.exp + LEEWAY_SECONDS),
        };
        let revoked = self.sign_outs.register_stream(user);
        let is_valid = match caller {
            Caller::Owner(Identity::Session(session) | Identity::Disputed(session, _), _) => {
                self.sessions.is_open(session)
            }
            Caller::Owner(_, generation) => generation >= self.sign_outs.required_generation(user),
            Caller::App(claims) => claims.generation >= self.sign_outs.required_generation(user),
        };
        let revoked = if is_valid { revoked } else { cancelled_token() };
        let remaining =
            |end: i64| Duration::from_secs(u64::try_from(end - now.as_second()).unwrap_or_default());
        Some(TimeLimit { revoked, deadline: tokio::time::Instant::now() + remaining(expires_at) })
    }

    /// Redirects to the legacy fallback, if one is configured, or reports why no machine is available.
    fn respond_unavailable(
        &self,
        context: &RequestContext,
        reason: UnavailableReason,
        uri: &Uri,
    ) -> Response {
        match &self.config.legacy_fallback {
            Some(base) => {
                let path = uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
                redirect(
                    StatusCode::TEMPORARY_REDIRECT,
                    &format!("{}{path}", base.as_str().trim_end_matches('/')),
                )
            }
            None => reason.respond(context.wants_page),
        }
    }
}

/// Returns a cancelled token, for a stream whose credential is no longer valid.
fn cancelled_token() -> Arc<CancellationToken> {
    let token = CancellationToken::new();
    token.cancel();
    Arc::new(token)
}

fn auth_problem(error: AuthError) -> Problem {
    match error {
        AuthError::Bearer(error) => {
            tracing::debug!(%error, "bearer token rejected");
            Problem::new(Code::Unauthorized, "The bearer token is invalid.")
        }
        AuthError::NoKeys => Problem::new(Code::Unavailable, "The identity provider is unreachable.")
            .retry_after(page::REFRESH_SECONDS),
        AuthError::Sessions(error) => session_problem(&error),
        AuthError::RateLimited { retry_after } => rate_limited(retry_after),
    }
}

pub(super) fn session_problem(error: &SessionError) -> Problem {
    if let SessionError::RateLimited(wait) = error {
        return rate_limited(*wait);
    }
    if matches!(error, SessionError::ParentEnded) {
        return Problem::new(Code::Unauthorized, "The session has ended; sign in again.");
    }
    tracing::warn!(error = %format_chain(error), "cannot read or change sessions");
    Problem::new(Code::DatabaseUnavailable, "The session database is unavailable.")
        .retry_after(page::REFRESH_SECONDS)
}

pub(super) fn rate_limited(wait: Duration) -> Problem {
    Problem::new(Code::RateLimited, "Too many requests. Retry after the number of seconds in Retry-After.")
        .retry_after(wait.as_secs() + 1)
}

/// Returns a redirect that browsers do not cache, because its target depends on the caller.
pub(super) fn redirect(code: StatusCode, to: &str) -> Response {
    let mut response = code.into_response();
    match HeaderValue::from_str(to) {
        Ok(to) => {
            response.headers_mut().insert(LOCATION, to);
            response.headers_mut().insert(http::header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
            response
        }
        Err(_) => Problem::new(Code::InvalidRequest, "The request target is not valid.").into_response(),
    }
}
