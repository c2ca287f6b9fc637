//! GET `/vps/slots/pointer` and POST `/vps/slots/pointer/rebuild`: shows a slot's snapshot pointer, and replaces one
//! that is missing, unreadable or unsound. With `force`, also replaces a sound one.
//!
//! The audit entry, with the first bytes of an unreadable pointer, is committed before the pointer is written, so that
//! these bytes are never lost. The planned pointer is stored with it: a retry with the same `Idempotency-Key` completes
//! the rebuild, even if its first attempt received no response.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use deadpool_postgres::{GenericClient, Transaction};
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::call::ApiCall;
use super::endpoint::{
    Access, Endpoint, IDEMPOTENCY_KEY, OPERATE, OPERATOR, READ, documented_json, idp_user_id, slot_name,
};
use super::mutation::{self, AuditChange, Mutation, Reply};
use crate::context::Platform;
use crate::db::{self, DbError};
use crate::tokens::TokenMint;
use svc_base::clock::rfc3339_ms;
use svc_http::fields::Fields;
use svc_http::openapi::{
    Operation, Parameter, ParameterLocation, boolean, request_object, schema_of, text_matching,
};
use svc_http::problem::{Code, Problem};
use svc_http::request_id;
use svc_machine::name::{IdpUserId, Slot};
use svc_store::key::{SlotPrefix, SnapshotKey};
use svc_store::pointer::{Fence, Pointer};
use svc_store::pointer_repair::{self, Inspection, PointerState, RebuildTarget, RepairError, SlotRecord};
use svc_wire::pointer as wire;

/// Timeout for the store requests of one inspection or one write. A rebuild makes up to two inspections and one write,
/// and a retry also checks the earlier write. Together, these must take less than svcctl's timeout of 30 s.
const STORE_TIMEOUT: Duration = Duration::from_secs(7);

struct PointerTarget {
    user: IdpUserId,
    slot: Slot,
    /// The snapshot to name, instead of the newest one from the highest epoch.
    snapshot_key: Option<SnapshotKey>,
    /// Whether the pointer should name no snapshot.
    should_be_empty: bool,
}

impl PointerTarget {
    fn read(fields: &mut Fields) -> Option<Self> {
        let user = fields.required("idpUserId");
        let slot = fields.optional("slot").unwrap_or_else(Slot::primary);
        let snapshot_key = fields.optional("snapshotKey");
        user.map(|user| Self { user, slot, snapshot_key, should_be_empty: false })
    }

    fn prefix(&self) -> SlotPrefix {
        SlotPrefix::new(&self.user, &self.slot)
    }

    fn name(&self) -> String {
        format!("{}/{}", self.user, self.slot)
    }

    fn rebuild_target(&self) -> RebuildTarget<'_> {
        match &self.snapshot_key {
            _ if self.should_be_empty => RebuildTarget::Nothing,
            Some(key) => RebuildTarget::Snapshot(key),
            None => RebuildTarget::Newest,
        }
    }

    /// Returns whether the database has a record of the slot.
    async fn is_recorded(&self, client: &impl GenericClient) -> Result<bool, DbError> {
        let machines = db::machines::list_newest_in_slot(client, &self.user, &self.slot).await?;
        Ok(!machines.is_empty()
            || db::slots::find_subscription(client, &self.user, &self.slot).await?.is_some())
    }

    async fn load_record(
        &self,
        client: &impl GenericClient,
        mint: &TokenMint,
    ) -> Result<SlotRecord, DbError> {
        let current = db::machines::find_in_slot(client, &self.user, &self.slot).await?;
        // Until the current machine's server has been ordered, the fence is still the predecessor's.
        let holder = match current {
            Some(current)
                if current.create_requested_at.is_none() && current.provider_server_id.is_none() =>
            {
                db::machines::find_last_registered(client, &current).await?
            }
            current => current,
        };
        let fence = holder.map(|machine| {
            let proof = mint.fence_proof(&self.prefix(), machine.epoch, machine.id);
            Fence { epoch: machine.epoch, machine: machine.id, proof: Some(proof) }
        });
        let highest_epoch = db::machines::find_highest_epoch(client, &self.user, &self.slot).await?;
        Ok(SlotRecord { highest_epoch, fence })
    }
}

/// What a rebuild does with a sound pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SoundPointerPolicy {
    Keep,
    Replace,
}

pub async fn show(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    call.authenticate_operator(&platform).await?;
    let mut query = call.request.query_fields();
    let target = PointerTarget::read(&mut query);
    let target = query.finish(target)?;
    let session = platform.db.session().await?;
    let (record, is_recorded) =
        (target.load_record(&session, &platform.mint).await?, target.is_recorded(&session).await?);
    drop(session);
    let inspection = inspect(&platform, &target, record).await?;
    ensure_exists(&target, is_recorded, &inspection)?;
    Ok(Json(inspection_resource(&target, &inspection)).into_response())
}

