//! GET `/audit`: lists audit entries, newest first, with keyset pagination.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::Method;
use serde_json::{Value, json};

use super::call::ApiCall;
use super::endpoint::{Access, CURSOR, Endpoint, OPERATOR, READ_OR_ADMIN, documented_json};
use crate::context::Platform;
use crate::db::audit::{self, AuditFilter};
use svc_http::openapi::{Operation, Parameter, ParameterLocation, schema_of, text_up_to, time, uuid};
use svc_http::problem::{Code, Problem};
use svc_wire::audit::AuditPage;

const DEFAULT_PAGE_SIZE: usize = 100;
const MAX_PAGE_SIZE: usize = 500;
const MAX_FILTER_CHARS: usize = 256;

async fn handle(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    call.authenticate_operator(&platform).await?;
    let mut query = call.request.query_fields();
    let filter = AuditFilter {
        actor: query.optional_text("actor", MAX_FILTER_CHARS),
        action: query.optional_text("action", MAX_FILTER_CHARS),
        target: query.optional_text("target", MAX_FILTER_CHARS),
        since: query.optional_time("since"),
        until: query.optional_time("until"),
        before: query.optional("cursor"),
    };
    let limit = query.number_in_range("limit", 1..=MAX_PAGE_SIZE, DEFAULT_PAGE_SIZE);
    query.finish(Some(()))?;

    let session = platform.report_db.session().await?;
    let fetch_limit = i64::try_from(limit + 1).unwrap_or(i64::MAX);
    let mut rows = audit::list(&session, &filter, fetch_limit).await?;
    let has_more = rows.len() > limit;
    rows.truncate(limit);
    let next_cursor = rows.last().filter(|_| has_more).map(|entry| entry.id.to_string());
    let page = AuditPage { entries: rows.into_iter().map(Into::into).collect(), next_cursor };
    Ok(Json(page).into_response())
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(READ_OR_ADMIN),
    operation: Operation {
        id: "listAudit",
        method: Method::GET,
        path: "/audit",
        summary: "Lists audit entries, newest first: changes, and reads of owners' data, with their actors.",
        credentials: &[OPERATOR],
        parameters: &[ACTOR, ACTION, TARGET, SINCE, UNTIL, LIMIT, Parameter { schema: uuid, ..CURSOR }],
        body: None,
        responses: &[documented_json(200, "A page of entries.", schema_of::<AuditPage>)],
        problems: &[Code::DatabaseUnavailable],
    },
    serve: || get(handle),
};

const fn filter_parameter(name: &'static str, schema: fn() -> Value, description: &'static str) -> Parameter {
    Parameter { name, location: ParameterLocation::Query, schema, description }
}

fn filter_schema() -> Value {
    text_up_to(MAX_FILTER_CHARS)
}

const ACTOR: Parameter = filter_parameter(
    "actor",
    filter_schema,
    "An operator's name, `operator` for PLATFORM_SECRET, `platform` for the platform itself, or `machine:<id>`.",
);
const ACTION: Parameter =
    filter_parameter("action", filter_schema, "The action, for example `recover` or `operator.add`.");
const TARGET: Parameter = filter_parameter(
    "target",
    filter_schema,
    "The object of the action: a machine's id, USER/SLOT, or another identifier.",
);
const SINCE: Parameter = filter_parameter("since", time, "Entries at or after this time.");
const UNTIL: Parameter = filter_parameter("until", time, "Entries before this time.");
const LIMIT: Parameter = filter_parameter(
    "limit",
    || json!({ "type": "integer", "minimum": 1, "maximum": MAX_PAGE_SIZE, "default": DEFAULT_PAGE_SIZE }),
    "Page size.",
);
