//! POST `/vps/:id/heartbeat`: what a host says of itself, and what it is to know: its version, keys, its end.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::header::{CACHE_CONTROL, HeaderValue};
use jiff::Timestamp;
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Value, json};

use super::attention;
use super::call::{Call, HostToken, path_id};
use super::endpoint::{
    Access, CHECKS, Endpoint, HOST, MACHINE_ID, MOST_DAMAGED, UPDATE_ENDS, checks_told, image_version,
    last_backup_told, last_update_told, told,
};
use super::heal;
use super::mutation::{self, Changed};
use super::register::{self, Registered};
use crate::failpoint;
use crate::http::fields::Fields;
use crate::http::openapi::{
    Operation, any_text, array, boolean, count, extensible, fields, matching, nullable, object, one_of, text,
    uuid,
};
use crate::http::problem::{Code, Problem, chain};
use crate::http::segments::Segments;
use crate::machine::epoch::{Epoch, MAX_EPOCH};
use crate::machine::id::MachineId;
use crate::machine::name::ImageVersion;
use crate::platform::context::Platform;
use crate::platform::db::machine_changes::{self, Heartbeat, TrustedKeys};
use crate::platform::db::machine_row::MachineRow;
use crate::platform::db::machine_server;
use crate::platform::db::upgrade_token;
use crate::platform::db::{self};
use crate::platform::operations::later_holder;
use crate::platform::token_rotation::{TokenOffer, TokenStatus, UpgradeToken};
use crate::platform::tokens::{Generation, Purpose};
use crate::store::bundle::MAX_KEYS;
use crate::untrusted_text;
use axum::routing::post;
use http::Method;

/// Keys that a host may know at one time.
const MOST_KIDS: usize = 16;

struct Beat {
    image_version: ImageVersion,
    health: Value,
    last_backup: Option<Value>,
    last_update: Option<Value>,
    checks: Option<Value>,
    updating: bool,
    /// What needs a person.
    attention: Value,
    /// Of the verified snapshot that it tells of.
    backup_taken_at: Option<Timestamp>,
    epoch: Epoch,
    proof_kids: Vec<String>,
    trusted_keys: Option<TrustedKeys>,
    /// As it registered once.
    registration: Option<Registered>,
}