pub async fn rebuild(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = ApiCall::read(request).await?;
    let operator = call.authenticate_operator(&platform).await?;
    let mut body = call.request.json_fields()?;
    let should_be_empty = body.boolean("empty") == Some(true);
    let target = PointerTarget::read(&mut body).map(|target| PointerTarget { should_be_empty, ..target });
    let policy = if body.boolean("force") == Some(true) {
        SoundPointerPolicy::Replace
    } else {
        SoundPointerPolicy::Keep
    };
    let target = body.finish(target)?;
    if should_be_empty && target.snapshot_key.is_some() {
        return Err(Problem::field("/empty", "cannot be combined with `--to`"));
    }
    let mutation = Mutation::from_call(&call, &operator)?;
    // The rebuild completes even if the operator disconnects, so that no audit entry is left without its pointer.
    let rebuild = async move { rebuild_pointer(&platform, &target, policy, &mutation).await };
    let rebuild = tokio::spawn(request_id::run_with_id(request_id::current(), rebuild));
    Ok(rebuild.await.map_err(|error| Problem::internal(&error))??.into_response())
}

async fn rebuild_pointer(
    platform: &Platform,
    target: &PointerTarget,
    policy: SoundPointerPolicy,
    mutation: &Mutation,
) -> Result<Reply, Problem> {
    let session = platform.db.session().await?;
    if let Some(reply) = mutation.replay(&session).await? {
        return Ok(reply);
    }
    let (record, is_recorded) =
        (target.load_record(&session, &platform.mint).await?, target.is_recorded(&session).await?);
    drop(session);
    let mut inspection = inspect(platform, target, record.clone()).await?;
    ensure_exists(target, is_recorded, &inspection)?;
    let prefix = target.prefix();
    // Look up the plan after the inspection: if the inspection has found a pointer that another attempt at this
    // request wrote, that attempt has already stored its plan.
    let planned = mutation.find_plan::<Pointer>(&platform.db.session().await?).await?;
    if let Some(planned) = &planned {
        let resumed = pointer_repair::resume(&platform.bucket, &prefix, &inspection, planned);
        let resumed = with_timeout(resumed).await.map_err(|problem| explain_failed_write(problem, target))?;
        if let Some(written) = resumed {
            return store_reply(platform, target, mutation, &written).await;
        }
    }
    if inspection.found.is_sound() && policy == SoundPointerPolicy::Keep {
        let detail = format!(
            "The pointer is sound and was not changed; to replace it anyway, run `svcctl pointer rebuild {} --slot {} --force`.",
            target.user, target.slot
        );
        return Err(Problem::new(Code::Conflict, detail));
    }
    if target.should_be_empty && policy == SoundPointerPolicy::Keep {
        ensure_nothing_restorable(platform, target, record).await?;
    }
    let Some(next) = &inspection.next else {
        return Err(Problem::new(Code::SnapshotUnusable, describe_failed_search(&inspection)));
    };
    // The earlier attempt may still be writing its pointer, so a plan that differs only in `emptied_at` is kept.
    let next = match &planned {
        Some(planned) if Pointer { emptied_at: planned.emptied_at, ..next.clone() } == *planned => planned,
        _ => next,
    };
    let change = AuditChange {
        action: "pointer.rebuild",
        target: target.name(),
        before: Some(audit_record(&inspection.found)),
        after: Some(json!(pointer_resource(next))),
    };
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    // Another attempt may have completed since the inspection.
    if let Some(reply) = mutation.begin(&tx).await? {
        return Ok(reply);
    }
    let next = store_plan(&tx, mutation, planned.as_ref(), next.clone(), &change).await?;
    db::commit(tx).await?;
    // No session is held during the requests to the store.
    drop(session);

    inspection.next = Some(next);
    let written = with_timeout(pointer_repair::rebuild(&platform.bucket, &prefix, &inspection)).await;
    let written = written.map_err(|problem| explain_failed_write(problem, target))?;
    store_reply(platform, target, mutation, &written).await
}

/// Stores the planned pointer and its audit entry. Concurrent attempts must write the same pointer, so if another
/// attempt at this request has stored the same plan, or any plan since `earlier` was looked up, returns that plan
/// instead.
async fn store_plan(
    tx: &Transaction<'_>,
    mutation: &Mutation,
    earlier: Option<&Pointer>,
    next: Pointer,
    change: &AuditChange,
) -> Result<Pointer, Problem> {
    let stored = mutation.find_plan::<Pointer>(tx).await?;
    if let Some(stored) = stored.filter(|stored| *stored == next || earlier != Some(stored)) {
        return Ok(stored);
    }
    mutation::write_audit(tx, mutation.actor(), change).await?;
    mutation.store_plan(tx, &next).await?;
    Ok(next)
}

