//! The router's own paths, below `/_svc/` on both hosts. None of them is ever forwarded: a host's `/_svc/internal`
//! cannot be reached from outside.

use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::header::{CACHE_CONTROL, CONTENT_TYPE, SET_COOKIE};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use serde::Deserialize;
use serde_json::json;
use url::form_urlencoded;

use super::directory::Found;
use super::door::Door;
use super::identity::Identity;
use super::page::{self, Absence};
use super::serve::{Visit, database_unavailable, redirect};
use super::session::LIFE_SECONDS;
use super::{Site, app_token, cookie, sign_in};
use crate::http::problem::{Code, Problem};
use crate::machine::name::Slot;

const SLOTS: &str = "/_svc/slots";
const SIGN_OUT: &str = "/_svc/sign-out";
const LARGEST_BODY: usize = 64 * 1024;
const APP_TOKEN: &str = "/_svc/app-token";
const SLOTS_PAGE: &str = include_str!("slots.html");

pub(super) fn is_ours(path: &str) -> bool {
    path == "/_svc" || path.starts_with("/_svc/")
}

pub(super) async fn answer(site: &Site, visit: &Visit, request: Request) -> Result<Response, Problem> {
    let path = request.uri().path();
    match (path, request.method(), visit.door) {
        (SLOTS, &Method::GET | &Method::HEAD, _) => list(site, visit, request.uri(), request.headers()).await,
        (SLOTS, &Method::POST, _) => choose(site, visit, request).await,
        (SIGN_OUT, &Method::POST, _) => sign_in::sign_out(site, visit, request.headers()).await,
        (sign_in::HAND_OVER, &Method::GET, Door::App) => sign_in::hand_over(site, visit, request).await,
        (sign_in::TAKE, &Method::GET, Door::Code) => {
            sign_in::take(site, request.uri(), request.headers()).await
        }
        (APP_TOKEN, &Method::POST, Door::App) => app_token_for(site, visit, request).await,
        (SLOTS | SIGN_OUT, _, _) | (APP_TOKEN, _, Door::App) => {
            Err(Problem::new(Code::MethodNotAllowed, "This method is not served here."))
        }
        _ => Err(Problem::new(Code::NotFound, "There is nothing at this path.")),
    }
}

/// The user's slots, oldest first, and which one this browser is led to.
async fn list(site: &Site, visit: &Visit, uri: &Uri, headers: &HeaderMap) -> Result<Response, Problem> {
    let Some(identity) = site.identify(visit, headers).await? else {
        return sign_in::ask(site, visit, uri);
    };
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
        return Ok(page::html(StatusCode::OK, SLOTS_PAGE.replace("{{buttons}}", &buttons)));
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Choice {
    slot: Slot,
}

/// Remembers a slot in the browser's session, and opens one where there is none yet.
async fn choose(site: &Site, visit: &Visit, request: Request) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let Some(identity) = site.identify(visit, &parts.headers).await? else {
        return Err(Problem::new(Code::Unauthorized, "Sign in first."));
    };
    let body = axum::body::to_bytes(body, LARGEST_BODY).await;
    let body = body.map_err(|_| Problem::new(Code::RequestTooLarge, "At most 64 KiB are read here."))?;
    let kind = parts.headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let form = kind.starts_with("application/x-www-form-urlencoded");
    let slot = if form { from_form(&body)? } else { from_json(&body)? };
    let machines = site.directory.machines(identity.user());
    let known = machines.is_some_and(|machines| machines.iter().any(|machine| machine.row.slot == slot));
    if !known {
        return Err(Problem::new(Code::NotFound, "You have no such slot."));
    }
    let mut set = None;
    let remembered = match &identity {
        Identity::Session(session) => site.sessions.choose(session, &slot).await,
        Identity::Cookie(subject) => {
            site.sessions.open(visit.door, &subject.user, Some(&slot)).await.map(|(token, _)| {
                set = Some(cookie::set(visit.door.session_cookie(), &token, "/", LIFE_SECONDS));
                true
            })
        }
        Identity::Bearer(_) => {
            let detail = "A slot is remembered by a browser's session; a bearer token has none.";
            return Err(Problem::new(Code::InvalidRequest, detail));
        }
    };
    if !remembered.map_err(|error| database_unavailable(&error))? {
        return Err(Problem::new(Code::Unauthorized, "The session has ended."));
    }
    let mut answer =
        if form { redirect(StatusCode::SEE_OTHER, "/") } else { json_answer(&json!({ "slot": slot })) };
    if let Some(set) = set {
        answer.headers_mut().append(SET_COOKIE, set);
    }
    Ok(answer)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    app: String,
}

/// A token for one app on the machine that this owner is led to; the frame renews its own by this.
async fn app_token_for(site: &Site, visit: &Visit, request: Request) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let Some(identity) = site.identify(visit, &parts.headers).await? else {
        return Err(Problem::new(Code::Unauthorized, "Sign in first."));
    };
    let body = axum::body::to_bytes(body, LARGEST_BODY).await;
    let body = body.map_err(|_| Problem::new(Code::RequestTooLarge, "At most 64 KiB are read here."))?;
    let wanted: Wanted =
        serde_json::from_slice(&body).map_err(|error| Problem::field("", error.to_string()))?;
    if !app_token::is_slug(&wanted.app) {
        return Err(Problem::field("/app", "must be an app's slug, such as notes"));
    }
    let machine = match site.directory.find(identity.user(), identity.slot()) {
        Found::Running(machine, _) => machine,
        Found::Waiting(machine) => return Ok(Absence::NotRunning(machine.row.status).answer(false)),
        Found::Nothing => return Ok(Absence::NoMachine.answer(false)),
        Found::Unknown => return Ok(Absence::Unknown.answer(false)),
    };
    let row = &machine.row;
    let minted = app_token::mint(&site.proof.borrow().app.current, &row.user, row.id, &wanted.app, visit.now);
    Ok(json_answer(&json!({ "token": minted.token, "expiresAt": minted.expires_at })))
}

fn from_json(body: &[u8]) -> Result<Slot, Problem> {
    let choice: Choice =
        serde_json::from_slice(body).map_err(|error| Problem::field("", error.to_string()))?;
    Ok(choice.slot)
}

fn from_form(body: &[u8]) -> Result<Slot, Problem> {
    let slot = form_urlencoded::parse(body).find(|(name, _)| name == "slot");
    let (_, slot) = slot.ok_or_else(|| Problem::field("/slot", "is required"))?;
    slot.parse().map_err(|error| Problem::field("/slot", format!("{error}")))
}

fn json_answer(body: &serde_json::Value) -> Response {
    let mut answer = body.to_string().into_response();
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    answer
}
