//! POST `/vps/:id/backup`, `/vps/:id/drill` and `/vps/:id/backup-accept`: asks the host of a running machine for a backup now, to
//! restore the latest snapshot on trial, or to make the snapshot that it holds back the latest. What came of it shows in its next heartbeats and in `/vps/:id/backups`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use deadpool_postgres::GenericClient;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::call::{Call, path_id};
use super::endpoint::{Access, Endpoint, IDEMPOTENCY_KEY, MACHINE_ID, OPERATE, OPERATOR, told};
use super::fault;
use super::mutation::{Changed, Mutation, Reply};
use crate::clock::{now_ms, rfc3339_ms};
use crate::http::openapi::{Operation, fields, object, time, uuid};
use crate::http::problem::{Code, Problem};
use crate::http::segments::Segments;
use crate::machine::id::MachineId;
use crate::machine::state::Status;
use crate::platform::context::Platform;
use crate::platform::db::machine_row::MachineRow;
use crate::platform::db::{self};
use crate::platform::operations::{ask_host, last_backup};
use axum::routing::post;

/// What is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Backup,
    Drill,
    Accept,
}

impl What {
    fn as_str(self) -> &'static str {
        match self {
            Self::Backup => "backup",
            Self::Drill => "drill",
            Self::Accept => "backup.accept",
        }
    }
}

pub async fn back_up(
    state: State<Arc<Platform>>,
    id: Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    handle(state, id, request, What::Backup).await
}

pub async fn drill(
    state: State<Arc<Platform>>,
    id: Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    handle(state, id, request, What::Drill).await
}

pub async fn accept(
    state: State<Arc<Platform>>,
    id: Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    handle(state, id, request, What::Accept).await
}

async fn handle(
    State(platform): State<Arc<Platform>>,
    Segments(id): Segments<String>,
    request: Request,
    what: What,
) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    let operator = call.operator(&platform).await?;
    let fields = call.fields()?;
    let id = path_id("machineId", &id)?;
    fields.finish(Some(()))?;
    let mutation = Mutation::of(&call, &operator)?;
    Ok(ask(&platform, id, &mutation, what).await?.into_response())
}

async fn ask(platform: &Platform, id: MachineId, mutation: &Mutation, what: What) -> Result<Reply, Problem> {
    let session = platform.db.session().await?;
    if let Some(reply) = mutation.replay(&session).await? {
        return Ok(reply);
    }
    let machine = db::machines::get(&session, id).await?;
    let machine = machine.ok_or_else(|| fault::machine_not_found(&id.to_string()))?;
    let machine = match what {
        What::Backup | What::Drill => running(&machine).map(|()| machine)?,
        What::Accept => holder_of_held_back(&session, machine).await?,
    };
    let id = machine.id;
    // Held by nobody while the host is asked.
    drop(session);
    let asked = match what {
        What::Backup => ask_host::backup(platform, &machine).await,
        What::Drill => ask_host::drill(platform, &machine).await,
        What::Accept => ask_host::accept_backup(platform, &machine).await,
    };
    let requested_at = asked.map_err(|error| {
        let what = what.as_str();
        tracing::warn!(machine = %id, what, error = format!("{error:#}"), "the host cannot be asked");
        Problem::new(Code::HostUnreachable, "The machine's host did not take the request.")
    })?;
    let requested_at = rfc3339_ms(requested_at.unwrap_or_else(now_ms));
    let reply = Reply::new(StatusCode::ACCEPTED, json!({"machineId": id, "requestedAt": requested_at}));
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    if let Some(first) = mutation.begin(&tx).await? {
        return Ok(first);
    }
    let target = id.to_string();
    // What is accepted is what the host last said that it holds back.
    let before = (what == What::Accept).then(|| json!({"attention": machine.attention}));
    let changed =
        Changed { action: what.as_str(), target: &target, before: before.as_ref(), after: Some(&reply.body) };
    mutation.record(&tx, &reply, &changed).await?;
    db::commit(tx).await?;
    Ok(reply)
}

