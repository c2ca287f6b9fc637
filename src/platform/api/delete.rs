//! DELETE `/vps/:id`: the machine leaves its slot immediately, and its server is deleted later. The slot's objects in
//! the store are kept.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use deadpool_postgres::Transaction;
use http::{Method, StatusCode};
use jiff::SignedDuration;

use super::endpoint::{
    Access, Endpoint, IDEMPOTENCY_KEY, MACHINE_ID, OPERATE, OPERATOR, PREFER, documented_json,
};
use super::machine_change::ChangeRequest;
use super::mutation::{self, AuditChange, Mutation, MutationEffect, Reply};
use super::problems;
use crate::context::Platform;
use crate::copies;
use crate::db::machine_row::MachineRow;
use crate::db::operations::OperationRow;
use crate::db::{self, DbError};
use crate::lifecycle::{self, Change, EventContext};
use axum::routing::delete as delete_route;
use svc_http::fields::Fields;
use svc_http::openapi::{Operation, Parameter, ParameterLocation, boolean, schema_of};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem};
use svc_machine::event::Event;
use svc_machine::id::{MachineId, OperationId};
use svc_machine::operation::OperationOptions;
use svc_wire::change::{AlsoDeletedMachine, DeletedMachine};
use svc_wire::copies::Copies;
use svc_wire::text::Time;

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let ChangeRequest { call, id, mutation } = ChangeRequest::read(&platform, &id, request).await?;
    let mut query = call.request.query_fields();
    let options = OperationOptions {
        now: read_flag(&mut query, "now"),
        accept_loss: read_flag(&mut query, "acceptLoss"),
        ..OperationOptions::default()
    };
    let options = query.finish(Some(options))?;
    let reply = delete(&platform, id, options, &mutation).await?;
    platform.runner_wake.notify_one();
    Ok(mutation::respond(&platform, &call, reply).await)
}

fn read_flag(query: &mut Fields, name: &str) -> bool {
    query.optional::<bool>(name).unwrap_or(false)
}

async fn delete(
    platform: &Platform,
    id: MachineId,
    options: OperationOptions,
    mutation: &Mutation,
) -> Result<Reply, Problem> {
    let session = platform.db.session().await?;
    let not_found = || problems::machine_not_found(&id.to_string());
    let unlocked = db::machines::get(&session, id).await?.ok_or_else(not_found)?;
    let copies = copies::load_copies(&session, &unlocked, &platform.config.timing).await?;
    // No session is held during requests to the store.
    drop(session);
    let copies = copies.with_snapshot(&platform.bucket).await;
    let change = async |tx: &Transaction<'_>| {
        let machine = db::machines::lock(tx, id).await?.ok_or_else(not_found)?;
        let event = Event::DeleteRequested;
        let context = EventContext { options, ..EventContext::default() };
        let change = lifecycle::apply(tx, &platform.mint, &machine, &event, context).await;
        let operation = match change.map_err(|error| problems::lifecycle_problem(error, &machine))? {
            Change::Moved { created } => created.map(|created| created.operation),
            Change::Unchanged => {
                // The response to a repeated request names the first request's operation.
                let operation = db::operations::find_newest(tx, id, "delete").await?;
                let options = operation.as_ref().map_or(options, |operation| operation.options);
                let operation = operation.map(|operation| operation.id);
                let deletion = Deletion { operation, options, copies };
                let body = response_body(platform, tx, &machine, &deletion).await?;
                let reply = Reply::new(StatusCode::ACCEPTED, body);
                return Ok(MutationEffect::unchanged(reply));
            }
        };
        let deleted = db::machines::get(tx, id).await?.ok_or_else(not_found)?;
        let body = response_body(platform, tx, &deleted, &Deletion { operation, options, copies }).await?;
        let reply = Reply::new(StatusCode::ACCEPTED, body);
        let (before, after) = (Some(machine.audit_record()), Some(deleted.audit_record()));
        Ok(MutationEffect::changed(
            reply,
            AuditChange { action: "delete", target: id.to_string(), before, after },
        ))
    };
    mutation.run_for_user(platform, &unlocked.user, change).await
}

/// A machine's deletion, for the response.
struct Deletion {
    operation: Option<OperationId>,
    options: OperationOptions,
    /// The copies of the slot's data when the request arrived.
    copies: Copies,
}

