//! DELETE `/vps/:id`: the machine leaves its slot at once, its server is deleted after; objects stay.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use http::{Method, StatusCode};
use jiff::SignedDuration;
use serde_json::{Value, json};

use super::endpoint::{Endpoint, IDEMPOTENCY_KEY, MACHINE_ID, OPERATOR, PREFER, kind, status, told};
use super::fault;
use super::machine_change::ChangeRequest;
use super::mutation::{self, Changed, Mutation, Reply};
use crate::clock::rfc3339_ms;
use crate::http::fields::Fields;
use crate::http::openapi::{Operation, Parameter, Place, boolean, nullable, object, time, uuid};
use crate::http::problem::{Code, Problem};
use crate::http::segments::Segments;
use crate::machine::event::Event;
use crate::machine::id::{MachineId, OperationId};
use crate::platform::context::Platform;
use crate::platform::db::machine_row::MachineRow;
use crate::platform::db::{self};
use crate::platform::lifecycle::{self, Change, Circumstances};
use crate::platform::operations::OperationOptions;
use axum::routing::delete as delete_route;

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    Segments(id): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    let ChangeRequest { call, id, mutation } = ChangeRequest::read(&platform, &id, request).await?;
    let mut query = call.query();
    let options = OperationOptions {
        now: flag(&mut query, "now"),
        accept_loss: flag(&mut query, "acceptLoss"),
        ..OperationOptions::default()
    };
    let options = query.finish(Some(options))?;
    let reply = delete(&platform, id, options, &mutation).await?;
    platform.nudge.notify_one();
    mutation::answer(&platform, &call, reply).await
}

fn flag(query: &mut Fields, name: &str) -> bool {
    query.optional::<bool>(name).unwrap_or(false)
}

async fn delete(
    platform: &Platform,
    id: MachineId,
    options: OperationOptions,
    mutation: &Mutation,
) -> Result<Reply, Problem> {
    let mut session = platform.db.session().await?;
    let not_found = || fault::machine_not_found(&id.to_string());
    let seen = db::machines::get(&session, id).await?.ok_or_else(not_found)?;
    let tx = db::begin(&mut session).await?;
    db::lock(&tx, &format!("user {}", seen.user)).await?;
    if let Some(reply) = mutation.begin(&tx).await? {
        return Ok(reply);
    }
    let machine = db::machines::locked(&tx, id).await?.ok_or_else(not_found)?;
    let event = Event::DeleteRequested;
    let with = Circumstances { options, ..Circumstances::default() };
    let change = lifecycle::apply(&tx, &platform.mint, &machine, &event, with).await;
    let filed = match change.map_err(|error| fault::lifecycle(error, &machine))? {
        Change::Moved { filed } => filed.map(|filed| filed.operation),
        Change::Unchanged => {
            // Asked again: the operation that the first request filed.
            let operation = db::operations::newest(&tx, id, "delete").await?;
            let options = operation.as_ref().map_or(options, |operation| operation.options);
            let reply =
                Reply::new(StatusCode::ACCEPTED, body(platform, &machine, operation.map(|o| o.id), options));
            mutation.store(&tx, &reply).await?;
            db::commit(tx).await?;
            return Ok(reply);
        }
    };
    let deleted = db::machines::get(&tx, id).await?.ok_or_else(not_found)?;
    let reply = Reply::new(StatusCode::ACCEPTED, body(platform, &deleted, filed, options));
    let (before, after) = (machine.record(), deleted.record());
    let target = id.to_string();
    let changed = Changed { action: "delete", target: &target, before: Some(&before), after: Some(&after) };
    mutation.record(&tx, &reply, &changed).await?;
    db::commit(tx).await?;
    Ok(reply)
}

fn body(
    platform: &Platform,
    machine: &MachineRow,
    operation: Option<OperationId>,
    options: OperationOptions,
) -> Value {
    let grace = SignedDuration::try_from(platform.config.timing.delete_grace).unwrap_or(SignedDuration::MAX);
    let until = machine.deleted_at.and_then(|at| at.checked_add(grace).ok());
    // A machine that never registered holds no data: its server is not kept.
    let until = until.filter(|_| !options.now && machine.registered_at.is_some());
    json!({
        "machineId": machine.id,
        "kind": machine.kind.as_str(),
        "status": machine.status,
        "deletedAt": machine.deleted_at.map(rfc3339_ms),
        "newestSnapshotAt": machine.backup_taken_at.map(rfc3339_ms),
        "undeletableUntil": until.map(rfc3339_ms),
        "operationId": operation,
    })
}

const NOW: Parameter = Parameter {
    name: "now",
    place: Place::Query,
    schema: boolean,
    about: "true: the server is deleted as soon as the last backup is taken, and undelete is not possible.",
};
const ACCEPT_LOSS: Parameter = Parameter {
    name: "acceptLoss",
    place: Place::Query,
    schema: boolean,
    about: "true: where no last backup can be made, what no snapshot holds may be lost.",
};

/// The route and its description.
pub static ENDPOINT: Endpoint = Endpoint {
    operation: Operation {
        id: "delete",
        method: Method::DELETE,
        path: "/vps/{id}",
        summary: "Deletes a machine: a last backup is taken, its server is switched off and kept for a grace.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, NOW, ACCEPT_LOSS, IDEMPOTENCY_KEY, PREFER],
        body: None,
        answers: &[told(
            202,
            "The machine is deleted; undelete brings it back while its server is kept.",
            || {
                object(
                    &[
                        ("machineId", uuid()),
                        ("kind", kind()),
                        ("status", status()),
                        ("deletedAt", nullable(time())),
                        ("newestSnapshotAt", nullable(time())),
                        ("undeletableUntil", nullable(time())),
                        ("operationId", nullable(uuid())),
                    ],
                    &[],
                )
            },
        )],
        problems: &[
            Code::MachineNotFound,
            Code::InvalidState,
            Code::DatabaseUnavailable,
            Code::IdempotencyMismatch,
        ],
    },
    serve: || delete_route(handle),
};
