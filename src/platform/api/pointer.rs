//! GET `/vps/slots/pointer` and POST `/vps/slots/pointer/rebuild`: what a slot's snapshot pointer says, and another one in
//! the place of a pointer that was lost, is unreadable, or names what is not there.
//!
//! The audit row, with what is unreadable, is committed before the pointer is written: the bytes are never lost.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use deadpool_postgres::GenericClient;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::call::Call;
use super::endpoint::{
    Access, Endpoint, IDEMPOTENCY_KEY, OPERATE, OPERATOR, READ, idp_user_id, slot_name, told,
};
use super::fault;
use super::mutation::{self, Changed, Mutation, Reply};
use super::shape;
use crate::clock::rfc3339_ms;
use crate::http::fields::Fields;
use crate::http::openapi::{
    Operation, Parameter, Place, boolean, count, fields, matching, nullable, object, one_of, text,
};
use crate::http::problem::{Code, Problem};
use crate::machine::name::{IdpUserId, Slot};
use crate::platform::context::Platform;
use crate::platform::db::{self, DbError};
use crate::platform::tokens::TokenMint;
use crate::store::key::{SlotPrefix, SnapshotKey};
use crate::store::pointer::Pointer;
use crate::store::pointer_repair::{
    self, CurrentFence, Inspection, PointerState, RebuildTarget, RepairError, SlotRecord,
};

/// Of all requests to the store together: a slot's snapshots are listed once. An operator's client waits longer.
const STORE_TIMEOUT: Duration = Duration::from_secs(10);

struct Target {
    user: IdpUserId,
    slot: Slot,
    /// The snapshot to name, instead of the newest of the highest epoch.
    to: Option<SnapshotKey>,
    /// Whether the slot is to start without any.
    empty: bool,
}

impl Target {
    fn read(fields: &mut Fields) -> Option<Self> {
        let user = fields.required("idpUserId");
        let slot = fields.optional("slot").unwrap_or_else(Slot::primary);
        let to = fields.optional("snapshotKey");
        user.map(|user| Self { user, slot, to, empty: false })
    }

    fn prefix(&self) -> SlotPrefix {
        SlotPrefix::new(&self.user, &self.slot)
    }

    fn wanted(&self) -> RebuildTarget<'_> {
        match &self.to {
            _ if self.empty => RebuildTarget::Nothing,
            Some(key) => RebuildTarget::Snapshot(key),
            None => RebuildTarget::Newest,
        }
    }

    /// Whether the database knows of the slot.
    async fn is_known(&self, client: &impl GenericClient) -> Result<bool, DbError> {
        let machines = db::machines::newest_of_slot(client, &self.user, &self.slot).await?;
        Ok(!machines.is_empty() || db::slots::get(client, &self.user, &self.slot).await?.is_some())
    }

    async fn on_record(&self, client: &impl GenericClient, mint: &TokenMint) -> Result<SlotRecord, DbError> {
        let current = db::machines::of_slot(client, &self.user, &self.slot).await?;
        // Before its server is ordered, the fence is still that of the machine which it is to replace.
        let holder = match current {
            Some(current) if current.create_ordered_at.is_none() && current.provider_server_id.is_none() => {
                db::machines::last_registered(client, &current).await?
            }
            current => current,
        };
        let holder = holder.map(|machine| {
            let proof = mint.fence_proof(&self.prefix(), machine.epoch, machine.id);
            CurrentFence { epoch: machine.epoch, machine: machine.id, proof: Some(proof) }
        });
        let highest = db::machines::highest_epoch(client, &self.user, &self.slot).await?;
        Ok(SlotRecord { highest, holder })
    }
}

/// Whether a pointer that can be used is replaced all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sound {
    Kept,
    Replaced,
}

pub async fn show(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    call.operator(&platform).await?;
    let mut query = call.query();
    let target = Target::read(&mut query);
    let target = query.finish(target)?;
    let session = platform.db.session().await?;
    let (record, is_known) =
        (target.on_record(&session, &platform.mint).await?, target.is_known(&session).await?);
    drop(session);
    let inspection = inspect(&platform, &target, record).await?;
    ensure_exists(&target, is_known, &inspection)?;
    Ok(Json(shown(&target, &inspection)).into_response())
}

pub async fn rebuild(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    let operator = call.operator(&platform).await?;
    let mut body = call.fields()?;
    let empty = body.boolean("empty") == Some(true);
    let target = Target::read(&mut body).map(|target| Target { empty, ..target });
    let sound = if body.boolean("force") == Some(true) { Sound::Replaced } else { Sound::Kept };
    let target = body.finish(target)?;
    if empty && target.to.is_some() {
        return Err(Problem::field("/empty", "cannot be combined with a snapshot to name"));
    }
    let mutation = Mutation::of(&call, &operator)?;
    Ok(replace(&platform, &target, sound, &mutation).await?.into_response())
}

