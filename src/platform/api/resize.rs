//! POST `/vps/:id/resize`: changes the server type of a running machine, which keeps its disk.
//!
//! All checks run before any change; requests to the provider run outside the transaction.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use deadpool_postgres::Transaction;
use http::{Method, StatusCode};
use serde_json::json;

use super::endpoint::{
    Access, Endpoint, IDEMPOTENCY_KEY, MACHINE_ID, OPERATE, OPERATOR, PREFER, documented_json, server_type,
};
use super::machine_change::ChangeRequest;
use super::mutation::{self, AuditChange, Mutation, MutationEffect, Reply};
use super::{entitlement, problems, replacement_checks};
use crate::context::Platform;
use crate::db;
use crate::db::machine_row::MachineRow;
use crate::lifecycle::{self, Change, EventContext, LifecycleError};
use axum::routing::post;
use svc_http::openapi::{Operation, request_object, schema_of};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem};
use svc_machine::event::Event;
use svc_machine::id::{MachineId, OperationId};
use svc_machine::name::ServerType;
use svc_machine::transition::{Outcome, transition};
use svc_provider::{ServerId, ServerTypeInfo};
use svc_wire::change::Resize;

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let ChangeRequest { call, id, mutation } = ChangeRequest::read(&platform, &id, request).await?;
    let mut fields = call.request.json_fields()?;
    let to = fields.required("serverType");
    let to = fields.finish(to)?;
    let reply = resize(&platform, id, &to, &mutation).await?;
    platform.runner_wake.notify_one();
    Ok(mutation::respond(&platform, &call, reply).await)
}

async fn resize(
    platform: &Platform,
    id: MachineId,
    to: &ServerType,
    mutation: &Mutation,
) -> Result<Reply, Problem> {
    let session = platform.db.session().await?;
    if let Some(reply) = mutation.replay(&session).await? {
        return Ok(reply);
    }
    let unlocked = require_machine(db::machines::get(&session, id).await?, id)?;
    if changes_type(&unlocked, to)? {
        entitlement::ensure_machine_entitled(platform, &session, &unlocked, to).await?;
        // No session is held during requests to the provider and the store.
        drop(session);
        let info = require_server_type(platform, to).await?;
        ensure_disk_does_not_shrink(platform, &unlocked, &info).await?;
        replacement_checks::ensure_holds_slot(platform, &unlocked).await?;
    } else {
        drop(session);
    }
    let change = async |tx: &Transaction<'_>| {
        let machine = require_machine(db::machines::lock(tx, id).await?, id)?;
        if machine.server_type != unlocked.server_type {
            return Err(Problem::new(Code::Unavailable, "The machine has changed; try again.").retry_after(1));
        }
        if changes_type(&machine, to)? {
            entitlement::ensure_machine_entitled(platform, tx, &machine, to).await?;
            if let Some(operation) = db::operations::find_running(tx, id).await? {
                let detail = format!(
                    "Operation {} ({}) is running on the machine; wait until it has ended.",
                    operation.id, operation.kind
                );
                return Err(Problem::new(Code::InvalidState, detail)
                    .with("machineStatus", json!(machine.status))
                    .with("allowed", json!(["running"])));
            }
        }
        let event = Event::ResizeRequested { to: to.clone() };
        let change = lifecycle::apply(tx, &platform.mint, &machine, &event, EventContext::default()).await;
        let created = match change.map_err(|error| problems::lifecycle_problem(error, &machine))? {
            Change::Moved { created } => created.map(|created| created.operation),
            Change::Unchanged => {
                return Ok(MutationEffect::unchanged(Reply::new(
                    StatusCode::OK,
                    response_body(&machine, to, None),
                )));
            }
        };
        let resizing = require_machine(db::machines::get(tx, id).await?, id)?;
        let reply = Reply::new(StatusCode::ACCEPTED, response_body(&resizing, to, created));
        let (before, after) = (Some(machine.audit_record()), Some(resizing.audit_record()));
        Ok(MutationEffect::changed(
            reply,
            AuditChange { action: "resize", target: id.to_string(), before, after },
        ))
    };
    mutation.run_for_user(platform, &unlocked.user, change).await
}