async fn response_body(
    platform: &Platform,
    tx: &Transaction<'_>,
    machine: &MachineRow,
    deletion: &Deletion,
) -> Result<DeletedMachine, DbError> {
    let also_deleted = find_also_deleted(tx, machine).await?.map(|(predecessor, operation)| {
        let until = undelete_until(platform, &predecessor, operation.options);
        AlsoDeletedMachine {
            machine_id: predecessor.id.into(),
            operation_id: operation.id.into(),
            undelete_until: until.clone(),
            undeletable_until: until,
        }
    });
    let until = undelete_until(platform, machine, deletion.options);
    let copies = &deletion.copies;
    Ok(DeletedMachine {
        machine_id: machine.id.into(),
        idp_user_id: (&machine.user).into(),
        slot: (&machine.slot).into(),
        handle: (&machine.handle).into(),
        kind: machine.kind.into(),
        status: machine.status.into(),
        registered_at: machine.registered_at.map(Into::into),
        deleted_at: machine.deleted_at.map(Into::into),
        newest_snapshot_at: copies.newest_snapshot_at.clone(),
        newest_snapshot_source: copies.newest_snapshot.as_ref().map(|newest| newest.source.clone()),
        snapshot_problem: copies.snapshot_problem.clone(),
        undelete_until: until.clone(),
        undeletable_until: until,
        operation_id: deletion.operation.map(Into::into),
        also_deleted,
    })
}

/// Returns the time until which the deletion can be undone; `None` if it cannot be undone.
fn undelete_until(platform: &Platform, machine: &MachineRow, options: OperationOptions) -> Option<Time> {
    let grace = SignedDuration::try_from(platform.config.timing.delete_grace).unwrap_or(SignedDuration::MAX);
    // The server of a machine that never registered holds no data, so it is not kept. A lost server cannot be kept.
    let is_server_kept = !options.now && machine.registered_at.is_some() && !machine.has_lost_server();
    let deleted_at = machine.deleted_at.filter(|_| is_server_kept);
    // The retention period of the server starts later if the deletion had to wait before powering off the server.
    let kept_since =
        deleted_at.map(|at| machine.power_off_requested_at.map_or(at, |requested| at.max(requested)));
    kept_since.and_then(|since| since.checked_add(grace).ok()).map(Into::into)
}

/// Finds the predecessor that was deleted together with its replacement, and the predecessor's delete operation.
async fn find_also_deleted(
    tx: &Transaction<'_>,
    machine: &MachineRow,
) -> Result<Option<(MachineRow, OperationRow)>, DbError> {
    if machine.registered_at.is_some() {
        return Ok(None);
    }
    let Some(predecessor) = db::machines::find_last_registered(tx, machine).await? else { return Ok(None) };
    // One transaction deleted both; an earlier deletion has a different time.
    if predecessor.deleted_at.is_none() || predecessor.deleted_at != machine.deleted_at {
        return Ok(None);
    }
    let operation = db::operations::find_newest(tx, predecessor.id, "delete").await?;
    Ok(operation.map(|operation| (predecessor, operation)))
}

const NOW: Parameter = Parameter {
    name: "now",
    location: ParameterLocation::Query,
    schema: boolean,
    description: "true: the server is deleted as soon as the final backup has been taken, and undelete is not \
                  possible.",
};
const ACCEPT_LOSS: Parameter = Parameter {
    name: "acceptLoss",
    location: ParameterLocation::Query,
    schema: boolean,
    description: "true: if no final backup can be taken, data that no snapshot contains may be lost.",
};

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "delete",
        method: Method::DELETE,
        path: "/vps/{id}",
        summary: "Deletes a machine: a final backup is taken, then its server is powered off and kept for a grace period.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, NOW, ACCEPT_LOSS, IDEMPOTENCY_KEY, PREFER],
        body: None,
        responses: &[documented_json(
            202,
            "The machine has been deleted; undelete restores it while its server is kept. `alsoDeleted` is the \
             machine that it was going to replace; that machine's server has the slot's data and is kept. \
             `newestSnapshotAt` is the time of the snapshot that the store's pointer names, or, if the store is \
             unavailable or that snapshot is damaged, of the last one that a host reported; in that case, \
             `snapshotProblem` has the reason.",
            schema_of::<DeletedMachine>,
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
