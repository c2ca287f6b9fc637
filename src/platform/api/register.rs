//! POST `/vps/register`: registers a host with a single-use token, which makes its machine routable.
//!
//! A repeated request with an identical body receives the same response until the token expires, because the first
//! response may have been lost.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use deadpool_postgres::Transaction;
use jiff::Timestamp;
use serde::Serialize;
use serde_json::json;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::call::{ApiCall, registration_rejected};
use super::endpoint::{Access, Endpoint, REGISTRATION, documented_json};
use super::mutation::{self, AuditChange};
use crate::context::Platform;
use crate::db;
use crate::db::machine_changes::{self, Registration};
use crate::db::machine_row::MachineRow;
use crate::lifecycle::{self, EventContext, LifecycleError};
use crate::operations::later_holder;
use crate::tokens;
use axum::routing::post;
use http::Method;
use svc_http::fields::Fields;
use svc_http::openapi::{Operation, extensible, schema_of};
use svc_http::problem::{Code, Problem};
use svc_http::tls::SpkiPin;
use svc_machine::event::{Event, RestoreMode};
use svc_machine::id::MachineId;
use svc_machine::name::ImageVersion;
use svc_machine::state::Status;
use svc_store::bundle::parse_digest;
use svc_wire::registration::{self as wire, RegistrationResponse};

/// A host's registration, with its TLS pin parsed.
pub struct HostRegistration {
    pub sent: wire::Registration,
    pin: SpkiPin,
}

/// The canonical form of a registration. The audit log records it, and its hash is stored so that a repeated request is
/// recognized. This form must not change, because the platform may be updated between a request and its retry.
#[derive(Serialize)]
struct CanonicalRegistration<'a> {
    machine: MachineId,
    image_version: &'a ImageVersion,
    bundle_sha256: &'a str,
    tls_spki_sha256: &'a str,
    boot_ms: Option<u64>,
}

pub async fn handle(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let (claimed, token) = call.parse_registration_claim(&platform)?;
    let machine = db::machines::get(&platform.host_db.session().await?, claimed).await?;
    let machine = machine.ok_or_else(registration_rejected)?;
    check_token(token, &machine)?;
    // This check runs before the transaction, so that no row lock or session is held during requests to the store.
    ensure_not_fenced_out(&platform, &machine).await?;
    let mut session = platform.host_db.session().await?;
    // The token is checked before the body is parsed. The lock serializes the uses of the token.
    let tx = db::begin(&mut session).await?;
    let machine = lock_claimed_machine(&tx, claimed, token).await?;
    let mut body = call.host_fields()?;
    let registration = HostRegistration::read(&mut body);
    let registration = body.finish(registration)?;
    if !registration.is_for(machine.id) {
        return Err(registration_rejected());
    }
    let response = register(&platform, &tx, &machine, &registration).await?;
    db::commit(tx).await?;
    Ok(Json(response).into_response())
}

/// Locks the machine that the token claims, if the token is valid.
pub async fn lock_claimed_machine(
    tx: &Transaction<'_>,
    claimed: MachineId,
    token: &str,
) -> Result<MachineRow, Problem> {
    let machine = db::machines::lock(tx, claimed).await?.ok_or_else(registration_rejected)?;
    check_token(token, &machine)?;
    Ok(machine)
}

fn check_token(token: &str, machine: &MachineRow) -> Result<(), Problem> {
    if !tokens::matches_hash(token, &machine.registration_token_hash) || !machine.is_active() {
        return Err(registration_rejected());
    }
    if machine.registration_expires_at.is_some_and(|end| end <= Timestamp::now()) {
        return Err(registration_rejected());
    }
    Ok(())
}

