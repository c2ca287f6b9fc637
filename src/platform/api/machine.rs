//! GET `/vps/:id`: one machine with its operations, whatever has become of it.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::Value;

use super::call::{Call, path_id};
use super::endpoint::{Access, Endpoint, MACHINE_ID, OPERATOR, READ, machine_with_operations, told};
use super::{fault, operation};
use crate::http::openapi::Operation;
use crate::http::problem::{Code, Problem};
use crate::http::segments::Segments;
use crate::machine::id::MachineId;
use crate::platform::context::Platform;
use crate::platform::copies::{self, Copies};
use crate::platform::db::{self};
use axum::routing::get;
use http::Method;

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    Segments(id): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    call.operator(&platform).await?;
    let id = path_id("machineId", &id)?;
    call.query().finish(Some(()))?;
    // The store may take its time: no session is held meanwhile.
    let (mut record, copies) = read(&platform, id).await?;
    record["copies"] = copies.with_snapshot(&platform.bucket).await;
    Ok(Json(record).into_response())
}

/// The machine with its operations, and the copies of its slot, all as of one moment: the log of an operation never names a
/// step whose effect the machine does not show yet.
async fn read(platform: &Platform, id: MachineId) -> Result<(Value, Copies), Problem> {
    let mut session = platform.report_db.session().await?;
    let tx = db::begin_snapshot(&mut session).await?;
    let machine = db::machines::get(&tx, id).await?;
    let machine = machine.ok_or_else(|| fault::machine_not_found(&id.to_string()))?;
    let mut record = machine.record();
    let mut operations = Vec::new();
    for one in db::operations::list_for_machine(&tx, id).await? {
        operations.push(operation::record(&tx, &one).await?);
    }
    record["operations"] = operations.into();
    let copies = copies::of_slot(&tx, &machine, &platform.config.timing).await?;
    db::commit(tx).await?;
    Ok((record, copies))
}

/// The route and its description.
pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(READ),
    operation: Operation {
        id: "getMachine",
        method: Method::GET,
        path: "/vps/{id}",
        summary: "One machine with its operations, whatever has become of it.",
        credentials: &[OPERATOR],
        parameters: &[MACHINE_ID],
        body: None,
        answers: &[told(200, "The machine.", machine_with_operations)],
        problems: &[Code::MachineNotFound, Code::DatabaseUnavailable],
    },
    serve: || get(handle),
};
