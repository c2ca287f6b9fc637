//! POST `/vps/:id/heartbeat`: receives a host's report and responds with its desired state.

mod report;

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::header::{CACHE_CONTROL, HeaderValue};
use jiff::Timestamp;
use secrecy::SecretString;
use serde_json::json;

use super::call::{ApiCall, AuthenticatedHost, path_id};
use super::endpoint::{Access, Endpoint, HOST, MACHINE_ID, documented_json};
use super::heal;
use super::mutation::{self, AuditChange};
use super::register;
use crate::context::Platform;
use crate::db;
use crate::db::machine_changes;
use crate::db::machine_row::MachineRow;
use crate::db::machine_server;
use crate::db::upgrade_token;
use crate::operations::{files_fence, later_holder};
use crate::token_rotation::{TokenOffer, TokenStatus, UpgradeToken};
use crate::tokens::{Generation, Purpose};
use axum::routing::post;
use http::Method;
use svc_base::failpoint;
use svc_http::openapi::{Operation, extensible, schema_of};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem, format_chain};
use svc_http::proof::ProofKey;
use svc_machine::id::MachineId;
use svc_wire::heartbeat::{self as wire, Heartbeat, HeartbeatResponse};
use svc_wire::machine;

use report::{HeartbeatReport, parse_report};

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    PathParams(id): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let host = call.authenticate_host_token(&platform).await?;
    let machine = &host.machine;
    let id: MachineId = path_id("machineId", &id)?;
    if id != machine.id {
        return Err(Problem::new(Code::Forbidden, "This token belongs to another machine."));
    }
    let report = parse_report(&call)?;
    let next_token = issue_next_token(&platform, &host).await?;
    // A machine with a stopping operation may still return to its slot, so it is quiesced but not superseded.
    let stopping_operation = {
        let session = platform.host_db.session().await?;
        db::machines::find_stopping_operation(&session, machine).await?
    };
    let may_hold_slot = reconcile_with_store(&platform, machine, &report).await?;
    let is_superseded = !machine.is_active() && stopping_operation.is_none() && !may_hold_slot;
    let epoch = report.sent.epoch;
    let is_healthy = report.sent.health.is_ok();
    if !is_superseded {
        let session = platform.host_db.session().await?;
        machine_changes::record_heartbeat(&session, id, &report.columns()).await?;
        // This must precede `record_proven`, which starts the retention period of the predecessor's server.
        if report.has_attention_item(wire::FILES_NOT_RESTORED) && machine.is_active() {
            machine_changes::mark_predecessors_unsaved(&session, id).await?;
        }
        // The host is running although a power-off was requested, so it may write data that no snapshot contains.
        if machine.is_active() && machine.power_off_requested_at.is_some() {
            machine_server::record_power_on_in_slot(&session, id).await?;
        }
        if is_healthy && epoch == machine.epoch && machine.is_active() {
            if machine.proven_at.is_none() {
                machine_changes::record_proven(&session, id).await?;
            }
            // This release works, so the slot's next machine starts with it, even if it is older than the recorded one:
            // the host may have rolled back.
            if !report.sent.updating {
                db::slots::set_release_for_machine(&session, id, &report.sent.image_version).await?;
            }
        }
    }
    let files_error = report.sent.files.as_ref().and_then(|files| files.error.as_deref());
    if machine.is_active() && files_error.is_some_and(files_fence::is_fence_error) {
        files_fence::try_restore(&platform, machine).await;
    }
    if is_healthy {
        heal::resume_healthy_machine(&platform, machine, epoch).await;
    }
    heal::detect_power_on(&platform, machine, epoch).await;
    // Do not use this process's cache: another process may already be signing with a key that the cache lacks.
    let session = platform.host_db.session().await?;
    let keys =
        db::keys::list_public_keys_for_host(&session, db::keys::PROOF_PURPOSE, &machine.proof_kids).await?;
    let desired = if is_superseded { None } else { db::rollouts::find_desired_release(&session, id).await? };
    drop(session);
    let (desired_image_version, desired_request_id) = match desired {
        Some(desired) => (desired.image_version, Some(desired.request_id)),
        None => (report.sent.image_version, None),
    };
    let keys = keys.keys.into_iter().map(|ProofKey { kid, x }| wire::ProofKey { kid, x });
    let body = HeartbeatResponse {
        desired_image_version: Some(desired_image_version),
        epoch: Some(machine.epoch),
        superseded: is_superseded,
        proof_keys: Some(wire::ProofKeys { keys: keys.collect() }),
        quiesce: stopping_operation.map(Into::into),
        desired_request_id,
        certificate: machine.is_active().then(|| platform.config.hosts.certificate_settings(machine.id)),
        next_token: next_token.filter(|_| !is_superseded && machine.is_active()),
    };
    let mut response = Json(body).into_response();
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

