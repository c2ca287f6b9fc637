//! Handles a request: determines the public host, identifies the caller, finds the machine, and forwards the request.

use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::header::{SET_COOKIE, STRICT_TRANSPORT_SECURITY, UPGRADE};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};

use super::app_token::MintedToken;
use super::cookie::RouterCookie;
use super::directory::MachineLookup;
use super::forward::Caller;
use super::identity::{AuthError, Identity};
use super::machine::Machine;
use super::page::{self, UnavailableReason};
use super::request_context::{self, RequestContext};
use super::responses::{rate_limited, redirect, session_problem, sign_in_required};
use super::session::SessionError;
use super::{RouterState, account, app_request, app_token, browser_data, builtin, frame, origin, sign_in};
use crate::public_host::PublicHost;
use crate::signed_lifetimes::SESSION_SECONDS;
use svc_http::problem::{Code, Problem, format_chain};
use svc_http::server::{ConnectionInfo, Scheme};

/// Omits `includeSubDomains`, because the operator's hosts on subdomains may not support HTTPS.
const HSTS_ONE_YEAR: &str = "max-age=31536000";

impl RouterState {
    pub(super) async fn respond(&self, request: Request, connection: ConnectionInfo) -> Response {
        let scheme = request_context::public_scheme(&self.config, connection);
        let mut response = self.serve(request, connection).await.unwrap_or_else(IntoResponse::into_response);
        if scheme == Scheme::Https.as_str() {
            response.headers_mut().insert(STRICT_TRANSPORT_SECURITY, HeaderValue::from_static(HSTS_ONE_YEAR));
        }
        response
    }

    async fn serve(&self, mut request: Request, connection: ConnectionInfo) -> Result<Response, Problem> {
        let context = RequestContext::read(&self.config, connection, &mut request)?;
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
            return sign_in::start_sign_in(self, &context, request.headers(), request.uri());
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
                match self.render_app_frame(&context, &machine, &identity, request.uri()).await? {
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
        self.identify(context, headers).await?.ok_or_else(sign_in_required)
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
    async fn render_app_frame(
        &self,
        context: &RequestContext,
        machine: &Machine,
        identity: &Identity,
        uri: &Uri,
    ) -> Result<Option<Response>, Problem> {
        if context.host != PublicHost::App || !context.wants_page {
            return Ok(None);
        }
        let Some((app, rest)) = frame::parse_target(uri.path()) else { return Ok(None) };
        let minted = self.mint_app_token(context, machine, identity, app).await;
        let Some(minted) = minted.map_err(|error| session_problem(&error))? else {
            // The session has ended, so the same request now starts a sign-in.
            let path = uri.path_and_query().map_or("/", |path| path.as_str());
            return Ok(Some(redirect(StatusCode::FOUND, path)));
        };
        let origin = format!("{}://{}", context.scheme, context.authority);
        Ok(Some(frame::render(app, rest, uri, &origin, &minted)))
    }

    /// Issues an app token for this machine; `None` if the session has ended since the caller was authenticated.
    ///
    /// # Errors
    /// If the session must be looked up, and the database cannot be read.
    pub(super) async fn mint_app_token(
        &self,
        context: &RequestContext,
        machine: &Machine,
        identity: &Identity,
        app: &str,
    ) -> Result<Option<MintedToken>, SessionError> {
        let record = &machine.record;
        let generation = self.sign_outs.generation(&record.user);
        // The session is checked after the generation is read: a sign-out ends the sessions before it raises the
        // generation.
        if let Some(session) = identity.session()
            && self.sessions.is_revoked(session).await?
        {
            return Ok(None);
        }
        let keys = self.signing_keys.borrow();
        let signer = &keys.app.current;
        Ok(Some(app_token::mint(signer, &record.user, record.id, app, generation, context.now)))
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

    /// Returns the other origins to which the submission of a form can lead: `CODE_HOST` if the form's page has
    /// interrupted a sign-in there, and the legacy fallback if no machine is running.
    pub(super) fn form_redirect_origins(&self, context: &RequestContext) -> Vec<String> {
        let legacy = self.config.legacy_fallback.as_ref().map(|url| url.origin().ascii_serialization());
        let code_host = sign_in::host_url(self, context, PublicHost::Code);
        std::iter::once(code_host).chain(legacy).collect()
    }
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
