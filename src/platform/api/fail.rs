//! POST `/vps/:id/fail`: an operator takes a machine out of `running`, or out of a state that it is stuck in.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::{Method, StatusCode};

use super::call::{Call, path_id};
use super::endpoint::{Endpoint, IDEMPOTENCY_KEY, MACHINE_ID, OPERATOR, told};
use super::fault;
use super::mutation::{Changed, Mutation, Reply};
use crate::http::openapi::{Operation, fields, named, text_to};
use crate::http::problem::{Code, Problem};
use crate::http::segments::Segments;
use crate::machine::event::Event;
use crate::machine::id::MachineId;
use crate::platform::context::Platform;
use crate::platform::db::{self};
use crate::platform::lifecycle::{self, Change, Circumstances};
use axum::routing::post;

const LONGEST_REASON: usize = 1024;
/// Where a machine failed that somebody has failed.
const STAGE: &str = "operator";

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    Segments(id): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    call.operator(&platform)?;
    let mut fields = call.fields()?;
    let id = path_id("machineId", &id)?;
    let reason = fields.text("reason", LONGEST_REASON);
    let reason = fields.finish(reason)?;
    let mutation = Mutation::of(&call)?;
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
    let not_found = || fault::machine_not_found(&id.to_string());
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    if let Some(reply) = mutation.begin(&tx).await? {
        return Ok(reply);
    }
    let machine = db::machines::locked(&tx, id).await?.ok_or_else(not_found)?;
    let with = Circumstances { failed_at: Some((STAGE, reason)), ..Circumstances::default() };
    let change = lifecycle::apply(&tx, &platform.mint, &machine, &Event::OperatorFailed, with).await;
    let change = change.map_err(|error| fault::lifecycle(error, &machine))?;
    let failed = db::machines::get(&tx, id).await?.ok_or_else(not_found)?;
    let reply = Reply::new(StatusCode::OK, failed.record());
    if change == Change::Unchanged {
        mutation.store(&tx, &reply).await?;
    } else {
        let (before, target) = (machine.record(), id.to_string());
        let after = Some(&reply.body);
        let changed = Changed { action: "fail", target: &target, before: Some(&before), after };
        mutation.record(&tx, &reply, &changed).await?;
    }
    db::commit(tx).await?;
    Ok(reply)
}

/// The route and its description.
pub static ENDPOINT: Endpoint = Endpoint {
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
