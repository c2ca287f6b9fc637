//! The bridge's routes: whose request it is, whose table it names, and its way to plan and answer.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Extension, Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use serde_json::json;

use super::request::{self, Action};
use super::{plan, refusal, run, schemas};
use crate::host::gateway::apps::App;
use crate::host::gateway::auth::{Caller, Principal};
use crate::host::gateway::body;
use crate::host::gateway::router::BRIDGE_BODY;
use crate::host::gateway::state::Gateway;
use crate::http::problem::{Code, Problem};

/// `POST /api/bridge/query`.
pub async fn query(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Response {
    let (head, body) = request.into_parts();
    answer(&gateway, &caller.0, &head.headers, body).await.unwrap_or_else(IntoResponse::into_response)
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
) -> Result<Response, Problem> {
    require_json(headers)?;
    let body = body::read(body, BRIDGE_BODY).await?;
    let request = request::Request::parse(&body)?;
    let app = request.app.as_deref();
    match request.action {
        Action::Schemas => schemas_of(gateway, principal, app),
        Action::Table { table, operation } => {
            let app = app.unwrap_or_default();
            allow(principal, app)?;
            let app = find_app(gateway, app)?;
            let table = app.tables.get(&*table);
            let table = table.ok_or_else(|| Problem::new(Code::NotFound, "The app has no such table."))?;
            let planned =
                plan::plan(&app.schema, table, &operation).map_err(|wrong| Problem::invalid(&wrong))?;
            run::run(&app.pool, planned, gateway.config.statement_timeout).await
        }
    }
}

fn require_json(headers: &HeaderMap) -> Result<(), Problem> {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    Err(Problem::new(Code::UnsupportedMediaType, "Send the request as application/json."))
}

/// An app speaks for itself alone.
fn allow(principal: &Principal, app: &str) -> Result<(), Problem> {
    match principal {
        Principal::App { slug } if slug != app => {
            Err(Problem::new(Code::Forbidden, "An app may use its own tables alone."))
        }
        Principal::App { .. } | Principal::Owner { .. } | Principal::Admin => Ok(()),
        Principal::Platform => Err(Problem::new(Code::Forbidden, "The platform does not use the bridge.")),
    }
}

fn find_app(gateway: &Gateway, slug: &str) -> Result<Arc<App>, Problem> {
    let known = gateway.apps.known();
    match known.apps.get(slug) {
        Some(app) => Ok(app.clone()),
        None if !known.loaded => Err(refusal::unavailable()),
        None => Err(Problem::new(Code::NotFound, "There is no such app.")),
    }
}

/// The owner sees all apps, or the one that is named; an app sees itself.
fn schemas_of(gateway: &Gateway, principal: &Principal, app: Option<&str>) -> Result<Response, Problem> {
    let only = match (principal, app) {
        (Principal::App { slug }, None) => Some(slug.as_str()),
        (_, app) => app,
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
    Ok(run::json(StatusCode::OK, Bytes::from(json!({ "data": data }).to_string())))
}