/// Records the use of a token of a later generation, which proves that the host has stored it. Returns the token that
/// the host must use next; `None` if it keeps its token, has not registered yet, or must wait because processes with
/// different platform keys are running.
async fn issue_next_token(
    platform: &Platform,
    host: &AuthenticatedHost,
) -> Result<Option<SecretString>, Problem> {
    let (id, timing) = (host.machine.id, platform.config.timing.tokens);
    let (current, status) = match host.token_status {
        TokenStatus::Later(generation) => {
            (advance_token(platform, host, generation).await?, TokenStatus::Current)
        }
        status => (host.machine.upgrade_token.clone(), status),
    };
    let offer = current.next_offer(id, status, &platform.mint, timing, Timestamp::now());
    match offer.filter(|_| host.machine.registered_at.is_some()) {
        None => Ok(None),
        Some(TokenOffer::Stored(token)) => Ok(Some(token)),
        Some(TokenOffer::Next(generation)) if may_issue_next(platform).await? => {
            Ok(Some(platform.mint.token(id, Purpose::Upgrade, generation)))
        }
        Some(TokenOffer::Next(_)) => Ok(None),
    }
}

/// Returns whether a token of a later generation may be issued. None may be issued while a process with a different
/// current platform key is running, or shortly after it has stopped.
async fn may_issue_next(platform: &Platform) -> Result<bool, Problem> {
    if platform.process.ids.previous.is_none() {
        return Ok(true);
    }
    Ok(platform.process.is_settled(&platform.host_db.session().await?).await?)
}

/// Records the first heartbeat with a token of this later generation. The previous token remains valid for the overlap
/// period.
async fn advance_token(
    platform: &Platform,
    host: &AuthenticatedHost,
    generation: Generation,
) -> Result<UpgradeToken, Problem> {
    let id = host.machine.id;
    let before = host.machine.upgrade_token.clone();
    let mut session = platform.host_db.session().await?;
    let tx = db::begin(&mut session).await?;
    let overlap = platform.config.timing.tokens.overlap;
    let is_first = upgrade_token::advance(&tx, id, generation, &host.token_hash, overlap).await?;
    let (hash, last) = (host.token_hash.clone(), host.machine.heartbeat_at);
    let after = before.clone().advance(generation, hash, overlap, last, Timestamp::now());
    if !is_first {
        // A concurrent heartbeat has recorded and audited the rotation.
        return Ok(after);
    }
    let change = AuditChange {
        action: "token.taken_up",
        target: id.to_string(),
        before: Some(json!(machine::UpgradeToken::from(&before))),
        after: Some(json!(machine::UpgradeToken::from(&after))),
    };
    mutation::write_audit(&tx, &format!("machine:{id}"), &change).await?;
    failpoint::trigger("token-adoption-before-commit").map_err(|error| Problem::internal(&error))?;
    db::commit(tx).await?;
    failpoint::trigger("token-adoption-after-commit").map_err(|error| Problem::internal(&error))?;
    tracing::info!(machine = %id, generation = generation.0, "token rotated");
    Ok(after)
}

