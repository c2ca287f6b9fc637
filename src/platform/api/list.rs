//! GET `/vps`: lists machines, newest first, with keyset pagination.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::call::ApiCall;
use super::endpoint::{
    Access, CURSOR, Endpoint, OPERATOR, READ, documented_json, handle_name, idp_user_id, slot_name, status,
};
use crate::context::Platform;
use crate::db::machines::{self, MachineFilter, MachineScope};
use axum::routing::get;
use http::Method;
use svc_http::openapi::{Operation, Parameter, ParameterLocation, boolean, schema_of, uuid};
use svc_http::problem::{Code, Problem};
use svc_wire::machine::MachinePage;

const DEFAULT_PAGE_SIZE: usize = 100;
const MAX_PAGE_SIZE: usize = 500;

pub async fn handle(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    call.authenticate_operator(&platform).await?;
    let mut query = call.request.query_fields();
    let scope = match query.flag("deleted") {
        Some(true) => MachineScope::Former,
        Some(false) | None => MachineScope::Active,
    };
    let filter = MachineFilter {
        status: query.optional("status"),
        user: query.optional("idpUserId"),
        slot: query.optional("slot"),
        handle: query.optional("handle"),
        scope,
        before: query.optional("cursor"),
    };
    let limit = query.number_in_range("limit", 1..=MAX_PAGE_SIZE, DEFAULT_PAGE_SIZE);
    query.finish(Some(()))?;

    let session = platform.report_db.session().await?;
    let fetch_limit = i64::try_from(limit + 1).unwrap_or(i64::MAX);
    let mut rows = machines::list(&session, &filter, fetch_limit).await?;
    let has_more = rows.len() > limit;
    rows.truncate(limit);
    let next_cursor = rows.last().filter(|_| has_more).map(|machine| machine.id.to_string());
    let page = MachinePage { machines: rows.iter().map(Into::into).collect(), next_cursor };
    Ok(Json(page).into_response())
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(READ),
    operation: Operation {
        id: "listMachines",
        method: Method::GET,
        path: "/vps",
        summary: "Lists machines, newest first.",
        credentials: &[OPERATOR],
        parameters: &[STATUS, USER, SLOT, HANDLE, DELETED, LIMIT, Parameter { schema: uuid, ..CURSOR }],
        body: None,
        responses: &[documented_json(200, "A page of machines.", schema_of::<MachinePage>)],
        problems: &[Code::DatabaseUnavailable],
    },
    serve: || get(handle),
};

const fn filter_parameter(name: &'static str, schema: fn() -> Value, description: &'static str) -> Parameter {
    Parameter { name, location: ParameterLocation::Query, schema, description }
}

const STATUS: Parameter = filter_parameter("status", status, "Only machines with this status.");
const USER: Parameter = filter_parameter("idpUserId", idp_user_id, "Only machines of this user.");
const SLOT: Parameter = filter_parameter("slot", slot_name, "Only machines of slots with this name.");
const HANDLE: Parameter = filter_parameter("handle", handle_name, "Only machines with this handle.");
const DELETED: Parameter =
    filter_parameter("deleted", boolean, "true: list deleted and replaced machines instead of active ones.");
const LIMIT: Parameter = filter_parameter(
    "limit",
    || json!({ "type": "integer", "minimum": 1, "maximum": MAX_PAGE_SIZE, "default": DEFAULT_PAGE_SIZE }),
    "Page size.",
);
