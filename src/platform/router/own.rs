//! The router's own paths, below `/_svc/` on both hosts. None of them is ever forwarded: a host's `/_svc/internal`
//! cannot be reached from outside.

use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, SET_COOKIE};
use http::{HeaderValue, Method, StatusCode};
use serde_json::json;

use super::cookie::RouterCookie;
use super::directory::Found;
use super::door::Door;
use super::identity::Identity;
use super::own_routes::{
    CHOOSE_ACCOUNT, CHOOSE_SLOT, HAND_OVER, LIST_SLOTS, MINT_APP_TOKEN, SIGN_OUT, TAKE_SESSION,
};
use super::page::{self, Absence};
use super::serve::{Visit, redirect, session_failure};
use super::session::LIFE_SECONDS;
use super::{Site, account, app_token, sign_in};
use crate::http::openapi::Operation;
use crate::http::problem::{Code, Problem};
use crate::machine::name::Slot;
use crate::platform::api::call::{self, Call};

const SLOTS_PAGE: &str = include_str!("slots.html");
const PREFIX: &str = "/_svc";

/// One of the router's own routes: on which host, and what serves it.
pub struct Own {
    pub operation: Operation,
    /// `None`: on both.
    pub(super) door: Option<Door>,
    pub(super) act: Act,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Act {
    ListSlots,
    ChooseSlot,
    ChooseAccount,
    SignOut,
    HandOver,
    TakeSession,
    MintAppToken,
}

impl Own {
    /// A HEAD only where a look changes nothing: the other pages use a code up, or make one.
    fn takes(&self, method: &Method) -> bool {
        let own = &self.operation.method;
        own == method || (method == Method::HEAD && own == Method::GET && matches!(self.act, Act::ListSlots))
    }
}

pub static ROUTES: [&Own; 7] =
    [&LIST_SLOTS, &CHOOSE_SLOT, &CHOOSE_ACCOUNT, &MINT_APP_TOKEN, &SIGN_OUT, &HAND_OVER, &TAKE_SESSION];

pub(super) fn is_ours(path: &str) -> bool {
    path.strip_prefix(PREFIX).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

pub(super) async fn answer(site: &Site, visit: &Visit, request: Request) -> Result<Response, Problem> {
    let path = request.uri().path();
    let here: Vec<&Own> = ROUTES
        .into_iter()
        .filter(|own| own.operation.path == path && own.door.is_none_or(|door| door == visit.door))
        .collect();
    let Some(own) = here.iter().find(|own| own.takes(request.method())) else {
        return Ok(refused(&here, request).await);
    };
    let call = Call::read(request).await?;
    match own.act {
        Act::ListSlots => list(site, visit, &call).await,
        Act::ChooseSlot => choose(site, visit, &call).await,
        Act::ChooseAccount => account::choose(site, visit, &call).await,
        Act::SignOut => sign_in::sign_out(site, visit, &call.headers).await,
        Act::HandOver => sign_in::hand_over(site, visit, &call).await,
        Act::TakeSession => sign_in::take(site, visit, &call).await,
        Act::MintAppToken => app_token_for(site, visit, &call).await,
    }
}

/// Nothing is at this path, or it takes other methods.
async fn refused(here: &[&Own], request: Request) -> Response {
    call::discard(&mut request.into_body()).await;
    if here.is_empty() {
        return Problem::new(Code::NotFound, "There is nothing at this path of the router's own.")
            .into_response();
    }
    let detail = "This route takes another method; the header Allow names it.";
    let mut answer = Problem::new(Code::MethodNotAllowed, detail).into_response();
    let takes: Vec<&str> = here.iter().map(|own| own.operation.method.as_str()).collect();
    if let Ok(allow) = HeaderValue::from_str(&takes.join(", ")) {
        answer.headers_mut().insert(ALLOW, allow);
    }
    answer
}

/// The user's slots, oldest first, and which one this browser is led to.
async fn list(site: &Site, visit: &Visit, call: &Call) -> Result<Response, Problem> {
    let Some(identity) = site.identify(visit, &call.headers).await? else {
        return sign_in::ask(site, visit, &call.uri);
    };
    if let Some(page) = account::unsettled(site, visit, &identity, &call.headers, &call.uri) {
        return Ok(page);
    }
    let Some(machines) = site.directory.machines(identity.user()) else {
        return Ok(Absence::Unknown.answer(visit.page));
    };
    let current = match site.directory.find(identity.user(), identity.slot()) {
        Found::Running(machine, _) | Found::Waiting(machine) => Some(machine.row.id),
        Found::Nothing | Found::Unknown => None,
    };
    let rows = machines.iter().map(|machine| (&machine.row, Some(machine.row.id) == current));
    if visit.page {
        let buttons: String = rows
            .map(|(row, current)| {
                let mark = if current { " aria-current=\"true\"" } else { "" };
                // Slots, handles and statuses hold nothing that HTML would read.
                format!(
                    "<button name=\"slot\" value=\"{0}\"{mark}><b>{0}</b><span>{1}</span></button>",
                    row.slot, row.status
                )
            })
            .collect();
        return Ok(page::html(StatusCode::OK, page::styled(SLOTS_PAGE).replace("{{buttons}}", &buttons)));
    }
    let slots: Vec<_> = rows
        .map(|(row, current)| {
            json!({
                "slot": row.slot, "handle": row.handle, "machineId": row.id, "status": row.status,
                "current": current,
            })
        })
        .collect();
    Ok(json_answer(&json!({ "slots": slots })))
}

/// Remembers a slot in the browser's session, and opens one where there is none yet.
async fn choose(site: &Site, visit: &Visit, call: &Call) -> Result<Response, Problem> {
    let Some(identity) = site.identify(visit, &call.headers).await? else {
        return Err(sign_in::first());
    };
    // A form of a page, or a program.
    let form = call.is_form();
    let mut fields = if form { call.form()? } else { call.fields()? };
    let slot = fields.required::<Slot>("slot");
    let slot = fields.finish(slot)?;
    let machines = site.directory.machines(identity.user());
    let known = machines.is_some_and(|machines| machines.iter().any(|machine| machine.row.slot == slot));
    if !known {
        return Err(Problem::new(Code::NotFound, "You have no such slot; GET /_svc/slots lists yours."));
    }
    let mut set = None;
    let remembered = match &identity {
        Identity::Session(session) | Identity::Disputed(session, _) => {
            site.sessions.choose(session, &slot).await
        }
        Identity::Cookie(subject) => {
            site.sessions.open(visit.door, &subject.user, Some(&slot)).await.map(|(token, _)| {
                set = Some(RouterCookie::Session(visit.door).set(&token, visit.scheme, LIFE_SECONDS));
                true
            })
        }
        Identity::Bearer(_) => {
            let detail = "A slot is remembered by a browser's session, which a bearer token has not: \
                          send the session's cookie instead.";
            return Err(Problem::new(Code::InvalidRequest, detail));
        }
    };
    if !remembered.map_err(|error| session_failure(&error))? {
        return Err(Problem::new(Code::Unauthorized, "The session has ended; sign in again."));
    }
    let mut answer =
        if form { redirect(StatusCode::SEE_OTHER, "/") } else { json_answer(&json!({ "slot": slot })) };
    if let Some(set) = set {
        answer.headers_mut().append(SET_COOKIE, set);
    }
    Ok(answer)
}

/// A token for one app on the machine that this owner is led to; the frame renews its own by this.
async fn app_token_for(site: &Site, visit: &Visit, call: &Call) -> Result<Response, Problem> {
    let Some(identity) = site.identify(visit, &call.headers).await? else {
        return Err(sign_in::first());
    };
    let mut fields = call.fields()?;
    let app: Option<String> = fields.required("app");
    if app.as_deref().is_some_and(|app| !app_token::is_slug(app)) {
        fields.wrong("app", "must be an app's slug, such as notes");
    }
    let app = fields.finish(app)?;
    let machine = match site.directory.find(identity.user(), identity.slot()) {
        Found::Running(machine, _) => machine,
        Found::Waiting(machine) => return Ok(Absence::of(&machine.row).answer(false)),
        Found::Nothing => return Ok(Absence::NoMachine.answer(false)),
        Found::Unknown => return Ok(Absence::Unknown.answer(false)),
    };
    let minted = site.mint(visit, &machine, &identity, &app).ok_or_else(sign_in::first)?;
    Ok(json_answer(&json!({ "token": minted.token, "expiresAt": minted.expires_at })))
}

fn json_answer(body: &serde_json::Value) -> Response {
    let mut answer = body.to_string().into_response();
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    answer
}
