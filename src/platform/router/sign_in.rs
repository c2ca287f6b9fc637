//! Signs browsers in: on `APP_HOST` through the identity provider, and on `CODE_HOST` with a code from `APP_HOST`.
//!
//! The code can be used once, and only together with a nonce (`state`) in a `CODE_HOST` cookie in the same browser, so
//! that a link cannot sign a user in as another user (login CSRF). Tabs that sign in at the same time share the nonce.

use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::header::{HeaderMap, SET_COOKIE};
use http::{StatusCode, Uri};
use url::form_urlencoded;

use super::RouterState;
use super::account;
use super::browser_data;
use super::cookie::RouterCookie;
use super::request_context::RequestContext;
use super::responses::{redirect, session_problem, sign_in_required};
use super::return_path::{is_local_path, local_path};
use super::session::{CodeGrant, SessionOrigin, has_token_format, random_token};
use crate::public_host::PublicHost;
use crate::signed_lifetimes::SESSION_SECONDS;
use svc_http::buffered_request::BufferedRequest;
use svc_http::problem::{Code, Problem};

/// On `APP_HOST`: issues a code for the browser that holds `state` on `CODE_HOST`.
pub(super) const ISSUE_CODE_PATH: &str = "/_svc/code-session";
/// On `CODE_HOST`: redeems the code.
pub(super) const REDEEM_CODE_PATH: &str = "/_svc/session";
const STATE_TTL_SECONDS: u64 = 600;

/// Responds to an unauthenticated request: redirects a browser to sign in, and rejects other clients.
pub(super) fn start_sign_in(
    router: &RouterState,
    context: &RequestContext,
    headers: &HeaderMap,
    uri: &Uri,
) -> Result<Response, Problem> {
    if !context.wants_page {
        return Err(sign_in_required());
    }
    let path = uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
    match context.host {
        PublicHost::App => {
            let mut target = router.config.sign_in.clone();
            let return_url = format!(
                "{}://{}{path}",
                context.scheme,
                router.config.app_host.authority(&context.authority)
            );
            target.query_pairs_mut().append_pair("redirect_url", &return_url);
            Ok(redirect(StatusCode::FOUND, target.as_str()))
        }
        PublicHost::Code => {
            let state = match RouterCookie::State.get(headers, context.scheme) {
                Some(state) if has_token_format(state) => state.to_owned(),
                _ => random_token().map_err(|error| Problem::internal(&error))?,
            };
            let return_to = local_path(uri);
            let query = form_urlencoded::Serializer::new(String::new())
                .append_pair("state", &state)
                .append_pair("return_to", return_to)
                .finish();
            let mut response = redirect(
                StatusCode::FOUND,
                &format!("{}{ISSUE_CODE_PATH}?{query}", host_url(router, context, PublicHost::App)),
            );
            let set_cookie = RouterCookie::State.set_cookie_header(&state, context.scheme, STATE_TTL_SECONDS);
            response.headers_mut().append(SET_COOKIE, set_cookie);
            Ok(response)
        }
    }
}

/// On `APP_HOST`: issues a code for an authenticated caller and redirects to `CODE_HOST`.
pub(super) async fn issue_code(
    router: &RouterState,
    context: &RequestContext,
    call: &BufferedRequest,
) -> Result<Response, Problem> {
    let Some(identity) = router.identify(context, &call.headers).await? else {
        return start_sign_in(router, context, &call.headers, &call.uri);
    };
    if let Some(page) = account::choice_page(router, context, &identity, &call.headers, &call.uri) {
        return Ok(page);
    }
    let mut query = call.query_fields();
    let state: Option<String> = query.required("state");
    let return_to: Option<String> = query.optional("return_to");
    let state = query.discard_remaining().finish(state)?;
    let return_to = return_to.filter(|path| is_local_path(path)).unwrap_or_else(|| "/".to_owned());
    let grant = CodeGrant {
        origin: SessionOrigin {
            parent: identity.session().map(|session| session.hash),
            // Not stored: redeeming the code reads the generation.
            sign_out_generation: 0,
        },
        user: identity.user().clone(),
        slot: identity.slot().cloned(),
        return_to,
    };
    let code = router.sessions.issue_code(&grant, &state).await.map_err(|error| session_problem(&error))?;
    Ok(redirect(
        StatusCode::FOUND,
        &format!("{}{REDEEM_CODE_PATH}?code={code}", host_url(router, context, PublicHost::Code)),
    ))
}

/// On `CODE_HOST`: exchanges the code and the nonce for a session.
pub(super) async fn redeem_code(
    router: &RouterState,
    context: &RequestContext,
    call: &BufferedRequest,
) -> Result<Response, Problem> {
    let mut query = call.query_fields();
    let code: Option<String> = query.required("code");
    let code = query.discard_remaining().finish(code)?;
    router.admit_check(context)?;
    let grant = match RouterCookie::State.get(&call.headers, context.scheme) {
        Some(state) => {
            router.sessions.redeem_code(&code, state).await.map_err(|error| session_problem(&error))?
        }
        None => None,
    };
    let grant = grant.ok_or_else(|| {
        Problem::new(
            Code::Unauthorized,
            "This sign-in has expired or was started in another browser. Open the page again.",
        )
    })?;
    let opened = router
        .sessions
        .open_with_origin(grant.origin, PublicHost::Code, &grant.user, grant.slot.as_ref())
        .await;
    let (token, _) = opened.map_err(|error| session_problem(&error))?;
    let mut response = redirect(StatusCode::FOUND, &grant.return_to);
    let headers = response.headers_mut();
    let set_cookie =
        RouterCookie::Session(PublicHost::Code).set_cookie_header(&token, context.scheme, SESSION_SECONDS);
    // The nonce remains until it expires, because another tab may still need it.
    headers.append(SET_COOKIE, set_cookie);
    browser_data::record_user(router, &mut response, context, &call.headers, &grant.user);
    Ok(response)
}

/// Ends the user's sessions on both hosts, revokes the user's app tokens, and closes the user's open streams. The
/// identity provider's session is not affected.
pub(super) async fn sign_out(
    router: &RouterState,
    context: &RequestContext,
    headers: &HeaderMap,
) -> Result<Response, Problem> {
    if let Some(identity) = router.identify(context, headers).await? {
        let user = identity.user();
        let generation = router.sessions.revoke_all(user).await.map_err(|error| session_problem(&error))?;
        router.sign_outs.record_sign_out(user, generation, Duration::ZERO);
    }
    let mut response = StatusCode::NO_CONTENT.into_response();
    response
        .headers_mut()
        .append(SET_COOKIE, RouterCookie::Session(context.host).expired_cookie_header(context.scheme));
    browser_data::clear_data(&mut response);
    Ok(response)
}

pub(super) fn host_url(router: &RouterState, context: &RequestContext, host: PublicHost) -> String {
    format!("{}://{}", context.scheme, router.config.address(host).authority(&context.authority))
}