/// Rejects a machine that is fenced out in the store: it could never take a backup. A registered machine passes,
/// because its host only repeats the request.
async fn ensure_not_fenced_out(platform: &Platform, machine: &MachineRow) -> Result<(), Problem> {
    if machine.registered_at.is_some() {
        return Ok(());
    }
    let claim = later_holder::find_claim(platform, &platform.host_db, &machine.user, &machine.slot).await?;
    let Some(holder) =
        claim.holder().filter(|holder| holder.machine != machine.id && holder.epoch >= machine.epoch)
    else {
        return Ok(());
    };
    later_holder::raise_alarm(platform, machine, holder).await;
    let detail = format!(
        "The slot is fenced at epoch {} by machine {}; this machine's epoch {} is not above it.",
        holder.epoch, holder.machine, machine.epoch
    );
    Err(Problem::new(Code::InvalidState, detail).with("machineStatus", json!(machine.status)))
}

/// Registers a machine again from its heartbeat, after the database was restored from a copy older than the machine's
/// registration.
///
/// # Errors
/// `invalid_state` if another machine holds the slot's fence, or if this one is not waiting for its registration;
/// `registration_rejected` if a different registration is recorded; `unavailable` if its server is not recorded;
/// `store_unavailable` if the pointer cannot be read; `database_unavailable` if the database is unreachable.
pub async fn register_from_heartbeat(
    platform: &Platform,
    machine: &MachineRow,
    registration: &HostRegistration,
) -> Result<(), Problem> {
    ensure_not_fenced_out(platform, machine).await?;
    let mut session = platform.host_db.session().await?;
    let tx = db::begin(&mut session).await?;
    let machine = db::machines::lock(&tx, machine.id).await?.ok_or_else(registration_rejected)?;
    register(platform, &tx, &machine, registration).await?;
    Ok(db::commit(tx).await?)
}

impl HostRegistration {
    /// Reads a registration. The TLS pin is kept both parsed and as text, because repeated requests are compared by the
    /// text.
    pub fn read(fields: &mut Fields) -> Option<Self> {
        let machine = fields.required("machineId");
        let image_version = fields.required("imageVersion");
        let digest: Option<String> = fields.required("bundleSha256");
        let bundle_sha256 = digest.and_then(|text| {
            let parsed = parse_digest(&text).filter(|_| text.len() == 64);
            if parsed.is_none() {
                fields.add_error("bundleSha256", "must be 64 hexadecimal digits");
            }
            parsed
        });
        let pin: Option<SpkiPin> = fields.required("tlsSpkiSha256");
        let boot_ms = fields.optional_number("bootMs");
        let restored_files = read_restored_files(fields);
        let pin = pin?;
        let sent = wire::Registration {
            machine_id: machine?,
            image_version: image_version?,
            bundle_sha256: bundle_sha256?,
            tls_spki_sha256: pin.to_string(),
            boot_ms,
            restored_files,
        };
        Some(Self { sent, pin })
    }

    /// Returns whether the registration is for this machine.
    pub fn is_for(&self, machine: MachineId) -> bool {
        self.sent.machine_id == machine
    }

    fn canonical(&self) -> CanonicalRegistration<'_> {
        let wire::Registration {
            machine_id,
            image_version,
            bundle_sha256,
            tls_spki_sha256,
            boot_ms,
            restored_files: _,
        } = &self.sent;
        CanonicalRegistration {
            machine: *machine_id,
            image_version,
            bundle_sha256,
            tls_spki_sha256,
            boot_ms: *boot_ms,
        }
    }
}

