//! POST `/vps/:id/fail`: marks a machine as failed, because it should not run or is stuck in another state.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::{Method, StatusCode};

use super::endpoint::{Access, Endpoint, IDEMPOTENCY_KEY, MACHINE_ID, OPERATE, OPERATOR, documented_json};
use super::machine_change::{ChangeEffect, ChangeRequest, ChangeStart, LockScope, MachineChange};
use super::mutation::{Mutation, Reply};
use super::problems;
use crate::context::Platform;
use crate::lifecycle::{self, Change, EventContext};
use axum::routing::post;
use svc_http::openapi::{Operation, request_object, schema_ref, text_up_to};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem};
use svc_machine::event::Event;
use svc_machine::id::MachineId;
use svc_wire::machine::Machine;

const MAX_REASON_CHARS: usize = 1024;
/// The failure stage of a machine that an operator has marked as failed.
const FAILURE_STAGE: &str = "operator";

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let ChangeRequest { call, id, mutation } = ChangeRequest::read(&platform, &id, request).await?;
    let mut fields = call.request.json_fields()?;
    let reason = fields.required_text("reason", MAX_REASON_CHARS);
    let reason = fields.finish(reason)?;
    let reply = fail(&platform, id, &reason, &mutation).await?;
    // If the request cancelled an operation, the operation may have left resources behind.
    platform.reconciler_wake.notify_one();
    Ok(reply.into_response())
}

async fn fail(
    platform: &Platform,
    id: MachineId,
    reason: &str,
    mutation: &Mutation,
) -> Result<Reply, Problem> {
    let mut session = platform.db.session().await?;
    let change = match MachineChange::begin(&mut session, mutation, id, LockScope::Machine).await? {
        ChangeStart::Replayed(reply) => return Ok(reply),
        ChangeStart::Started(change) => change,
    };
    let context = EventContext { failure: Some((FAILURE_STAGE, reason)), ..EventContext::default() };
    let event = Event::FailRequested;
    let changed = lifecycle::apply(&change.tx, &platform.mint, &change.machine, &event, context).await;
    let effect = match changed.map_err(|error| problems::lifecycle_problem(error, &change.machine))? {
        Change::Unchanged => ChangeEffect::Unchanged,
        Change::Moved { .. } => ChangeEffect::Changed("fail"),
    };
    change.end(effect, StatusCode::OK, |after| Machine::from(after)).await
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "fail",
        method: Method::POST,
        path: "/vps/{id}/fail",
        summary: "Marks a machine as failed, because it should not run or is stuck in another state.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, IDEMPOTENCY_KEY],
        body: Some(|| request_object(&[("reason", text_up_to(MAX_REASON_CHARS))], &[])),
        responses: &[documented_json(200, "The machine is marked as failed.", || schema_ref("Machine"))],
        problems: &[
            Code::MachineNotFound,
            Code::InvalidState,
            Code::DatabaseUnavailable,
            Code::IdempotencyMismatch,
        ],
    },
    serve: || post(handle),
};
