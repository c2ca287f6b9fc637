//! The catalog routes: server types, locations and images. Data centers were removed from the API in October 2026,
//! and their routes return the error for removed functionality.

use axum::extract::{Path, RawQuery};
use axum::response::Response;
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};

use super::api::parse_id;
use super::catalog::{self, CatalogEntry, Image, Location, ServerType};
use super::error_response::ErrorResponse;
use super::query::Query;

pub(super) fn routes() -> Router {
    Router::new()
        .route("/v1/server_types", get(list_entries::<ServerType>))
        .route("/v1/server_types/{id}", get(get_entry::<ServerType>))
        .route("/v1/locations", get(list_entries::<Location>))
        .route("/v1/locations/{id}", get(get_entry::<Location>))
        .route("/v1/images", get(list_entries::<Image>))
        .route("/v1/images/{id}", get(get_entry::<Image>))
        .route("/v1/datacenters", get(reject_removed_route))
        .route("/v1/datacenters/{id}", get(reject_removed_route))
}

async fn list_entries<E: CatalogEntry>(RawQuery(raw): RawQuery) -> Result<Response, ErrorResponse> {
    let query = Query::parse(raw.as_deref());
    let entries = E::all().iter().filter(|entry| query.allows("name", entry.name()));
    query.render_page(&format!("/v1/{}", E::PLURAL), E::PLURAL, entries.map(CatalogEntry::json).collect())
}

async fn get_entry<E: CatalogEntry>(Path(id): Path<String>) -> Result<Json<Value>, ErrorResponse> {
    let id = parse_id(E::SINGULAR, &id)?;
    let entry = catalog::find::<E>(&id.to_string());
    let entry = entry.ok_or_else(|| ErrorResponse::not_found(E::SINGULAR, id))?;
    Ok(Json(json!({E::SINGULAR: entry.json()})))
}

async fn reject_removed_route() -> ErrorResponse {
    ErrorResponse::removed("https://docs.hetzner.cloud/changelog#2026-06-02-datacenters-deprecated")
}