/// Returns the machine, or the problem if it does not exist or has been deleted.
fn require_machine(machine: Option<MachineRow>, id: MachineId) -> Result<MachineRow, Problem> {
    let existing = machine.filter(|machine| machine.deleted_at.is_none());
    existing.ok_or_else(|| problems::machine_not_found(&id.to_string()))
}

/// Returns whether the request changes the machine's type.
///
/// # Errors
/// `invalid_state` if the machine cannot be resized.
fn changes_type(machine: &MachineRow, to: &ServerType) -> Result<bool, Problem> {
    let event = Event::ResizeRequested { to: to.clone() };
    let outcome = transition(&machine.to_lifecycle_machine(), &event);
    let outcome =
        outcome.map_err(|refusal| problems::lifecycle_problem(LifecycleError::Refused(refusal), machine))?;
    if machine.powered_off_at.is_some() {
        let detail = format!(
            "The machine's server is powered off; power it on with `svcctl power on {}` first.",
            machine.id
        );
        return Err(Problem::new(Code::InvalidState, detail)
            .with("machineStatus", json!(machine.status))
            .with("allowed", json!(["running"])));
    }
    if machine.provider_server_id.is_none() {
        return Err(Problem::new(
            Code::InvalidState,
            "The machine has no server at the provider: recover the slot.",
        )
        .with("machineStatus", json!(machine.status))
        .with("allowed", json!(["running"])));
    }
    Ok(outcome != Outcome::Unchanged)
}

async fn require_server_type(platform: &Platform, to: &ServerType) -> Result<ServerTypeInfo, Problem> {
    let info = platform.provider.get_server_type(to).await;
    let info = info.map_err(|error| problems::provider_problem(&error))?;
    info.ok_or_else(|| {
        Problem::field("/serverType", format!("{to} is not a server type that the provider offers"))
    })
}

/// Rejects a type with a smaller disk than the server's actual one, because disks cannot shrink.
async fn ensure_disk_does_not_shrink(
    platform: &Platform,
    machine: &MachineRow,
    to: &ServerTypeInfo,
) -> Result<(), Problem> {
    let Some(id) = machine.provider_server_id else { return Ok(()) };
    let server =
        platform.provider.get(ServerId(id)).await.map_err(|error| problems::provider_problem(&error))?;
    let Some(server) = server else {
        // The reconciler handles the missing server.
        platform.reconciler_wake.notify_one();
        tracing::warn!(machine = %machine.id, server = id, "the provider has no server with this id");
        return Err(problems::provisioning_error());
    };
    if to.disk_gb < server.disk_gb {
        let detail = format!(
            "The server has a disk of {} GB; {} has {} GB, and disks cannot shrink.",
            server.disk_gb, to.name, to.disk_gb
        );
        return Err(Problem::new(Code::DiskWouldShrink, detail));
    }
    Ok(())
}

fn response_body(machine: &MachineRow, to: &ServerType, operation: Option<OperationId>) -> Resize {
    Resize {
        machine_id: machine.id.into(),
        server_type: to.into(),
        status: machine.status.into(),
        operation_id: operation.map(Into::into),
    }
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "resize",
        method: Method::POST,
        path: "/vps/{id}/resize",
        summary: "Changes the server type of a running machine, which keeps its disk.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, IDEMPOTENCY_KEY, PREFER],
        body: Some(|| request_object(&[("serverType", server_type())], &[])),
        responses: &[
            documented_json(202, "The machine is being resized.", schema_of::<Resize>),
            documented_json(200, "The machine already has this type.", schema_of::<Resize>),
        ],
        problems: &[
            Code::MachineNotFound,
            Code::InvalidState,
            Code::SubscriptionRequired,
            Code::ServerTypeNotAllowed,
            Code::DiskWouldShrink,
            Code::ProvisioningError,
            Code::Unavailable,
            Code::StoreUnavailable,
            Code::DatabaseUnavailable,
            Code::IdempotencyMismatch,
        ],
    },
    serve: || post(handle),
};