async fn register(
    platform: &Platform,
    tx: &Transaction<'_>,
    machine: &MachineRow,
    registration: &HostRegistration,
) -> Result<RegistrationResponse, Problem> {
    let HostRegistration { sent, pin } = registration;
    let response = RegistrationResponse { status: Status::Running.into(), epoch: machine.epoch };
    let canonical =
        serde_json::to_vec(&registration.canonical()).map_err(|error| Problem::internal(&error))?;
    let body_hash = Sha256::digest(&canonical).to_vec();
    if let Some(recorded_hash) = &machine.registration_body_hash {
        let is_same: bool = recorded_hash.ct_eq(&body_hash).into();
        return if is_same { Ok(response) } else { Err(registration_rejected()) };
    }
    if machine.registration_expires_at.is_none() || machine.provider_server_id.is_none() {
        // The host booted before the provider's response to the create request was stored, so the host must retry.
        return Err(
            Problem::new(Code::Unavailable, "The server is not recorded yet; try again.").retry_after(1)
        );
    }
    let event = Event::Registered { server_type: machine.server_type.clone() };
    match lifecycle::apply(tx, &platform.mint, machine, &event, EventContext::default()).await {
        Ok(_) => {}
        Err(LifecycleError::Refused(_)) => {
            return Err(Problem::new(Code::InvalidState, "The machine is not waiting for its registration.")
                .with("machineStatus", json!(machine.status)));
        }
        Err(LifecycleError::Db(error)) => return Err(error.into()),
        Err(error @ LifecycleError::Missing(_)) => return Err(Problem::internal(&error)),
    }
    let columns = Registration {
        image_version: &sent.image_version,
        bundle_sha256: &sent.bundle_sha256,
        tls_pin: *pin,
        body_hash: &body_hash,
    };
    machine_changes::record_registration(tx, machine.id, &columns).await?;
    db::slots::set_release(tx, &machine.user, &machine.slot, &sent.image_version).await?;
    if let Some(restored) = describe_restored(machine, sent.restored_files.as_ref()) {
        machine_changes::log_restored(tx, machine.id, &restored).await?;
    }
    db::operations::end_running(tx, machine.id, "succeeded", None).await?;
    let (target, after) = (machine.id.to_string(), serde_json::to_value(registration.canonical()).ok());
    let change = AuditChange { action: "register", target, before: None, after };
    mutation::write_audit(tx, &format!("machine:{}", machine.id), &change).await?;
    tracing::info!(machine = %machine.id, boot_ms = sent.boot_ms, "registered");
    Ok(response)
}

fn read_restored_files(fields: &mut Fields) -> Option<wire::RestoredFiles> {
    let mut inner = fields.optional_nested("restoredFiles")?;
    let as_of = inner.optional_time("asOf").map(Into::into);
    let restored = wire::RestoredFiles { as_of, error: inner.optional_host_text("error") };
    fields.close(inner);
    Some(restored)
}

/// Describes what a new machine restored, for the operation's log; `None` if there was nothing to restore.
fn describe_restored(machine: &MachineRow, files: Option<&wire::RestoredFiles>) -> Option<String> {
    let database = match (&machine.restore_snapshot, machine.restore) {
        (Some(key), _) => Some(format!("the database was restored from {key}")),
        (None, RestoreMode::Required) => {
            Some("the database was restored from the latest snapshot".to_owned())
        }
        (None, RestoreMode::Empty) => None,
    };
    let files = files.and_then(|files| match (&files.as_of, &files.error) {
        (_, Some(error)) => Some(format!("the owner's files were not restored: {error}")),
        (Some(at), None) => Some(format!("the owner's files were restored as of {at}")),
        (None, None) => None,
    });
    let parts: Vec<String> = database.into_iter().chain(files).collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Machine,
    operation: Operation {
        id: "register",
        method: Method::POST,
        path: "/vps/register",
        summary: "Registers a new host, which makes its machine routable.",
        credentials: &[REGISTRATION],
        parameters: &[],
        body: Some(|| extensible(schema_of::<wire::Registration>())),
        responses: &[documented_json(200, "The machine is running.", schema_of::<RegistrationResponse>)],
        problems: &[
            Code::RegistrationRejected,
            Code::RateLimited,
            Code::InvalidState,
            Code::Unavailable,
            Code::StoreUnavailable,
            Code::DatabaseUnavailable,
        ],
    },
    serve: || post(handle),
};
