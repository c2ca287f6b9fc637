//! POST `/vps/:id/boot-stage`: a booting host reports its stage, or the progress of a stage. A report does not change
//! the machine's state; progress extends the registration deadline.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use deadpool_postgres::Transaction;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::call::{ApiCall, path_id, registration_rejected};
use super::endpoint::{Access, Endpoint, MACHINE_ID, REGISTRATION};
use super::register;
use crate::context::Platform;
use crate::db::machine_row::MachineRow;
use crate::db::{self, DbError, machine_changes};
use axum::routing::post;
use svc_base::clock::now_ms;
use svc_http::fields::Fields;
use svc_http::openapi::{Content, DocumentedResponse, Operation, extensible, schema_of};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem};
use svc_machine::id::MachineId;
use svc_wire::machine::{BootProgress, BootStage};
use svc_wire::registration::{BootStageName, BootStageReport, StageProgress};

/// Maximum number of stored stages; the newest are kept. A host in a boot loop reports the same stages repeatedly.
const MAX_STAGES: usize = 20;

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let (claimed, token) = call.parse_registration_claim(&platform)?;
    let mut session = platform.host_db.session().await?;
    let tx = db::begin(&mut session).await?;
    let machine = register::lock_claimed_machine(&tx, claimed, token).await?;
    let mut fields = call.host_fields()?;
    let id: MachineId = path_id("machineId", &id)?;
    if id != machine.id {
        return Err(registration_rejected());
    }
    let stage = fields.required("stage");
    let progress = read_progress(&mut fields);
    let stage: BootStageName = fields.finish(stage)?;
    if let Some(progress) = progress.map(|progress| json!(to_boot_progress(stage, progress))) {
        record_progress(&platform, &tx, &machine, &progress).await?;
        db::commit(tx).await?;
        return Ok(StatusCode::NO_CONTENT.into_response());
    }

    let mut stages = machine.boot_stages.as_array().cloned().unwrap_or_default();
    stages.push(json!(BootStage { stage: stage.to_string(), at: now_ms().into() }));
    let surplus = stages.len().saturating_sub(MAX_STAGES);
    stages.drain(..surplus);
    machine_changes::record_boot_stages(&tx, id, &stages.into()).await?;
    db::commit(tx).await?;
    tracing::info!(machine = %id, %stage, "host boot stage");
    Ok(StatusCode::NO_CONTENT.into_response())
}

fn to_boot_progress(stage: BootStageName, progress: StageProgress) -> BootProgress {
    let StageProgress { bytes, total_bytes, rows, total_rows } = progress;
    BootProgress { stage: stage.to_string(), bytes, total_bytes, rows, total_rows }
}

fn read_progress(fields: &mut Fields) -> Option<StageProgress> {
    let mut inner = fields.optional_nested("progress")?;
    let mut number = |name: &str| inner.optional_number(name);
    let progress = StageProgress {
        bytes: number("bytes"),
        total_bytes: number("totalBytes"),
        rows: number("rows"),
        total_rows: number("totalRows"),
    };
    fields.close(inner);
    Some(progress)
}

/// Records progress, which extends the deadlines for the registration and for the machine's operation. A report that
/// repeats the last one is not progress.
async fn record_progress(
    platform: &Platform,
    tx: &Transaction<'_>,
    machine: &MachineRow,
    progress: &Value,
) -> Result<(), DbError> {
    if machine.boot_progress.as_ref() == Some(progress) {
        return Ok(());
    }
    let timing = &platform.config.timing;
    let (ttl, limit) = (timing.registration_ttl, timing.operation_limit);
    machine_changes::record_boot_progress(tx, machine.id, progress, ttl, limit).await?;
    db::operations::record_progress(tx, machine.id).await
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Machine,
    operation: Operation {
        id: "reportBootStage",
        method: Method::POST,
        path: "/vps/{id}/boot-stage",
        summary: "Reports the stage and progress of a booting host.",
        credentials: &[REGISTRATION],
        parameters: &[MACHINE_ID],
        body: Some(|| extensible(schema_of::<BootStageReport>())),
        responses: &[DocumentedResponse {
            status: 204,
            description: "The report has been recorded.",
            content: Content::Nothing,
        }],
        problems: &[Code::RegistrationRejected, Code::RateLimited, Code::DatabaseUnavailable],
    },
    serve: || post(handle),
};
