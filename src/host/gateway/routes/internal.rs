//! `/_svc/internal/…`: what the platform asks of this machine. A request becomes a file that a unit consumes.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use http::{HeaderMap, Method, StatusCode};
use jiff::Timestamp;
use serde_json::json;

use crate::clock::rfc3339_ms;
use crate::fsx;
use crate::host::gateway::body;
use crate::host::gateway::endpoint::{Endpoint, OWN_BODY, PLATFORM, told};
use crate::host::gateway::state::Gateway;
use crate::host::system::blocking::blocking;
use crate::host::update::protocol::UpdateRequest;
use crate::http::openapi::{Operation, fields, matching, object, one_of, time};
use crate::http::problem::{Code, Problem};
use crate::http::request_id;
use crate::machine::name::ImageVersion;

/// `POST /_svc/internal/backup`: asks for a backup soon. Asked again before it ran, it is the same one.
pub async fn backup(State(gateway): State<Arc<Gateway>>) -> Result<Response, Problem> {
    ask_for(&gateway, "backup").await
}

/// `POST /_svc/internal/backup-accept`: the snapshot that is held back is to become the latest.
pub async fn accept(State(gateway): State<Arc<Gateway>>) -> Result<Response, Problem> {
    ask_for(&gateway, "accept").await
}

/// `POST /_svc/internal/drill`: asks that the latest snapshot is restored on trial soon.
pub async fn drill(State(gateway): State<Arc<Gateway>>) -> Result<Response, Problem> {
    ask_for(&gateway, "drill").await
}

/// Writes the request file of this name.
async fn ask_for(gateway: &Gateway, what: &'static str) -> Result<Response, Problem> {
    let path = gateway.config.layout.request(what);
    let requested_at = rfc3339_ms(Timestamp::now());
    let content =
        json!({ "requestedAt": requested_at, "by": "platform", "requestId": request_id::current() })
            .to_string();
    blocking(move || fsx::write_atomic(&path, content.as_bytes(), 0o600)).await?;
    let body = json!({ "request": what, "requestedAt": requested_at });
    Ok((StatusCode::ACCEPTED, Json(body)).into_response())
}

/// `POST /_svc/internal/update`: asks for a release soon. The request names it and nothing else: whether it is taken is
/// decided by the updater, which is root and trusts nobody here.
pub async fn update(
    State(gateway): State<Arc<Gateway>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let mut fields = body::fields(&headers, body, OWN_BODY).await?;
    let version = fields.required("imageVersion");
    let version: ImageVersion = fields.finish(version)?;
    let request = UpdateRequest::new(version);
    let (layout, asked) = (gateway.config.layout.clone(), request.clone());
    blocking(move || asked.write(&layout)).await?;
    let body = json!({
        "request": "update", "imageVersion": request.image_version, "requestedAt": rfc3339_ms(request.requested_at),
    });
    Ok((StatusCode::ACCEPTED, Json(body)).into_response())
}

pub static UPDATE: Endpoint = Endpoint {
    operation: Operation {
        id: "askForUpdate",
        method: Method::POST,
        path: "/_svc/internal/update",
        summary: "Asks for a release soon.",
        credentials: &[PLATFORM],
        parameters: &[],
        body: Some(|| fields(&[("imageVersion", matching(ImageVersion::PATTERN))], &[])),
        answers: &[told(202, "It is asked for.", || {
            let version = matching(ImageVersion::PATTERN);
            object(
                &[("request", one_of(&["update"])), ("imageVersion", version), ("requestedAt", time())],
                &[],
            )
        })],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    largest_body: OWN_BODY,
    serve: || post(update),
};

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

pub static ACCEPT: Endpoint = Endpoint {
    operation: Operation {
        id: "acceptBackup",
        method: Method::POST,
        path: "/_svc/internal/backup-accept",
        summary: "Asks that the snapshot that is held back, because the database has shrunk, becomes the latest.",
        credentials: &[PLATFORM],
        parameters: &[],
        body: None,
        answers: &[told(202, "It is asked for.", || {
            object(&[("request", one_of(&["accept"])), ("requestedAt", time())], &[])
        })],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    largest_body: OWN_BODY,
    serve: || post(accept),
};

pub static DRILL: Endpoint = Endpoint {
    operation: Operation {
        id: "askForDrill",
        method: Method::POST,
        path: "/_svc/internal/drill",
        summary: "Asks that the latest snapshot is restored on trial soon.",
        credentials: &[PLATFORM],
        parameters: &[],
        body: None,
        answers: &[told(202, "It is asked for.", || {
            object(&[("request", one_of(&["drill"])), ("requestedAt", time())], &[])
        })],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    largest_body: OWN_BODY,
    serve: || post(drill),
};
