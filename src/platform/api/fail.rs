//! POST `/vps/:id/fail`: an operator takes a machine out of `running`, or out of a state that it is stuck in.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::{Method, StatusCode};

use super::endpoint::{Access, Endpoint, IDEMPOTENCY_KEY, MACHINE_ID, OPERATE, OPERATOR, told};
use super::fault;
use super::machine_change::{Begun, ChangeRequest, Effect, Lock, MachineChange};
use super::mutation::{Mutation, Reply};
use crate::http::openapi::{Operation, fields, named, text_to};
use crate::http::problem::{Code, Problem};
use crate::http::segments::Segments;
use crate::machine::event::Event;
use crate::machine::id::MachineId;
use crate::platform::context::Platform;
use crate::platform::db::machine_row::MachineRow;
use crate::platform::lifecycle::{self, Change, EventContext};
use axum::routing::post;

const LONGEST_REASON: usize = 1024;
/// Where a machine failed that somebody has failed.
const STAGE: &str = "operator";

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    Segments(id): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    let ChangeRequest { call, id, mutation } = ChangeRequest::read(&platform, &id, request).await?;
    let mut fields = call.fields()?;
    let reason = fields.text("reason", LONGEST_REASON);
    let reason = fields.finish(reason)?;
    let reply = fail(&platform, id, &reason, &mutation).await?;
    // The operation that it ends may have left something behind.
    platform.reconcile.notify_one();
    Ok(reply.into_response())
}

async fn fail(
    platform: &Platform,
    id: MachineId,
    reason: &str,
    mutation: &Mutation,
) -> Result<Reply, Problem> {
    let mut session = platform.db.session().await?;
    let change = match MachineChange::begin(&mut session, mutation, id, Lock::Machine).await? {
        Begun::Replayed(reply) => return Ok(reply),
        Begun::Open(change) => change,
    };
    let with = EventContext { failed_at: Some((STAGE, reason)), ..EventContext::default() };
    let event = Event::OperatorFailed;
    let changed = lifecycle::apply(&change.tx, &platform.mint, &change.machine, &event, with).await;
    let effect = match changed.map_err(|error| fault::lifecycle(error, &change.machine))? {
        Change::Unchanged => Effect::Unchanged,
        Change::Moved { .. } => Effect::Changed("fail"),
    };
    change.end(effect, StatusCode::OK, MachineRow::record).await
}

/// The route and its description.
pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "fail",
        method: Method::POST,
        path: "/vps/{id}/fail",
        summary: "Takes a machine out of running, or out of a state that it is stuck in.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, IDEMPOTENCY_KEY],
        body: Some(|| fields(&[("reason", text_to(LONGEST_REASON))], &[])),
        answers: &[told(200, "The machine has failed.", || named("Machine"))],
        problems: &[
            Code::MachineNotFound,
            Code::InvalidState,
            Code::DatabaseUnavailable,
            Code::IdempotencyMismatch,
        ],
    },
    serve: || post(handle),
};
