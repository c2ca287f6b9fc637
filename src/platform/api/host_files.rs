//! `/vps/:id/files/…`: shows the state of a machine's file backup, lists earlier versions of the owner's files,
//! and requests restores. The host reads them from the slot's file backup. File contents are never sent.
//!
//! File names are the owner's data, so each valid read and each valid request for a restore is audited, even if it then
//! fails. Reads of a restore's state are not audited.

mod endpoints;

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::{StatusCode, header};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::call::{ApiCall, path_id};
use super::mutation::{self, AuditChange, Mutation, MutationEffect, Reply};
use super::problems;
use crate::context::Platform;
use crate::db;
use crate::db::machine_row::MachineRow;
use crate::operations::host_call::{self, FilesCall, FilesCallError, HostCallError};
use crate::operators::Operator;
use svc_base::clock::rfc3339_ms;
use svc_base::untrusted_text;
use svc_http::fields::Fields;
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem, format_chain};
use svc_http::request_id;
use svc_machine::id::MachineId;
use svc_machine::state::Status;
use svc_wire::files::{
    DEFAULT_ENTRIES, DEFAULT_VERSIONS, FileBackupStatus, FileListing, FileRestoreAccepted,
    FileRestoreResponse, FileVersions, MAX_ENTRIES, MAX_PATH_CHARS, MAX_VERSIONS,
};

pub use endpoints::{LIST, RESTORE, SHOW_RESTORE, STATUS, VERSIONS};

const RETRY_AFTER_SECONDS: u64 = 5;
/// `Retry-After` for a request that timed out. `svcctl` does not wait this long, so it does not repeat the request.
const TIMEOUT_RETRY_AFTER_SECONDS: u64 = 30;

