//! Calls a host: requests updates, drills and backups, stops and resumes its writers, fetches its usage report, queries
//! its file backup, and requests restores of files.
//!
//! Each call has a deadline and carries a proof for exactly this machine, method and path. A host's response never
//! proves that a snapshot exists: the store must confirm it.

use std::time::Duration;

use anyhow::Context;
use http::{Method, StatusCode};
use jiff::Timestamp;
use serde_json::{Value, json};
use url::Url;

use crate::context::Platform;
use crate::db::machine_row::MachineRow;
use svc_base::untrusted_text;
use svc_http::body::{ResponseBodyError, read_response};
use svc_http::client::{self, Timeouts};
use svc_http::proof::{self, Claims, Route};
use svc_http::usage::UsageQuery;
use svc_http::{idempotency, request_id};
use svc_machine::id::OperationId;
use svc_machine::name::ImageVersion;

const BACKUP_PATH: &str = "/_svc/internal/backup";
const ACCEPT_PATH: &str = "/_svc/internal/backup-accept";
const DRILL_PATH: &str = "/_svc/internal/drill";
const VERIFY_FILES_PATH: &str = "/_svc/internal/files-verify";
const UPDATE_PATH: &str = "/_svc/internal/update";
const QUIESCE_PATH: &str = "/_svc/internal/quiesce";
const RESUME_PATH: &str = "/_svc/internal/resume";
const USAGE_PATH: &str = "/api/usage";
const FILES_RESTORE_PATH: &str = "/api/files/restore";
const CALL_TIMEOUTS: Timeouts = Timeouts {
    connect: Duration::from_secs(3),
    total: Some(Duration::from_secs(6)),
    idle: Duration::from_secs(6),
};

/// Timeouts for calls about the file backup and file history, for which the host may read a repository's index. The
/// total timeout is shorter than `svcctl`'s.
const FILES_TIMEOUTS: Timeouts = Timeouts {
    connect: Duration::from_secs(3),
    total: Some(Duration::from_secs(20)),
    idle: Duration::from_secs(20),
};

const PROOF_TTL_SECONDS: i64 = 30;
const MAX_RESPONSE_BYTES: usize = 64 << 10;
/// A daily report for one year takes about 40 KiB; a report by user has one entry per user and channel.
const MAX_USAGE_REPORT_BYTES: usize = 1 << 20;
/// Enough for a page of 10,000 entries.
const MAX_FILES_RESPONSE_BYTES: usize = 8 << 20;

/// Requests a backup from a machine's host. Returns the request time by the host's clock, if the host reports it: a
/// backup that began earlier belongs to another request.
pub async fn request_backup(
    platform: &Platform,
    machine: &MachineRow,
) -> Result<Option<Timestamp>, HostCallError> {
    send_request(platform, machine, &HostRequest::post(BACKUP_PATH, None)).await
}

/// Requests that a host publish its held-back snapshot as the latest; its heartbeats report the outcome.
pub async fn request_backup_acceptance(
    platform: &Platform,
    machine: &MachineRow,
) -> Result<Option<Timestamp>, HostCallError> {
    send_request(platform, machine, &HostRequest::post(ACCEPT_PATH, None)).await
}

/// Requests a drill, a test restore of the latest snapshot; the host's heartbeats report the outcome.
pub async fn request_drill(
    platform: &Platform,
    machine: &MachineRow,
) -> Result<Option<Timestamp>, HostCallError> {
    send_request(platform, machine, &HostRequest::post(DRILL_PATH, None)).await
}

/// Requests a verification of part of the file backup; the host's heartbeats report the outcome.
pub async fn request_files_verification(
    platform: &Platform,
    machine: &MachineRow,
) -> Result<Option<Timestamp>, HostCallError> {
    send_request(platform, machine, &HostRequest::post(VERIFY_FILES_PATH, None)).await
}

/// Requests an update to a release; the host's heartbeats report the outcome.
pub async fn request_update(
    platform: &Platform,
    machine: &MachineRow,
    version: &ImageVersion,
) -> Result<(), HostCallError> {
    let body = json!({"imageVersion": version});
    send_request(platform, machine, &HostRequest::post(UPDATE_PATH, Some(body))).await.map(drop)
}

/// The reason a call to a host failed.
#[derive(Debug, thiserror::Error)]
pub enum HostCallError {
    /// The machine has no address or never registered, no connection to the host could be made, the host did not
    /// respond in time, or its response could not be read.
    #[error("the host cannot be reached")]
    Unreachable(#[source] anyhow::Error),
    /// The host responded with this error status.
    #[error("the host returned {0}")]
    ErrorStatus(StatusCode),
}

/// A host's progress in stopping its writers.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct QuiesceStatus {
    /// The time since which all writers have been stopped.
    #[serde(with = "svc_base::clock::wire_option")]
    pub quiesced_at: Option<Timestamp>,
    pub running_dispatches: u64,
}

