//! The handlers of the bridge's routes: they authorize the caller, find the table, plan, execute and respond.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request as HttpRequest, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use serde_json::json;

use super::describe::MAX_QUERY_BYTES;
use super::insert_batch::InsertRequest;
use super::plan::{self, NewRow, Plan};
use super::request::{Action, BridgeRequest, Operation, TableCall};
use super::response::{self, BridgeResponse, ResponseBudget};
use super::service::Bridge;
use super::{execute, problems, schemas};
use crate::apps::{App, ChangedRows, InFlightWrite, Table, WriteSize};
use crate::auth::{Caller, Principal};
use crate::body;
use svc_base::metrics::BRIDGE_ACTIONS;
use svc_http::problem::{Code, Problem};

/// `POST /api/bridge/query`.
pub async fn query(State(bridge): State<Arc<Bridge>>, caller: Caller, request: HttpRequest) -> Response {
    let (head, body) = request.into_parts();
    let mut action = "unreadable";
    let result = handle_query(&bridge, &caller.0, &head.headers, body, &mut action).await;
    BRIDGE_ACTIONS.add_one([action, result.as_ref().map_or_else(|problem| problem.code.as_str(), |_| "ok")]);
    result.unwrap_or_else(IntoResponse::into_response)
}

/// `GET /api/bridge/schemas`.
pub async fn list_schemas(State(bridge): State<Arc<Bridge>>, caller: Caller) -> Response {
    schemas_response(&bridge, &caller.0, None).unwrap_or_else(IntoResponse::into_response)
}

async fn handle_query(
    bridge: &Bridge,
    principal: &Principal,
    headers: &HeaderMap,
    body: Body,
    action_name: &mut &'static str,
) -> Result<Response, Problem> {
    body::require_json(headers)?;
    let body = body::read(body, MAX_QUERY_BYTES).await?;
    let BridgeRequest { app, action } = BridgeRequest::parse(&body)?;
    *action_name = action.name();
    let app = app.as_deref();
    let calls = match &action {
        Action::Schemas => return schemas_response(bridge, principal, app),
        Action::Table(call) => std::slice::from_ref(call),
        Action::Transaction(calls) => calls,
    };
    let slug = app.unwrap_or_default();
    require_access(principal, slug)?;
    // While writers are stopped, the bridge rejects reads as well.
    let _permit = bridge.writers.admit()?;
    let app = bridge.find_app(slug)?;
    if let Action::Table(TableCall { table, operation: Operation::Insert { data } }) = &action {
        let table = find_table(&app, table)?;
        let row = NewRow::parse(&app.schema, table, data).map_err(|errors| Problem::invalid(&errors))?;
        bridge.quotas.admit(|| bridge.kernel.settings(), principal, slug)?;
        let size = WriteSize { body_bytes: body.len(), rows: 1, is_filtered_mutation: false };
        let write = bridge.quotas.begin_write(|| bridge.kernel.settings(), slug, size);
        let request = InsertRequest { app: &app, table, row, body_bytes: body.len() };
        let response = bridge.inserts.execute(request, &write.changed_rows).await?;
        write.complete();
        bridge.changes.wake();
        return Ok(response::json_response(response.status, response.body));
    }
    let is_transaction = matches!(action, Action::Transaction(_));
    let add_index = |problem, index| {
        if is_transaction { problems::with_operation_index(problem, index) } else { problem }
    };
    let mut plans = Vec::with_capacity(calls.len());
    for (index, call) in calls.iter().enumerate() {
        plans.push(plan_call(&app, call).map_err(|problem| add_index(problem, index))?);
    }
    if calls.iter().any(|call| call.operation.writes_values()) {
        bridge.quotas.admit(|| bridge.kernel.settings(), principal, slug)?;
    }
    let write = begin_write(bridge, slug, &plans, body.len());
    let uncounted = ChangedRows::default();
    let changed = write.as_ref().map_or(&uncounted, |write| &write.changed_rows);
    let timeout = bridge.statement_timeout;
    let response = if is_transaction {
        let budget = ResponseBudget::new(changed);
        let result = execute::execute_transaction(&app.pool, plans, timeout, &budget).await;
        result
            .map(|responses| response::json_response(StatusCode::OK, BridgeResponse::combine(&responses)))
            .map_err(|error| match error.index {
                Some(index) => problems::with_operation_index(*error.problem, index),
                None => *error.problem,
            })
    } else {
        let plan = plans.pop().ok_or_else(|| problems::bridge_defect("request without a plan"))?;
        execute::execute_plan(&app.pool, plan, timeout, changed)
            .await
            .map(|response| response::json_response(response.status, response.body))
    };
    if response.is_ok()
        && let Some(write) = write
    {
        write.complete();
        bridge.changes.wake();
    }
    response
}