type Query = Vec<(&'static str, String)>;

pub async fn show_status(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    parse_read_request(platform, &id, request, "files.status", |_| Some(Vec::new()))
        .await?
        .respond::<FileBackupStatus>(|_| FilesCall::Status)
        .await
}

pub async fn list_versions(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    parse_read_request(platform, &id, request, "files.versions", |fields| {
        let path: Option<String> = fields.required_text("path", MAX_PATH_CHARS);
        let before = fields.optional_time("before");
        let limit = fields.number_in_range("limit", 1..=MAX_VERSIONS, DEFAULT_VERSIONS);
        let mut query = vec![("path", path?), ("limit", limit.to_string())];
        query.extend(before.map(|before| ("before", rfc3339_ms(before))));
        Some(query)
    })
    .await?
    .respond::<FileVersions>(FilesCall::Versions)
    .await
}

pub async fn list(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    parse_read_request(platform, &id, request, "files.list", |fields| {
        let path = fields.optional_text("path", MAX_PATH_CHARS);
        let time = fields.optional_time("time");
        let cursor = fields.number_in_range("cursor", 0..=usize::MAX, 0);
        let limit = fields.number_in_range("limit", 1..=MAX_ENTRIES, DEFAULT_ENTRIES);
        let mut query = vec![("cursor", cursor.to_string()), ("limit", limit.to_string())];
        query.extend(path.map(|path| ("path", path)));
        query.extend(time.map(|time| ("time", rfc3339_ms(time))));
        Some(query)
    })
    .await?
    .respond::<FileListing>(FilesCall::ListAt)
    .await
}

/// Shows the state of the last restore. The read is not audited, because `svcctl` polls this route, and the request for
/// the restore has been audited.
pub async fn show_restore(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    call.authenticate_operator(&platform).await?;
    let id: MachineId = path_id("machineId", &id)?;
    call.request.query_fields().finish(Some(()))?;
    let machine = load_serving_machine(&platform, id).await?;
    let response: FileRestoreResponse = call_host(&platform, &machine, FilesCall::ShowRestore).await?;
    Ok(([(header::CACHE_CONTROL, "no-store")], Json(response)).into_response())
}

/// An operator's authenticated and validated request to read from a host.
struct FilesReadRequest {
    platform: Arc<Platform>,
    operator: Operator,
    id: MachineId,
    action: &'static str,
    query: Query,
}

/// Authenticates the operator, and parses a request to read from a host.
async fn parse_read_request(
    platform: Arc<Platform>,
    id: &str,
    request: Request,
    action: &'static str,
    read_query: impl FnOnce(&mut Fields) -> Option<Query>,
) -> Result<FilesReadRequest, Problem> {
    let call = ApiCall::read(request).await?;
    let operator = call.authenticate_operator(&platform).await?;
    let id: MachineId = path_id("machineId", id)?;
    let mut fields = call.request.query_fields();
    let query = read_query(&mut fields);
    let query = fields.finish(query)?;
    Ok(FilesReadRequest { platform, operator, id, action, query })
}

impl FilesReadRequest {
    async fn respond<T: HostFilesResponse>(
        self,
        to_call: impl FnOnce(Query) -> FilesCall,
    ) -> Result<Response, Problem> {
        let mut after = json!({});
        for (name, value) in &self.query {
            after[*name] = value.as_str().into();
        }
        let Self { platform, operator, id, action, query } = self;
        let read = read_from_host::<T>(platform, id, to_call(query), operator, action, after);
        // The read completes even if the operator disconnects, so that it is audited.
        let read = tokio::spawn(request_id::run_with_id(request_id::current(), read));
        let content = read.await.map_err(|error| Problem::internal(&error))??;
        Ok(([(header::CACHE_CONTROL, "no-store")], Json(content)).into_response())
    }
}

/// Reads from the host, and audits the read and its outcome. If it cannot be audited, the host's response is withheld.
async fn read_from_host<T: HostFilesResponse>(
    platform: Arc<Platform>,
    id: MachineId,
    files_call: FilesCall,
    operator: Operator,
    action: &'static str,
    mut after: Value,
) -> Result<T, Problem> {
    let response = match load_serving_machine(&platform, id).await {
        Ok(machine) => call_host::<T>(&platform, &machine, files_call).await,
        Err(problem) => Err(problem),
    };
    after["outcome"] = response.as_ref().map_or_else(|problem| problem.code.as_str(), |_| "read").into();
    let change = AuditChange { action, target: id.to_string(), before: None, after: Some(after) };
    audit(&platform, &operator, change).await?;
    response
}

async fn audit(platform: &Platform, operator: &Operator, change: AuditChange) -> Result<(), Problem> {
    let mut session = platform.report_db.session().await?;
    let tx = db::begin(&mut session).await?;
    mutation::write_audit(&tx, operator.actor(), &change).await?;
    Ok(db::commit(tx).await?)
}

async fn load_serving_machine(platform: &Platform, id: MachineId) -> Result<MachineRow, Problem> {
    // No session is held during the call to the host.
    let machine = db::machines::get(&platform.report_db.session().await?, id).await?;
    let machine = machine.ok_or_else(|| problems::machine_not_found(&id.to_string()))?;
    ensure_serving(&machine, "the state of its files")?;
    Ok(machine)
}

/// A host's response. A response with too many items is rejected before it is processed further.
trait HostFilesResponse: Serialize + DeserializeOwned + Send + 'static {
    fn item_count(&self) -> usize {
        1
    }
}

impl HostFilesResponse for FileVersions {
    fn item_count(&self) -> usize {
        self.versions.len()
    }
}

impl HostFilesResponse for FileListing {
    fn item_count(&self) -> usize {
        self.entries.len()
    }
}

impl HostFilesResponse for FileBackupStatus {
    fn item_count(&self) -> usize {
        self.invalid_rules.len() + self.excluded.as_ref().map_or(0, |excluded| excluded.largest.len())
    }
}

impl HostFilesResponse for FileRestoreResponse {}
impl HostFilesResponse for FileRestoreAccepted {}