/// Requests that a host stop its writers for an operation; returns its progress.
///
/// # Errors
/// [`HostCallError`]; 404 or 405 from a release without this route.
pub async fn quiesce(
    platform: &Platform,
    machine: &MachineRow,
    operation: OperationId,
) -> Result<QuiesceStatus, HostCallError> {
    let body = Some(json!({"operationId": operation}));
    let response = call(platform, machine, &HostRequest::post(QUIESCE_PATH, body)).await?;
    Ok(serde_json::from_slice(&response).unwrap_or_default())
}

/// Requests that a host resume the writers that it stopped for an operation.
pub async fn resume(
    platform: &Platform,
    machine: &MachineRow,
    operation: OperationId,
) -> Result<(), HostCallError> {
    let body = Some(json!({"operationId": operation}));
    call(platform, machine, &HostRequest::post(RESUME_PATH, body)).await.map(drop)
}

/// A host's running backup, and the outcome of its last one.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BackupProgress {
    #[serde(rename = "running")]
    pub is_running: bool,
    pub stage: Option<String>,
    pub dumped_bytes: Option<u64>,
    pub uploaded_bytes: Option<u64>,
    pub last: Option<BackupOutcome>,
    /// Absent if the host has not recorded a state of its file backup yet, or runs an earlier release.
    pub files: Option<Box<FilesProgress>>,
}

/// The state of a host's file backup.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FilesProgress {
    /// Everything that was written before this time is saved.
    #[serde(with = "svc_base::clock::wire_option")]
    pub saved_until: Option<Timestamp>,
    pub error: Option<String>,
    /// Names the entries that the last save could not read. Earlier releases do not report them.
    pub unreadable: Option<String>,
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BackupOutcome {
    pub status: String,
    #[serde(with = "svc_base::clock::wire_option")]
    pub began_at: Option<Timestamp>,
    /// The snapshot that the backup published as the latest.
    pub key: Option<String>,
    pub error: Option<String>,
    /// Set if the complete snapshot was not published as the latest. Earlier releases do not report this.
    pub held: Option<HeldSnapshot>,
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(default)]
pub struct HeldSnapshot {
    /// A sentence that names the missing tables and rows.
    pub loss: String,
}

/// Fetches a host's backup progress.
///
/// # Errors
/// [`HostCallError`]; 404 or 405 from a release without this route.
pub async fn fetch_backup_progress(
    platform: &Platform,
    machine: &MachineRow,
) -> Result<BackupProgress, HostCallError> {
    let request = HostRequest::get(BACKUP_PATH, Vec::new());
    let response = call(platform, machine, &request).await?;
    Ok(serde_json::from_slice(&response).unwrap_or_default())
}

