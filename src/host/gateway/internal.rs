//! `/_svc/internal/…`: what the platform asks of this machine. A request becomes a file that a unit consumes.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use jiff::Timestamp;
use serde_json::json;

use super::state::Gateway;
use crate::clock::rfc3339_ms;
use crate::fsx;
use crate::http::problem::Problem;
use crate::http::request_id;

/// `POST /_svc/internal/backup`: asks for a backup soon. Asked again before it ran, it is the same one.
pub async fn backup(State(gateway): State<Arc<Gateway>>) -> Response {
    let path = gateway.config.layout.request("backup");
    let requested_at = rfc3339_ms(Timestamp::now());
    let content =
        json!({ "requestedAt": requested_at, "by": "platform", "requestId": request_id::current() })
            .to_string();
    let written =
        tokio::task::spawn_blocking(move || fsx::write_atomic(&path, content.as_bytes(), 0o600)).await;
    match written {
        Ok(Ok(())) => {
            let body = json!({ "request": "backup", "requestedAt": requested_at });
            (StatusCode::ACCEPTED, Json(body)).into_response()
        }
        Ok(Err(error)) => Problem::internal(&error).into_response(),
        Err(error) => Problem::internal(&error).into_response(),
    }
}
