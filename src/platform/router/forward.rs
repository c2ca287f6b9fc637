//! Forwards a request to its machine, with a proof of the caller's identity. Limits responses of unknown length and
//! upgraded connections to the lifetime of the caller's session or app token.

use std::sync::Arc;
use std::time::Duration;

use axum::body::HttpBody;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::header::CONTENT_LENGTH;
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use super::app_token::AppClaims;
use super::headers::{ForwardHeaders, prepare_headers};
use super::identity::Identity;
use super::machine::{Machine, Upstream};
use super::page::{self, UnavailableReason};
use super::request_context::RequestContext;
use super::{RouterState, browser_data, cookie};
use crate::signed_lifetimes::SESSION_SECONDS;
use svc_base::metrics::UPSTREAM_FAILURES;
use svc_http::problem::{Code, Problem, format_chain};
use svc_http::proof::{LEEWAY_SECONDS, Route};
use svc_http::proxy::{ProxyError, TimeLimit};

/// The caller for whom a request is forwarded.
#[derive(Clone, Copy)]
pub(super) enum Caller<'a> {
    /// The owner, with the generation of their last sign-out at the time of authentication.
    Owner(&'a Identity, i64),
    App(&'a AppClaims),
}

impl RouterState {
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
        let proof = machine.proof(route, app, &self.signing_keys.borrow(), context.now);
        let values = ForwardHeaders { peer: context.peer_address, scheme: context.scheme, proof };
        if prepare_headers(request.headers_mut(), values)
            && let Some(limit) = self.create_time_limit(caller, context.now).await
        {
            request.extensions_mut().insert(limit);
        }
        match upstream.proxy.forward(request).await {
            Ok(mut response) => {
                cookie::drop_reserved_cookies(response.headers_mut());
                browser_data::sanitize_response_headers(context, response.headers_mut());
                self.limit_stream(caller, context.now, response).await
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
    async fn limit_stream(&self, caller: Caller<'_>, now: Timestamp, response: Response) -> Response {
        if response.body().size_hint().exact().is_some() || response.headers().contains_key(CONTENT_LENGTH) {
            return response;
        }
        match self.create_time_limit(caller, now).await {
            Some(limit) => response.map(|body| limit.limit_body(body)),
            None => response,
        }
    }

    /// Creates the time limit for a stream of this caller, and registers the stream, so that a sign-out closes it;
    /// `None` for a bearer token, which a sign-out does not revoke. `now` is the time at which the request arrived.
    async fn create_time_limit(&self, caller: Caller<'_>, now: Timestamp) -> Option<TimeLimit> {
        let (user, expires_at) = match caller {
            Caller::Owner(Identity::Bearer(_), _) => return None,
            // The request may open a session, so the limit is a new session's lifetime.
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
            Caller::Owner(Identity::Session(session) | Identity::Disputed(session, _), generation) => {
                match self.sessions.is_revoked(session).await {
                    Ok(is_revoked) => !is_revoked,
                    // A database failure does not end a stream; a sign-out that this process has recorded does.
                    Err(_) => generation >= self.sign_outs.required_generation(user),
                }
            }
            Caller::Owner(_, generation) => generation >= self.sign_outs.required_generation(user),
            Caller::App(claims) => claims.generation >= self.sign_outs.required_generation(user),
        };
        let revoked = if is_valid { revoked } else { cancelled_token() };
        // Not `now`: the head of a response can arrive long after its request.
        let remaining = u64::try_from(expires_at - Timestamp::now().as_second()).unwrap_or_default();
        Some(TimeLimit { revoked, deadline: tokio::time::Instant::now() + Duration::from_secs(remaining) })
    }
}

/// Returns a cancelled token, for a stream whose credential is no longer valid.
fn cancelled_token() -> Arc<CancellationToken> {
    let token = CancellationToken::new();
    token.cancel();
    Arc::new(token)
}
