//! `/_svc/internal/quiesce` and `/resume`: the platform stops the machine's writers before a final backup, and resumes
//! them if the operation finishes without replacing the machine.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use http::{HeaderMap, Method};
use serde_json::{Value, json};

use crate::auth::PLATFORM;
use crate::body;
use crate::endpoint::{DEFAULT_MAX_BODY_BYTES, Endpoint, documented_json};
use crate::writers::{QuiesceProgress, Writers};
use svc_base::clock::rfc3339_ms;
use svc_http::openapi::{Operation, count, nullable, object, request_object, time, uuid};
use svc_http::problem::{Code, Problem};
use svc_machine::id::OperationId;

async fn read_operation_id(headers: &HeaderMap, body: Body) -> Result<OperationId, Problem> {
    let mut fields = body::read_fields(headers, body, DEFAULT_MAX_BODY_BYTES).await?;
    let operation = fields.required("operationId");
    fields.finish(operation)
}

/// `POST /_svc/internal/quiesce`: stops writers for an operation and returns the progress.
pub async fn quiesce(
    State(writers): State<Arc<Writers>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let operation = read_operation_id(&headers, body).await?;
    let QuiesceProgress { quiesce, running_dispatches } = writers.quiesce(operation).await?;
    Ok(Json(json!({
        "operationId": quiesce.operation_id,
        "quiescedAt": quiesce.quiesced_at.map(rfc3339_ms),
        "runningDispatches": running_dispatches,
    })))
}

/// `POST /_svc/internal/resume`: resumes writers stopped for an operation.
pub async fn resume(
    State(writers): State<Arc<Writers>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let operation = read_operation_id(&headers, body).await?;
    writers.resume(operation).await?;
    Ok(Json(json!({})))
}

pub static QUIESCE: Endpoint = Endpoint {
    operation: Operation {
        id: "quiesce",
        method: Method::POST,
        path: "/_svc/internal/quiesce",
        summary: "Stops all writers for an operation: running dispatches are ended and recorded, and the bridge \
                  returns 503. Repeated requests return the progress; the state survives a restart.",
        credentials: &[PLATFORM],
        parameters: &[],
        body: Some(|| request_object(&[("operationId", uuid())], &[])),
        responses: &[documented_json(200, "Writers are stopped once quiescedAt is set.", || {
            object(
                &[("operationId", uuid()), ("quiescedAt", nullable(time())), ("runningDispatches", count())],
                &[],
            )
        })],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static RESUME: Endpoint = Endpoint {
    operation: Operation {
        id: "resume",
        method: Method::POST,
        path: "/_svc/internal/resume",
        summary: "Resumes writers after a quiesce for this operation.",
        credentials: &[PLATFORM],
        parameters: &[],
        body: Some(|| request_object(&[("operationId", uuid())], &[])),
        responses: &[documented_json(200, "Writers are resumed.", || object(&[], &[]))],
        problems: &[Code::Forbidden, Code::Unavailable, Code::InvalidState],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};
