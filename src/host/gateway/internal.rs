//! `/_svc/internal/…`: what the platform asks of this machine. A request becomes a file that a unit consumes.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use http::{Method, StatusCode};
use jiff::Timestamp;
use serde_json::json;

use super::endpoint::{Endpoint, OWN_BODY, PLATFORM, told};
use super::state::Gateway;
use crate::clock::rfc3339_ms;
use crate::fsx;
use crate::http::openapi::{Operation, object, one_of, time};
use crate::http::problem::{Code, Problem};
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

pub static BACKUP: Endpoint = Endpoint {
    operation: Operation {
        id: "askForBackup",
        method: Method::POST,
        path: "/_svc/internal/backup",
        summary: "Asks for a backup soon.",
        credentials: &[PLATFORM],
        parameters: &[],
        body: None,
        answers: &[told(202, "It is asked for.", || {
            object(&[("request", one_of(&["backup"])), ("requestedAt", time())], &[])
        })],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    largest_body: OWN_BODY,
    serve: || post(backup),
};