pub async fn handle(
    State(platform): State<Arc<Platform>>,
    Segments(id): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    let host = call.host_token(&platform).await?;
    let machine = &host.machine;
    let id: MachineId = path_id("machineId", &id)?;
    if id != machine.id {
        return Err(Problem::new(Code::Forbidden, "This token is another machine's."));
    }
    let beat = beat(&call)?;
    let next_token = next_token(&platform, &host).await?;
    // A machine that may still get its slot back is not sent away: its writers stay stopped.
    let stopped_for = {
        let session = platform.host_db.session().await?;
        db::machines::stopped_for(&session, machine).await?
    };
    let serves_after_all = serves_after_all(&platform, machine, &beat).await?;
    let superseded = !machine.is_active() && stopped_for.is_none() && !serves_after_all;
    let epoch = beat.epoch;
    let is_well = beat.health["gateway"] == "ok" && beat.health["database"] == "ok";
    if !superseded {
        let session = platform.host_db.session().await?;
        let beat = Heartbeat {
            image_version: &beat.image_version,
            health: &beat.health,
            last_backup: beat.last_backup.as_ref(),
            last_update: beat.last_update.as_ref(),
            checks: beat.checks.as_ref(),
            updating: beat.updating,
            attention: &beat.attention,
            backup_taken_at: beat.backup_taken_at,
            proof_kids: &beat.proof_kids,
            trusted_keys: beat.trusted_keys.as_ref(),
        };
        machine_changes::record_heartbeat(&session, id, &beat).await?;
        // The host is running, even if a power-off was ordered: what it writes must be saved again.
        if machine.is_active() && machine.power_off_ordered_at.is_some() {
            machine_server::record_power_on_in_slot(&session, id).await?;
        }
        if is_well && epoch == machine.epoch && machine.is_active() && machine.proven_at.is_none() {
            machine_changes::record_proven(&session, id).await?;
        }
    }
    if is_well {
        heal::heal(&platform, machine, epoch).await;
    }
    heal::note_power(&platform, machine, epoch).await;
    // From the database: an answer by what this process knew a moment ago could take a key away that another process
    // has delivered, and that is signed with already.
    let session = platform.host_db.session().await?;
    let keys = db::keys::public_keys_for(&session, db::keys::PROOF, &machine.proof_kids).await?;
    let desired = if superseded { None } else { db::rollouts::desired_release(&session, id).await? };
    drop(session);
    let mut answer = json!({
        "desiredImageVersion": beat.image_version,
        "epoch": machine.epoch,
        "superseded": superseded,
        "proofKeys": keys,
        "quiesce": stopped_for,
    });
    if let Some(desired) = desired {
        answer["desiredImageVersion"] = desired.image_version.into();
        answer["desiredRequestId"] = desired.request_id.into();
    }
    if let Some(token) = next_token.filter(|_| !superseded && machine.is_active()) {
        answer["nextToken"] = token.expose_secret().into();
    }
    let mut response = Json(answer).into_response();
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

/// Notes a token of a later generation, which its host has stored since it sends heartbeats with it, and makes the token
/// that the host is to use from now on, if that is another one.
async fn next_token(platform: &Platform, host: &HostToken) -> Result<Option<SecretString>, Problem> {
    let (id, timing) = (host.machine.id, platform.config.timing.tokens);
    let (current, standing) = match host.standing {
        TokenStatus::Later(generation) => (take_up(platform, host, generation).await?, TokenStatus::Current),
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

/// Whether a token of a later generation may be made: not while processes with another current platform key run.
async fn is_next_due(platform: &Platform) -> Result<bool, Problem> {
    if platform.process.ids.previous.is_none() {
        return Ok(true);
    }
    Ok(platform.process.is_settled(&platform.host_db.session().await?).await?)
}

async fn take_up(
    platform: &Platform,
    host: &HostToken,
    generation: Generation,
) -> Result<UpgradeToken, Problem> {
    let id = host.machine.id;
    let before = host.machine.upgrade_token.clone();
    let mut session = platform.host_db.session().await?;
    let tx = db::begin(&mut session).await?;
    let overlap = platform.config.timing.tokens.overlap;
    upgrade_token::advance(&tx, id, generation, &host.hash, overlap).await?;
    let after = before.clone().advanced(generation, host.hash.clone(), overlap, Timestamp::now());
    let (target, actor) = (id.to_string(), format!("machine:{id}"));
    let (was, is) = (before.record(), after.record());
    let changed = Changed { action: "token.taken_up", target: &target, before: Some(&was), after: Some(&is) };
    mutation::audit(&tx, &actor, &changed).await?;
    failpoint::pass("token-take-up-before-commit").map_err(|error| Problem::internal(&error))?;
    db::commit(tx).await?;
    failpoint::pass("token-take-up-after-commit").map_err(|error| Problem::internal(&error))?;
    tracing::info!(machine = %id, generation = generation.0, "its token has rotated");
    Ok(after)
}

/// Notes what the host knows and this database, restored from an older copy, does not: that it has registered, or got its
/// slot back since, under a later epoch. Answers whether it holds its slot although the database says otherwise.
async fn serves_after_all(platform: &Platform, machine: &MachineRow, beat: &Beat) -> Result<bool, Problem> {
    let registration = beat.registration.as_ref().filter(|registration| registration.is_of(machine.id));
    if let Some(registration) = registration.filter(|_| machine.registered_at.is_none()) {
        match register::again(platform, machine, registration).await {
            Ok(()) => {
                tracing::warn!(machine = %machine.id, "registered by its heartbeat: the database is older");
            }
            Err(problem) => {
                tracing::warn!(machine = %machine.id, %problem, "a machine serves and is not registered");
                // Its server is kept: it may hold the only copy.
                let session = platform.host_db.session().await?;
                machine_changes::mark_unsaved(&session, machine.id).await?;
            }
        }
    }
    if beat.epoch <= machine.epoch || beat.epoch > machine.epoch.max_plausible() {
        return Ok(false);
    }
    let found = later_holder::find(platform, &platform.host_db, &machine.user, &machine.slot).await;
    let holder = match found {
        Ok(found) => found.holder().filter(|holder| holder.machine == machine.id),
        // The machine may hold its slot: it is not told that it is superseded before the fence is known. The next heartbeat
        // looks again.
        Err(error) => {
            tracing::warn!(machine = %machine.id, error = %chain(&error), "the fence of the slot is not known");
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

/// A host that is asked for its last backup may write it before it is sent away.
pub(super) async fn still_needed(platform: &Platform, machine: &MachineRow) -> Result<bool, Problem> {
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

/// What a heartbeat's body would leave in the database, as `tests/fuzz` reaches it.
///
/// # Errors
/// What the host is answered.
#[cfg(feature = "fuzzing")]
pub async fn read_body(body: Vec<u8>) -> Result<Value, Problem> {
    let mut request = Request::new(axum::body::Body::from(body));
    let json = http::HeaderValue::from_static("application/json");
    request.headers_mut().insert(http::header::CONTENT_TYPE, json);
    let beat = beat(&Call::read(request).await?)?;
    Ok(json!({
        "imageVersion": beat.image_version,
        "health": beat.health,
        "lastBackup": beat.last_backup,
        "lastUpdate": beat.last_update,
        "checks": beat.checks,
        "updating": beat.updating,
        "attention": beat.attention,
        "backupTakenAt": beat.backup_taken_at.map(crate::clock::rfc3339_ms),
        "epoch": beat.epoch,
        "proofKids": beat.proof_kids,
        "hasRegistration": beat.registration.is_some(),
    }))
}

fn beat(call: &Call) -> Result<Beat, Problem> {
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
    let proof_kids = fields.strings("proofKids", MOST_KIDS);
    let trusted_keys = trusted_keys(&mut fields);
    let registration = registration(&mut fields);
    let built = (|| {
        let (mut health, epoch) = (health?, epoch?);
        health["disk"] = disk?;
        let (last_backup, backup_taken_at) = last_backup.unzip();
        let backup_taken_at = backup_taken_at.flatten();
        Some(Beat {
            image_version: image_version?,
            health,
            last_backup,
            last_update,
            checks,
            updating,
            attention,
            backup_taken_at,
            epoch,
            proof_kids,
            trusted_keys,
            registration,
        })
    })();
    fields.finish(built)
}

/// Whose signature on a release the host believes, by the ids of the keys.
fn trusted_keys(fields: &mut Fields) -> Option<TrustedKeys> {
    let mut inner = fields.optional_nested("trustedKeys")?;
    let sequence = inner.required_number("sequence").map(u32::try_from);
    if matches!(sequence, Some(Err(_))) {
        inner.wrong("sequence", format!("must be at most {}", u32::MAX));
    }
    if !inner.has("ids") {
        inner.wrong("ids", "is required");
    }
    let ids = inner.strings("ids", MAX_KEYS);
    let is_id = |id: &String| id.len() == 16 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !ids.iter().all(is_id) {
        inner.wrong("ids", "must be of 16 hexadecimal digits each");
    }
    fields.close(inner);
    Some(TrustedKeys { sequence: sequence?.ok()?, ids })
}

fn registration(fields: &mut Fields) -> Option<Registered> {
    let mut inner = fields.optional_nested("registration")?;
    let registration = Registered::read(&mut inner);
    fields.close(inner);
    registration
}

fn health(fields: &mut Fields) -> Option<Value> {
    let mut inner = fields.nested("health")?;
    let part = |inner: &mut Fields, name: &str| {
        let text: String = inner.required(name)?;
        if !matches!(text.as_str(), "ok" | "failing") {
            inner.wrong(name, "must be ok or failing");
            return None;
        }
        Some(text)
    };
    let gateway = part(&mut inner, "gateway");
    let database = part(&mut inner, "database");
    fields.close(inner);
    Some(json!({"gateway": gateway?, "database": database?}))
}

fn disk(fields: &mut Fields) -> Option<Value> {
    let mut inner = fields.nested("disk")?;
    let total = inner.required_number("totalBytes");
    let free = inner.required_number("freeBytes");
    fields.close(inner);
    Some(json!({"totalBytes": total?, "freeBytes": free?}))
}

/// What the host says of its last backup, and when its snapshot was taken, if it succeeded.
fn last_backup(fields: &mut Fields) -> Option<(Value, Option<Timestamp>)> {
    let mut inner = fields.optional_nested("lastBackup")?;
    let status: Option<String> = inner.required("status");
    if status.as_deref().is_some_and(|status| !matches!(status, "success" | "error")) {
        inner.wrong("status", "must be success or error");
    }
    let key = inner.reported("key");
    let (began_at, taken_at) = (inner.time("beganAt"), inner.time("takenAt"));
    let size = inner.optional_number("sizeBytes");
    let error = inner.reported("error");
    fields.close(inner);
    let status = status?;
    let verified = taken_at.filter(|_| status == "success");
    let told = json!({
        "status": status,
        "beganAt": began_at.map(crate::clock::rfc3339_ms),
        "key": key,
        "takenAt": taken_at.map(crate::clock::rfc3339_ms),
        "sizeBytes": size,
        "error": error,
    });
    Some((told, verified))
}

/// What the host says of its last update.
fn last_update(fields: &mut Fields) -> Option<Value> {
    let mut inner = fields.optional_nested("lastUpdate")?;
    let version: Option<ImageVersion> = inner.required("version");
    let outcome: Option<String> = inner.required("outcome");
    if outcome.as_deref().is_some_and(|outcome| !UPDATE_ENDS.contains(&outcome)) {
        inner.wrong("outcome", "must be updated, rolled_back, refused or failed");
    }
    let stage: Option<String> = inner.required("stage");
    let stage = stage.map(|stage| untrusted_text::bounded(&stage));
    let error = inner.reported("error");
    let at = inner.required_time("at");
    fields.close(inner);
    let mut told = json!({"version": version?, "outcome": outcome?, "stage": stage?, "at": crate::clock::rfc3339_ms(at?)});
    if let Some(error) = error {
        told["error"] = error.into();
    }
    Some(told)
}

/// What the host says of its last looks at snapshots, by kind.
fn checks(fields: &mut Fields) -> Option<Value> {
    let mut inner = fields.optional_nested("checks")?;
    let mut told = serde_json::Map::new();
    for kind in CHECKS {
        if let Some(check) = check(&mut inner, kind) {
            told.insert(kind.to_owned(), check);
        }
    }
    fields.close(inner);
    Some(Value::Object(told))
}

fn check(checks: &mut Fields, kind: &str) -> Option<Value> {
    let mut inner = checks.optional_nested(kind)?;
    let status: Option<String> = inner.required("status");
    if status.as_deref().is_some_and(|status| !matches!(status, "success" | "error")) {
        inner.wrong("status", "must be success or error");
    }
    let at = inner.required_time("at");
    let key = inner.reported("key");
    let damaged = inner.strings("damaged", MOST_DAMAGED);
    let damaged: Vec<String> = damaged.iter().map(|key| untrusted_text::bounded(key)).collect();
    let error = inner.reported("error");
    checks.close(inner);
    let at = crate::clock::rfc3339_ms(at?);
    Some(json!({"status": status?, "at": at, "key": key, "damaged": damaged, "error": error}))
}

/// The route and its description.
pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Machine,
    operation: Operation {
        id: "heartbeat",
        method: Method::POST,
        path: "/vps/{id}/heartbeat",
        summary: "What a host says of itself, and what it is to know.",
        credentials: &[HOST],
        parameters: &[MACHINE_ID],
        body: Some(said),
        answers: &[told(200, "What the host is to know.", known)],
        problems: &[Code::Forbidden, Code::RateLimited, Code::DatabaseUnavailable],
    },
    serve: || post(handle),
};

fn said() -> Value {
    let word = || one_of(&["ok", "failing"]);
    let kids = json!({ "type": "array", "items": any_text(), "maxItems": MOST_KIDS });
    let sequence = json!({ "type": "integer", "minimum": 0, "maximum": u32::MAX });
    let key_ids = json!({ "type": "array", "items": matching("^[0-9A-Fa-f]{16}$"), "maxItems": MAX_KEYS });
    extensible(fields(
        &[
            ("imageVersion", image_version()),
            ("epoch", count()),
            ("health", fields(&[("gateway", word()), ("database", word())], &[])),
            ("disk", fields(&[("totalBytes", count()), ("freeBytes", count())], &[])),
        ],
        &[
            ("lastBackup", last_backup_told()),
            ("lastUpdate", last_update_told()),
            ("checks", checks_told()),
            ("updating", boolean()),
            ("attention", attention::shape()),
            ("proofKids", kids),
            ("trustedKeys", fields(&[("sequence", sequence), ("ids", key_ids)], &[])),
            ("registration", Registered::shape()),
        ],
    ))
}

fn known() -> Value {
    let key = object(&[("kid", text()), ("x", text())], &[]);
    object(
        &[
            ("desiredImageVersion", text()),
            ("epoch", count()),
            ("superseded", boolean()),
            ("proofKeys", object(&[("keys", array(key))], &[])),
            ("quiesce", nullable(uuid())),
        ],
        &[("desiredRequestId", text()), ("nextToken", text())],
    )
}
