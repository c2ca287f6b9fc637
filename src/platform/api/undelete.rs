//! POST `/vps/:id/undelete`: returns a deleted machine to its slot while its server is kept.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::post;
use deadpool_postgres::Transaction;
use http::{Method, StatusCode};
use serde_json::json;

use super::endpoint::{
    Access, Endpoint, IDEMPOTENCY_KEY, MACHINE_ID, OPERATE, OPERATOR, PREFER, documented_json,
};
use super::machine_change::{ChangeEffect, ChangeRequest, ChangeStart, LockScope, MachineChange};
use super::mutation::{self, Mutation, Reply};
use super::{problems, replacement_checks};
use crate::context::Platform;
use crate::db;
use crate::db::machine_row::MachineRow;
use crate::lifecycle::{self, Change, CreatedOperation, EventContext};
use svc_http::openapi::{Operation, schema_of};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem};
use svc_machine::event::Event;
use svc_machine::id::MachineId;
use svc_wire::change::UndeletedMachine;

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let ChangeRequest { call, id, mutation } = ChangeRequest::read(&platform, &id, request).await?;
    call.ensure_empty_body()?;
    let reply = undelete(&platform, id, &mutation).await?;
    platform.runner_wake.notify_one();
    Ok(mutation::respond(&platform, &call, reply).await)
}

async fn undelete(platform: &Platform, id: MachineId, mutation: &Mutation) -> Result<Reply, Problem> {
    let mut session = platform.db.session().await?;
    if let Some(reply) = mutation.replay(&session).await? {
        return Ok(reply);
    }
    let unlocked = db::machines::get(&session, id).await?;
    if let Some(deleted) = unlocked.filter(|machine| machine.deleted_at.is_some()) {
        // No session is held during requests to the store.
        drop(session);
        ensure_slot_is_free(platform, &deleted).await?;
        session = platform.db.session().await?;
    }
    let change = match MachineChange::begin(&mut session, mutation, id, LockScope::User).await? {
        ChangeStart::Replayed(reply) => return Ok(reply),
        ChangeStart::Started(change) => change,
    };
    if let Some(created) = find_reinstatement(&change.tx, &change.machine).await? {
        let body = |after: &MachineRow| response_body(after, created, true);
        return change.end(ChangeEffect::Unchanged, StatusCode::ACCEPTED, body).await;
    }
    let created = reinstate(platform, &change.tx, &change.machine).await?;
    let body = |after: &MachineRow| response_body(after, created, false);
    change.end(ChangeEffect::Changed("undelete"), StatusCode::ACCEPTED, body).await
}

/// Rejects a machine whose slot another machine holds or may hold, according to the store. If the store is unavailable,
/// the check passes: the operation repeats it in its first step.
///
/// # Errors
/// `invalid_state` for such a machine; `database_unavailable` if the database is unreachable.
pub async fn ensure_slot_is_free(platform: &Platform, deleted: &MachineRow) -> Result<(), Problem> {
    match replacement_checks::ensure_holds_slot(platform, deleted).await {
        Err(problem) if problem.code == Code::StoreUnavailable => Ok(()),
        result => result,
    }
}

/// Finds the operation that has already undone the machine's deletion.
async fn find_reinstatement(
    tx: &Transaction<'_>,
    machine: &MachineRow,
) -> Result<Option<CreatedOperation>, Problem> {
    if !machine.is_active() {
        return Ok(None);
    }
    let deletion = db::operations::find_newest(tx, machine.id, "delete").await?;
    let reinstatement = db::operations::find_newest(tx, machine.id, "reinstate").await?;
    let reinstatement = deletion
        .zip(reinstatement)
        .filter(|(deletion, reinstatement)| deletion.created_at < reinstatement.created_at);
    Ok(reinstatement
        .map(|(_, reinstatement)| CreatedOperation { machine: machine.id, operation: reinstatement.id }))
}