async fn replace(
    platform: &Platform,
    target: &Target,
    sound: Sound,
    mutation: &Mutation,
) -> Result<Reply, Problem> {
    let session = platform.db.session().await?;
    if let Some(reply) = mutation.replay(&session).await? {
        return Ok(reply);
    }
    let (record, is_known) =
        (target.on_record(&session, &platform.mint).await?, target.is_known(&session).await?);
    drop(session);
    let inspection = inspect(platform, target, record.clone()).await?;
    ensure_exists(target, is_known, &inspection)?;
    if inspection.found.is_sound() && sound == Sound::Kept {
        // A repetition may have been passed by the request that it repeats.
        if let Some(reply) = mutation.replay(&platform.db.session().await?).await? {
            return Ok(reply);
        }
        let detail = format!(
            "The pointer is sound, and was not changed; `svcctl pointer rebuild {} --slot {} --force` replaces it all the same.",
            target.user, target.slot
        );
        return Err(Problem::new(Code::Conflict, detail));
    }
    if target.empty && sound == Sound::Kept {
        refuse_whole(platform, target, record).await?;
    }
    let Some(next) = &inspection.next else {
        return Err(Problem::new(Code::SnapshotUnusable, none_is_whole(&inspection)));
    };
    let (before, after) = (audited(&inspection.found), pointer(next));
    let name = format!("{}/{}", target.user, target.slot);
    let changed =
        Changed { action: "pointer.rebuild", target: &name, before: Some(&before), after: Some(&after) };
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    mutation::audit(&tx, mutation.actor(), &changed).await?;
    db::commit(tx).await?;
    drop(session);

    let prefix = target.prefix();
    let written = within(pointer_repair::rebuild(&platform.bucket, &prefix, &inspection)).await?;
    let reply = Reply::new(
        StatusCode::OK,
        json!({"idpUserId": target.user, "slot": target.slot, "pointer": pointer(&written)}),
    );
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    // A repetition may have come while the first was under way.
    if let Some(reply) = mutation.begin(&tx).await? {
        return Ok(reply);
    }
    mutation.store(&tx, &reply).await?;
    db::commit(tx).await?;
    tracing::warn!(slot = name, key = written.snapshot.as_ref().map(|named| &*named.key), "pointer rebuilt");
    Ok(reply)
}

/// Refuses a slot of which neither the database nor the store knows anything.
fn ensure_exists(target: &Target, is_known: bool, inspection: &Inspection) -> Result<(), Problem> {
    if is_known || inspection.snapshots > 0 || !matches!(inspection.found, PointerState::Sound(None)) {
        return Ok(());
    }
    let detail = format!(
        "User {0} has no slot {1}: there is no subscription, no machine and no snapshot of it. `svcctl slot list {0}` lists \
         the user's slots.",
        target.user, target.slot
    );
    Err(Problem::new(Code::NotFound, detail))
}

/// Refuses to leave out a snapshot that could be restored.
async fn refuse_whole(platform: &Platform, target: &Target, record: SlotRecord) -> Result<(), Problem> {
    let prefix = target.prefix();
    let found =
        within(pointer_repair::inspect(&platform.bucket, &prefix, record, RebuildTarget::Newest)).await?;
    if found.unchecked > 0 {
        let detail = format!(
            "{} The pointer was not changed; `svcctl pointer rebuild {user} --slot {slot} --to KEY` names one, and \
             `svcctl pointer rebuild {user} --slot {slot} --empty --force` leaves all of them out.",
            none_is_whole(&found),
            user = target.user,
            slot = target.slot
        );
        return Err(Problem::new(Code::Conflict, detail));
    }
    let Some(whole) = found.next.and_then(|next| next.snapshot) else { return Ok(()) };
    let detail = format!(
        "{} of {} can be restored, and the pointer was not changed; `svcctl pointer rebuild {} --slot {} --empty --force` \
         leaves that snapshot out all the same.",
        whole.key,
        rfc3339_ms(whole.taken_at),
        target.user,
        target.slot
    );
    Err(Problem::new(Code::Conflict, detail))
}

/// Where nothing but snapshots that are not whole was found.
fn none_is_whole(inspection: &Inspection) -> String {
    let (all, untried) = (inspection.snapshots, inspection.unchecked);
    if untried == 0 {
        return "No snapshot of the slot is whole.".to_owned();
    }
    let tried = all - untried;
    format!(
        "None of the {tried} snapshots that were tried is whole; {untried} others of the slot were not tried."
    )
}

async fn inspect(platform: &Platform, target: &Target, record: SlotRecord) -> Result<Inspection, Problem> {
    let prefix = target.prefix();
    within(pointer_repair::inspect(&platform.bucket, &prefix, record, target.wanted())).await
}

