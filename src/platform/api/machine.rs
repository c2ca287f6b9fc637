//! GET `/vps/:id`: returns a machine with its operations, even after it has been replaced or deleted.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};

use super::call::{ApiCall, path_id};
use super::endpoint::{Access, Endpoint, MACHINE_ID, OPERATOR, READ, documented_json};
use super::problems;
use crate::context::Platform;
use crate::copies::{self, Copies};
use crate::db::machine_row::MachineRow;
use crate::{db, resource};
use axum::routing::get;
use http::Method;
use svc_http::openapi::{Operation, schema_of};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem};
use svc_machine::id::MachineId;
use svc_wire::machine::{Machine, MachineDetail};

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    call.authenticate_operator(&platform).await?;
    let id = path_id("machineId", &id)?;
    call.request.query_fields().finish(Some(()))?;
    let stored = read_machine(&platform, id).await?;
    // No session is held during requests to the store.
    let copies = Some(stored.copies.with_snapshot(&platform.bucket).await);
    let detail =
        MachineDetail { machine: Machine::from(&stored.machine), operations: stored.operations, copies };
    Ok(Json(detail).into_response())
}

/// A machine as the database records it.
struct StoredMachine {
    machine: MachineRow,
    operations: Vec<svc_wire::operation::Operation>,
    copies: Copies,
}

/// Reads the machine, its operations and the copies of its slot in one database snapshot, so that an operation's log
/// never names a step whose effect the machine does not show yet.
async fn read_machine(platform: &Platform, id: MachineId) -> Result<StoredMachine, Problem> {
    let mut session = platform.report_db.session().await?;
    let tx = db::begin_snapshot(&mut session).await?;
    let machine = db::machines::get(&tx, id).await?;
    let machine = machine.ok_or_else(|| problems::machine_not_found(&id.to_string()))?;
    let operations = resource::operation::load_for_machine(&tx, id).await?;
    let copies = copies::load_copies(&tx, &machine, &platform.config.timing).await?;
    db::commit(tx).await?;
    Ok(StoredMachine { machine, operations, copies })
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(READ),
    operation: Operation {
        id: "getMachine",
        method: Method::GET,
        path: "/vps/{id}",
        summary: "Shows a machine with its operations, even after it has been replaced or deleted.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID],
        body: None,
        responses: &[documented_json(200, "The machine.", schema_of::<MachineDetail>)],
        problems: &[Code::MachineNotFound, Code::DatabaseUnavailable],
    },
    serve: || get(handle),
};
