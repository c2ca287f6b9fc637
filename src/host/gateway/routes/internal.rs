//! `POST /_svc/internal/…`: backup, check and update requests from the platform. Each is written to a file that
//! triggers a systemd path unit.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, Method, StatusCode};
use jiff::Timestamp;
use serde_json::json;

use crate::auth::PLATFORM;
use crate::body;
use crate::endpoint::{DEFAULT_MAX_BODY_BYTES, Endpoint, documented_json};
use svc_base::clock::rfc3339_ms;
use svc_base::fsx;
use svc_host::files::verify;
use svc_host::system::blocking::run_blocking;
use svc_host::system::layout::Layout;
use svc_host::update::protocol::UpdateRequest;
use svc_http::openapi::{Operation, object, request_object, string_enum, text_matching, time};
use svc_http::problem::{Code, Problem};
use svc_http::request_id;
use svc_machine::name::ImageVersion;

/// `POST /_svc/internal/backup`: requests a backup. Idempotent until the backup starts.
pub async fn request_backup(State(layout): State<Layout>) -> Result<Response, Problem> {
    write_request(&layout, "backup").await
}

/// `POST /_svc/internal/backup-accept`: requests that the held-back snapshot be promoted to latest.
pub async fn request_backup_acceptance(State(layout): State<Layout>) -> Result<Response, Problem> {
    write_request(&layout, "accept").await
}

/// `POST /_svc/internal/drill`: requests a restore drill of the latest snapshot.
pub async fn request_drill(State(layout): State<Layout>) -> Result<Response, Problem> {
    write_request(&layout, "drill").await
}

/// `POST /_svc/internal/files-verify`: requests verification of part of the file backup.
pub async fn request_files_verification(State(layout): State<Layout>) -> Result<Response, Problem> {
    write_request(&layout, verify::REQUEST).await
}

/// Writes the named request file, replacing any pending request.
async fn write_request(layout: &Layout, name: &'static str) -> Result<Response, Problem> {
    let path = layout.request(name);
    let requested_at = rfc3339_ms(Timestamp::now());
    let content =
        json!({ "requestedAt": requested_at, "by": "platform", "requestId": request_id::current() })
            .to_string();
    run_blocking(move || fsx::write_atomic(&path, content.as_bytes(), 0o600)).await?;
    let body = json!({ "request": name, "requestedAt": requested_at });
    Ok((StatusCode::ACCEPTED, Json(body)).into_response())
}

/// `POST /_svc/internal/update`: requests an update. The request only names the release; the updater runs as root,
/// trusts no other process, and decides whether to install it.
pub async fn request_update(
    State(layout): State<Layout>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let mut fields = body::read_fields(&headers, body, DEFAULT_MAX_BODY_BYTES).await?;
    let version = fields.required("imageVersion");
    let version: ImageVersion = fields.finish(version)?;
    let request = UpdateRequest::new(version);
    let stored = request.clone();
    run_blocking(move || stored.write(&layout)).await?;
    let body = json!({
        "request": "update", "imageVersion": request.image_version, "requestedAt": rfc3339_ms(request.requested_at),
    });
    Ok((StatusCode::ACCEPTED, Json(body)).into_response())
}

pub static UPDATE: Endpoint = Endpoint {
    operation: Operation {
        id: "requestUpdate",
        method: Method::POST,
        path: "/_svc/internal/update",
        summary: "Requests an update to a release.",
        credentials: &[PLATFORM],
        parameters: &[],
        body: Some(|| request_object(&[("imageVersion", text_matching(ImageVersion::PATTERN))], &[])),
        responses: &[documented_json(202, "The request is accepted.", || {
            let version = text_matching(ImageVersion::PATTERN);
            object(
                &[("request", string_enum(&["update"])), ("imageVersion", version), ("requestedAt", time())],
                &[],
            )
        })],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static BACKUP: Endpoint = Endpoint {
    operation: Operation {
        id: "requestBackup",
        method: Method::POST,
        path: "/_svc/internal/backup",
        summary: "Requests a backup.",
        credentials: &[PLATFORM],
        parameters: &[],
        body: None,
        responses: &[documented_json(202, "The request is accepted.", || {
            object(&[("request", string_enum(&["backup"])), ("requestedAt", time())], &[])
        })],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static ACCEPT: Endpoint = Endpoint {
    operation: Operation {
        id: "acceptBackup",
        method: Method::POST,
        path: "/_svc/internal/backup-accept",
        summary: "Accepts as the latest the snapshot that was held back because the database shrank.",
        credentials: &[PLATFORM],
        parameters: &[],
        body: None,
        responses: &[documented_json(202, "The request is accepted.", || {
            object(&[("request", string_enum(&["accept"])), ("requestedAt", time())], &[])
        })],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static DRILL: Endpoint = Endpoint {
    operation: Operation {
        id: "requestDrill",
        method: Method::POST,
        path: "/_svc/internal/drill",
        summary: "Requests a restore drill of the latest snapshot.",
        credentials: &[PLATFORM],
        parameters: &[],
        body: None,
        responses: &[documented_json(202, "The request is accepted.", || {
            object(&[("request", string_enum(&["drill"])), ("requestedAt", time())], &[])
        })],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static VERIFY_FILES: Endpoint = Endpoint {
    operation: Operation {
        id: "requestFilesVerification",
        method: Method::POST,
        path: "/_svc/internal/files-verify",
        summary: "Requests a verification of part of the file backup.",
        credentials: &[PLATFORM],
        parameters: &[],
        body: None,
        responses: &[documented_json(202, "The request is accepted.", || {
            object(&[("request", string_enum(&[verify::REQUEST])), ("requestedAt", time())], &[])
        })],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};