/// Stores the response to a rebuild that has taken effect.
async fn store_reply(
    platform: &Platform,
    target: &PointerTarget,
    mutation: &Mutation,
    written: &Pointer,
) -> Result<Reply, Problem> {
    let rebuilt = wire::RebuiltPointer {
        idp_user_id: (&target.user).into(),
        slot: (&target.slot).into(),
        pointer: pointer_resource(written),
    };
    let reply = Reply::new(StatusCode::OK, rebuilt);
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    // A repeated request may have completed in the meantime.
    if let Some(reply) = mutation.begin(&tx).await? {
        return Ok(reply);
    }
    mutation.store(&tx, &reply).await?;
    db::commit(tx).await?;
    tracing::warn!(
        slot = target.name(),
        key = written.snapshot.as_ref().map(|snapshot| &*snapshot.key),
        "pointer rebuilt"
    );
    Ok(reply)
}

/// If a request to the store failed, replaces the detail with a warning that the pointer may have been replaced.
fn explain_failed_write(problem: Problem, target: &PointerTarget) -> Problem {
    if problem.code != Code::StoreUnavailable {
        return problem;
    }
    let detail = format!(
        "A request to the object store failed, and the pointer may have been replaced: check it with `svcctl pointer \
         show {} --slot {}`.",
        target.user, target.slot
    );
    Problem { detail, ..problem }
}

/// Rejects a slot that is in neither the database nor the store.
fn ensure_exists(target: &PointerTarget, is_recorded: bool, inspection: &Inspection) -> Result<(), Problem> {
    if is_recorded || inspection.snapshots > 0 || !matches!(inspection.found, PointerState::Sound(None)) {
        return Ok(());
    }
    let detail = format!(
        "User {0} has no slot {1}: it has no subscription, machine or snapshot. `svcctl slot list {0}` lists the user's \
         slots.",
        target.user, target.slot
    );
    Err(Problem::new(Code::NotFound, detail))
}

/// Rejects emptying the pointer of a slot unless all its snapshots were checked and none of them can be restored.
async fn ensure_nothing_restorable(
    platform: &Platform,
    target: &PointerTarget,
    record: SlotRecord,
) -> Result<(), Problem> {
    let prefix = target.prefix();
    let inspection =
        with_timeout(pointer_repair::inspect(&platform.bucket, &prefix, record, RebuildTarget::Newest))
            .await?;
    if inspection.unchecked > 0 {
        let detail = format!(
            "{} The pointer was not changed. To make it name a snapshot, run `svcctl pointer rebuild {user} --slot {slot} --to \
             KEY`; to ignore all snapshots, run `svcctl pointer rebuild {user} --slot {slot} --empty --force`.",
            describe_failed_search(&inspection),
            user = target.user,
            slot = target.slot
        );
        return Err(Problem::new(Code::Conflict, detail));
    }
    let Some(snapshot) = inspection.next.and_then(|next| next.snapshot) else { return Ok(()) };
    let detail = format!(
        "Snapshot {}, taken at {}, can be restored, so the pointer was not changed. To ignore that snapshot, run `svcctl \
         pointer rebuild {} --slot {} --empty --force`.",
        snapshot.key,
        rfc3339_ms(snapshot.taken_at),
        target.user,
        target.slot
    );
    Err(Problem::new(Code::Conflict, detail))
}

/// Describes the result of a search that found no complete snapshot.
fn describe_failed_search(inspection: &Inspection) -> String {
    let (total, unchecked) = (inspection.snapshots, inspection.unchecked);
    if unchecked == 0 {
        return "The slot has no complete snapshot.".to_owned();
    }
    let checked = total - unchecked;
    format!(
        "None of the {checked} checked snapshots is complete; {unchecked} others in the slot were not checked."
    )
}

async fn inspect(
    platform: &Platform,
    target: &PointerTarget,
    record: SlotRecord,
) -> Result<Inspection, Problem> {
    let prefix = target.prefix();
    with_timeout(pointer_repair::inspect(&platform.bucket, &prefix, record, target.rebuild_target())).await
}