async fn within<T>(work: impl Future<Output = Result<T, RepairError>>) -> Result<T, Problem> {
    let ended = tokio::time::timeout(STORE_TIMEOUT, work).await.map_err(|_| fault::store_unavailable())?;
    ended.map_err(|error| match error {
        RepairError::Store(error) => error.into(),
        error @ RepairError::Unusable { .. } => Problem::new(Code::SnapshotUnusable, format!("{error}.")),
        RepairError::Changed => Problem::new(
            Code::Conflict,
            "The pointer was changed by another writer meanwhile; show it again.",
        ),
    })
}

fn shown(target: &Target, inspection: &Inspection) -> Value {
    json!({
        "idpUserId": target.user,
        "slot": target.slot,
        "state": state(&inspection.found),
        "problem": inspection.found.problem(),
        "snapshots": inspection.snapshots,
        "current": inspection.found.pointer().map(pointer),
        "rebuilt": inspection.next.as_ref().map(pointer),
    })
}

fn state(found: &PointerState) -> &'static str {
    match found {
        PointerState::Sound(_) => "sound",
        PointerState::Unsound { .. } => "unsound",
        PointerState::Absent { .. } => "absent",
        PointerState::Unreadable { .. } => "unreadable",
    }
}

fn audited(found: &PointerState) -> Value {
    let mut before = json!({
        "state": state(found),
        "problem": found.problem(),
        "pointer": found.pointer().map(pointer),
    });
    if let PointerState::Unreadable { size_bytes, start, .. } = found {
        before["sizeBytes"] = (*size_bytes).into();
        before["startBase64"] = BASE64_STANDARD.encode(start).into();
    }
    before
}

fn pointer(of: &Pointer) -> Value {
    json!({
        "seq": of.seq,
        "fenceEpoch": of.fence_epoch,
        "fenceMachineId": of.fence_holder(),
        "emptiedAt": of.emptied_at.map(rfc3339_ms),
        "snapshot": of.snapshot.as_ref().map(|named| json!({
            "key": named.key,
            "sizeBytes": named.size_bytes,
            "sha256": named.sha256,
            "epoch": named.epoch,
            "machineId": named.machine_id,
            "takenAt": rfc3339_ms(named.taken_at),
            "verifiedAt": rfc3339_ms(named.verified_at),
        })),
    })
}

const USER: Parameter =
    Parameter { name: "idpUserId", place: Place::QueryNeeded, schema: idp_user_id, about: "Whose slot." };
const SLOT: Parameter = Parameter {
    name: "slot",
    place: Place::Query,
    schema: slot_name,
    about: "Which of the user's slots; else `primary`.",
};
const SNAPSHOT_KEY: Parameter = Parameter {
    name: "snapshotKey",
    place: Place::Query,
    schema: || matching(SnapshotKey::PATTERN),
    about: "The snapshot that a rebuild would name; else the newest whole one of the highest epoch.",
};

/// The route and its description.
pub static SHOW: Endpoint = Endpoint {
    access: Access::Operator(READ),
    operation: Operation {
        id: "showPointer",
        method: Method::GET,
        path: "/vps/slots/pointer",
        summary: "The snapshot pointer of a slot, and what a rebuild would write.",
        credentials: &[OPERATOR],
        parameters: &[USER, SLOT, SNAPSHOT_KEY],
        body: None,
        answers: &[told(200, "The pointer.", || {
            object(
                &[
                    ("idpUserId", idp_user_id()),
                    ("slot", slot_name()),
                    ("state", one_of(&["sound", "unsound", "absent", "unreadable"])),
                    ("problem", nullable(text())),
                    ("snapshots", count()),
                    ("current", nullable(shape::pointer())),
                    ("rebuilt", nullable(shape::pointer())),
                ],
                &[],
            )
        })],
        problems: &[
            Code::NotFound,
            Code::SnapshotUnusable,
            Code::StoreUnavailable,
            Code::DatabaseUnavailable,
        ],
    },
    serve: || get(show),
};

/// The route and its description.
pub static REBUILD: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "rebuildPointer",
        method: Method::POST,
        path: "/vps/slots/pointer/rebuild",
        summary: "Writes the snapshot pointer of a slot again, from the side records of its snapshots.",
        credentials: &[OPERATOR],
        parameters: &[IDEMPOTENCY_KEY],
        body: Some(|| {
            fields(
                &[("idpUserId", idp_user_id())],
                &[
                    ("slot", slot_name()),
                    ("snapshotKey", matching(SnapshotKey::PATTERN)),
                    ("force", boolean()),
                    ("empty", boolean()),
                ],
            )
        }),
        answers: &[told(200, "The pointer as it was written.", || {
            object(&[("idpUserId", idp_user_id()), ("slot", slot_name()), ("pointer", shape::pointer())], &[])
        })],
        problems: &[
            Code::NotFound,
            Code::Conflict,
            Code::SnapshotUnusable,
            Code::StoreUnavailable,
            Code::DatabaseUnavailable,
            Code::IdempotencyMismatch,
        ],
    },
    serve: || post(rebuild),
};
