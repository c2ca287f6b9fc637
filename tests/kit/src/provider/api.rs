//! The server, action and pricing routes of API v1.

use std::sync::Arc;

use axum::extract::{Path, RawQuery, State};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use bytes::Bytes;
use http::StatusCode;
use serde_json::{Value, json};
use uuid::Uuid;

use super::catalog;
use super::cloud::{Cloud, Outcome, parse_body};
use super::error_response::ErrorResponse;
use super::inventory::{ActionRecord, CreateRequest, UpdateRequest};
use super::query::Query;
use super::{catalog_api, labels, wire};

type Shared = State<Arc<Cloud>>;
type ApiResult = Result<Json<Value>, ErrorResponse>;
type CreatedResult = Result<(StatusCode, Json<Value>), ErrorResponse>;
type ListResult = Result<Response, ErrorResponse>;

pub(super) fn routes(cloud: Arc<Cloud>) -> Router {
    Router::new()
        .route("/v1/servers", get(list_servers).post(create_server))
        .route("/v1/servers/{id}", get(get_server).put(update_server).delete(delete_server))
        .route("/v1/servers/{id}/actions", get(list_server_actions))
        .route("/v1/servers/{id}/actions/{action}", post(start_action).get(get_server_action))
        .route("/v1/actions", get(list_actions))
        .route("/v1/actions/{id}", get(get_action))
        .route("/v1/pricing", get(get_pricing))
        .with_state(cloud)
        .merge(catalog_api::routes())
        .fallback(reject_unknown_route)
        .method_not_allowed_fallback(reject_method)
}

async fn list_servers(State(cloud): Shared, RawQuery(raw): RawQuery) -> ListResult {
    let query = Query::parse(raw.as_deref());
    let inventory = cloud.inventory();
    let mut servers = Vec::new();
    for record in inventory.servers.values().filter(|record| !inventory.hidden.contains(&record.name)) {
        let is_listed = query.allows("name", &record.name) && query.allows("status", record.power.as_str());
        if is_listed && labels::selects(query.first("label_selector").unwrap_or_default(), &record.labels)? {
            servers.push(wire::server_json(record, inventory.is_locked(record.id)));
        }
    }
    query.render_page("/v1/servers", "servers", servers)
}

async fn create_server(
    State(cloud): Shared,
    outcome: Option<Extension<Outcome>>,
    body: Bytes,
) -> CreatedResult {
    let create_request: CreateRequest = parse_body(&body)?;
    let has_key = create_request.has_ssh_keys();
    let (record, actions) = cloud.create(create_request, outcome_of(outcome))?;
    let mut actions = actions.iter().map(wire::action_json);
    let body = json!({
        "server": wire::server_json(&record, true),
        "action": actions.next(),
        "next_actions": actions.collect::<Vec<_>>(),
        "root_password": (!has_key).then(|| Uuid::new_v4().simple().to_string()),
    });
    Ok((StatusCode::CREATED, Json(body)))
}

async fn get_server(State(cloud): Shared, Path(id): Path<String>) -> ApiResult {
    let id = parse_id("server", &id)?;
    let inventory = cloud.inventory();
    let record = Some(inventory.server(id)?).filter(|record| !inventory.hidden.contains(&record.name));
    let record = record.ok_or_else(|| ErrorResponse::not_found("server", id))?;
    Ok(Json(json!({"server": wire::server_json(record, inventory.is_locked(id))})))
}

async fn update_server(State(cloud): Shared, Path(id): Path<String>, body: Bytes) -> ApiResult {
    let id = parse_id("server", &id)?;
    let request: UpdateRequest = parse_body(&body)?;
    let mut inventory = cloud.inventory();
    let is_locked = inventory.is_locked(id);
    Ok(Json(json!({"server": wire::server_json(inventory.update(id, request)?, is_locked)})))
}

async fn delete_server(State(cloud): Shared, Path(id): Path<String>) -> ApiResult {
    let id = parse_id("server", &id)?;
    Ok(Json(json!({"action": wire::action_json(&cloud.delete(id).await?)})))
}

async fn start_action(
    State(cloud): Shared,
    Path((id, command)): Path<(String, String)>,
    outcome: Option<Extension<Outcome>>,
    body: Bytes,
) -> CreatedResult {
    let id = parse_id("server", &id)?;
    let action = cloud.start_action(id, &command, &body, outcome_of(outcome))?;
    Ok((StatusCode::CREATED, Json(json!({"action": wire::action_json(&action)}))))
}

async fn list_server_actions(
    State(cloud): Shared,
    Path(id): Path<String>,
    RawQuery(raw): RawQuery,
) -> ListResult {
    let id = parse_id("server", &id)?;
    let query = Query::parse(raw.as_deref());
    let inventory = cloud.inventory();
    inventory.server(id)?;
    let actions = inventory.actions().filter(|action| action.server == id);
    let actions = actions.filter(|action| query.allows("status", action.status())).map(wire::action_json);
    query.render_page(&format!("/v1/servers/{id}/actions"), "actions", actions.collect())
}

/// Lists the actions with the ids in the query; like the provider, it requires ids.
async fn list_actions(State(cloud): Shared, RawQuery(raw): RawQuery) -> ApiResult {
    let query = Query::parse(raw.as_deref());
    if query.first("id").is_none() {
        return Err(ErrorResponse::invalid("id", "is required"));
    }
    let inventory = cloud.inventory();
    let is_requested = |action: &&ActionRecord| query.allows("id", &action.id.to_string());
    let actions: Vec<Value> = inventory.actions().filter(is_requested).map(wire::action_json).collect();
    Ok(Json(json!({"actions": actions})))
}

async fn get_action(State(cloud): Shared, Path(id): Path<String>) -> ApiResult {
    let id = parse_id("action", &id)?;
    Ok(Json(json!({"action": wire::action_json(cloud.inventory().action(id)?)})))
}

async fn get_server_action(State(cloud): Shared, Path((server, id)): Path<(String, String)>) -> ApiResult {
    let (server, id) = (parse_id("server", &server)?, parse_id("action", &id)?);
    let inventory = cloud.inventory();
    let action = inventory.action(id)?;
    if action.server != server {
        return Err(ErrorResponse::not_found("action", id));
    }
    Ok(Json(json!({"action": wire::action_json(action)})))
}

async fn reject_unknown_route() -> ErrorResponse {
    ErrorResponse::new(StatusCode::NOT_FOUND, "not_found", "no such route")
}

async fn reject_method() -> ErrorResponse {
    let text = "the method is not allowed for this route";
    ErrorResponse::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", text)
}

async fn get_pricing(State(cloud): Shared) -> Json<Value> {
    Json(json!({"pricing": catalog::pricing(cloud.inventory().price_percent)}))
}

pub(super) fn parse_id(kind: &str, text: &str) -> Result<i64, ErrorResponse> {
    let message = || format!("{kind} with ID '{text}' not found");
    text.parse().map_err(|_| ErrorResponse::new(StatusCode::NOT_FOUND, "not_found", message()))
}

fn outcome_of(extension: Option<Extension<Outcome>>) -> Outcome {
    extension.map_or(Outcome::Success, |Extension(outcome)| outcome)
}
