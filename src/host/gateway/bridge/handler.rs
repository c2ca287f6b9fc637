//! The bridge's routes: whose request it is, whose table it names, and its way to plan and answer.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Extension, Request as HttpRequest, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use serde_json::json;

use super::answer::{self, Answer};
use super::describe::QUERY_BODY;
use super::plan::{self, Plan};
use super::request::{Action, Call, Request};
use super::{refusal, run, schemas};
use crate::host::gateway::apps::{App, ChangedRows, SentWrite, WriteSize};
use crate::host::gateway::auth::{Caller, Principal};
use crate::host::gateway::body;
use crate::host::gateway::state::Gateway;
use crate::http::problem::{Code, Problem};
use crate::metrics::BRIDGE_ACTIONS;

/// `POST /api/bridge/query`.
pub async fn query(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
    request: HttpRequest,
) -> Response {
    let (head, body) = request.into_parts();
    let mut action = "unreadable";
    let answered = answer(&gateway, &caller.0, &head.headers, body, &mut action).await;
    BRIDGE_ACTIONS
        .add_one([action, answered.as_ref().map_or_else(|problem| problem.code.as_str(), |_| "ok")]);
    answered.unwrap_or_else(IntoResponse::into_response)
}

/// `GET /api/bridge/schemas`.
pub async fn list_schemas(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
) -> Response {
    schemas_of(&gateway, &caller.0, None).unwrap_or_else(IntoResponse::into_response)
}

async fn answer(
    gateway: &Gateway,
    principal: &Principal,
    headers: &HeaderMap,
    body: Body,
    named: &mut &'static str,
) -> Result<Response, Problem> {
    body::require_json(headers)?;
    let body = body::read(body, QUERY_BODY).await?;
    let Request { app, action } = Request::parse(&body)?;
    *named = action.name();
    let app = app.as_deref();
    let calls = match &action {
        Action::Schemas => return schemas_of(gateway, principal, app),
        Action::Table(call) => std::slice::from_ref(call),
        Action::Transaction(calls) => calls,
    };
    let slug = app.unwrap_or_default();
    allow(principal, slug)?;
    let _permit = gateway.writers.admit()?;
    let app = find_app(gateway, slug)?;
    let is_transaction = matches!(action, Action::Transaction(_));
    let place = |problem, index| if is_transaction { refusal::at_operation(problem, index) } else { problem };
    let mut plans = Vec::with_capacity(calls.len());
    for (index, call) in calls.iter().enumerate() {
        plans.push(planned(&app, call).map_err(|problem| place(problem, index))?);
    }
    if calls.iter().any(|call| call.operation.adds_data()) {
        gateway.quotas.admit(|| gateway.kernel.settings(), principal, slug)?;
    }
    let sent = sent(gateway, slug, &plans, body.len());
    let uncounted = ChangedRows::default();
    let changed = sent.as_ref().map_or(&uncounted, |sent| &sent.changed);
    let limit = gateway.config.statement_timeout;
    let answer = if is_transaction {
        let ran = run::run_together(&app.pool, plans, limit, changed).await;
        ran.map(|answers| answer::json(StatusCode::OK, Answer::all(&answers))).map_err(|failed| match failed
            .index
        {
            Some(index) => refusal::at_operation(*failed.problem, index),
            None => *failed.problem,
        })
    } else {
        let plan = plans.pop().ok_or_else(refusal::lost)?;
        run::run(&app.pool, plan, limit, changed).await.map(|answer| answer::json(answer.status, answer.body))
    };
    if answer.is_ok()
        && let Some(sent) = sent
    {
        sent.settle();
        gateway.changes.wake();
    }
    answer
}

/// Counts what is about to be written, where anything is.
fn sent<'g>(
    gateway: &'g Gateway,
    slug: &'g str,
    plans: &[Plan<'_>],
    body_bytes: usize,
) -> Option<SentWrite<'g>> {
    let rows = plans.iter().map(Plan::rows_made).sum();
    let is_by_filter = plans.iter().any(Plan::is_by_filter);
    let is_write = plans.iter().any(Plan::is_write);
    let size = WriteSize { body_bytes, rows, is_by_filter };
    is_write.then(|| gateway.quotas.send(|| gateway.kernel.settings(), slug, size))
}

fn planned<'a>(app: &'a App, call: &Call<'_>) -> Result<Plan<'a>, Problem> {
    let table = app.tables.get(&*call.table);
    let table = table.ok_or_else(|| Problem::new(Code::NotFound, "The app has no such table."))?;
    plan::plan(&app.schema, table, &call.operation).map_err(|wrong| Problem::invalid(&wrong))
}

/// An app speaks for itself alone, an agent for the apps that its owner named.
pub(super) fn allow(principal: &Principal, app: &str) -> Result<(), Problem> {
    match principal {
        Principal::App { slug } if slug != app => {
            Err(Problem::new(Code::Forbidden, "An app may use its own tables alone."))
        }
        Principal::Agent { apps, .. } if !apps.iter().any(|one| one == app) => {
            let detail = format!("This agent may use the tables of {} alone.", apps.join(", "));
            Err(Problem::new(Code::Forbidden, detail))
        }
        Principal::App { .. }
        | Principal::Agent { .. }
        | Principal::Owner { .. }
        | Principal::OwnersProcess { .. }
        | Principal::Admin => Ok(()),
        Principal::Platform => Err(Problem::new(Code::Forbidden, "The platform does not use the bridge.")),
    }
}

pub(super) fn find_app(gateway: &Gateway, slug: &str) -> Result<Arc<App>, Problem> {
    let known = gateway.apps.known();
    match known.apps.get(slug) {
        Some(app) => Ok(app.clone()),
        None if !known.loaded => Err(refusal::unavailable()),
        None => Err(Problem::new(Code::NotFound, "There is no such app.")),
    }
}

/// The app that is meant where a request names none; `None` where all are.
///
/// # Errors
/// For an agent that may use several.
pub(super) fn only_app(principal: &Principal) -> Result<Option<&str>, Problem> {
    match principal {
        Principal::App { slug } => Ok(Some(slug)),
        Principal::Agent { apps, .. } => match &**apps {
            [one] => Ok(Some(one)),
            _ => Err(Problem::field("app", format!("is required: one of {}", apps.join(", ")))),
        },
        Principal::Owner { .. }
        | Principal::OwnersProcess { .. }
        | Principal::Admin
        | Principal::Platform => Ok(None),
    }
}

/// The owner sees all apps, or the one that is named; an app sees itself.
fn schemas_of(gateway: &Gateway, principal: &Principal, app: Option<&str>) -> Result<Response, Problem> {
    let only = match app {
        Some(app) => Some(app),
        None => only_app(principal)?,
    };
    let data = match only {
        Some(slug) => {
            allow(principal, slug)?;
            vec![schemas::schema(&*find_app(gateway, slug)?)]
        }
        None => {
            let known = gateway.apps.known();
            if !known.loaded {
                return Err(refusal::unavailable());
            }
            known.apps.values().map(|app| schemas::schema(app)).collect()
        }
    };
    Ok(answer::json(StatusCode::OK, Bytes::from(json!({ "data": data }).to_string())))
}