/// Counts a write against the quota before it is sent; `None` if no plan writes.
fn begin_write<'b>(
    bridge: &'b Bridge,
    slug: &'b str,
    plans: &[Plan<'_>],
    body_bytes: usize,
) -> Option<InFlightWrite<'b>> {
    let rows = plans.iter().map(Plan::inserted_rows).sum();
    let is_filtered_mutation = plans.iter().any(Plan::is_filtered_mutation);
    let is_write = plans.iter().any(Plan::is_write);
    let size = WriteSize { body_bytes, rows, is_filtered_mutation };
    is_write.then(|| bridge.quotas.begin_write(|| bridge.kernel.settings(), slug, size))
}

fn plan_call<'a>(app: &'a App, call: &TableCall<'_>) -> Result<Plan<'a>, Problem> {
    let table = find_table(app, &call.table)?;
    plan::plan(&app.schema, table, &call.operation).map_err(|errors| Problem::invalid(&errors))
}

fn find_table<'a>(app: &'a App, name: &str) -> Result<&'a Table, Problem> {
    app.tables.get(name).ok_or_else(|| Problem::new(Code::NotFound, "The app has no such table."))
}

/// Checks access to an app's tables: an app may use only its own, an agent those of the apps that the owner listed for
/// it, and the platform none. All other principals may use every app's tables.
pub(super) fn require_access(principal: &Principal, app: &str) -> Result<(), Problem> {
    match principal {
        Principal::App { slug } if slug != app => {
            Err(Problem::new(Code::Forbidden, "An app may use only its own tables."))
        }
        Principal::Agent { apps, .. } if !apps.iter().any(|granted| granted == app) => {
            let detail = format!("This agent may use only the tables of {}.", apps.join(", "));
            Err(Problem::new(Code::Forbidden, detail))
        }
        Principal::App { .. }
        | Principal::Agent { .. }
        | Principal::Owner { .. }
        | Principal::OwnerProcess { .. }
        | Principal::Admin => Ok(()),
        Principal::Platform => Err(Problem::new(Code::Forbidden, "The platform may not use the bridge.")),
    }
}

/// Returns the app that a request without `app` refers to; `None` means all apps.
///
/// # Errors
/// 400 for an agent with access to several apps: its request must name one.
pub(super) fn default_app(principal: &Principal) -> Result<Option<&str>, Problem> {
    match principal {
        Principal::App { slug } => Ok(Some(slug)),
        Principal::Agent { apps, .. } => match &**apps {
            [only] => Ok(Some(only)),
            _ => Err(Problem::field("app", format!("is required: one of {}", apps.join(", ")))),
        },
        Principal::Owner { .. } | Principal::OwnerProcess { .. } | Principal::Admin | Principal::Platform => {
            Ok(None)
        }
    }
}

/// Returns the schema of `app` or, by default, those of all apps that the principal may use.
fn schemas_response(bridge: &Bridge, principal: &Principal, app: Option<&str>) -> Result<Response, Problem> {
    let data = match (app, principal) {
        (Some(slug), _) => {
            require_access(principal, slug)?;
            vec![schemas::schema_json(&*bridge.find_app(slug)?)]
        }
        (None, Principal::App { slug }) => vec![schemas::schema_json(&*bridge.find_app(slug)?)],
        (None, _) => {
            let registered = bridge.apps.snapshot();
            if !registered.is_loaded {
                return Err(problems::database_unavailable());
            }
            let apps = registered.apps.iter().filter(|(slug, _)| require_access(principal, slug).is_ok());
            apps.map(|(_, app)| schemas::schema_json(app)).collect()
        }
    };
    Ok(response::json_response(StatusCode::OK, Bytes::from(json!({ "data": data }).to_string())))
}