async fn with_timeout<T>(call: impl Future<Output = Result<T, RepairError>>) -> Result<T, Problem> {
    let result =
        tokio::time::timeout(STORE_TIMEOUT, call).await.map_err(|_| svc_store::problem::unavailable())?;
    result.map_err(|error| match error {
        RepairError::Store(error) => error.into(),
        error @ RepairError::Unusable { .. } => Problem::new(Code::SnapshotUnusable, format!("{error}.")),
        RepairError::ChangedConcurrently => Problem::new(
            Code::Conflict,
            "Another writer has changed the pointer: check it with `svcctl pointer show`, then repeat the request.",
        ),
    })
}

fn inspection_resource(target: &PointerTarget, inspection: &Inspection) -> wire::PointerInspection {
    wire::PointerInspection {
        idp_user_id: (&target.user).into(),
        slot: (&target.slot).into(),
        state: pointer_state(&inspection.found).into(),
        problem: inspection.found.problem().map(str::to_owned),
        snapshots: inspection.snapshots as u64,
        current: inspection.found.pointer().map(pointer_resource),
        rebuilt: inspection.next.as_ref().map(pointer_resource),
    }
}

fn pointer_state(state: &PointerState) -> wire::PointerState {
    match state {
        PointerState::Sound(_) => wire::PointerState::Sound,
        PointerState::Unsound { .. } => wire::PointerState::Unsound,
        PointerState::Absent { .. } => wire::PointerState::Absent,
        PointerState::Unreadable { .. } => wire::PointerState::Unreadable,
    }
}

fn audit_record(state: &PointerState) -> Value {
    let mut before = json!({
        "state": pointer_state(state).as_str(),
        "problem": state.problem(),
        "pointer": state.pointer().map(pointer_resource),
    });
    if let PointerState::Unreadable { size_bytes, start, .. } = state {
        before["sizeBytes"] = (*size_bytes).into();
        before["startBase64"] = BASE64_STANDARD.encode(start).into();
    }
    before
}

fn pointer_resource(pointer: &Pointer) -> wire::Pointer {
    wire::Pointer {
        seq: pointer.seq,
        fence_epoch: pointer.fence_epoch.0.into(),
        fence_machine_id: pointer.fence_holder().map(Into::into),
        emptied_at: pointer.emptied_at.map(Into::into),
        snapshot: pointer.snapshot.as_ref().map(|snapshot| wire::NamedSnapshot {
            key: snapshot.key.clone(),
            size_bytes: snapshot.size_bytes,
            sha256: snapshot.sha256.clone(),
            epoch: snapshot.epoch.0.into(),
            machine_id: snapshot.machine_id.into(),
            taken_at: snapshot.taken_at.into(),
            verified_at: snapshot.verified_at.into(),
        }),
    }
}

pub const USER: Parameter = Parameter {
    name: "idpUserId",
    location: ParameterLocation::RequiredQuery,
    schema: idp_user_id,
    description: "The slot's user.",
};
pub const SLOT: Parameter = Parameter {
    name: "slot",
    location: ParameterLocation::Query,
    schema: slot_name,
    description: "The slot; default `primary`.",
};
const SNAPSHOT_KEY: Parameter = Parameter {
    name: "snapshotKey",
    location: ParameterLocation::Query,
    schema: || text_matching(SnapshotKey::PATTERN),
    description: "The snapshot that a rebuild would name; by default, the newest complete snapshot of the highest epoch.",
};

pub static SHOW: Endpoint = Endpoint {
    access: Access::Operator(READ),
    operation: Operation {
        id: "showPointer",
        method: Method::GET,
        path: "/vps/slots/pointer",
        summary: "Shows the snapshot pointer of a slot, and the pointer that a rebuild would write.",
        credentials: &[OPERATOR],
        parameters: &[USER, SLOT, SNAPSHOT_KEY],
        body: None,
        responses: &[documented_json(200, "The pointer.", schema_of::<wire::PointerInspection>)],
        problems: &[
            Code::NotFound,
            Code::SnapshotUnusable,
            Code::StoreUnavailable,
            Code::DatabaseUnavailable,
        ],
    },
    serve: || get(show),
};

pub static REBUILD: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "rebuildPointer",
        method: Method::POST,
        path: "/vps/slots/pointer/rebuild",
        summary: "Rebuilds the snapshot pointer of a slot from the sidecars of its snapshots.",
        credentials: &[OPERATOR],
        parameters: &[IDEMPOTENCY_KEY],
        body: Some(|| {
            request_object(
                &[("idpUserId", idp_user_id())],
                &[
                    ("slot", slot_name()),
                    ("snapshotKey", text_matching(SnapshotKey::PATTERN)),
                    ("force", boolean()),
                    ("empty", boolean()),
                ],
            )
        }),
        responses: &[documented_json(200, "The written pointer.", schema_of::<wire::RebuiltPointer>)],
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
