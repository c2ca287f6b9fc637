//! Handles the router's built-in routes, under `/_svc/` on both hosts. Requests under this prefix are never forwarded,
//! so a machine's `/_svc/internal` cannot be reached from outside.

use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, SET_COOKIE};
use http::{HeaderValue, StatusCode};
use serde_json::json;

use super::builtin_routes::{BuiltinAction, BuiltinRoute, ROUTES};
use super::cookie::RouterCookie;
use super::directory::MachineLookup;
use super::identity::Identity;
use super::page::{self, UnavailableReason};
use super::request_context::RequestContext;
use super::responses::{redirect, session_problem, sign_in_required};
use super::{RouterState, account, app_token, browser_data, sign_in};
use crate::signed_lifetimes::SESSION_SECONDS;
use svc_http::buffered_request::{BODY_LIMITS, BufferedRequest};
use svc_http::problem::{Code, Problem};
use svc_machine::name::Slot;

const SLOTS_PAGE: &str = include_str!("slots.html");
const PREFIX: &str = "/_svc";

pub(super) fn is_builtin_path(path: &str) -> bool {
    path.strip_prefix(PREFIX).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

pub(super) async fn handle(
    router: &RouterState,
    context: &RequestContext,
    request: Request,
) -> Result<Response, Problem> {
    let path = request.uri().path();
    let candidates: Vec<&BuiltinRoute> = ROUTES
        .into_iter()
        .filter(|route| route.operation.path == path && route.host.is_none_or(|host| host == context.host))
        .collect();
    let Some(route) = candidates.iter().find(|route| route.accepts(request.method())) else {
        return Ok(reject(&candidates, request).await);
    };
    let skips_data_clearing = matches!(route.action, BuiltinAction::SignOut | BuiltinAction::RedeemCode);
    if !skips_data_clearing
        && let Ok(Some(identity)) = router.identify(context, request.headers()).await
        && let Some(response) =
            browser_data::require_cleared_data(router, context, &identity, request.headers(), request.uri())
    {
        return Ok(response);
    }
    let call = BufferedRequest::read(request).await?;
    match route.action {
        BuiltinAction::ListSlots => list_slots(router, context, &call).await,
        BuiltinAction::ChooseSlot => choose_slot(router, context, &call).await,
        BuiltinAction::ChooseAccount => account::handle_choice(router, context, &call).await,
        BuiltinAction::SignOut => sign_in::sign_out(router, context, &call.headers).await,
        BuiltinAction::IssueCode => sign_in::issue_code(router, context, &call).await,
        BuiltinAction::RedeemCode => sign_in::redeem_code(router, context, &call).await,
        BuiltinAction::MintAppToken => mint_app_token(router, context, &call).await,
    }
}

/// Rejects an unknown path or a wrong method.
async fn reject(candidates: &[&BuiltinRoute], request: Request) -> Response {
    BODY_LIMITS.drain(request.into_body()).await;
    if candidates.is_empty() {
        return Problem::new(Code::NotFound, "The router has no route at this path.").into_response();
    }
    let detail = "This route does not accept the method; see the Allow header.";
    let mut response = Problem::new(Code::MethodNotAllowed, detail).into_response();
    let methods: Vec<&str> = candidates.iter().flat_map(|route| route.methods()).collect();
    if let Ok(allow) = HeaderValue::from_str(&methods.join(", ")) {
        response.headers_mut().insert(ALLOW, allow);
    }
    response
}

/// Lists the user's slots, oldest first, and marks the one that this browser uses.
async fn list_slots(
    router: &RouterState,
    context: &RequestContext,
    call: &BufferedRequest,
) -> Result<Response, Problem> {
    let Some(identity) = router.identify(context, &call.headers).await? else {
        return sign_in::start_sign_in(router, context, &call.headers, &call.uri);
    };
    if let Some(page) = account::choice_page(router, context, &identity, &call.headers, &call.uri) {
        return Ok(page);
    }
    let Some(machines) = router.directory.list_machines(identity.user()) else {
        return Ok(UnavailableReason::Unknown.respond(context.wants_page));
    };
    let current_id = match router.directory.find(identity.user(), identity.slot()) {
        MachineLookup::Running(machine, _) | MachineLookup::NotRunning(machine) => Some(machine.record.id),
        MachineLookup::NoMachine | MachineLookup::Unknown => None,
    };
    let rows = machines.iter().map(|machine| (&machine.record, Some(machine.record.id) == current_id));
    if context.wants_page {
        let buttons: String = rows
            .map(|(row, is_current)| {
                let attribute = if is_current { " aria-current=\"true\"" } else { "" };
                // Slots and statuses contain no HTML special characters.
                format!(
                    "<button name=\"slot\" value=\"{0}\"{attribute}><b>{0}</b><span>{1}</span></button>",
                    row.slot, row.status
                )
            })
            .collect();
        return Ok(page::form_response(
            StatusCode::OK,
            page::insert_style(SLOTS_PAGE).replace("{{buttons}}", &buttons),
            &router.form_redirect_origins(context),
        ));
    }
    let slots: Vec<_> = rows
        .map(|(row, is_current)| {
            json!({
                "slot": row.slot, "handle": row.handle, "machineId": row.id, "status": row.status,
                "current": is_current,
            })
        })
        .collect();
    Ok(json_response(&json!({ "slots": slots })))
}

/// Stores the chosen slot in the browser's session, and opens a session if there is none.
async fn choose_slot(
    router: &RouterState,
    context: &RequestContext,
    call: &BufferedRequest,
) -> Result<Response, Problem> {
    let identity = router.require_identity(context, &call.headers).await?;
    // The router's page sends a form; other clients send JSON.
    let is_form = call.is_form();
    let mut fields = if is_form { call.form_fields()? } else { call.json_fields()? };
    let slot = fields.required::<Slot>("slot");
    let slot = fields.finish(slot)?;
    let Some(machines) = router.directory.list_machines(identity.user()) else {
        return Ok(UnavailableReason::Unknown.respond(false));
    };
    if !machines.iter().any(|machine| machine.record.slot == slot) {
        return Err(Problem::new(
            Code::NotFound,
            "You have no slot with this name; GET /_svc/slots lists your slots.",
        ));
    }
    let mut set_cookie = None;
    let stored = match &identity {
        Identity::Session(session) | Identity::Disputed(session, _) => {
            router.sessions.choose_slot(session, &slot).await
        }
        Identity::Cookie(subject) => {
            router.sessions.open(context.host, &subject.user, Some(&slot)).await.map(|(token, _)| {
                set_cookie = Some(RouterCookie::Session(context.host).set_cookie_header(
                    &token,
                    context.scheme,
                    SESSION_SECONDS,
                ));
                true
            })
        }
        Identity::Bearer(_) => {
            let detail = "The chosen slot is stored in a browser session, which a request with a bearer token does not \
                          have: send the session cookie instead.";
            return Err(Problem::new(Code::InvalidRequest, detail));
        }
    };
    if !stored.map_err(|error| session_problem(&error))? {
        return Err(Problem::new(Code::Unauthorized, "The session has ended; sign in again."));
    }
    let mut response =
        if is_form { redirect(StatusCode::SEE_OTHER, "/") } else { json_response(&json!({ "slot": slot })) };
    if let Some(set_cookie) = set_cookie {
        response.headers_mut().append(SET_COOKIE, set_cookie);
    }
    Ok(response)
}

/// Issues a token for one app on the caller's machine; the app's frame renews its token here.
async fn mint_app_token(
    router: &RouterState,
    context: &RequestContext,
    call: &BufferedRequest,
) -> Result<Response, Problem> {
    let identity = router.require_identity(context, &call.headers).await?;
    let mut fields = call.json_fields()?;
    let app: Option<String> = fields.required("app");
    if app.as_deref().is_some_and(|app| !app_token::is_slug(app)) {
        fields.add_error("app", "must be an app's slug, such as notes");
    }
    let app = fields.finish(app)?;
    let machine = match router.directory.find(identity.user(), identity.slot()) {
        MachineLookup::Running(machine, _) => machine,
        MachineLookup::NotRunning(machine) => {
            return Ok(UnavailableReason::for_machine(&machine.record).respond(false));
        }
        MachineLookup::NoMachine => return Ok(UnavailableReason::NoMachine.respond(false)),
        MachineLookup::Unknown => return Ok(UnavailableReason::Unknown.respond(false)),
    };
    let minted = router.mint_app_token(context, &machine, &identity, &app).await;
    let minted = minted.map_err(|error| session_problem(&error))?.ok_or_else(sign_in_required)?;
    Ok(json_response(&json!({ "token": minted.token, "expiresAt": minted.expires_at })))
}

fn json_response(body: &serde_json::Value) -> Response {
    let mut response = body.to_string().into_response();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}