/// Calls the host, and makes all text in its response printable.
async fn call_host<T: HostFilesResponse>(
    platform: &Platform,
    machine: &MachineRow,
    files_call: FilesCall,
) -> Result<T, Problem> {
    let id = machine.id;
    let is_restore = matches!(files_call, FilesCall::Restore { .. });
    let response = host_call::call_files(platform, machine, files_call).await.map_err(|error| {
        tracing::warn!(machine = %id, error = %format_chain(&error), "a files request to the host failed");
        host_problem(id, error, is_restore)
    })?;
    // Parse as `T` first, because a `Value` of arbitrary shape would take many times the memory of its text.
    let parsed = serde_json::from_slice::<T>(&response).and_then(|content| {
        if content.item_count() > MAX_ENTRIES {
            return Err(serde::de::Error::custom("the response has too many items"));
        }
        let mut value = serde_json::to_value(content)?;
        untrusted_text::make_printable(&mut value);
        serde_json::from_value(value)
    });
    parsed.map_err(|error| {
        // The error may quote arbitrarily long text from the response.
        let error = untrusted_text::truncate_printable(&error.to_string());
        tracing::warn!(machine = %id, %error, "the host's response to a files request is invalid");
        let detail = format!("The response from machine {id} is invalid; see the platform's log.");
        Problem::new(Code::HostResponseInvalid, detail)
    })
}

/// Maps a failed call to the host to a problem for the operator.
fn host_problem(id: MachineId, error: FilesCallError, is_restore: bool) -> Problem {
    match error {
        FilesCallError::Host(HostCallError::Unreachable(_)) => {
            Problem::new(Code::HostUnreachable, format!("The host of machine {id} did not respond."))
        }
        FilesCallError::TimedOut(limit) => {
            let advice = if is_restore {
                "The restore may have started: check `activity.log` in the owner's `system/logs` before you repeat it."
            } else {
                "It may be busy: try again later. For a list, the directory may be too large: use `svc-sync-agent` on the \
                 machine."
            };
            let seconds = limit.as_secs();
            let detail =
                format!("The host of machine {id} did not complete the request within {seconds} s. {advice}");
            Problem::new(Code::Unavailable, detail).retry_after(TIMEOUT_RETRY_AFTER_SECONDS)
        }
        FilesCallError::TooLarge(max) => {
            let detail = format!(
                "The response from machine {id} is larger than {max} bytes; for a list, reduce `limit`."
            );
            Problem::new(Code::HostResponseInvalid, detail)
        }
        FilesCallError::Problem { status: StatusCode::NOT_FOUND, detail } if !detail.is_empty() => {
            Problem::new(Code::NotFound, detail)
        }
        FilesCallError::InvalidField { pointer, detail } => Problem::field(pointer, detail),
        FilesCallError::Problem { status: StatusCode::CONFLICT, detail } => {
            invalid_state(Status::Running.as_str(), detail)
        }
        FilesCallError::Problem { status: StatusCode::UNPROCESSABLE_ENTITY, detail } if is_restore => {
            Problem::new(Code::IdempotencyMismatch, detail)
        }
        FilesCallError::Problem { status: StatusCode::SERVICE_UNAVAILABLE, detail } => {
            let fallback = || format!("The host of machine {id} cannot respond right now; try again.");
            let detail = if detail.is_empty() { fallback() } else { detail };
            Problem::new(Code::Unavailable, detail).retry_after(RETRY_AFTER_SECONDS)
        }
        FilesCallError::Problem { status: StatusCode::UNAUTHORIZED, .. } => {
            Problem::new(Code::HostRefused, problems::describe_proof_rejection(id))
        }
        FilesCallError::Problem {
            status: status @ (StatusCode::FORBIDDEN | StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED),
            ..
        } => {
            let detail = format!(
                "The release on machine {id} does not support this request from the platform ({}): update it with `svcctl \
                 deploy start`.",
                status.as_u16()
            );
            Problem::new(Code::HostRefused, detail)
        }
        FilesCallError::Problem { status, .. } | FilesCallError::Host(HostCallError::ErrorStatus(status)) => {
            let status = status.as_u16();
            let detail = format!(
                "The host of machine {id} returned {status}; search the host's log for this request id."
            );
            Problem::new(Code::HostRefused, detail)
        }
    }
}

