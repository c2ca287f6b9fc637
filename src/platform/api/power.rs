//! POST `/vps/:id/power`: powers the server of a slot's machine off or on, or restarts it.
//!
//! A machine that is powered off keeps its slot, status and data. No requests are routed to it, and the platform powers
//! it on again only at an operator's request.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::post;
use deadpool_postgres::Transaction;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::endpoint::{
    Access, Endpoint, IDEMPOTENCY_KEY, MACHINE_ID, OPERATE, OPERATOR, PREFER, documented_json,
};
use super::machine_change::{ChangeEffect, ChangeRequest, ChangeStart, LockScope, MachineChange};
use super::mutation::{self, Mutation, Reply};
use super::problems;
use crate::context::Platform;
use crate::db::machine_row::MachineRow;
use crate::db::{self, machine_server};
use svc_http::openapi::{Operation, request_object, schema_of, string_enum};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem};
use svc_machine::id::{MachineId, OperationId};
use svc_machine::operation::{OperationKind, OperationOptions};
use svc_machine::state::Status;
use svc_wire::change::{PowerAction, PowerChange};

fn operation_kind(action: PowerAction) -> OperationKind {
    match action {
        PowerAction::On => OperationKind::PowerOn,
        PowerAction::Off => OperationKind::PowerOff,
        PowerAction::Reboot => OperationKind::Reboot,
    }
}

fn audit_action(action: PowerAction) -> &'static str {
    match action {
        PowerAction::On => "power.on",
        PowerAction::Off => "power.off",
        PowerAction::Reboot => "power.reboot",
    }
}

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let ChangeRequest { call, id, mutation } = ChangeRequest::read(&platform, &id, request).await?;
    let mut fields = call.request.json_fields()?;
    let action = fields.required("action");
    let action = fields.finish(action)?;
    let reply = power(&platform, id, action, &mutation).await?;
    platform.runner_wake.notify_one();
    Ok(mutation::respond(&platform, &call, reply).await)
}

async fn power(
    platform: &Platform,
    id: MachineId,
    action: PowerAction,
    mutation: &Mutation,
) -> Result<Reply, Problem> {
    let mut session = platform.db.session().await?;
    let change = match MachineChange::begin(&mut session, mutation, id, LockScope::Machine).await? {
        ChangeStart::Replayed(reply) => return Ok(reply),
        ChangeStart::Started(change) => change,
    };
    ensure_power_change_allowed(&change.machine, action)?;
    if let Some(operation) = find_same_operation(&change.tx, &change.machine, action).await? {
        let body = |after: &MachineRow| response_body(after, action, Some(operation));
        return change.end(ChangeEffect::Unchanged, StatusCode::ACCEPTED, body).await;
    }
    let is_off = change.machine.powered_off_at.is_some();
    match action {
        PowerAction::Off if is_off => {
            let body = |after: &MachineRow| response_body(after, action, None);
            return change.end(ChangeEffect::Unchanged, StatusCode::OK, body).await;
        }
        PowerAction::Reboot if is_off => {
            return Err(invalid_state(
                &change.machine,
                &format!("The machine's server is powered off; power it on with `svcctl power on {id}`."),
            ));
        }
        PowerAction::Off => machine_server::mark_powered_off(&change.tx, id).await?,
        PowerAction::On | PowerAction::Reboot => {}
    }
    let created =
        db::operations::create(&change.tx, id, operation_kind(action), OperationOptions::default()).await?;
    let body = |after: &MachineRow| response_body(after, action, Some(created));
    change.end(ChangeEffect::Changed(audit_action(action)), StatusCode::ACCEPTED, body).await
}

fn ensure_power_change_allowed(machine: &MachineRow, action: PowerAction) -> Result<(), Problem> {
    if machine.deleted_at.is_some() {
        return Err(problems::machine_not_found(&machine.id.to_string()));
    }
    if machine.retired_at.is_some() {
        return Err(problems::invalid_state("replaced", &[]));
    }
    if !matches!(machine.status, Status::Running | Status::Failed) {
        return Err(problems::invalid_state(machine.status.as_str(), &[Status::Running, Status::Failed]));
    }
    // A power-on also looks up a server that the provider has reported missing.
    let can_look_up_server = action == PowerAction::On && machine.may_have_server();
    if can_look_up_server || machine.has_server() {
        Ok(())
    } else {
        Err(invalid_state(
            machine,
            if machine.may_have_server() {
                "The provider has reported the machine's server missing: look it up again with `svcctl power on`. If it \
                 is still missing, recover the slot."
            } else {
                "The machine has no server: recover the slot."
            },
        ))
    }
}

/// Finds a running operation with the same action.
///
/// # Errors
/// `invalid_state` if a different operation is running on the machine.
async fn find_same_operation(
    tx: &Transaction<'_>,
    machine: &MachineRow,
    action: PowerAction,
) -> Result<Option<OperationId>, Problem> {
    let Some(operation) = db::operations::find_running(tx, machine.id).await? else { return Ok(None) };
    if operation.kind == operation_kind(action).as_str() {
        return Ok(Some(operation.id));
    }
    let detail = format!(
        "Operation {0} ({1}) is running on the machine; wait until it has ended, or abandon it with `svcctl operation \
         abandon {0}`.",
        operation.id, operation.kind
    );
    Err(invalid_state(machine, &detail))
}

fn invalid_state(machine: &MachineRow, detail: &str) -> Problem {
    Problem::new(Code::InvalidState, detail)
        .with("machineStatus", json!(machine.status))
        .with("allowed", json!([machine.status]))
}

fn response_body(machine: &MachineRow, action: PowerAction, operation: Option<OperationId>) -> PowerChange {
    PowerChange {
        machine_id: machine.id.into(),
        action: action.into(),
        status: machine.status.into(),
        operation_id: operation.map(Into::into),
    }
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "power",
        method: Method::POST,
        path: "/vps/{id}/power",
        summary: "Powers the server of a running or failed machine off or on, or restarts it.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, IDEMPOTENCY_KEY, PREFER],
        body: Some(|| request_object(&[("action", action_schema())], &[])),
        responses: &[
            documented_json(
                202,
                "The server is being powered on or off, or restarted.",
                schema_of::<PowerChange>,
            ),
            documented_json(200, "The server is already powered off.", schema_of::<PowerChange>),
        ],
        problems: &[
            Code::MachineNotFound,
            Code::InvalidState,
            Code::DatabaseUnavailable,
            Code::IdempotencyMismatch,
        ],
    },
    serve: || post(handle),
};

fn action_schema() -> Value {
    string_enum(&PowerAction::ALL.map(PowerAction::as_str))
}
