//! `/_svc/internal/quiesce` and `/resume`: the platform stops the machine's writers before a last backup, and starts
//! them again when the operation ends without a successor.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::routing::post;
use http::{HeaderMap, Method};
use serde_json::{Value, json};

use crate::clock::rfc3339_ms;
use crate::host::gateway::body;
use crate::host::gateway::endpoint::{Endpoint, OWN_BODY, PLATFORM, told};
use crate::host::gateway::state::Gateway;
use crate::host::gateway::writers::Progress;
use crate::http::openapi::{Operation, count, fields, nullable, object, time, uuid};
use crate::http::problem::{Code, Problem};
use crate::machine::id::OperationId;

async fn operation_id(headers: &HeaderMap, body: Body) -> Result<OperationId, Problem> {
    let mut fields = body::fields(headers, body, OWN_BODY).await?;
    let operation = fields.required("operationId");
    fields.finish(operation)
}

/// `POST /_svc/internal/quiesce`
async fn quiesce(
    State(gateway): State<Arc<Gateway>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let operation = operation_id(&headers, body).await?;
    let Progress { quiesce, running_dispatches } = gateway.writers.quiesce(&gateway, operation).await?;
    Ok(Json(json!({
        "operationId": quiesce.operation_id,
        "quiescedAt": quiesce.quiesced_at.map(rfc3339_ms),
        "runningDispatches": running_dispatches,
    })))
}

/// `POST /_svc/internal/resume`
async fn resume(
    State(gateway): State<Arc<Gateway>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, Problem> {
    let operation = operation_id(&headers, body).await?;
    gateway.writers.resume(&gateway, operation).await?;
    Ok(Json(json!({})))
}

pub static QUIESCE: Endpoint = Endpoint {
    operation: Operation {
        id: "quiesce",
        method: Method::POST,
        path: "/_svc/internal/quiesce",
        summary: "Stops all writers for an operation: dispatches end and are recorded, the bridge answers 503. Asked \
                  again, it says how far that is; the state survives a restart.",
        credentials: &[PLATFORM],
        parameters: &[],
        body: Some(|| fields(&[("operationId", uuid())], &[])),
        answers: &[told(200, "Writers are stopped once quiescedAt is set.", || {
            object(
                &[("operationId", uuid()), ("quiescedAt", nullable(time())), ("runningDispatches", count())],
                &[],
            )
        })],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    largest_body: OWN_BODY,
    serve: || post(quiesce),
};

pub static RESUME: Endpoint = Endpoint {
    operation: Operation {
        id: "resume",
        method: Method::POST,
        path: "/_svc/internal/resume",
        summary: "Lets writers write again after a quiesce for this operation.",
        credentials: &[PLATFORM],
        parameters: &[],
        body: Some(|| fields(&[("operationId", uuid())], &[])),
        answers: &[told(200, "They may write.", || object(&[], &[]))],
        problems: &[Code::Forbidden, Code::Unavailable, Code::InvalidState],
    },
    largest_body: OWN_BODY,
    serve: || post(resume),
};
