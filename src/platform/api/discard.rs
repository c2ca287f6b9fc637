//! POST `/vps/:id/discard`: deletes the kept server of a machine that has left its slot, without waiting for the end of
//! the server's retention period.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use deadpool_postgres::Transaction;
use http::{Method, StatusCode};
use serde_json::json;

use super::endpoint::{Access, Endpoint, IDEMPOTENCY_KEY, MACHINE_ID, OPERATE, OPERATOR, documented_json};
use super::machine_change::{ChangeEffect, ChangeRequest, ChangeStart, LockScope, MachineChange};
use super::mutation::{Mutation, Reply};
use crate::context::Platform;
use crate::db::machine_row::MachineRow;
use crate::db::{self, machine_changes};
use svc_base::clock::rfc3339_ms;
use svc_http::openapi::{Operation, boolean, request_object, schema_of};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem};
use svc_machine::id::{MachineId, OperationId};
use svc_machine::operation::OperationKind;
use svc_wire::machine::DiscardedMachine;

/// Whether the operator has accepted the loss of data that no snapshot contains.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LossConsent {
    Given,
    NotGiven,
}

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let ChangeRequest { call, id, mutation } = ChangeRequest::read(&platform, &id, request).await?;
    let mut fields = call.request.json_fields()?;
    let consent =
        if fields.boolean("acceptLoss") == Some(true) { LossConsent::Given } else { LossConsent::NotGiven };
    let consent = fields.finish(Some(consent))?;
    let reply = discard(&platform, id, consent, &mutation).await?;
    platform.reconciler_wake.notify_one();
    Ok(reply.into_response())
}

async fn discard(
    platform: &Platform,
    id: MachineId,
    consent: LossConsent,
    mutation: &Mutation,
) -> Result<Reply, Problem> {
    let mut session = platform.db.session().await?;
    let change = match MachineChange::begin(&mut session, mutation, id, LockScope::Machine).await? {
        ChangeStart::Replayed(reply) => return Ok(reply),
        ChangeStart::Started(change) => change,
    };
    ensure_left_slot(&change.machine)?;
    let removal = find_pending_removal(&change.tx, id).await?;
    // Unless an operator has accepted the loss, a running removal may still decide to keep the server.
    let is_consent_new = consent == LossConsent::Given && !is_removal_requested(&change.machine);
    let is_requested = removal.is_some() || is_removal_requested(&change.machine);
    let body = |after: &MachineRow| response_body(after, removal, is_requested);
    if is_requested && !is_consent_new {
        return change.end(ChangeEffect::Unchanged, StatusCode::ACCEPTED, body).await;
    }
    if consent == LossConsent::NotGiven {
        ensure_safe_to_discard(&change.tx, &change.machine).await?;
    }
    machine_changes::record_discard(&change.tx, id).await?;
    // Without a removal, the reconciler creates one after it has listed the provider's servers.
    change.end(ChangeEffect::Changed("discard"), StatusCode::ACCEPTED, body).await
}

/// Finds the operation that deletes the server, unless it has ended.
async fn find_pending_removal(tx: &Transaction<'_>, id: MachineId) -> Result<Option<OperationId>, Problem> {
    let removal = db::operations::find_newest(tx, id, OperationKind::RemoveServer.as_str()).await?;
    Ok(removal.filter(|removal| !removal.has_ended()).map(|removal| removal.id))
}

/// Returns whether the server's retention period was ended early, and the removal has not been abandoned since.
fn is_removal_requested(machine: &MachineRow) -> bool {
    machine.discard_requested_at.is_some() && machine.removal_abandoned_at.is_none()
}

fn response_body(
    machine: &MachineRow,
    removal: Option<OperationId>,
    already_ordered: bool,
) -> DiscardedMachine {
    DiscardedMachine { machine: machine.into(), operation_id: removal.map(Into::into), already_ordered }
}

fn ensure_left_slot(machine: &MachineRow) -> Result<(), Problem> {
    if machine.is_active() {
        let detail =
            format!("The machine still holds its slot: delete it with `svcctl delete {}`.", machine.id);
        return Err(invalid_state(machine.status.as_str(), &detail));
    }
    if machine.server_deleted_at.is_some() {
        let detail = format!(
            "The machine's server has already been deleted; `svcctl backup list {}` lists the snapshots of its slot.",
            machine.id
        );
        return Err(invalid_state("server_deleted", &detail));
    }
    Ok(())
}

/// Rejects discarding a server that is still needed, or that may hold the only copy of the slot's data: the database
/// must record a final backup of the machine, or that an operator accepted the loss of its data. A machine that never
/// registered has no data.
async fn ensure_safe_to_discard(tx: &Transaction<'_>, machine: &MachineRow) -> Result<(), Problem> {
    if let Some(since) = machine.unsaved_since {
        let reason = if machine.has_unsaved_files_only {
            "A later machine started without the owner's files, which may exist only on this server."
                .to_owned()
        } else {
            format!("No snapshot contains the data written on this machine since {}.", rfc3339_ms(since))
        };
        return Err(kept_problem(machine, &reason));
    }
    if let Some(operation) = db::slot_operations::find_operation_needing_server(tx, machine).await? {
        let reason = format!(
            "The {} {} still needs this server; wait until it has ended.",
            operation.noun(),
            operation.id
        );
        return Err(kept_problem(machine, &reason));
    }
    if db::machines::is_successor_unproven(tx, machine).await? {
        let backup_state = match machine.final_backup_at {
            Some(at) => format!("The snapshot taken at {} contains this machine's data", rfc3339_ms(at)),
            None => {
                "No final backup of this machine is on record, so its server may hold the only copy of its data"
                    .to_owned()
            }
        };
        let reason = format!(
            "No later machine in the slot has served traffic yet: if the new machine does not start, the slot falls back to this \
             server. {backup_state}."
        );
        return Err(kept_problem(machine, &reason));
    }
    // `final_backup_at` is cleared when a machine returns to its slot, so a value is from its latest departure.
    if machine.registered_at.is_none() || machine.final_backup_at.is_some() {
        return Ok(());
    }
    if db::slot_operations::is_loss_accepted(tx, machine.id).await? {
        return Ok(());
    }
    Err(kept_problem(machine, "Neither a final backup of this machine nor an accepted loss is on record."))
}

fn kept_problem(machine: &MachineRow, reason: &str) -> Problem {
    let detail = format!(
        "{reason} `svcctl status {0}` shows what the machine's server holds. To delete the server anyway, run `svcctl discard {0} \
         --accept-loss`.",
        machine.id
    );
    invalid_state("kept", &detail)
}

fn invalid_state(status: &str, detail: &str) -> Problem {
    Problem::new(Code::InvalidState, detail).with("machineStatus", json!(status)).with("allowed", json!([]))
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "discard",
        method: Method::POST,
        path: "/vps/{id}/discard",
        summary: "Deletes the kept server of a replaced or deleted machine before its grace period ends.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, IDEMPOTENCY_KEY],
        body: Some(|| request_object(&[], &[("acceptLoss", boolean())])),
        responses: &[documented_json(
            202,
            "The server will be deleted after the reconciler has listed the provider's servers. `operationId` is the removal, \
             once it has been created. `alreadyOrdered` means that an earlier request, or the end of the grace period, had \
             already triggered the removal.",
            schema_of::<DiscardedMachine>,
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
