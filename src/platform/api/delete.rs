//! DELETE `/vps/:id`: the machine leaves its slot at once, its server is deleted after; objects stay.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use deadpool_postgres::Transaction;
use http::{Method, StatusCode};
use jiff::SignedDuration;
use serde_json::{Value, json};

use super::endpoint::{
    Access, Endpoint, IDEMPOTENCY_KEY, MACHINE_ID, OPERATE, OPERATOR, PREFER, handle_name, idp_user_id, kind,
    slot_name, status, told,
};
use super::fault;
use super::machine_change::ChangeRequest;
use super::mutation::{self, Changed, Mutation, Reply};
use crate::clock::rfc3339_ms;
use crate::http::fields::Fields;
use crate::http::openapi::{
    Operation, Parameter, Place, boolean, nullable, object, one_of, text, time, uuid,
};
use crate::http::problem::{Code, Problem};
use crate::http::segments::Segments;
use crate::machine::event::Event;
use crate::machine::id::{MachineId, OperationId};
use crate::platform::context::Platform;
use crate::platform::copies;
use crate::platform::db::machine_row::MachineRow;
use crate::platform::db::operations::OperationRow;
use crate::platform::db::{self, DbError};
use crate::platform::lifecycle::{self, Change, EventContext};
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
    let session = platform.db.session().await?;
    let not_found = || fault::machine_not_found(&id.to_string());
    let seen = db::machines::get(&session, id).await?.ok_or_else(not_found)?;
    let copies = copies::of_slot(&session, &seen, &platform.config.timing).await?;
    // The store may take its time: no session is held meanwhile.
    drop(session);
    let copies = copies.with_snapshot(&platform.bucket).await;
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    db::lock(&tx, &format!("user {}", seen.user)).await?;
    if let Some(reply) = mutation.begin(&tx).await? {
        return Ok(reply);
    }
    let machine = db::machines::lock(&tx, id).await?.ok_or_else(not_found)?;
    let event = Event::DeleteRequested;
    let with = EventContext { options, ..EventContext::default() };
    let change = lifecycle::apply(&tx, &platform.mint, &machine, &event, with).await;
    let filed = match change.map_err(|error| fault::lifecycle(error, &machine))? {
        Change::Moved { filed } => filed.map(|filed| filed.operation),
        Change::Unchanged => {
            // Asked again: the operation that the first request filed.
            let operation = db::operations::newest(&tx, id, "delete").await?;
            let options = operation.as_ref().map_or(options, |operation| operation.options);
            let operation = operation.map(|operation| operation.id);
            let deletion = Deletion { operation, options, copies };
            let body = body(platform, &tx, &machine, &deletion).await?;
            let reply = Reply::new(StatusCode::ACCEPTED, body);
            mutation.store(&tx, &reply).await?;
            db::commit(tx).await?;
            return Ok(reply);
        }
    };
    let deleted = db::machines::get(&tx, id).await?.ok_or_else(not_found)?;
    let body = body(platform, &tx, &deleted, &Deletion { operation: filed, options, copies }).await?;
    let reply = Reply::new(StatusCode::ACCEPTED, body);
    let (before, after) = (machine.record(), deleted.record());
    let target = id.to_string();
    let changed = Changed { action: "delete", target: &target, before: Some(&before), after: Some(&after) };
    mutation.record(&tx, &reply, &changed).await?;
    db::commit(tx).await?;
    Ok(reply)
}

/// What deletes a machine's server.
struct Deletion {
    operation: Option<OperationId>,
    options: OperationOptions,
    /// Of the slot, before it.
    copies: Value,
}

async fn body(
    platform: &Platform,
    tx: &Transaction<'_>,
    machine: &MachineRow,
    deletion: &Deletion,
) -> Result<Value, DbError> {
    let also = deleted_along(tx, machine).await?.map(|(other, operation)| {
        json!({
            "machineId": other.id,
            "operationId": operation.id,
            "undeletableUntil": undeletable_until(platform, &other, operation.options),
        })
    });
    Ok(json!({
        "machineId": machine.id,
        "idpUserId": machine.user,
        "slot": machine.slot,
        "handle": machine.handle,
        "kind": machine.kind.as_str(),
        "status": machine.status,
        "registeredAt": machine.registered_at.map(rfc3339_ms),
        "deletedAt": machine.deleted_at.map(rfc3339_ms),
        "newestSnapshotAt": deletion.copies["newestSnapshotAt"],
        "newestSnapshotSource": deletion.copies["newestSnapshot"]["source"],
        "snapshotProblem": deletion.copies["snapshotProblem"],
        "undeletableUntil": undeletable_until(platform, machine, deletion.options),
        "operationId": deletion.operation,
        "alsoDeleted": also,
    }))
}

fn undeletable_until(platform: &Platform, machine: &MachineRow, options: OperationOptions) -> Option<String> {
    let grace = SignedDuration::try_from(platform.config.timing.delete_grace).unwrap_or(SignedDuration::MAX);
    // A machine that never registered holds no data: its server is not kept.
    let kept = machine.deleted_at.filter(|_| !options.now && machine.registered_at.is_some());
    kept.and_then(|at| at.checked_add(grace).ok()).map(rfc3339_ms)
}

/// The machine that was deleted with one that was to replace it, and the operation that deletes its server.
async fn deleted_along(
    tx: &Transaction<'_>,
    machine: &MachineRow,
) -> Result<Option<(MachineRow, OperationRow)>, DbError> {
    if machine.registered_at.is_some() {
        return Ok(None);
    }
    let Some(last) = db::machines::last_registered(tx, machine).await? else { return Ok(None) };
    // One transaction deleted both: an earlier deletion has another time.
    if last.deleted_at.is_none() || last.deleted_at != machine.deleted_at {
        return Ok(None);
    }
    let operation = db::operations::newest(tx, last.id, "delete").await?;
    Ok(operation.map(|operation| (last, operation)))
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

fn answer() -> Value {
    let also = object(
        &[("machineId", uuid()), ("operationId", uuid()), ("undeletableUntil", nullable(time()))],
        &[],
    );
    object(
        &[
            ("machineId", uuid()),
            ("idpUserId", idp_user_id()),
            ("slot", slot_name()),
            ("handle", handle_name()),
            ("kind", kind()),
            ("status", status()),
            ("registeredAt", nullable(time())),
            ("deletedAt", nullable(time())),
            ("newestSnapshotAt", nullable(time())),
            ("newestSnapshotSource", nullable(one_of(&["store", "reported"]))),
            ("snapshotProblem", nullable(text())),
            ("undeletableUntil", nullable(time())),
            ("operationId", nullable(uuid())),
            ("alsoDeleted", nullable(also)),
        ],
        &[],
    )
}

/// The route and its description.
pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
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
            "The machine is deleted; undelete brings it back while its server is kept. `alsoDeleted` is the machine that it \
             was to replace: its server has the slot's data and is kept. `newestSnapshotAt` is what the store's pointer names; \
             where the store does not say, what a host last reported, with the reason in `snapshotProblem`.",
            answer,
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
