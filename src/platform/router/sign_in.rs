//! How a browser without a session gets one: at the identity provider, and from `APP_HOST` to `CODE_HOST` by a
//! one-time code.
//!
//! The code works only together with a nonce that the asking browser holds in a cookie of `CODE_HOST`, so that nobody
//! can be signed in as somebody else by a link.

use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::header::{HeaderMap, SET_COOKIE};
use http::{StatusCode, Uri};
use url::form_urlencoded;

use super::Site;
use super::account;
use super::cookie::RouterCookie;
use super::door::Door;
use super::serve::{Visit, redirect, session_failure};
use super::session::{Handed, LIFE_SECONDS, Origin, SessionError, random};
use crate::http::problem::{Code, Problem};
use crate::platform::api::call::Call;

/// On `APP_HOST`: makes a code for the browser that holds `state` on `CODE_HOST`.
pub(super) const HAND_OVER: &str = "/_svc/code-session";
/// On `CODE_HOST`: takes it.
pub(super) const TAKE: &str = "/_svc/session";
const STATE_SECONDS: u64 = 600;
const LONGEST_RETURN: usize = 2048;

/// Answers a request that nobody has signed for.
pub(super) fn ask(site: &Site, visit: &Visit, uri: &Uri) -> Result<Response, Problem> {
    if !visit.page {
        return Err(first());
    }
    let path = uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
    match visit.door {
        Door::App => {
            let mut to = site.config.sign_in.clone();
            let here =
                format!("{}://{}{path}", visit.scheme, site.config.app_host.authority(&visit.authority));
            to.query_pairs_mut().append_pair("redirect_url", &here);
            Ok(redirect(StatusCode::FOUND, to.as_str()))
        }
        Door::Code => {
            let state = random().map_err(|error| Problem::internal(&error))?;
            let return_to = if is_local(path) { path } else { "/" };
            let query = form_urlencoded::Serializer::new(String::new())
                .append_pair("state", &state)
                .append_pair("return_to", return_to)
                .finish();
            let mut answer = redirect(
                StatusCode::FOUND,
                &format!("{}{HAND_OVER}?{query}", url_of(site, visit, Door::App)),
            );
            let set = RouterCookie::State.set(&state, visit.scheme, STATE_SECONDS);
            answer.headers_mut().append(SET_COOKIE, set);
            Ok(answer)
        }
    }
}

/// On `APP_HOST`, for whoever is known there.
pub(super) async fn hand_over(site: &Site, visit: &Visit, call: &Call) -> Result<Response, Problem> {
    let Some(identity) = site.identify(visit, &call.headers).await? else {
        return ask(site, visit, &call.uri);
    };
    if let Some(page) = account::unsettled(site, visit, &identity, &call.headers, &call.uri) {
        return Ok(page);
    }
    let mut query = call.query();
    let state: Option<String> = query.required("state");
    let return_to: Option<String> = query.optional("return_to");
    let state = query.allow_unknown().finish(state)?;
    let return_to = return_to.filter(|path| is_local(path)).unwrap_or_else(|| "/".to_owned());
    let handed = Handed {
        origin: Origin { opened_by: identity.session().map(|session| session.hash), sign_out: 0 },
        user: identity.user().clone(),
        slot: identity.slot().cloned(),
        return_to,
    };
    let code = site.sessions.issue_code(&handed, &state).await.map_err(|error| failed(&error))?;
    Ok(redirect(StatusCode::FOUND, &format!("{}{TAKE}?code={code}", url_of(site, visit, Door::Code))))
}

/// On `CODE_HOST`: the code, together with the nonce, becomes a session.
pub(super) async fn take(site: &Site, visit: &Visit, call: &Call) -> Result<Response, Problem> {
    let mut query = call.query();
    let code: Option<String> = query.required("code");
    let code = query.allow_unknown().finish(code)?;
    site.admit_check(visit)?;
    let handed = match RouterCookie::State.get(&call.headers, visit.scheme) {
        Some(state) => site.sessions.redeem_code(&code, state).await.map_err(|error| failed(&error))?,
        None => None,
    };
    let handed = handed.ok_or_else(|| {
        Problem::new(
            Code::Unauthorized,
            "This sign-in is over, or was begun in another browser. Open the page again.",
        )
    })?;
    let opened =
        site.sessions.open_within(handed.origin, Door::Code, &handed.user, handed.slot.as_ref()).await;
    let (token, _) = opened.map_err(|error| failed(&error))?;
    let mut answer = redirect(StatusCode::FOUND, &handed.return_to);
    let headers = answer.headers_mut();
    let session = RouterCookie::Session(Door::Code).set(&token, visit.scheme, LIFE_SECONDS);
    headers.append(SET_COOKIE, session);
    headers.append(SET_COOKIE, RouterCookie::State.clear(visit.scheme));
    Ok(answer)
}

/// Ends the user's sessions on both hosts, app tokens and open streams; the provider's own is the provider's.
pub(super) async fn sign_out(site: &Site, visit: &Visit, headers: &HeaderMap) -> Result<Response, Problem> {
    if let Some(identity) = site.identify(visit, headers).await? {
        let user = identity.user();
        let generation = site.sessions.revoke_all(user).await.map_err(|error| failed(&error))?;
        site.sign_outs.record(user, generation, Duration::ZERO);
    }
    let mut answer = StatusCode::NO_CONTENT.into_response();
    answer.headers_mut().append(SET_COOKIE, RouterCookie::Session(visit.door).clear(visit.scheme));
    Ok(answer)
}

/// The refusal of a program that nobody has signed for.
pub(super) fn first() -> Problem {
    Problem::new(Code::Unauthorized, "Sign in first, or send the identity provider's token as bearer.")
}

fn failed(error: &SessionError) -> Problem {
    session_failure(error)
}

fn url_of(site: &Site, visit: &Visit, door: Door) -> String {
    format!("{}://{}", visit.scheme, site.config.host(door).authority(&visit.authority))
}

/// A path of the host itself, which no browser reads as another host.
pub(super) fn is_local(path: &str) -> bool {
    path.len() <= LONGEST_RETURN
        && path.starts_with('/')
        && !path.starts_with("//")
        && path.chars().all(|c| c.is_ascii_graphic() && c != '\\')
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_return_path_stays_on_its_host() {
        for good in ["/", "/a?b=c#d", "/%2F/x"] {
            assert!(super::is_local(good), "{good}");
        }
        for bad in ["", "a", "//evil", "/\\evil", "https://evil", "/a\nb", "/a b", "/\t/evil"] {
            assert!(!super::is_local(bad), "{bad:?}");
        }
    }
}