/// Returns a deleted machine to its slot.
///
/// # Errors
/// `invalid_state` if the machine is not deleted or never served traffic, if its server has been or is being deleted,
/// or if another machine holds the slot or has served traffic in it since.
pub async fn reinstate(
    platform: &Platform,
    tx: &Transaction<'_>,
    machine: &MachineRow,
) -> Result<CreatedOperation, Problem> {
    ensure_can_reinstate(tx, machine).await?;
    let highest = db::machines::find_highest_epoch(tx, &machine.user, &machine.slot).await?;
    let event = Event::Reinstated { epoch: highest.next(), power: machine.server_power() };
    // A failure that no heartbeat clears keeps its reason.
    let failure = machine.failure.as_ref().filter(|failure| !failure.cause.is_cleared_by_heartbeat());
    let previous_failure =
        failure.and_then(|failure| failure.stage.as_deref().zip(failure.message.as_deref()));
    let awaiting_heartbeat =
        ("reinstate", "its deletion was undone; its next healthy heartbeat returns it to service");
    let context =
        EventContext { failure: previous_failure.or(Some(awaiting_heartbeat)), ..EventContext::default() };
    let change = lifecycle::apply(tx, &platform.mint, machine, &event, context).await;
    match change.map_err(|error| problems::lifecycle_problem(error, machine))? {
        Change::Moved { created: Some(created) } => Ok(created),
        Change::Moved { created: None } | Change::Unchanged => Err(not_deleted(machine)),
    }
}

async fn ensure_can_reinstate(tx: &Transaction<'_>, machine: &MachineRow) -> Result<(), Problem> {
    if machine.deleted_at.is_none() {
        return Err(not_deleted(machine));
    }
    if machine.registered_at.is_none() {
        return Err(invalid_state("The machine has never served traffic: provision the slot."));
    }
    let removal = db::operations::find_newest(tx, machine.id, "remove_server").await?;
    // A removal that was abandoned, or failed because the machine is serving, has left the server untouched.
    if !machine.has_server() || removal.as_ref().is_some_and(|removal| removal.state == "succeeded") {
        return Err(invalid_state(
            "The machine's server has been deleted: provision the slot, which restores its latest snapshot.",
        ));
    }
    if let Some(removal) = removal.filter(|removal| removal.state == "running") {
        return Err(invalid_state(&format!(
            "Operation {0} is deleting the machine's server: if the provider still has it, keep it with `svcctl operation \
             abandon {0}`, then undelete again. Otherwise, provision the slot, which restores its latest snapshot.",
            removal.id
        )));
    }
    if db::machines::find_in_slot(tx, &machine.user, &machine.slot).await?.is_some() {
        return Err(invalid_state("Another machine holds the slot; delete that machine first."));
    }
    if db::machines::has_registered_successor(tx, machine).await? {
        return Err(invalid_state(
            "A later machine in the slot has served traffic, so this machine's data is outdated.",
        ));
    }
    Ok(())
}

fn not_deleted(machine: &MachineRow) -> Problem {
    Problem::new(Code::InvalidState, "The machine is not deleted.")
        .with("machineStatus", json!(machine.status_or_replaced()))
        .with("allowed", json!([]))
}

fn invalid_state(detail: &str) -> Problem {
    Problem::new(Code::InvalidState, detail)
        .with("machineStatus", json!("deleted"))
        .with("allowed", json!([]))
}

fn response_body(machine: &MachineRow, created: CreatedOperation, already_undone: bool) -> UndeletedMachine {
    UndeletedMachine {
        machine_id: machine.id.into(),
        kind: machine.kind.into(),
        status: machine.status.into(),
        epoch: machine.epoch.0.into(),
        operation_id: created.operation.into(),
        already_undone,
    }
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "undelete",
        method: Method::POST,
        path: "/vps/{id}/undelete",
        summary: "Returns a deleted machine to its slot while its server is kept. If the deletion has already been undone, \
                  responds with `alreadyUndone` and the operation that undid it.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, IDEMPOTENCY_KEY, PREFER],
        body: None,
        responses: &[documented_json(
            202,
            "The machine holds its slot again; its server is being powered on.",
            schema_of::<UndeletedMachine>,
        )],
        problems: &[
            Code::MachineNotFound,
            Code::InvalidState,
            Code::DatabaseUnavailable,
            Code::IdempotencyMismatch,
        ],
    },
    serve: || post(handle),
};
