//! POST `/vps/:id/backup`: asks the host of a running machine for a backup now. Whether it made one shows in its next
//! heartbeats and in `/vps/:id/backups`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::{Method, StatusCode};
use serde_json::json;

use super::call::{Call, path_id};
use super::endpoint::{Endpoint, IDEMPOTENCY_KEY, MACHINE_ID, OPERATOR, told};
use super::fault;
use super::mutation::{Changed, Mutation, Reply};
use crate::clock::{now_ms, rfc3339_ms};
use crate::http::openapi::{Operation, fields, object, time, uuid};
use crate::http::problem::{Code, Problem};
use crate::http::segments::Segments;
use crate::machine::id::MachineId;
use crate::machine::state::Status;
use crate::platform::context::Platform;
use crate::platform::db::machine_row::MachineRow;
use crate::platform::db::{self};
use crate::platform::operations::ask_host;
use axum::routing::post;

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    Segments(id): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    call.operator(&platform)?;
    let fields = call.fields()?;
    let id = path_id("machineId", &id)?;
    fields.finish(Some(()))?;
    let mutation = Mutation::of(&call)?;
    Ok(backup(&platform, id, &mutation).await?.into_response())
}

async fn backup(platform: &Platform, id: MachineId, mutation: &Mutation) -> Result<Reply, Problem> {
    let session = platform.db.session().await?;
    if let Some(reply) = mutation.replay(&session).await? {
        return Ok(reply);
    }
    let machine = db::machines::get(&session, id).await?;
    // Held by nobody while the host is asked.
    drop(session);
    let machine = machine.ok_or_else(|| fault::machine_not_found(&id.to_string()))?;
    running(&machine)?;
    if let Err(error) = ask_host::backup(platform, &machine).await {
        tracing::warn!(machine = %id, error = format!("{error:#}"), "the host cannot be asked for a backup");
        return Err(Problem::new(Code::HostUnreachable, "The machine's host did not take the request."));
    }
    let reply =
        Reply::new(StatusCode::ACCEPTED, json!({"machineId": id, "requestedAt": rfc3339_ms(now_ms())}));
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    if let Some(first) = mutation.begin(&tx).await? {
        return Ok(first);
    }
    let target = id.to_string();
    let changed = Changed { action: "backup", target: &target, before: None, after: Some(&reply.body) };
    mutation.record(&tx, &reply, &changed).await?;
    db::commit(tx).await?;
    Ok(reply)
}

fn running(machine: &MachineRow) -> Result<(), Problem> {
    if machine.deleted_at.is_some() {
        return Err(fault::machine_not_found(&machine.id.to_string()));
    }
    if machine.retired_at.is_some() {
        return Err(fault::invalid_state("retired", &[]));
    }
    if machine.status != Status::Running {
        return Err(fault::invalid_state(machine.status.as_str(), &[Status::Running]));
    }
    Ok(())
}

/// The route and its description.
pub static ENDPOINT: Endpoint = Endpoint {
    operation: Operation {
        id: "backUp",
        method: Method::POST,
        path: "/vps/{id}/backup",
        summary: "Asks the host of a running machine for a backup now.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, IDEMPOTENCY_KEY],
        body: Some(|| fields(&[], &[])),
        answers: &[told(202, "The host is asked.", || {
            object(&[("machineId", uuid()), ("requestedAt", time())], &[])
        })],
        problems: &[
            Code::MachineNotFound,
            Code::InvalidState,
            Code::HostUnreachable,
            Code::DatabaseUnavailable,
            Code::IdempotencyMismatch,
        ],
    },
    serve: || post(handle),
};
