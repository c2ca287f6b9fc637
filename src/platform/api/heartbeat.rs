//! POST `/vps/:id/heartbeat`: receives a host's report and responds with its desired state.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::header::{CACHE_CONTROL, HeaderValue};
use jiff::Timestamp;
use secrecy::SecretString;
use serde_json::{Value, json};

use super::attention;
use super::call::{ApiCall, AuthenticatedHost, path_id};
use super::endpoint::{Access, Endpoint, HOST, MACHINE_ID, documented_json};
use super::heal;
use super::mutation::{self, AuditChange};
use super::register::{self, HostRegistration};
use crate::context::Platform;
use crate::db::machine_changes;
use crate::db::machine_row::MachineRow;
use crate::db::machine_server;
use crate::db::upgrade_token;
use crate::db::{self};
use crate::operations::later_holder;
use crate::token_rotation::{TokenOffer, TokenStatus, UpgradeToken};
use crate::tokens::{Generation, Purpose};
use axum::routing::post;
use http::Method;
use svc_base::failpoint;
use svc_base::untrusted_text;
use svc_http::fields::Fields;
use svc_http::openapi::{Operation, extensible, schema_of};
use svc_http::path_params::PathParams;
use svc_http::problem::{Code, Problem, chain};
use svc_http::proof::ProofKey;
use svc_machine::epoch::{Epoch, MAX_EPOCH};
use svc_machine::id::MachineId;
use svc_machine::name::ImageVersion;
use svc_store::bundle::MAX_KEYS;
use svc_wire::heartbeat::{
    self as wire, ComponentHealth, Heartbeat, HeartbeatResponse, MAX_PROOF_KIDS, MAX_TRUSTED_KEYS,
    TrustedKeyIds,
};
use svc_wire::host::{
    ComponentStatus, LastBackup, LastUpdate, MAX_DAMAGED_KEYS, Outcome, SnapshotCheck, SnapshotChecks,
    UpdateOutcome,
};
use svc_wire::machine::{self, Disk, Health};

// A host trusts the keys of one set.
const _: () = assert!(MAX_TRUSTED_KEYS == MAX_KEYS);

/// A heartbeat whose fields have been checked, with their texts bounded and printable.
struct HeartbeatReport {
    sent: Heartbeat,
    /// When the reported verified snapshot was taken.
    backup_taken_at: Option<Timestamp>,
    /// The registration that the platform accepted.
    registration: Option<HostRegistration>,
}

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
    let next_token = next_token(&platform, &host).await?;
    // A machine that may still get its slot back is not superseded yet; its writers stay stopped.
    let stopped_for = {
        let session = platform.host_db.session().await?;
        db::machines::stopped_for(&session, machine).await?
    };
    let holds_slot_in_store = holds_slot_in_store(&platform, machine, &report).await?;
    let superseded = !machine.is_active() && stopped_for.is_none() && !holds_slot_in_store;
    let epoch = report.sent.epoch;
    let is_healthy = report.sent.health.is_ok();
    if !superseded {
        let session = platform.host_db.session().await?;
        machine_changes::record_heartbeat(&session, id, &report.columns()).await?;
        // The host runs although a power-off was ordered, so its data is unsaved again.
        if machine.is_active() && machine.power_off_ordered_at.is_some() {
            machine_server::record_power_on_in_slot(&session, id).await?;
        }
        if is_healthy && epoch == machine.epoch && machine.is_active() && machine.proven_at.is_none() {
            machine_changes::record_proven(&session, id).await?;
        }
    }
    if is_healthy {
        heal::resume_healthy_machine(&platform, machine, epoch).await;
    }
    heal::detect_power_on(&platform, machine, epoch).await;
    // Not from this process's cache, which may lack a key that another process has delivered and already signs with.
    let session = platform.host_db.session().await?;
    let keys = db::keys::public_keys_for(&session, db::keys::PROOF, &machine.proof_kids).await?;
    let desired = if superseded { None } else { db::rollouts::desired_release(&session, id).await? };
    drop(session);
    let (desired_image_version, desired_request_id) = match desired {
        Some(desired) => (desired.image_version, Some(desired.request_id)),
        None => (report.sent.image_version, None),
    };
    let keys = keys.keys.into_iter().map(|ProofKey { kid, x }| wire::ProofKey { kid, x });
    let body = HeartbeatResponse {
        desired_image_version: Some(desired_image_version),
        epoch: Some(machine.epoch),
        superseded,
        proof_keys: Some(wire::ProofKeys { keys: keys.collect() }),
        quiesce: stopped_for.map(Into::into),
        desired_request_id,
        next_token: next_token.filter(|_| !superseded && machine.is_active()),
    };
    let mut response = Json(body).into_response();
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