/// The reason a host's usage report is unavailable.
#[derive(Debug, thiserror::Error)]
pub enum UsageError {
    #[error(transparent)]
    Host(#[from] HostCallError),
    /// The report exceeds this many bytes.
    #[error("the host's report is larger than {0} bytes")]
    TooLarge(usize),
}

/// Fetches the host's usage report, unchanged and at most `MAX_USAGE_REPORT_BYTES` long.
///
/// # Errors
/// [`UsageError`]; 403 from a release that does not serve usage to the platform.
pub async fn fetch_usage(
    platform: &Platform,
    machine: &MachineRow,
    query: &UsageQuery,
) -> Result<Vec<u8>, UsageError> {
    let request = HostRequest::get(USAGE_PATH, query.pairs());
    let mut response = check_accepted(send(platform, machine, &request).await)?;
    let mut body = Vec::new();
    match read_response(&mut response, MAX_USAGE_REPORT_BYTES, &mut body).await {
        Ok(()) => Ok(body),
        Err(ResponseBodyError::TooLarge(max)) => Err(UsageError::TooLarge(max)),
        Err(ResponseBodyError::Http(error)) => Err(HostCallError::Unreachable(error.into()).into()),
    }
}

/// A query about the file backup or earlier versions of the owner's files, or a request to restore such a version.
#[derive(Debug)]
pub enum FilesCall {
    Status,
    Versions(Vec<(&'static str, String)>),
    ListAt(Vec<(&'static str, String)>),
    ShowRestore,
    Restore {
        body: Value,
        /// The host does not repeat the pending or last restore if it was requested with the same key.
        idempotency_key: Option<String>,
    },
}

/// The reason a [`FilesCall`] failed.
#[derive(Debug, thiserror::Error)]
pub enum FilesCallError {
    #[error(transparent)]
    Host(#[from] HostCallError),
    /// The host responded with this problem.
    #[error("the host returned {status}: {detail}")]
    Problem { status: StatusCode, detail: String },
    /// The host rejected this field of the request's body.
    #[error("the host rejected the field {pointer}: {detail}")]
    InvalidField { pointer: String, detail: String },
    /// The response exceeds this many bytes.
    #[error("the host's response is larger than {0} bytes")]
    TooLarge(usize),
    /// The host accepted the connection, but did not complete its response in time.
    #[error("the host did not respond within {} s", .0.as_secs())]
    TimedOut(Duration),
}

impl FilesCallError {
    /// Creates the error for a request that could not be sent, or whose response could not be read.
    fn from_transport(error: anyhow::Error) -> Self {
        let is_timeout = |cause: &(dyn std::error::Error + 'static)| {
            cause
                .downcast_ref::<reqwest::Error>()
                .is_some_and(|error| error.is_timeout() && !error.is_connect())
        };
        match FILES_TIMEOUTS.total {
            Some(limit) if error.chain().any(is_timeout) => Self::TimedOut(limit),
            _ => HostCallError::Unreachable(error).into(),
        }
    }
}

/// The members of a host's problem response that are shown to an operator.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(default)]
struct HostProblem {
    detail: String,
    errors: Vec<HostFieldError>,
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(default)]
struct HostFieldError {
    pointer: String,
    detail: String,
}

impl HostProblem {
    /// Converts the problem to an error. The text is untrusted, so it is truncated and made printable.
    fn to_error(&self, status: StatusCode) -> FilesCallError {
        match self.errors.first().filter(|_| status == StatusCode::BAD_REQUEST) {
            Some(error) => FilesCallError::InvalidField {
                pointer: untrusted_text::truncate_printable(&error.pointer),
                detail: untrusted_text::truncate_printable(&error.detail),
            },
            None => {
                FilesCallError::Problem { status, detail: untrusted_text::truncate_printable(&self.detail) }
            }
        }
    }
}

/// Sends a [`FilesCall`] to a host and returns the response body, which is at most 8 MiB long.
///
/// # Errors
/// [`FilesCallError`]. A 404 without a detail in response to [`FilesCall::Status`] means that the host's release does
/// not have these routes.
pub async fn call_files(
    platform: &Platform,
    machine: &MachineRow,
    files_call: FilesCall,
) -> Result<Vec<u8>, FilesCallError> {
    let max_bytes = match &files_call {
        FilesCall::Status | FilesCall::Versions(_) | FilesCall::ListAt(_) => MAX_FILES_RESPONSE_BYTES,
        FilesCall::ShowRestore | FilesCall::Restore { .. } => MAX_RESPONSE_BYTES,
    };
    let is_status = matches!(files_call, FilesCall::Status);
    let request = match files_call {
        FilesCall::Status => HostRequest::get("/api/files/status", Vec::new()),
        FilesCall::Versions(query) => HostRequest::get("/api/files/versions", query),
        FilesCall::ListAt(query) => HostRequest::get("/api/files/at", query),
        FilesCall::ShowRestore => HostRequest::get(FILES_RESTORE_PATH, Vec::new()),
        FilesCall::Restore { body, idempotency_key } => {
            HostRequest { idempotency_key, ..HostRequest::post(FILES_RESTORE_PATH, Some(body)) }
        }
    };
    let result = send_with_timeouts(platform, machine, &request, FILES_TIMEOUTS).await;
    let mut response = result.map_err(FilesCallError::from_transport)?;
    let status = response.status();
    let mut body = Vec::new();
    match read_response(&mut response, max_bytes, &mut body).await {
        Ok(()) if status.is_success() => Ok(body),
        // The status always exists, so the host's release does not have this route.
        Ok(()) if is_status && status == StatusCode::NOT_FOUND => {
            Err(FilesCallError::Problem { status, detail: String::new() })
        }
        Ok(()) => {
            let problem: HostProblem = serde_json::from_slice(&body).unwrap_or_default();
            Err(problem.to_error(status))
        }
        Err(ResponseBodyError::TooLarge(max)) => Err(FilesCallError::TooLarge(max)),
        Err(ResponseBodyError::Http(error)) => Err(FilesCallError::from_transport(error.into())),
    }
}

/// Sends a request. Returns the request's time by the host's clock, if the host reports it.
async fn send_request(
    platform: &Platform,
    machine: &MachineRow,
    request: &HostRequest,
) -> Result<Option<Timestamp>, HostCallError> {
    let response = call(platform, machine, request).await?;
    Ok(serde_json::from_slice::<RequestReceipt>(&response).unwrap_or_default().requested_at)
}

/// The response to an accepted request.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RequestReceipt {
    #[serde(with = "svc_base::clock::wire_option")]
    requested_at: Option<Timestamp>,
}

struct HostRequest {
    method: Method,
    path: &'static str,
    query: Vec<(&'static str, String)>,
    body: Option<Value>,
    idempotency_key: Option<String>,
}

impl HostRequest {
    fn get(path: &'static str, query: Vec<(&'static str, String)>) -> Self {
        Self { method: Method::GET, path, query, body: None, idempotency_key: None }
    }

    fn post(path: &'static str, body: Option<Value>) -> Self {
        Self { method: Method::POST, path, query: Vec::new(), body, idempotency_key: None }
    }
}

/// Sends a request and returns the response body. The body may be truncated: the host has accepted the request even if
/// its response cannot be read.
async fn call(
    platform: &Platform,
    machine: &MachineRow,
    request: &HostRequest,
) -> Result<Vec<u8>, HostCallError> {
    let mut response = check_accepted(send(platform, machine, request).await)?;
    let mut body = Vec::new();
    let _ = read_response(&mut response, MAX_RESPONSE_BYTES, &mut body).await;
    Ok(body)
}

/// Returns the response if its status indicates success.
fn check_accepted(result: anyhow::Result<reqwest::Response>) -> Result<reqwest::Response, HostCallError> {
    let response = result.map_err(HostCallError::Unreachable)?;
    let status = response.status();
    if status.is_success() { Ok(response) } else { Err(HostCallError::ErrorStatus(status)) }
}

/// Returns a host's base URL, and a client that connects to its address and verifies its key.
///
/// # Errors
/// If the machine has no address yet or never registered, or if the client cannot be created.
pub fn build_client(
    platform: &Platform,
    machine: &MachineRow,
    timeouts: Timeouts,
) -> anyhow::Result<(Url, reqwest::Client)> {
    let address = machine.public_ipv4.context("the machine has no address")?;
    let pin = machine.tls_pin.context("the machine never registered")?;
    let trust = &platform.config.trust;
    let name = trust.server_name(machine.id, address);
    let base = Url::parse(&format!("https://{}:{}/", name.to_str(), machine.https_port))?;
    let tls = trust.client_config(pin, trust.chain_required_from(machine.id, machine.registered_at))?;
    Ok((base, client::build_for_address(timeouts, tls, &name.to_str(), address.into())?))
}

async fn send(
    platform: &Platform,
    machine: &MachineRow,
    request: &HostRequest,
) -> anyhow::Result<reqwest::Response> {
    send_with_timeouts(platform, machine, request, CALL_TIMEOUTS).await
}

async fn send_with_timeouts(
    platform: &Platform,
    machine: &MachineRow,
    request: &HostRequest,
    timeouts: Timeouts,
) -> anyhow::Result<reqwest::Response> {
    let (mut url, client) = build_client(platform, machine, timeouts)?;
    url.set_path(request.path);
    if !request.query.is_empty() {
        url.query_pairs_mut().extend_pairs(&request.query);
    }
    let signed_proof =
        platform.keys.borrow().signer_for(&machine.proof_kids).sign(&build_request_claims(machine, request));
    let builder = client.request(request.method.clone(), url).header(proof::HEADER, signed_proof);
    let mut builder = request_id::attach(builder);
    if let Some(body) = &request.body {
        builder = builder.json(body);
    }
    if let Some(key) = &request.idempotency_key {
        builder = builder.header(idempotency::HEADER, key);
    }
    builder.send().await.context("the request failed")
}

fn build_request_claims(machine: &MachineRow, request: &HostRequest) -> Claims {
    Claims {
        method: Some(request.method.to_string()),
        path: Some(request.path.to_owned()),
        jti: Some(uuid::Uuid::new_v4().simple().to_string()),
        ..build_claims(machine, Route::Internal)
    }
}

/// Builds the claims for a proof that is valid for `PROOF_TTL_SECONDS` and for any request to this route on a machine.
pub fn build_claims(machine: &MachineRow, route: Route) -> Claims {
    let now = Timestamp::now().as_second();
    Claims {
        iss: proof::ISSUER.to_owned(),
        aud: machine.id,
        sub: machine.user.clone(),
        handle: machine.handle.clone(),
        slot: machine.slot.clone(),
        route,
        app: None,
        method: None,
        path: None,
        jti: None,
        iat: now,
        exp: now + PROOF_TTL_SECONDS,
    }
}
