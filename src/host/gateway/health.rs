//! `/livez` and `/readyz`: the two routes that answer anybody.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};

use super::state::Gateway;
use crate::http::problem::chain;

/// The process runs.
pub async fn live() -> Response {
    answer(StatusCode::OK, &json!({ "status": "live" }))
}

/// The database answers.
pub async fn ready(State(gateway): State<Arc<Gateway>>) -> Response {
    match gateway.database.ping().await {
        Ok(()) => answer(StatusCode::OK, &json!({ "status": "ready", "database": "ok" })),
        Err(error) => {
            tracing::warn!(error = %chain(&error), "not ready");
            answer(StatusCode::SERVICE_UNAVAILABLE, &json!({ "status": "unready", "database": "failing" }))
        }
    }
}

fn answer(status: StatusCode, body: &Value) -> Response {
    let mut response = (status, body.to_string()).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}
