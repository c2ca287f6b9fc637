//! Lets a user choose an account in a browser whose session and identity provider's cookie belong to different users.
//!
//! Two users may share a browser, so a page prompts for the choice. Any host on the same domain can set the provider's
//! cookie, so the session takes precedence until the user chooses an account.

use std::time::Duration;

use axum::response::Response;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as B64;
use http::header::{HeaderMap, SET_COOKIE};
use http::{StatusCode, Uri};

use super::cookie::RouterCookie;
use super::identity::Identity;
use super::page::UnavailableReason;
use super::request_context::RequestContext;
use super::responses::{redirect, session_problem};
use super::return_path::{is_local_path, local_path};
use super::session_token::sha256;
use super::{RouterState, browser_data, page};
use crate::signed_lifetimes::SESSION_SECONDS;
use svc_http::buffered_request::BufferedRequest;
use svc_http::problem::Problem;
use svc_machine::name::IdpUserId;

pub(super) const PATH: &str = "/_svc/account";
const TEMPLATE: &str = include_str!("account.html");

/// The account that the user chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AccountChoice {
    Session,
    Provider,
}

impl AccountChoice {
    pub(super) const NAMES: [&str; 2] = ["session", "provider"];
}

impl std::str::FromStr for AccountChoice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "session" => Ok(Self::Session),
            "provider" => Ok(Self::Provider),
            _ => Err("must be session or provider"),
        }
    }
}

/// Returns the page that prompts for the choice; `None` if none is needed, if the request is not for a page, or if the
/// user has already chosen to keep the session. Without usable routes, the accounts cannot be named, so the page says
/// that the machine cannot be found.
pub(super) fn choice_page(
    router: &RouterState,
    context: &RequestContext,
    identity: &Identity,
    headers: &HeaderMap,
    uri: &Uri,
) -> Option<Response> {
    let Identity::Disputed(session, subject) = identity else { return None };
    let kept_account = RouterCookie::KeptAccount.get(headers, context.scheme);
    if !context.wants_page || kept_account == Some(&kept_account_value(&session.user, &subject.user)) {
        return None;
    }
    let names = router.account_name(&session.user).zip(router.account_name(&subject.user));
    let Some((session_name, provider_name)) = names else {
        return Some(UnavailableReason::Unknown.respond(context.wants_page));
    };
    let return_to = local_path(uri);
    let body = page::insert_style(TEMPLATE)
        .replace("{{session}}", &session_name)
        .replace("{{provider}}", &provider_name)
        .replace("{{return_to}}", &escape_attribute(return_to));
    Some(page::form_response(StatusCode::CONFLICT, body, &router.form_redirect_origins(context)))
}

/// Keeps the session, or replaces it with a session for the provider's user.
pub(super) async fn handle_choice(
    router: &RouterState,
    context: &RequestContext,
    call: &BufferedRequest,
) -> Result<Response, Problem> {
    let identity = router.require_identity(context, &call.headers).await?;
    let mut fields = if call.is_form() { call.form_fields()? } else { call.json_fields()? };
    let choice = fields.required::<AccountChoice>("account");
    let return_to = fields.optional::<String>("returnTo");
    let choice = fields.finish(choice)?;
    let return_to = return_to.filter(|path| is_local_path(path)).unwrap_or_else(|| "/".to_owned());
    let mut response = redirect(StatusCode::SEE_OTHER, &return_to);
    // The accounts no longer differ, for example because the user has already switched in another tab.
    let Identity::Disputed(session, subject) = &identity else { return Ok(response) };
    let set_cookie = match choice {
        AccountChoice::Session => RouterCookie::KeptAccount.set_cookie_header(
            &kept_account_value(&session.user, &subject.user),
            context.scheme,
            SESSION_SECONDS,
        ),
        AccountChoice::Provider => {
            let opened = router.sessions.open(context.host, &subject.user, None).await;
            let (token, _) = opened.map_err(|error| session_problem(&error))?;
            let revoked = router.sessions.revoke(session).await;
            let generation = revoked.map_err(|error| session_problem(&error))?;
            router.sign_outs.record_sign_out(&session.user, generation, Duration::ZERO);
            RouterCookie::Session(context.host).set_cookie_header(&token, context.scheme, SESSION_SECONDS)
        }
    };
    response.headers_mut().append(SET_COOKIE, set_cookie);
    if choice == AccountChoice::Provider {
        browser_data::record_user(router, &mut response, context, &call.headers, &subject.user);
    }
    Ok(response)
}

impl RouterState {
    /// Returns a name that the user recognizes: the handle of their oldest machine, or a description if they have none;
    /// `None` if the routes are not loaded or too old.
    fn account_name(&self, user: &IdpUserId) -> Option<String> {
        let machines = self.directory.list_machines(user)?;
        // Handles contain no HTML special characters.
        Some(machines.first().map_or_else(
            || "an account without a computer".to_owned(),
            |machine| machine.record.handle.to_string(),
        ))
    }
}

/// Returns the cookie value that records that the session's user was chosen over the provider's user.
fn kept_account_value(session: &IdpUserId, provider: &IdpUserId) -> String {
    B64.encode(sha256(format!("{session}\0{provider}").as_bytes()))
}

fn escape_attribute(text: &str) -> String {
    text.replace('&', "&amp;").replace('"', "&quot;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_account_value_depends_on_users_and_roles() {
        let user = |text: &str| text.parse::<IdpUserId>().unwrap();
        assert_eq!(kept_account_value(&user("a"), &user("b")), kept_account_value(&user("a"), &user("b")));
        assert_ne!(kept_account_value(&user("a"), &user("b")), kept_account_value(&user("b"), &user("a")));
        assert_ne!(kept_account_value(&user("a"), &user("b")), kept_account_value(&user("a"), &user("c")));
    }

    #[test]
    fn escape_attribute_escapes_special_characters() {
        assert_eq!(escape_attribute(r#"/?a="><b>&"#), "/?a=&quot;&gt;&lt;b&gt;&amp;");
    }
}