/// Records two facts that the database lacks after it was restored from an older copy: that the host has registered,
/// and that it holds its slot under a later epoch. Returns true if the machine is inactive in the database but
/// holds its slot according to the store, or may hold it because the fence cannot be read.
async fn reconcile_with_store(
    platform: &Platform,
    machine: &MachineRow,
    report: &HeartbeatReport,
) -> Result<bool, Problem> {
    let registration = report.registration.as_ref().filter(|registration| registration.is_for(machine.id));
    if let Some(registration) = registration.filter(|_| machine.registered_at.is_none()) {
        match register::register_from_heartbeat(platform, machine, registration).await {
            Ok(()) => {
                tracing::warn!(machine = %machine.id, "machine registered by its heartbeat: the database was restored from an older copy");
            }
            Err(problem) => {
                tracing::warn!(machine = %machine.id, %problem, "the machine is serving, but cannot be registered");
                // Keep its server, which may hold the only copy of the data.
                let session = platform.host_db.session().await?;
                machine_changes::mark_unsaved(&session, machine.id).await?;
            }
        }
    }
    let epoch = report.sent.epoch;
    if epoch <= machine.epoch || epoch > machine.epoch.max_plausible() {
        return Ok(false);
    }
    let claim = later_holder::find_claim(platform, &platform.host_db, &machine.user, &machine.slot).await;
    let holder = match claim {
        Ok(claim) => claim.holder().filter(|holder| holder.machine == machine.id),
        // The machine may hold its slot, so it is not superseded until the fence has been read. The next heartbeat
        // retries.
        Err(error) => {
            tracing::warn!(machine = %machine.id, error = %format_chain(&error), "cannot read the slot's fence");
            return Ok(true);
        }
    };
    let Some(holder) = holder else { return Ok(false) };
    later_holder::raise_alarm(platform, machine, holder).await;
    let mut session = platform.host_db.session().await?;
    if !machine.is_active() {
        machine_changes::mark_unsaved(&session, machine.id).await?;
        return Ok(true);
    }
    let tx = db::begin(&mut session).await?;
    let locked = db::machines::lock(&tx, machine.id).await?;
    if locked.is_some_and(|locked| locked.is_active() && locked.epoch < holder.epoch) {
        machine_changes::raise_epoch(&tx, machine.id, holder.epoch).await?;
    }
    db::commit(tx).await?;
    Ok(false)
}

/// Returns whether an operation is waiting for the machine's final backup, for which the host needs store access.
pub(super) async fn is_final_backup_pending(
    platform: &Platform,
    machine: &MachineRow,
) -> Result<bool, Problem> {
    let session = platform.host_db.session().await?;
    let Some(operation) = db::machines::find_stopping_operation(&session, machine).await? else {
        return Ok(false);
    };
    let operation = db::operations::get(&session, operation).await?;
    Ok(operation.is_some_and(|operation| !operation.has_ended() && operation.step == "last_backup"))
}

/// Parses a heartbeat's body, for `tests/fuzz`.
///
/// # Errors
/// The problem that the host would receive.
#[cfg(feature = "fuzzing")]
pub async fn read_body(body: Vec<u8>) -> Result<serde_json::Value, Problem> {
    let mut request = Request::new(axum::body::Body::from(body));
    let json = http::HeaderValue::from_static("application/json");
    request.headers_mut().insert(http::header::CONTENT_TYPE, json);
    let report = parse_report(&ApiCall::read(request).await?)?;
    let sent = &report.sent;
    Ok(json!({
        "imageVersion": sent.image_version,
        "health": report.stored_health(),
        "lastBackup": sent.last_backup,
        "lastUpdate": sent.last_update,
        "checks": sent.checks,
        "files": sent.files,
        "updating": sent.updating,
        "attention": sent.attention,
        "backupTakenAt": report.backup_taken_at.map(svc_base::clock::rfc3339_ms),
        "epoch": sent.epoch,
        "proofKids": sent.proof_kids,
        "hasRegistration": report.registration.is_some(),
    }))
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Machine,
    operation: Operation {
        id: "heartbeat",
        method: Method::POST,
        path: "/vps/{id}/heartbeat",
        summary: "Receives a host's status and responds with its desired version, keys and token.",
        credentials: &[HOST],
        parameters: &[MACHINE_ID],
        body: Some(|| extensible(schema_of::<Heartbeat>())),
        responses: &[documented_json(200, "The desired state of the host.", schema_of::<HeartbeatResponse>)],
        problems: &[Code::Forbidden, Code::RateLimited, Code::DatabaseUnavailable],
    },
    serve: || post(handle),
};
