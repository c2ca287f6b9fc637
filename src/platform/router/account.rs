//! Which account a browser uses, where its session and the identity provider's cookie name different users.
//!
//! Two people may share a browser, so a page asks. Any host of the same domain can plant the provider's cookie, so until
//! the person has decided, the session counts and the provider's user gets nothing.

use axum::response::Response;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as B64;
use http::header::{HeaderMap, SET_COOKIE};
use http::{StatusCode, Uri};

use super::cookie::RouterCookie;
use super::identity::Identity;
use super::serve::{Visit, redirect, session_failure};
use super::session::{LIFE_SECONDS, hash};
use super::{Site, page, sign_in};
use crate::http::problem::Problem;
use crate::machine::name::IdpUserId;
use crate::platform::api::call::Call;

pub(super) const PATH: &str = "/_svc/account";
const TEMPLATE: &str = include_str!("account.html");

/// What the person decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    Session,
    Provider,
}

impl Choice {
    pub(super) const NAMES: [&str; 2] = ["session", "provider"];
}

impl std::str::FromStr for Choice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "session" => Ok(Self::Session),
            "provider" => Ok(Self::Provider),
            _ => Err("must be session or provider"),
        }
    }
}

/// The page that asks, where a person looks and has not decided between these two users.
pub(super) fn unsettled(
    site: &Site,
    visit: &Visit,
    identity: &Identity,
    headers: &HeaderMap,
    uri: &Uri,
) -> Option<Response> {
    let Identity::Disputed(session, subject) = identity else { return None };
    let kept = RouterCookie::KeptAccount.get(headers, visit.scheme);
    if !visit.page || kept == Some(&mark(&session.user, &subject.user)) {
        return None;
    }
    let path = uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
    let return_to = if sign_in::is_local(path) { path } else { "/" };
    let body = page::styled(TEMPLATE)
        .replace("{{session}}", &site.account_name(&session.user))
        .replace("{{provider}}", &site.account_name(&subject.user))
        .replace("{{return_to}}", &in_attribute(return_to));
    Some(page::html(StatusCode::CONFLICT, body))
}

/// Keeps the session's account, or ends that session and opens one for the provider's user.
pub(super) async fn choose(site: &Site, visit: &Visit, call: &Call) -> Result<Response, Problem> {
    let Some(identity) = site.identify(visit, &call.headers).await? else {
        return Err(sign_in::first());
    };
    let mut fields = if call.is_form() { call.form()? } else { call.fields()? };
    let choice = fields.required::<Choice>("account");
    let return_to = fields.optional::<String>("returnTo");
    let choice = fields.finish(choice)?;
    let return_to = return_to.filter(|path| sign_in::is_local(path)).unwrap_or_else(|| "/".to_owned());
    let mut answer = redirect(StatusCode::SEE_OTHER, &return_to);
    // Already decided, in another tab or by a double click.
    let Identity::Disputed(session, subject) = &identity else { return Ok(answer) };
    let set = match choice {
        Choice::Session => {
            RouterCookie::KeptAccount.set(&mark(&session.user, &subject.user), visit.scheme, LIFE_SECONDS)
        }
        Choice::Provider => {
            let opened = site.sessions.open(visit.door, &subject.user, None).await;
            let (token, _) = opened.map_err(|error| session_failure(&error))?;
            site.sessions.revoke(session).await.map_err(|error| session_failure(&error))?;
            RouterCookie::Session(visit.door).set(&token, visit.scheme, LIFE_SECONDS)
        }
    };
    answer.headers_mut().append(SET_COOKIE, set);
    Ok(answer)
}

impl Site {
    /// As the user knows it: the name of their computer.
    fn account_name(&self, user: &IdpUserId) -> String {
        let machines = self.directory.machines(user).unwrap_or_default();
        // Handles hold nothing that HTML would interpret.
        machines
            .first()
            .map_or_else(|| "an account without a computer".to_owned(), |it| it.row.handle.to_string())
    }
}

/// Remembers a decision for these two users alone.
fn mark(session: &IdpUserId, provider: &IdpUserId) -> String {
    B64.encode(hash(format!("{session}\0{provider}").as_bytes()))
}

fn in_attribute(text: &str) -> String {
    text.replace('&', "&amp;").replace('"', "&quot;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decision_is_for_two_users_in_their_roles() {
        let user = |text: &str| text.parse::<IdpUserId>().unwrap();
        assert_eq!(mark(&user("a"), &user("b")), mark(&user("a"), &user("b")));
        assert_ne!(mark(&user("a"), &user("b")), mark(&user("b"), &user("a")));
        assert_ne!(mark(&user("a"), &user("b")), mark(&user("a"), &user("c")));
    }

    #[test]
    fn a_path_cannot_end_its_attribute() {
        assert_eq!(in_attribute(r#"/?a="><b>&"#), "/?a=&quot;&gt;&lt;b&gt;&amp;");
    }
}
