//! POST `/vps/:id/boot-failure`: a host reports that its boot failed, and at which stage.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::{Method, StatusCode};
use serde_json::json;

use super::call::{ApiCall, path_id, registration_rejected};
use super::endpoint::{Access, Endpoint, MACHINE_ID, REGISTRATION, documented_json};
use super::mutation::{self, AuditChange, Reply};
use super::{problems, register};
use crate::context::Platform;
use crate::db;
use crate::lifecycle::{self, EventContext};
use axum::routing::post;
use svc_base::untrusted_text;
use svc_http::openapi::{Operation, extensible, schema_of};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem};
use svc_machine::event::Event;
use svc_machine::id::MachineId;
use svc_machine::state::Status;
use svc_wire::registration::{BootFailureReport, BootFailureResponse, MAX_STAGE_CHARS};

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let (claimed, token) = call.parse_registration_claim(&platform)?;
    let mut session = platform.host_db.session().await?;
    let tx = db::begin(&mut session).await?;
    let machine = register::lock_claimed_machine(&tx, claimed, token).await?;
    let mut fields = call.host_fields()?;
    let id: MachineId = path_id("machineId", &id)?;
    if id != machine.id {
        return Err(registration_rejected());
    }
    let stage = fields
        .required_text("stage", MAX_STAGE_CHARS)
        .map(|stage| untrusted_text::truncate_printable(&stage));
    let message = fields.required_host_text("message");
    let report = stage.zip(message).map(|(stage, message)| BootFailureReport { stage, message });
    let report = fields.finish(report)?;
    let BootFailureReport { stage, message } = &report;

    let context = EventContext { failure: Some((stage, message)), ..EventContext::default() };
    lifecycle::apply(&tx, &platform.mint, &machine, &Event::BootFailureReported, context)
        .await
        .map_err(|error| problems::lifecycle_problem(error, &machine))?;
    let (target, after) = (id.to_string(), json!(report));
    let change = AuditChange { action: "boot-failure", target, before: None, after: Some(after) };
    mutation::write_audit(&tx, &format!("machine:{id}"), &change).await?;
    db::commit(tx).await?;
    tracing::warn!(machine = %id, stage, "host failed to boot");
    let response = BootFailureResponse { machine_id: id.into(), status: Status::Failed.into() };
    Ok(Reply::new(StatusCode::ACCEPTED, response).into_response())
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Machine,
    operation: Operation {
        id: "reportBootFailure",
        method: Method::POST,
        path: "/vps/{id}/boot-failure",
        summary: "Reports that a host's boot failed, and at which stage.",
        credentials: &[REGISTRATION],
        parameters: &[MACHINE_ID],
        body: Some(|| extensible(schema_of::<BootFailureReport>())),
        responses: &[documented_json(
            202,
            "The machine is marked as failed.",
            schema_of::<BootFailureResponse>,
        )],
        problems: &[
            Code::RegistrationRejected,
            Code::RateLimited,
            Code::InvalidState,
            Code::DatabaseUnavailable,
        ],
    },
    serve: || post(handle),
};
