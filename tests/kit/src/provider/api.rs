//! The routes of API v1 that the platform uses.

use std::sync::Arc;

use axum::extract::{Path, Query, State};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use bytes::Bytes;
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use super::catalog;
use super::cloud::{Cloud, Outcome};
use super::inventory::CreateRequest;
use super::labels;
use super::refusal::Refusal;
use super::wire;

type Shared = State<Arc<Cloud>>;
type ApiResult = Result<Json<Value>, Refusal>;
type CreatedResult = Result<(StatusCode, Json<Value>), Refusal>;

pub(super) fn routes(cloud: Arc<Cloud>) -> Router {
    Router::new()
        .route("/v1/servers", get(list_servers).post(create_server))
        .route("/v1/servers/{id}", get(get_server).delete(delete_server))
        .route("/v1/servers/{id}/actions/{action}", post(start_action).get(get_server_action))
        .route("/v1/actions/{id}", get(get_action))
        .route("/v1/server_types", get(list_server_types))
        .route("/v1/locations", get(list_locations))
        .route("/v1/pricing", get(get_pricing))
        .fallback(not_found)
        .with_state(cloud)
}

#[derive(Deserialize)]
struct ListQuery {
    name: Option<String>,
    #[serde(default)]
    label_selector: String,
    #[serde(default = "first_page")]
    page: usize,
    #[serde(default = "default_size")]
    per_page: usize,
}

fn first_page() -> usize {
    1
}

fn default_size() -> usize {
    25
}

async fn list_servers(State(cloud): Shared, Query(query): Query<ListQuery>) -> ApiResult {
    let inventory = cloud.inventory();
    let mut found = Vec::new();
    for record in inventory.servers.values().filter(|record| !inventory.hidden.contains(&record.name)) {
        let matches_name = query.name.as_ref().is_none_or(|name| *name == record.name);
        if matches_name && labels::selects(&query.label_selector, &record.labels)? {
            found.push(wire::server(record, inventory.is_locked(record.id)));
        }
    }
    let (page, per_page) = (query.page.max(1), query.per_page.clamp(1, 50));
    let meta = wire::pagination(page, per_page, found.len());
    let servers: Vec<Value> = found.into_iter().skip((page - 1) * per_page).take(per_page).collect();
    Ok(Json(json!({"servers": servers, "meta": meta})))
}

async fn create_server(
    State(cloud): Shared,
    outcome: Option<Extension<Outcome>>,
    body: Bytes,
) -> CreatedResult {
    let create_request: CreateRequest = serde_json::from_slice(&body)
        .map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, "json_error", error.to_string()))?;
    let (record, actions) = cloud.create(create_request, outcome_of(outcome))?;
    let mut actions = actions.iter().map(wire::action);
    let body = json!({
        "server": wire::server(&record, true),
        "action": actions.next(),
        "next_actions": actions.collect::<Vec<_>>(),
        "root_password": null,
    });
    Ok((StatusCode::CREATED, Json(body)))
}

async fn get_server(State(cloud): Shared, Path(id): Path<i64>) -> ApiResult {
    let inventory = cloud.inventory();
    let found = Some(inventory.server(id)?).filter(|record| !inventory.hidden.contains(&record.name));
    let found = found.ok_or_else(|| Refusal::not_found("server", id))?;
    Ok(Json(json!({"server": wire::server(found, inventory.is_locked(id))})))
}

async fn delete_server(State(cloud): Shared, Path(id): Path<i64>) -> ApiResult {
    Ok(Json(json!({"action": wire::action(&cloud.delete(id).await?)})))
}

async fn start_action(
    State(cloud): Shared,
    Path((id, command)): Path<(i64, String)>,
    outcome: Option<Extension<Outcome>>,
    body: Bytes,
) -> CreatedResult {
    let action = cloud.act(id, &command, &body, outcome_of(outcome))?;
    Ok((StatusCode::CREATED, Json(json!({"action": wire::action(&action)}))))
}

async fn get_action(State(cloud): Shared, Path(id): Path<i64>) -> ApiResult {
    Ok(Json(json!({"action": wire::action(cloud.inventory().action(id)?)})))
}

async fn get_server_action(State(cloud): Shared, Path((server, id)): Path<(i64, i64)>) -> ApiResult {
    let inventory = cloud.inventory();
    let action = inventory.action(id)?;
    if action.server != server {
        return Err(Refusal::not_found("action", id));
    }
    Ok(Json(json!({"action": wire::action(action)})))
}

#[derive(Deserialize)]
struct NameQuery {
    name: Option<String>,
}

async fn list_server_types(Query(query): Query<NameQuery>) -> Json<Value> {
    let matches = |known: &&catalog::CatalogType| query.name.as_deref().is_none_or(|name| name == known.name);
    let types: Vec<Value> = catalog::TYPES.iter().filter(matches).map(catalog::CatalogType::json).collect();
    let meta = wire::pagination(1, 50, types.len());
    Json(json!({"server_types": types, "meta": meta}))
}

async fn list_locations(Query(query): Query<NameQuery>) -> Json<Value> {
    let matches = |known: &&&str| query.name.as_deref().is_none_or(|name| name == **known);
    let found: Vec<Value> =
        catalog::LOCATIONS.iter().filter(matches).map(|name| json!({"name": name})).collect();
    let meta = wire::pagination(1, 50, found.len());
    Json(json!({"locations": found, "meta": meta}))
}

async fn get_pricing(State(cloud): Shared) -> Json<Value> {
    Json(json!({"pricing": catalog::pricing(cloud.inventory().price_percent)}))
}

async fn not_found() -> Result<Response, Refusal> {
    Err(Refusal::new(StatusCode::NOT_FOUND, "not_found", "no such route"))
}

fn outcome_of(extension: Option<Extension<Outcome>>) -> Outcome {
    extension.map_or(Outcome::Success, |Extension(outcome)| outcome)
}
