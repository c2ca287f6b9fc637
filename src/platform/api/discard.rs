//! POST `/vps/:id/discard`: the kept server of a machine that left its slot is deleted before its time.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use deadpool_postgres::Transaction;
use http::{Method, StatusCode};
use serde_json::json;

use super::endpoint::{Endpoint, IDEMPOTENCY_KEY, MACHINE_ID, OPERATOR, told};
use super::machine_change::{Begun, ChangeRequest, Effect, Lock, MachineChange};
use super::mutation::{Mutation, Reply};
use crate::clock::rfc3339_ms;
use crate::http::openapi::{Operation, boolean, fields, named};
use crate::http::problem::{Code, Problem};
use crate::http::segments::Segments;
use crate::machine::id::MachineId;
use crate::platform::context::Platform;
use crate::platform::db::machine_row::MachineRow;
use crate::platform::db::{self, machine_changes};

/// Whether what no snapshot holds may be lost.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Loss {
    Accepted,
    Refused,
}

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    Segments(id): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    let ChangeRequest { call, id, mutation } = ChangeRequest::read(&platform, &id, request).await?;
    let mut said = call.fields()?;
    let loss = if said.boolean("acceptLoss") == Some(true) { Loss::Accepted } else { Loss::Refused };
    let loss = said.finish(Some(loss))?;
    let reply = discard(&platform, id, loss, &mutation).await?;
    platform.reconcile.notify_one();
    Ok(reply.into_response())
}

async fn discard(
    platform: &Platform,
    id: MachineId,
    loss: Loss,
    mutation: &Mutation,
) -> Result<Reply, Problem> {
    let mut session = platform.db.session().await?;
    let change = match MachineChange::begin(&mut session, mutation, id, Lock::Machine).await? {
        Begun::Replayed(reply) => return Ok(reply),
        Begun::Open(change) => change,
    };
    check(&change.machine, loss)?;
    if loss == Loss::Refused {
        check_saved(&change.tx, &change.machine).await?;
    }
    machine_changes::discard_ordered(&change.tx, id).await?;
    change.end(Effect::Changed("discard"), StatusCode::ACCEPTED, MachineRow::record).await
}

fn check(machine: &MachineRow, loss: Loss) -> Result<(), Problem> {
    if machine.is_active() {
        let detail = format!("The machine holds its slot: `svcctl delete {}` deletes it.", machine.id);
        return Err(invalid(machine.status.as_str(), &detail));
    }
    if machine.server_deleted_at.is_some() {
        let detail = format!(
            "Its server is deleted already; `svcctl backup list {}` shows the snapshots of its slot.",
            machine.id
        );
        return Err(invalid("server_deleted", &detail));
    }
    match machine.unsaved_since.filter(|_| loss == Loss::Refused) {
        None => Ok(()),
        Some(since) => Err(refused(&format!(
            "No snapshot holds what was written on it since {}. Send acceptLoss to delete it all the same.",
            rfc3339_ms(since)
        ))),
    }
}

/// Refuses a server that may hold the only copy of the slot's data: without `acceptLoss`, the database must say that a
/// last backup exists or that an operator has accepted the loss already.
async fn check_saved(tx: &Transaction<'_>, machine: &MachineRow) -> Result<(), Problem> {
    if let Some(operation) = db::slot_operations::needs_server(tx, machine).await? {
        return Err(refused(&format!(
            "Operation {} ({}) still needs this server: wait until it has ended, or send acceptLoss to delete the \
             server all the same.",
            operation.id, operation.kind
        )));
    }
    if db::machines::is_successor_unproven(tx, machine).await? {
        return Err(refused(
            "No later machine of the slot has served yet: this server is its last copy. Send acceptLoss to delete it \
             all the same.",
        ));
    }
    // A machine that gets its slot back loses its `final_backup_at`: one that is set was made for this departure.
    if machine.registered_at.is_none() || machine.final_backup_at.is_some() {
        return Ok(());
    }
    if db::slot_operations::is_loss_accepted(tx, machine.id).await? {
        return Ok(());
    }
    Err(refused(
        "No last backup of this machine is on record, and no accepted loss. Send acceptLoss to delete its server all \
         the same.",
    ))
}

fn refused(detail: &str) -> Problem {
    invalid("kept", detail)
}

fn invalid(status: &str, detail: &str) -> Problem {
    Problem::new(Code::InvalidState, detail).with("machineStatus", json!(status)).with("allowed", json!([]))
}

/// The route and its description.
pub static ENDPOINT: Endpoint = Endpoint {
    operation: Operation {
        id: "discard",
        method: Method::POST,
        path: "/vps/{id}/discard",
        summary: "Deletes the kept server of a replaced or deleted machine before its time.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, IDEMPOTENCY_KEY],
        body: Some(|| fields(&[], &[("acceptLoss", boolean())])),
        answers: &[told(202, "Its server is being deleted.", || named("Machine"))],
        problems: &[
            Code::MachineNotFound,
            Code::InvalidState,
            Code::DatabaseUnavailable,
            Code::IdempotencyMismatch,
        ],
    },
    serve: || post(handle),
};
