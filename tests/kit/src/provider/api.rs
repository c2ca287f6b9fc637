//! The routes of the API v1 that the platform uses.

use std::sync::Arc;

use axum::extract::{Path, Query, State};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use bytes::Bytes;
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use super::book::Order;
use super::catalog;
use super::cloud::{Cloud, Outcome};
use super::labels;
use super::refusal::Refusal;
use super::wire;

type Shared = State<Arc<Cloud>>;
type Answer = Result<Json<Value>, Refusal>;
type Made = Result<(StatusCode, Json<Value>), Refusal>;

pub(super) fn routes(cloud: Arc<Cloud>) -> Router {
    Router::new()
        .route("/v1/servers", get(list).post(create))
        .route("/v1/servers/{id}", get(one).delete(delete))
        .route("/v1/servers/{id}/actions/{action}", post(act).get(action_of))
        .route("/v1/actions/{id}", get(action))
        .route("/v1/server_types", get(server_types))
        .route("/v1/locations", get(locations))
        .fallback(nothing)
        .with_state(cloud)
}

#[derive(Deserialize)]
struct Listing {
    name: Option<String>,
    #[serde(default)]
    label_selector: String,
    #[serde(default = "first")]
    page: usize,
    #[serde(default = "default_size")]
    per_page: usize,
}

fn first() -> usize {
    1
}

fn default_size() -> usize {
    25
}

async fn list(State(cloud): Shared, Query(listing): Query<Listing>) -> Answer {
    let book = cloud.book();
    let mut found = Vec::new();
    for record in book.servers.values().filter(|record| !book.hidden.contains(&record.name)) {
        let named = listing.name.as_ref().is_none_or(|name| *name == record.name);
        if named && labels::selects(&listing.label_selector, &record.labels)? {
            found.push(wire::server(record, book.is_locked(record.id)));
        }
    }
    let (page, per_page) = (listing.page.max(1), listing.per_page.clamp(1, 50));
    let meta = wire::pagination(page, per_page, found.len());
    let servers: Vec<Value> = found.into_iter().skip((page - 1) * per_page).take(per_page).collect();
    Ok(Json(json!({"servers": servers, "meta": meta})))
}

async fn create(State(cloud): Shared, outcome: Option<Extension<Outcome>>, body: Bytes) -> Made {
    let order: Order = serde_json::from_slice(&body)
        .map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, "json_error", error.to_string()))?;
    let (record, actions) = cloud.create(order, outcome_of(outcome))?;
    let mut actions = actions.iter().map(wire::action);
    let body = json!({
        "server": wire::server(&record, true),
        "action": actions.next(),
        "next_actions": actions.collect::<Vec<_>>(),
        "root_password": null,
    });
    Ok((StatusCode::CREATED, Json(body)))
}

async fn one(State(cloud): Shared, Path(id): Path<i64>) -> Answer {
    let book = cloud.book();
    let found = Some(book.server(id)?).filter(|record| !book.hidden.contains(&record.name));
    let found = found.ok_or_else(|| Refusal::not_found("server", id))?;
    Ok(Json(json!({"server": wire::server(found, book.is_locked(id))})))
}

async fn delete(State(cloud): Shared, Path(id): Path<i64>) -> Answer {
    Ok(Json(json!({"action": wire::action(&cloud.delete(id).await?)})))
}

async fn act(
    State(cloud): Shared,
    Path((id, command)): Path<(i64, String)>,
    outcome: Option<Extension<Outcome>>,
    body: Bytes,
) -> Made {
    let action = cloud.act(id, &command, &body, outcome_of(outcome))?;
    Ok((StatusCode::CREATED, Json(json!({"action": wire::action(&action)}))))
}

async fn action(State(cloud): Shared, Path(id): Path<i64>) -> Answer {
    Ok(Json(json!({"action": wire::action(cloud.book().action(id)?)})))
}

async fn action_of(State(cloud): Shared, Path((server, id)): Path<(i64, i64)>) -> Answer {
    let book = cloud.book();
    let action = book.action(id)?;
    if action.server != server {
        return Err(Refusal::not_found("action", id));
    }
    Ok(Json(json!({"action": wire::action(action)})))
}

#[derive(Deserialize)]
struct Named {
    name: Option<String>,
}

async fn server_types(Query(named): Query<Named>) -> Json<Value> {
    let wanted = |known: &&catalog::CatalogType| named.name.as_deref().is_none_or(|name| name == known.name);
    let types: Vec<Value> = catalog::TYPES.iter().filter(wanted).map(catalog::CatalogType::json).collect();
    let meta = wire::pagination(1, 50, types.len());
    Json(json!({"server_types": types, "meta": meta}))
}

async fn locations(Query(named): Query<Named>) -> Json<Value> {
    let wanted = |known: &&&str| named.name.as_deref().is_none_or(|name| name == **known);
    let found: Vec<Value> =
        catalog::LOCATIONS.iter().filter(wanted).map(|name| json!({"name": name})).collect();
    let meta = wire::pagination(1, 50, found.len());
    Json(json!({"locations": found, "meta": meta}))
}

async fn nothing() -> Result<Response, Refusal> {
    Err(Refusal::new(StatusCode::NOT_FOUND, "not_found", "no such route"))
}

fn outcome_of(extension: Option<Extension<Outcome>>) -> Outcome {
    extension.map_or(Outcome::Success, |Extension(outcome)| outcome)
}
