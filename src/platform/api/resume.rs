//! POST `/vps/:id/resume`: returns a failed machine to service if its server is running and its host is healthy.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use http::{Method, StatusCode};
use jiff::{SignedDuration, Timestamp};
use serde_json::json;

use super::endpoint::{Access, Endpoint, IDEMPOTENCY_KEY, MACHINE_ID, OPERATE, OPERATOR, documented_json};
use super::machine_change::{ChangeEffect, ChangeRequest, ChangeStart, LockScope, MachineChange};
use super::mutation::{Mutation, Reply};
use super::problems;
use crate::context::Platform;
use crate::db;
use crate::db::machine_row::MachineRow;
use crate::lifecycle::{self, Change, EventContext};
use svc_http::openapi::{Operation, schema_ref};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem};
use svc_machine::event::Event;
use svc_machine::id::MachineId;
use svc_machine::name::ServerType;
use svc_machine::state::Status;
use svc_provider::{ServerId, ServerStatus};
use svc_wire::machine::Machine;

/// Maximum age of a live host's last heartbeat.
const MAX_HEARTBEAT_AGE: SignedDuration = SignedDuration::from_mins(2);

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let ChangeRequest { call, id, mutation } = ChangeRequest::read(&platform, &id, request).await?;
    call.ensure_empty_body()?;
    Ok(resume(&platform, id, &mutation).await?.into_response())
}

async fn resume(platform: &Platform, id: MachineId, mutation: &Mutation) -> Result<Reply, Problem> {
    let not_found = || problems::machine_not_found(&id.to_string());
    let session = platform.db.session().await?;
    if let Some(reply) = mutation.replay(&session).await? {
        return Ok(reply);
    }
    let unlocked = db::machines::get(&session, id).await?.ok_or_else(not_found)?;
    let now = db::servers::now(&session).await?;
    // No session is held during the request to the provider.
    drop(session);
    let server_type = match unlocked.status {
        Status::Failed if unlocked.is_active() => check_server_and_host(platform, &unlocked, now).await?,
        // In any other state, the transition rejects the request or changes nothing, so the type is not used.
        _ => unlocked.server_type.clone(),
    };
    let mut session = platform.db.session().await?;
    let change = match MachineChange::begin(&mut session, mutation, id, LockScope::Machine).await? {
        ChangeStart::Replayed(reply) => return Ok(reply),
        ChangeStart::Started(change) => change,
    };
    // The checks ran without a lock, so the machine must not have changed since.
    let (before, locked) = ((unlocked.status, unlocked.epoch, unlocked.is_active()), &change.machine);
    if before != (locked.status, locked.epoch, locked.is_active()) {
        return Err(Problem::new(Code::Unavailable, "The machine has changed; try again.").retry_after(1));
    }
    let event = Event::ResumeRequested { server_type };
    let context = EventContext::default();
    let changed = lifecycle::apply(&change.tx, &platform.mint, &change.machine, &event, context).await;
    let effect = match changed.map_err(|error| problems::lifecycle_problem(error, &change.machine))? {
        Change::Unchanged => ChangeEffect::Unchanged,
        Change::Moved { .. } => ChangeEffect::Changed("resume"),
    };
    change.end(effect, StatusCode::OK, |after| Machine::from(after)).await
}

/// Checks that the machine's server is running and its host is healthy. Returns the server's type.
async fn check_server_and_host(
    platform: &Platform,
    machine: &MachineRow,
    now: Timestamp,
) -> Result<ServerType, Problem> {
    if machine.registered_at.is_none() {
        return Err(invalid_state("The machine's host never registered: recover or provision the slot."));
    }
    let is_live = machine.heartbeat_at.is_some_and(|last| now.duration_since(last) < MAX_HEARTBEAT_AGE);
    if !is_live || !machine.is_healthy() {
        return Err(invalid_state(&format!(
            "The machine's host has sent no healthy heartbeat in the last two minutes: use `svcctl power on {0}` if its \
             server is off, `svcctl power off {0}` and then `svcctl power on {0}` if its host has hung, or recover the slot.",
            machine.id
        )));
    }
    let Some(server_id) = machine.provider_server_id else {
        return Err(invalid_state("The machine has no server: recover the slot."));
    };
    let server = platform.provider.get(ServerId(server_id)).await;
    let server = server.map_err(|error| problems::provider_problem(&error))?;
    match server {
        Some(server) if server.status == ServerStatus::Running => Ok(server.server_type),
        Some(_) => Err(invalid_state(&format!(
            "The machine's server is not running: power it on with `svcctl power on {}`.",
            machine.id
        ))),
        None => Err(invalid_state("The provider no longer has the machine's server: recover the slot.")),
    }
}

fn invalid_state(detail: &str) -> Problem {
    Problem::new(Code::InvalidState, detail)
        .with("machineStatus", json!(Status::Failed))
        .with("allowed", json!([Status::Failed]))
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "resume",
        method: Method::POST,
        path: "/vps/{id}/resume",
        summary: "Returns a failed machine with a healthy host to service.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, IDEMPOTENCY_KEY],
        body: None,
        responses: &[documented_json(200, "The machine is running.", || schema_ref("Machine"))],
        problems: &[
            Code::MachineNotFound,
            Code::InvalidState,
            Code::ProvisioningError,
            Code::Unavailable,
            Code::DatabaseUnavailable,
            Code::IdempotencyMismatch,
        ],
    },
    serve: || post(handle),
};
