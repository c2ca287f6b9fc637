//! DELETE `/vps/:id`: the machine leaves its slot at once, its server is deleted after; objects stay.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::call::{Call, path_id};
use super::endpoint::{Endpoint, IDEMPOTENCY_KEY, MACHINE_ID, OPERATOR, PREFER, status, told};
use super::fault;
use super::mutation::{self, Changed, Mutation, Reply};
use crate::clock::rfc3339_ms;
use crate::http::openapi::{Operation, nullable, object, time, uuid};
use crate::http::problem::{Code, Problem};
use crate::http::segments::Segments;
use crate::machine::event::Event;
use crate::machine::id::{MachineId, OperationId};
use crate::platform::context::Platform;
use crate::platform::db::machine_row::MachineRow;
use crate::platform::db::{self};
use crate::platform::lifecycle::{self, Change, Circumstances};
use axum::routing::delete as delete_route;

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    Segments(id): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    call.operator(&platform)?;
    let id = path_id("machineId", &id)?;
    let mutation = Mutation::of(&call)?;
    let reply = delete(&platform, id, &mutation).await?;
    platform.nudge.notify_one();
    mutation::answer(&platform, &call, reply).await
}

async fn delete(platform: &Platform, id: MachineId, mutation: &Mutation) -> Result<Reply, Problem> {
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
    let change = lifecycle::apply(&tx, &platform.mint, &machine, &event, Circumstances::default()).await;
    let filed = match change.map_err(|error| fault::lifecycle(error, &machine))? {
        Change::Moved { filed } => filed.map(|filed| filed.operation),
        Change::Unchanged => {
            // Asked again: the operation that the first request filed.
            let operation = db::operations::newest(&tx, id, "delete").await?;
            let reply = Reply::new(StatusCode::ACCEPTED, body(&machine, operation.map(|o| o.id)));
            mutation.store(&tx, &reply).await?;
            db::commit(tx).await?;
            return Ok(reply);
        }
    };
    let deleted = db::machines::get(&tx, id).await?.ok_or_else(not_found)?;
    let reply = Reply::new(StatusCode::ACCEPTED, body(&deleted, filed));
    let (before, after) = (machine.record(), deleted.record());
    let target = id.to_string();
    let changed = Changed { action: "delete", target: &target, before: Some(&before), after: Some(&after) };
    mutation.record(&tx, &reply, &changed).await?;
    db::commit(tx).await?;
    Ok(reply)
}

fn body(machine: &MachineRow, operation: Option<OperationId>) -> Value {
    json!({
        "machineId": machine.id,
        "status": machine.status,
        "deletedAt": machine.deleted_at.map(rfc3339_ms),
        "operationId": operation,
    })
}

/// The route and its description.
pub static ENDPOINT: Endpoint = Endpoint {
    operation: Operation {
        id: "delete",
        method: Method::DELETE,
        path: "/vps/{id}",
        summary: "Deletes a machine and its server; its objects stay.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, IDEMPOTENCY_KEY, PREFER],
        body: None,
        answers: &[told(202, "The machine is deleted, its server is being deleted.", || {
            object(
                &[
                    ("machineId", uuid()),
                    ("status", status()),
                    ("deletedAt", nullable(time())),
                    ("operationId", nullable(uuid())),
                ],
                &[],
            )
        })],
        problems: &[
            Code::MachineNotFound,
            Code::InvalidState,
            Code::DatabaseUnavailable,
            Code::IdempotencyMismatch,
        ],
    },
    serve: || delete_route(handle),
};
