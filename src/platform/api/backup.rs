//! POST `/vps/:id/backup`, `/vps/:id/drill`, `/vps/:id/backup-accept` and `/vps/:id/files/verify`: sends a machine's
//! host a request to take a backup, to run a test restore of the latest snapshot, to accept a held-back snapshot as
//! the latest, or to verify part of the file backup. The host's next heartbeats and `/vps/:id/backups` show the result.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use deadpool_postgres::GenericClient;
use http::{Method, StatusCode};
use serde_json::json;

use super::call::{ApiCall, path_id};
use super::endpoint::{Access, Endpoint, IDEMPOTENCY_KEY, MACHINE_ID, OPERATE, OPERATOR, documented_json};
use super::mutation::{AuditChange, Mutation, MutationEffect, Reply};
use super::problems;
use crate::context::Platform;
use crate::db;
use crate::db::machine_row::MachineRow;
use crate::operations::{final_backup, host_call};
use axum::routing::post;
use svc_base::clock::now_ms;
use svc_http::openapi::{Operation, request_object, schema_of};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem, format_chain};
use svc_http::request_id;
use svc_machine::id::MachineId;
use svc_machine::state::Status;
use svc_wire::change::HostRequest;

/// The work that an operator requests from a machine's host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HostTask {
    Backup,
    Drill,
    Accept,
    VerifyFiles,
}

impl HostTask {
    fn audit_action(self) -> &'static str {
        match self {
            Self::Backup => "backup",
            Self::Drill => "drill",
            Self::Accept => "backup.accept",
            Self::VerifyFiles => "files.verify",
        }
    }
}

pub async fn back_up(
    state: State<Arc<Platform>>,
    id: PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    handle(state, id, request, HostTask::Backup).await
}

pub async fn drill(
    state: State<Arc<Platform>>,
    id: PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    handle(state, id, request, HostTask::Drill).await
}

pub async fn accept(
    state: State<Arc<Platform>>,
    id: PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    handle(state, id, request, HostTask::Accept).await
}

pub async fn verify_files(
    state: State<Arc<Platform>>,
    id: PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    handle(state, id, request, HostTask::VerifyFiles).await
}

async fn handle(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
    task: HostTask,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let operator = call.authenticate_operator(&platform).await?;
    let fields = call.request.json_fields()?;
    let id = path_id("machineId", &id)?;
    fields.finish(Some(()))?;
    let mutation = Mutation::from_call(&call, &operator)?;
    // The request completes even if the operator disconnects, so that its acceptance is audited.
    let request = request_host_task(platform, id, mutation, task);
    let request = tokio::spawn(request_id::run_with_id(request_id::current(), request));
    Ok(request.await.map_err(|error| Problem::internal(&error))??.into_response())
}

async fn request_host_task(
    platform: Arc<Platform>,
    id: MachineId,
    mutation: Mutation,
    task: HostTask,
) -> Result<Reply, Problem> {
    let session = platform.db.session().await?;
    if let Some(reply) = mutation.replay(&session).await? {
        return Ok(reply);
    }
    let machine = db::machines::get(&session, id).await?;
    let machine = machine.ok_or_else(|| problems::machine_not_found(&id.to_string()))?;
    let machine = match task {
        HostTask::Backup | HostTask::Drill | HostTask::VerifyFiles => {
            ensure_running(&machine).map(|()| machine)?
        }
        HostTask::Accept => find_machine_holding_back_snapshot(&session, machine).await?,
    };
    let id = machine.id;
    // No session is held during the request to the host.
    drop(session);
    let change = |after| AuditChange {
        action: task.audit_action(),
        target: id.to_string(),
        // One of the attention items describes the snapshot that the host holds back.
        before: (task == HostTask::Accept).then(|| json!({"attention": machine.attention})),
        after: Some(after),
    };
    // Audit before the call, because the database may be unreachable after the host has accepted the request.
    mutation.audit_before(&platform, &change(json!({"outcome": "requested"}))).await?;
    let response = match task {
        HostTask::Backup => host_call::request_backup(&platform, &machine).await,
        HostTask::Drill => host_call::request_drill(&platform, &machine).await,
        HostTask::Accept => host_call::request_backup_acceptance(&platform, &machine).await,
        HostTask::VerifyFiles => host_call::request_files_verification(&platform, &machine).await,
    };
    let requested_at = response.map_err(|error| {
        let task = task.audit_action();
        tracing::warn!(machine = %id, task, error = %format_chain(&error), "the request to the host failed");
        let detail = format!(
            "The host of machine {id} did not accept the request. Check its state with `svcctl status {id}`, then try again."
        );
        Problem::new(Code::HostUnreachable, detail)
    })?;
    // Use the time by the host's clock or, if the host does not report it, by the platform's clock.
    let requested_at = requested_at.unwrap_or_else(now_ms).into();
    let requested = HostRequest { machine_id: id.into(), requested_at };
    let outcome = mutation
        .run(&platform, async |_| {
            let change = change(json!(requested));
            Ok(MutationEffect::changed(Reply::new(StatusCode::ACCEPTED, requested), change))
        })
        .await?;
    Ok(outcome.into_reply())
}