/// Records a token of a later generation, which the host has evidently stored. Returns the token that the host must use
/// from now on, if it differs.
async fn next_token(platform: &Platform, host: &AuthenticatedHost) -> Result<Option<SecretString>, Problem> {
    let (id, timing) = (host.machine.id, platform.config.timing.tokens);
    let (current, standing) = match host.standing {
        TokenStatus::Later(generation) => {
            (advance_token(platform, host, generation).await?, TokenStatus::Current)
        }
        standing => (host.machine.upgrade_token.clone(), standing),
    };
    let offer = current.offer(id, standing, &platform.mint, timing, Timestamp::now());
    match offer.filter(|_| host.machine.registered_at.is_some()) {
        None => Ok(None),
        Some(TokenOffer::Stored(token)) => Ok(Some(token)),
        Some(TokenOffer::Next(generation)) if is_next_due(platform).await? => {
            Ok(Some(platform.mint.token(id, Purpose::Upgrade, generation)))
        }
        Some(TokenOffer::Next(_)) => Ok(None),
    }
}

/// Whether a token of a later generation may be issued: not while processes with another current platform key run.
async fn is_next_due(platform: &Platform) -> Result<bool, Problem> {
    if platform.process.ids.previous.is_none() {
        return Ok(true);
    }
    Ok(platform.process.is_settled(&platform.host_db.session().await?).await?)
}

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
    upgrade_token::advance(&tx, id, generation, &host.hash, overlap).await?;
    let after = before.clone().advanced(generation, host.hash.clone(), overlap, Timestamp::now());
    let change = AuditChange {
        action: "token.taken_up",
        target: id.to_string(),
        before: Some(json!(machine::UpgradeToken::from(&before))),
        after: Some(json!(machine::UpgradeToken::from(&after))),
    };
    mutation::write_audit(&tx, &format!("machine:{id}"), &change).await?;
    failpoint::pass("token-take-up-before-commit").map_err(|error| Problem::internal(&error))?;
    db::commit(tx).await?;
    failpoint::pass("token-take-up-after-commit").map_err(|error| Problem::internal(&error))?;
    tracing::info!(machine = %id, generation = generation.0, "token rotated");
    Ok(after)
}