/// The machine whose host holds a snapshot back: the one that is named, or the one that it is to replace while that still
/// has its last backup to make.
async fn holder_of_held_back(session: &impl GenericClient, named: MachineRow) -> Result<MachineRow, Problem> {
    let machine = match to_be_replaced(session, &named).await? {
        Some(replaced) => replaced,
        None => named,
    };
    let mut asks_about_it = false;
    if let Err(refusal) = running(&machine) {
        // Out of service, it may have made the last backup that an operation asks about.
        let operation = db::slot_operations::operation_needing_server(session, &machine).await?;
        let question = operation.and_then(|operation| operation.question);
        let question = question.filter(|_| machine.server_exists()).ok_or(refusal)?;
        asks_about_it = question["code"] == last_backup::HELD_BACK;
    }
    if asks_about_it || reports_held_back(&machine) {
        return Ok(machine);
    }
    let detail = format!(
        "Machine {0} is not holding back a snapshot; there is nothing to accept. `svcctl backup list {0}` shows the snapshots of \
         its slot.",
        machine.id
    );
    Err(Problem::new(Code::InvalidState, detail)
        .with("machineStatus", json!(machine.status))
        .with("allowed", json!([])))
}

/// The machine whose last backup an operation still waits for before it is replaced by this one.
async fn to_be_replaced(
    session: &impl GenericClient,
    successor: &MachineRow,
) -> Result<Option<MachineRow>, Problem> {
    if !successor.is_active() || successor.registered_at.is_some() {
        return Ok(None);
    }
    let Some(replaced) = db::machines::last_registered(session, successor).await? else { return Ok(None) };
    let is_needed = db::slot_operations::operation_needing_server(session, &replaced).await?.is_some();
    Ok(Some(replaced).filter(|replaced| is_needed && replaced.server_exists()))
}

/// Whether its host has said so, in its heartbeat or as the error of its last backup.
fn reports_held_back(machine: &MachineRow) -> bool {
    let items = machine.attention.as_array().into_iter().flatten();
    let error = machine.last_backup.as_ref().and_then(|backup| backup["error"].as_str());
    items.into_iter().any(|item| item["code"] == "snapshot_held")
        || error.is_some_and(|error| error.contains(last_backup::HELD_BACK_HINT))
}

fn running(machine: &MachineRow) -> Result<(), Problem> {
    if machine.deleted_at.is_some() {
        return Err(fault::machine_not_found(&machine.id.to_string()));
    }
    if machine.retired_at.is_some() {
        return Err(fault::invalid_state("retired", &[]));
    }
    if machine.status != Status::Running {
        return Err(fault::invalid_state(machine.status.as_str(), &[Status::Running]));
    }
    if machine.powered_off_at.is_some() {
        let detail = format!(
            "The machine is switched off: its host cannot make a backup or restore one. `svcctl power on {} --wait` switches \
             it on; try again then.",
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

fn asked() -> Value {
    object(&[("machineId", uuid()), ("requestedAt", time())], &[])
}

pub static BACKUP: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "backUp",
        method: Method::POST,
        path: "/vps/{id}/backup",
        summary: "Asks the host of a running machine for a backup now. `requestedAt` is by the host's clock, as is \
                  `lastBackup.beganAt` of the machine: what began before it is an earlier run.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, IDEMPOTENCY_KEY],
        body: Some(|| fields(&[], &[])),
        answers: &[told(202, "The request is sent to the host.", asked)],
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
        summary: "Asks the host of a running machine to restore the latest snapshot on trial.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, IDEMPOTENCY_KEY],
        body: Some(|| fields(&[], &[])),
        answers: &[told(202, "The request is sent to the host.", asked)],
        problems: PROBLEMS,
    },
    serve: || post(drill),
};

pub static ACCEPT: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "acceptBackup",
        method: Method::POST,
        path: "/vps/{id}/backup-accept",
        summary: "Asks the host of a running machine, or of one whose last backup an operation asks about, to make the \
                  snapshot that it holds back, because its database has shrunk, the latest. A machine that is to replace \
                  another one stands for that one; `machineId` in the answer names the machine whose host was asked.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID, IDEMPOTENCY_KEY],
        body: Some(|| fields(&[], &[])),
        answers: &[told(202, "The request is sent to the host.", asked)],
        problems: PROBLEMS,
    },
    serve: || post(accept),
};