pub async fn restore(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let operator = call.authenticate_operator(&platform).await?;
    let id: MachineId = path_id("machineId", &id)?;
    let mut fields = call.request.json_fields()?;
    let path = fields.required_text("path", MAX_PATH_CHARS);
    let time = fields.optional_time("time");
    let into = fields.optional_text("into", MAX_PATH_CHARS);
    let replace = fields.boolean("replace").unwrap_or(false);
    let path = fields.finish(path)?;
    let mutation = Mutation::from_call(&call, &operator)?;
    if let Some(reply) = mutation.replay(&platform.db.session().await?).await? {
        return Ok(reply.into_response());
    }
    let body = json!({"path": path, "time": time.map(rfc3339_ms), "into": into, "replace": replace});
    // The request completes even if the operator disconnects, so that its outcome is audited.
    let restore = request_restore(platform, operator, mutation, id, body);
    let restore = tokio::spawn(request_id::run_with_id(request_id::current(), restore));
    restore.await.map_err(|error| Problem::internal(&error))?
}

/// Requests the restore from the host, and audits the request and its outcome.
async fn request_restore(
    platform: Arc<Platform>,
    operator: Operator,
    mutation: Mutation,
    id: MachineId,
    body: Value,
) -> Result<Response, Problem> {
    let change = |outcome: &str| {
        let mut after = body.clone();
        after["outcome"] = outcome.into();
        AuditChange { action: "files.restore", target: id.to_string(), before: None, after: Some(after) }
    };
    // Audit before the call, because the database may be unreachable after the host has accepted the request.
    audit(&platform, &operator, change("requested")).await?;
    let call = async {
        let machine = load_serving_machine(&platform, id).await?;
        // If this process stops before it stores the response, the host uses this key to recognize the retry.
        let idempotency_key = mutation.derive_host_idempotency_key();
        let restore = FilesCall::Restore { body: body.clone(), idempotency_key };
        call_host::<FileRestoreAccepted>(&platform, &machine, restore).await
    };
    let accepted = match call.await {
        Ok(accepted) => accepted,
        Err(problem) => {
            // The host may have accepted the request even though its response was lost.
            audit(&platform, &operator, change(problem.code.as_str())).await?;
            return Err(problem);
        }
    };
    let outcome = mutation
        .run(&platform, async |_| {
            Ok(MutationEffect::changed(Reply::new(StatusCode::ACCEPTED, accepted), change("accepted")))
        })
        .await?;
    Ok(outcome.into_reply().into_response())
}

/// Rejects a machine whose host is not in service. `subject` names the data requested from the host.
///
/// # Errors
/// `machine_not_found` for a deleted machine; `invalid_state` for one that is replaced, not running or powered off.
pub fn ensure_serving(machine: &MachineRow, subject: &str) -> Result<(), Problem> {
    let id = machine.id;
    if machine.deleted_at.is_some() {
        let detail = format!("Machine {id} has been deleted, so its host cannot report {subject}.");
        return Err(Problem::new(Code::MachineNotFound, detail));
    }
    if machine.retired_at.is_some() {
        let detail = format!(
            "Machine {id} has been replaced: use the slot's current machine, which `svcctl list --user {}` shows.",
            machine.user
        );
        return Err(invalid_state("replaced", detail));
    }
    if machine.status != Status::Running {
        return Err(problems::invalid_state(machine.status.as_str(), &[Status::Running]));
    }
    if machine.powered_off_at.is_some() {
        let detail = format!(
            "Machine {id} is powered off, so its host cannot report {subject}: power it on with `svcctl power on {id} --wait`."
        );
        return Err(invalid_state(machine.status.as_str(), detail));
    }
    Ok(())
}

fn invalid_state(status: &str, detail: String) -> Problem {
    Problem::new(Code::InvalidState, detail).with("machineStatus", status.into()).with("allowed", json!([]))
}