/// Records what is missing in a database that was restored from an older copy: that the host has registered, or holds its
/// slot under a later epoch. Returns whether the machine holds its slot although it is inactive in the database.
async fn holds_slot_in_store(
    platform: &Platform,
    machine: &MachineRow,
    report: &HeartbeatReport,
) -> Result<bool, Problem> {
    let registration = report.registration.as_ref().filter(|registration| registration.is_of(machine.id));
    if let Some(registration) = registration.filter(|_| machine.registered_at.is_none()) {
        match register::register_from_heartbeat(platform, machine, registration).await {
            Ok(()) => {
                tracing::warn!(machine = %machine.id, "registered by its heartbeat; the database is outdated");
            }
            Err(problem) => {
                tracing::warn!(machine = %machine.id, %problem, "a machine serves, but cannot be registered");
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
    let found = later_holder::find(platform, &platform.host_db, &machine.user, &machine.slot).await;
    let holder = match found {
        Ok(found) => found.holder().filter(|holder| holder.machine == machine.id),
        // The machine may hold its slot, so it is not superseded before the fence is known. The next heartbeat retries.
        Err(error) => {
            tracing::warn!(machine = %machine.id, error = %chain(&error), "cannot read the fence of the slot");
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
    let still = db::machines::lock(&tx, machine.id).await?;
    if still.is_some_and(|still| still.is_active() && still.epoch < holder.epoch) {
        machine_changes::raise_epoch(&tx, machine.id, holder.epoch).await?;
    }
    db::commit(tx).await?;
    Ok(false)
}

/// Whether the platform still waits for the machine's last backup, which its host must be able to write.
pub(super) async fn needs_last_backup(platform: &Platform, machine: &MachineRow) -> Result<bool, Problem> {
    let session = platform.host_db.session().await?;
    let Some(operation) = db::machines::stopped_for(&session, machine).await? else { return Ok(false) };
    let operation = db::operations::get(&session, operation).await?;
    Ok(operation.is_some_and(|operation| !operation.has_ended() && operation.step == "last_backup"))
}

fn epoch(fields: &mut Fields) -> Option<Epoch> {
    let number = fields.required_number("epoch")?;
    let epoch = u32::try_from(number).ok().map(Epoch).filter(|epoch| *epoch <= MAX_EPOCH);
    if epoch.is_none() {
        fields.wrong("epoch", format!("must be at most {MAX_EPOCH}"));
    }
    epoch
}

/// Parses a heartbeat's body, for `tests/fuzz`.
///
/// # Errors
/// The problem that the host would get.
#[cfg(feature = "fuzzing")]
pub async fn read_body(body: Vec<u8>) -> Result<Value, Problem> {
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
        "updating": sent.updating,
        "attention": sent.attention,
        "backupTakenAt": report.backup_taken_at.map(svc_base::clock::rfc3339_ms),
        "epoch": sent.epoch,
        "proofKids": sent.proof_kids,
        "hasRegistration": report.registration.is_some(),
    }))
}

impl HeartbeatReport {
    /// What the platform stores of it.
    fn columns(&self) -> machine_changes::Heartbeat<'_> {
        let sent = &self.sent;
        machine_changes::Heartbeat {
            image_version: &sent.image_version,
            health: self.stored_health(),
            last_backup: sent.last_backup.as_ref().map(|report| json!(report)),
            last_update: sent.last_update.as_ref().map(|report| json!(report)),
            checks: sent.checks.as_ref().map(|report| json!(report)),
            updating: sent.updating,
            attention: json!(sent.attention),
            backup_taken_at: self.backup_taken_at,
            proof_kids: &sent.proof_kids,
            trusted_keys: sent.trusted_keys.as_ref(),
        }
    }

    fn stored_health(&self) -> Value {
        let ComponentHealth { gateway, database } = self.sent.health.clone();
        json!(Health { gateway, database, disk: self.sent.disk })
    }
}

fn parse_report(call: &ApiCall) -> Result<HeartbeatReport, Problem> {
    let mut fields = call.host_fields()?;
    let image_version = fields.required("imageVersion");
    let epoch = epoch(&mut fields);
    let health = health(&mut fields);
    let disk = disk(&mut fields);
    let last_backup = last_backup(&mut fields);
    let last_update = last_update(&mut fields);
    let checks = checks(&mut fields);
    let updating = fields.boolean("updating").unwrap_or(false);
    let attention = attention::read(&mut fields);
    let proof_kids = fields.strings("proofKids", MAX_PROOF_KIDS);
    let trusted_keys = trusted_keys(&mut fields);
    let registration = registration(&mut fields);
    let built = (|| {
        let (last_backup, backup_taken_at) = last_backup.unzip();
        let sent = Heartbeat {
            image_version: image_version?,
            epoch: epoch?,
            health: health?,
            disk: Some(disk?),
            last_backup,
            last_update,
            checks,
            updating,
            attention,
            proof_kids,
            trusted_keys,
            registration: registration.as_ref().map(|registration| registration.sent.clone()),
        };
        Some(HeartbeatReport { sent, backup_taken_at: backup_taken_at.flatten(), registration })
    })();
    fields.finish(built)
}

/// The ids of the keys whose signatures on releases the host accepts.
fn trusted_keys(fields: &mut Fields) -> Option<TrustedKeyIds> {
    let mut inner = fields.optional_nested("trustedKeys")?;
    let sequence = inner.required_number("sequence").map(u32::try_from);
    if matches!(sequence, Some(Err(_))) {
        inner.wrong("sequence", format!("must be at most {}", u32::MAX));
    }
    if !inner.has("ids") {
        inner.wrong("ids", "is required");
    }
    let ids = inner.strings("ids", MAX_TRUSTED_KEYS);
    let is_id = |id: &String| id.len() == 16 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !ids.iter().all(is_id) {
        inner.wrong("ids", "must each have 16 hexadecimal digits");
    }
    fields.close(inner);
    Some(TrustedKeyIds { sequence: sequence?.ok()?, ids })
}

fn registration(fields: &mut Fields) -> Option<HostRegistration> {
    let mut inner = fields.optional_nested("registration")?;
    let registration = HostRegistration::read(&mut inner);
    fields.close(inner);
    registration
}

fn health(fields: &mut Fields) -> Option<ComponentHealth> {
    let mut inner = fields.nested("health")?;
    let gateway: Option<ComponentStatus> = inner.required("gateway");
    let database: Option<ComponentStatus> = inner.required("database");
    fields.close(inner);
    Some(ComponentHealth { gateway: gateway?.into(), database: database?.into() })
}

fn disk(fields: &mut Fields) -> Option<Disk> {
    let mut inner = fields.nested("disk")?;
    let (total, free) = (inner.required_number("totalBytes"), inner.required_number("freeBytes"));
    fields.close(inner);
    Some(Disk { total_bytes: total?, free_bytes: free? })
}

/// The report of the last backup, and when its snapshot was taken if it succeeded.
fn last_backup(fields: &mut Fields) -> Option<(LastBackup, Option<Timestamp>)> {
    let mut inner = fields.optional_nested("lastBackup")?;
    let status: Option<Outcome> = inner.required("status");
    let key = inner.reported("key");
    let (began_at, taken_at) = (inner.time("beganAt"), inner.time("takenAt"));
    let size_bytes = inner.optional_number("sizeBytes");
    let error = inner.reported("error");
    fields.close(inner);
    let status = status?;
    let report = LastBackup {
        status: status.into(),
        began_at: began_at.map(Into::into),
        key,
        taken_at: taken_at.map(Into::into),
        size_bytes,
        error,
    };
    Some((report, taken_at.filter(|_| status == Outcome::Success)))
}

/// The report of the last update.
fn last_update(fields: &mut Fields) -> Option<LastUpdate> {
    let mut inner = fields.optional_nested("lastUpdate")?;
    let version: Option<ImageVersion> = inner.required("version");
    let outcome: Option<UpdateOutcome> = inner.required("outcome");
    let stage: Option<String> = inner.required("stage");
    let error = inner.reported("error");
    let at = inner.required_time("at");
    fields.close(inner);
    Some(LastUpdate {
        version: version?.into(),
        outcome: outcome?.into(),
        stage: untrusted_text::bounded(&stage?),
        at: at?.into(),
        error,
    })
}

/// The report of the last snapshot checks, by kind.
fn checks(fields: &mut Fields) -> Option<SnapshotChecks> {
    let mut inner = fields.optional_nested("checks")?;
    let checks = SnapshotChecks { verify: check(&mut inner, "verify"), drill: check(&mut inner, "drill") };
    fields.close(inner);
    Some(checks)
}

fn check(checks: &mut Fields, kind: &str) -> Option<SnapshotCheck> {
    let mut inner = checks.optional_nested(kind)?;
    let status: Option<Outcome> = inner.required("status");
    let at = inner.required_time("at");
    let key = inner.reported("key");
    let damaged = inner.strings("damaged", MAX_DAMAGED_KEYS);
    let damaged: Vec<String> = damaged.iter().map(|key| untrusted_text::bounded(key)).collect();
    let error = inner.reported("error");
    checks.close(inner);
    Some(SnapshotCheck { status: status?.into(), at: at?.into(), key, damaged, error })
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

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use http::header::CONTENT_TYPE;

    use super::*;
    use svc_wire::machine::Attention;
    use svc_wire::registration::Registration;
    use svc_wire::text::Time;

    async fn parse(body: &Value) -> Result<HeartbeatReport, Problem> {
        let request = Request::builder().header(CONTENT_TYPE, "application/json");
        let request = request.body(Body::from(body.to_string())).unwrap();
        parse_report(&ApiCall::read(request).await?)
    }

    fn at() -> Time {
        Time::stored("2026-11-21T11:05:00.000Z")
    }

    /// A heartbeat with every field.
    fn whole() -> Heartbeat {
        let check = |status: Outcome| SnapshotCheck {
            status: status.into(),
            at: at(),
            key: Some("k".to_owned()),
            damaged: vec!["d".to_owned()],
            error: Some("e".to_owned()),
        };
        Heartbeat {
            image_version: "2026.11.1".parse().unwrap(),
            epoch: Epoch(3),
            health: ComponentHealth {
                gateway: ComponentStatus::Ok.into(),
                database: ComponentStatus::Failing.into(),
            },
            disk: Some(Disk { total_bytes: 9, free_bytes: 5 }),
            last_backup: Some(LastBackup {
                status: Outcome::Success.into(),
                began_at: Some(at()),
                key: Some("k".to_owned()),
                taken_at: Some(at()),
                size_bytes: Some(7),
                error: Some("e".to_owned()),
            }),
            last_update: Some(LastUpdate {
                version: "2026.11.1".parse::<ImageVersion>().unwrap().into(),
                outcome: UpdateOutcome::RolledBack.into(),
                stage: "health".to_owned(),
                at: at(),
                error: Some("e".to_owned()),
            }),
            checks: Some(SnapshotChecks {
                verify: Some(check(Outcome::Success)),
                drill: Some(check(Outcome::Error)),
            }),
            updating: true,
            attention: vec![Attention { code: "snapshot_held".to_owned(), detail: "d".to_owned() }],
            proof_kids: vec!["proof-1".to_owned()],
            trusted_keys: Some(TrustedKeyIds { sequence: 2, ids: vec!["614c4b637b092e93".to_owned()] }),
            registration: Some(Registration {
                machine_id: MachineId::new(),
                image_version: "2026.11.1".parse().unwrap(),
                bundle_sha256: "ab".repeat(32),
                tls_spki_sha256: "cd".repeat(32),
                boot_ms: Some(5),
            }),
        }
    }

    #[tokio::test]
    async fn parse_report_reads_every_field() {
        let whole = whole();
        let report = parse(&json!(whole)).await.unwrap();
        assert_eq!(report.sent, whole);
        assert_eq!(report.backup_taken_at, Some(at().parse().unwrap()));
        assert!(report.registration.is_some());
    }

    #[tokio::test]
    async fn parse_report_accepts_older_and_newer_hosts() {
        let mut least = json!(whole());
        let optional = [
            "lastBackup",
            "lastUpdate",
            "checks",
            "updating",
            "attention",
            "proofKids",
            "trustedKeys",
            "registration",
        ];
        for name in optional {
            least.as_object_mut().unwrap().shift_remove(name);
        }
        least["someday"] = json!({ "new": 1 });
        least["health"]["someday"] = json!(1);
        let sent = parse(&least).await.unwrap().sent;
        assert_eq!((sent.last_backup, sent.updating, sent.attention), (None, false, vec![]));
        for name in optional {
            least[name] = Value::Null;
        }
        assert!(parse(&least).await.is_ok());
    }

    #[tokio::test]
    async fn parse_report_names_every_wrong_field() {
        let mut wrong = json!(whole());
        wrong["epoch"] = json!(u64::from(u32::MAX));
        wrong["disk"] = Value::Null;
        wrong["health"]["gateway"] = json!("well");
        wrong["trustedKeys"]["ids"][0] = json!("x");
        wrong["checks"]["drill"]["at"] = json!("soon");
        let problem = parse(&wrong).await.err().unwrap();
        let errors = problem.members["errors"].as_array().unwrap();
        let named: Vec<_> = errors.iter().map(|error| error["pointer"].as_str().unwrap()).collect();
        assert_eq!(named, ["/epoch", "/health/gateway", "/disk", "/checks/drill/at", "/trustedKeys/ids"]);
    }
}