/// Finds the machine whose host is holding back a snapshot: `target`, or its predecessor while the predecessor's final
/// backup is pending.
///
/// # Errors
/// `invalid_state` if that machine is not holding back a snapshot; `invalid_state` or `machine_not_found` if it is out
/// of service and no operation is waiting for a decision about its final backup; `database_unavailable` if the database
/// is unreachable.
async fn find_machine_holding_back_snapshot(
    session: &impl GenericClient,
    target: MachineRow,
) -> Result<MachineRow, Problem> {
    let machine = find_predecessor(session, &target).await?.unwrap_or(target);
    let mut is_held_back_decision_pending = false;
    if let Err(refusal) = ensure_running(&machine) {
        // An operation may be waiting for a decision about the final backup of a machine that is out of service.
        let operation = db::slot_operations::find_operation_needing_server(session, &machine).await?;
        let question = operation.and_then(|operation| operation.question);
        let question = question.filter(|_| machine.has_server()).ok_or(refusal)?;
        is_held_back_decision_pending = question["code"] == final_backup::HELD_BACK;
    }
    if is_held_back_decision_pending || reports_held_back_snapshot(&machine) {
        return Ok(machine);
    }
    let detail = format!(
        "Machine {0} is not holding back a snapshot; there is nothing to accept. `svcctl backup list {0}` lists the snapshots \
         of its slot.",
        machine.id
    );
    Err(Problem::new(Code::InvalidState, detail)
        .with("machineStatus", json!(machine.status_or_replaced()))
        .with("allowed", json!([])))
}

/// Finds the predecessor whose final backup an operation needs before the successor can replace it.
async fn find_predecessor(
    session: &impl GenericClient,
    successor: &MachineRow,
) -> Result<Option<MachineRow>, Problem> {
    if !successor.is_active() || successor.registered_at.is_some() {
        return Ok(None);
    }
    let Some(predecessor) = db::machines::find_last_registered(session, successor).await? else {
        return Ok(None);
    };
    let is_needed =
        db::slot_operations::find_operation_needing_server(session, &predecessor).await?.is_some();
    Ok(Some(predecessor).filter(|predecessor| is_needed && predecessor.has_server()))
}

/// Returns whether the host reports a held-back snapshot, as an attention item or as the error of its last backup.
fn reports_held_back_snapshot(machine: &MachineRow) -> bool {
    let items = machine.attention.as_array().into_iter().flatten();
    let error = machine.last_backup.as_ref().and_then(|backup| backup["error"].as_str());
    items.into_iter().any(|item| item["code"] == "snapshot_held")
        || error.is_some_and(|error| error.contains(final_backup::HELD_BACK_HINT))
}

fn ensure_running(machine: &MachineRow) -> Result<(), Problem> {
    if machine.deleted_at.is_some() {
        return Err(problems::machine_not_found(&machine.id.to_string()));
    }
    if machine.retired_at.is_some() {
        return Err(problems::invalid_state("replaced", &[]));
    }
    if machine.status != Status::Running {
        return Err(problems::invalid_state(machine.status.as_str(), &[Status::Running]));
    }
    if machine.powered_off_at.is_some() {
        let detail = format!(
            "The machine is powered off, so its host cannot process the request. Power it on with `svcctl power on {} \
             --wait`, then try again.",
            machine.id
        );
        return Err(Problem::new(Code::InvalidState, detail)
            .with("machineStatus", json!(machine.status))
            .with("allowed", json!([])));
    }
    Ok(())
}

const PROBLEMS: &[Code] = &[
    Code::MachineNotFound,
    Code::InvalidState,
    Code::HostUnreachable,
    Code::DatabaseUnavailable,
    Code::IdempotencyMismatch,
];

pub static BACKUP: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "backUp",
        method: Method::POST,
        path: "/vps/{id}/backup",
        summary: "Requests a backup from the host of a running machine. `requestedAt` and the machine's `lastBackup.beganAt` \
                  are times by the host's clock: a backup that began before `requestedAt` is an earlier one.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, IDEMPOTENCY_KEY],
        body: Some(|| request_object(&[], &[])),
        responses: &[documented_json(
            202,
            "The request has been sent to the host.",
            schema_of::<HostRequest>,
        )],
        problems: PROBLEMS,
    },
    serve: || post(back_up),
};

pub static DRILL: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "drill",
        method: Method::POST,
        path: "/vps/{id}/drill",
        summary: "Requests a test restore of the latest snapshot from the host of a running machine.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, IDEMPOTENCY_KEY],
        body: Some(|| request_object(&[], &[])),
        responses: &[documented_json(
            202,
            "The request has been sent to the host.",
            schema_of::<HostRequest>,
        )],
        problems: PROBLEMS,
    },
    serve: || post(drill),
};

pub static VERIFY_FILES: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "verifyFiles",
        method: Method::POST,
        path: "/vps/{id}/files/verify",
        summary: "Requests that the host of a running machine verify the next part of its file backup, and the parts with \
                  damaged packs. Heartbeats report the result.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, IDEMPOTENCY_KEY],
        body: Some(|| request_object(&[], &[])),
        responses: &[documented_json(
            202,
            "The request has been sent to the host.",
            schema_of::<HostRequest>,
        )],
        problems: PROBLEMS,
    },
    serve: || post(verify_files),
};

pub static ACCEPT: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "acceptBackup",
        method: Method::POST,
        path: "/vps/{id}/backup-accept",
        summary: "Accepts the snapshot that a host holds back because its database has shrunk: it becomes the \
                  latest snapshot. The machine must be running, or an operation must be waiting for its \
                  final backup. In the latter case, the machine's replacement may be named instead; \
                  `machineId` in the response is the machine whose host received the request.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, IDEMPOTENCY_KEY],
        body: Some(|| request_object(&[], &[])),
        responses: &[documented_json(
            202,
            "The request has been sent to the host.",
            schema_of::<HostRequest>,
        )],
        problems: PROBLEMS,
    },
    serve: || post(accept),
};
