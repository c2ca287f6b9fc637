//! GET `/vps`: machines, the newest first, in pages by key.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::call::Call;
use super::endpoint::{
    Access, CURSOR, Endpoint, OPERATOR, READ, handle_name, idp_user_id, slot_name, status, told,
};
use crate::http::openapi::{
    Operation, Parameter, Place, array, boolean, named, nullable, object, text, uuid,
};
use crate::http::problem::{Code, Problem};
use crate::platform::context::Platform;
use crate::platform::db::machine_row::MachineRow;
use crate::platform::db::machines::{self, MachineFilter, MachineScope};
use axum::routing::get;
use http::Method;

const PAGE: usize = 100;
const LARGEST_PAGE: usize = 500;

pub async fn handle(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    call.operator(&platform).await?;
    let mut query = call.query();
    let which = match query.flag("deleted") {
        Some(true) => MachineScope::Ended,
        Some(false) | None => MachineScope::Active,
    };
    let filter = MachineFilter {
        status: query.optional("status"),
        user: query.optional("idpUserId"),
        slot: query.optional("slot"),
        handle: query.optional("handle"),
        which,
        before: query.optional("cursor"),
    };
    let limit = query.within("limit", 1..=LARGEST_PAGE, PAGE);
    query.finish(Some(()))?;

    let session = platform.report_db.session().await?;
    let one_more = i64::try_from(limit + 1).unwrap_or(i64::MAX);
    let mut found = machines::list(&session, &filter, one_more).await?;
    let more = found.len() > limit;
    found.truncate(limit);
    let next = found.last().filter(|_| more).map(|machine| machine.id.to_string());
    let records: Vec<_> = found.iter().map(MachineRow::record).collect();
    Ok(Json(json!({"machines": records, "nextCursor": next})).into_response())
}

/// The route and its description.
pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(READ),
    operation: Operation {
        id: "listMachines",
        method: Method::GET,
        path: "/vps",
        summary: "Machines, the newest first.",
        credentials: &[OPERATOR],
        parameters: &[STATUS, USER, SLOT, HANDLE, DELETED, LIMIT, Parameter { schema: uuid, ..CURSOR }],
        body: None,
        answers: &[told(200, "A page.", || {
            object(&[("machines", array(named("Machine"))), ("nextCursor", nullable(text()))], &[])
        })],
        problems: &[Code::DatabaseUnavailable],
    },
    serve: || get(handle),
};

const fn by(name: &'static str, schema: fn() -> Value, about: &'static str) -> Parameter {
    Parameter { name, place: Place::Query, schema, about }
}

const STATUS: Parameter = by("status", status, "Only machines of this status.");
const USER: Parameter = by("idpUserId", idp_user_id, "Only this user's.");
const SLOT: Parameter = by("slot", slot_name, "Only of slots of this name.");
const HANDLE: Parameter = by("handle", handle_name, "Only with this handle.");
const DELETED: Parameter = by("deleted", boolean, "The ended ones instead of the active ones.");
const LIMIT: Parameter = by(
    "limit",
    || json!({ "type": "integer", "minimum": 1, "maximum": LARGEST_PAGE, "default": PAGE }),
    "The size of a page.",
);
