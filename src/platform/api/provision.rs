//! POST `/vps/provision`: a machine for a slot that has none, or whose machine has failed.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use deadpool_postgres::GenericClient;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::call::Call;
use super::endpoint::{
    Access, Endpoint, IDEMPOTENCY_KEY, OPERATE, OPERATOR, PREFER, fallback_locations, handle_name,
    idp_user_id, image_version, kind, location, server_type, slot_name, status, told,
};
use super::locations::AskedLocations;
use super::mutation::{self, Changed, Mutation, Reply};
use super::restorable::EmptyStart;
use super::{entitlement, fault, restorable};
use crate::config::Flag;
use crate::http::openapi::{Operation, boolean, count, fields, nullable, object, uuid};
use crate::http::problem::{Code, Problem};
use crate::machine::epoch::Epoch;
use crate::machine::event::{Event, RestoreMode};
use crate::machine::id::OperationId;
use crate::machine::name::{Handle, IdpUserId, ImageVersion, Location, ServerType, Slot};
use crate::machine::plan::Plan;
use crate::machine::state::Status;
use crate::platform::context::Platform;
use crate::platform::db::machine_row::{Kind, MachineRow};
use crate::platform::db::operations::OperationRow;
use crate::platform::db::{self};
use crate::platform::lifecycle::{self, Change, Circumstances, Filed, Wanted};
use crate::platform::operations::OperationOptions;
use crate::store::key::SlotPrefix;
use crate::store::snapshot::{self, SnapshotUnusable};
use crate::store::{Bucket, bundle};
use axum::routing::post;

struct Asked {
    user: IdpUserId,
    slot: Slot,
    handle: Handle,
    server_type: ServerType,
    location: Location,
    locations: AskedLocations,
    /// `None`: the one that the slot runs, or the platform's for a new slot.
    image_version: Option<ImageVersion>,
    kind: Kind,
    empty: EmptyStart,
    options: OperationOptions,
}

pub async fn handle(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    let operator = call.operator(&platform).await?;
    let asked = asked(&platform, &call)?;
    let mutation = Mutation::of(&call, &operator)?;
    let reply = provision(&platform, &asked, &mutation).await?;
    platform.nudge.notify_one();
    mutation::answer(&platform, &call, reply).await
}

fn asked(platform: &Platform, call: &Call) -> Result<Asked, Problem> {
    let defaults = &platform.config.provisioning;
    let mut fields = call.fields()?;
    let user = fields.required("idpUserId");
    let slot = fields.optional("slot").unwrap_or_default();
    let handle = fields.required("handle");
    let server_type = fields.optional("serverType").unwrap_or_else(|| defaults.server_type.clone());
    let locations = AskedLocations::read(&mut fields);
    let location = locations.location.clone().unwrap_or_else(|| defaults.location.clone());
    let image_version = fields.optional("imageVersion");
    let kind = fields.optional("kind").unwrap_or(Kind::Customer);
    let empty = EmptyStart::read(&mut fields);
    let accept_loss = fields.boolean("acceptLoss").unwrap_or(false);
    let options = OperationOptions { accept_loss, ..OperationOptions::default() };
    let asked = user.zip(handle).map(|(user, handle)| Asked {
        user,
        slot,
        handle,
        server_type,
        location,
        locations,
        image_version,
        kind,
        empty,
        options,
    });
    fields.finish(asked)
}

async fn provision(platform: &Platform, asked: &Asked, mutation: &Mutation) -> Result<Reply, Problem> {
    let session = platform.db.session().await?;
    if let Some(reply) = mutation.replay(&session).await? {
        return Ok(reply);
    }
    let existing = admissible(platform, &session, asked).await?;
    drop(session);
    // Looked up before, so that neither row nor session is held while the store is asked.
    let prepared = if existing.as_ref().is_none_or(has_failed) {
        Some(prepare(platform, asked, existing.as_ref()).await?)
    } else {
        None
    };
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    db::lock(&tx, &format!("user {}", asked.user)).await?;
    if let Some(reply) = mutation.begin(&tx).await? {
        return Ok(reply);
    }
    admissible(platform, &tx, asked).await?;
    let existing = db::machines::of_slot_locked(&tx, &asked.user, &asked.slot).await?;
    if let Some(machine) = existing.as_ref().filter(|machine| !has_failed(machine)) {
        let operation = db::operations::of_machine(&tx, machine.id).await?.into_iter().next();
        let reply = Reply::new(StatusCode::OK, body(machine, operation.map(|operation| operation.id)));
        mutation.store(&tx, &reply).await?;
        db::commit(tx).await?;
        return Ok(reply);
    }
    let Some(prepared) = prepared else {
        return Err(Problem::new(Code::Unavailable, "The slot changed meanwhile; ask again.").retry_after(1));
    };
    if let Some(failed) = &existing {
        restorable::ensure_not_switched_off(failed, asked.options.accept_loss)?;
    }
    let owner = db::slots::claim_handle(&tx, &asked.handle, &asked.user).await?;
    if owner != asked.user.as_str() {
        return Err(handle_taken(&asked.handle));
    }
    let filed = make(platform, &tx, asked, prepared, existing.as_ref()).await?;
    let machine = db::machines::get(&tx, filed.machine).await?.ok_or_else(|| gone(filed))?;
    let reply = Reply::new(StatusCode::ACCEPTED, body(&machine, Some(filed.operation)));
    let (before, mut after) = (existing.as_ref().map(MachineRow::record), machine.record());
    after["allowEmpty"] = (asked.empty == EmptyStart::Allowed).into();
    let target = format!("{}/{}", asked.user, asked.slot);
    let changed =
        Changed { action: "provision", target: &target, before: before.as_ref(), after: Some(&after) };
    mutation.record(&tx, &reply, &changed).await?;
    db::commit(tx).await?;
    Ok(reply)
}

/// What the new machine is made of, looked up before anything changes.
struct Prepared {
    image_version: ImageVersion,
    bundle_sha256: String,
    restore: RestoreMode,
    /// The highest epoch that the store knows of the slot.
    epoch_floor: Epoch,
}

async fn prepare(
    platform: &Platform,
    asked: &Asked,
    existing: Option<&MachineRow>,
) -> Result<Prepared, Problem> {
    asked.locations.check(platform).await?;
    let image_version = match &asked.image_version {
        Some(version) => version.clone(),
        None => release(platform, &asked.user, &asked.slot).await?,
    };
    let bundle_sha256 = digest(&platform.bucket, &image_version).await?;
    let restore = restore_mode(platform, asked).await?;
    let whose = (&asked.user, &asked.slot);
    let starts_as_asked = restore == RestoreMode::Required || asked.empty == EmptyStart::Allowed;
    let accepted = asked.options.accept_loss && starts_as_asked;
    restorable::ensure_no_forgotten_holder(platform, whose, existing, accepted).await?;
    let epoch_floor = restorable::epoch_floor(platform, &asked.user, &asked.slot).await?;
    Ok(Prepared { image_version, bundle_sha256, restore, epoch_floor })
}

/// The release that the next machine of a slot starts with.
pub async fn release(platform: &Platform, user: &IdpUserId, slot: &Slot) -> Result<ImageVersion, Problem> {
    let known = db::slots::release(&platform.db.session().await?, user, slot).await?;
    Ok(known.unwrap_or_else(|| platform.config.provisioning.image_version.clone()))
}

async fn make(
    platform: &Platform,
    tx: &deadpool_postgres::Transaction<'_>,
    asked: &Asked,
    prepared: Prepared,
    failed: Option<&MachineRow>,
) -> Result<Filed, Problem> {
    let config = &platform.config;
    let wanted = Wanted {
        user: asked.user.clone(),
        slot: asked.slot.clone(),
        handle: asked.handle.clone(),
        kind: asked.kind,
        server_type: asked.server_type.clone(),
        location: asked.location.clone(),
        fallback_locations: asked.locations.fallback_of(platform, &asked.location),
        image_version: prepared.image_version,
        bundle_sha256: prepared.bundle_sha256,
        https_port: config.hosts.https_port,
        lives_for: (asked.kind == Kind::Preview).then_some(config.provisioning.preview_ttl),
        restore_snapshot: None,
    };
    let restore = prepared.restore;
    let with = Circumstances {
        successor: Some(&wanted),
        options: asked.options,
        epoch_floor: prepared.epoch_floor,
        ..Circumstances::default()
    };
    let Some(failed) = failed else {
        let begun = lifecycle::begin(tx, &platform.mint, &wanted, restore, &with).await;
        return begun.map_err(|error| match error {
            lifecycle::LifecycleError::Db(error) => error.into(),
            error => Problem::internal(&error),
        });
    };
    let event = Event::ProvisionRequested { restore };
    let change = lifecycle::apply(tx, &platform.mint, failed, &event, with).await;
    match change.map_err(|error| fault::lifecycle(error, failed))? {
        Change::Moved { filed: Some(filed) } => Ok(filed),
        Change::Moved { filed: None } | Change::Unchanged => {
            Err(Problem::new(Code::Unavailable, "The slot changed meanwhile; ask again.").retry_after(1))
        }
    }
}

/// Everything that can be said against the request without the store; the slot's machine, if it has one.
async fn admissible(
    platform: &Platform,
    client: &impl GenericClient,
    asked: &Asked,
) -> Result<Option<MachineRow>, Problem> {
    let config = &platform.config.provisioning;
    if !config.enabled.is_on() {
        return Err(Problem::new(Code::Disabled, "Provisioning is switched off (CUSTOMER_VPS_ENABLED)."));
    }
    let existing = db::machines::of_slot(client, &asked.user, &asked.slot).await?;
    if existing.is_none()
        && let Some(deletion) = db::slot_operations::backing_up(client, &asked.user, &asked.slot).await?
    {
        return Err(being_deleted(&deletion));
    }
    if let Some(other) = existing.as_ref().filter(|machine| machine.kind != asked.kind) {
        let (held, asked) = (other.kind.as_str(), asked.kind.as_str());
        let detail =
            format!("The slot holds a {held} machine, and a {asked} machine is asked for; delete the first.");
        return Err(Problem::new(Code::InvalidState, detail)
            .with("machineStatus", json!(other.status))
            .with("kind", json!(held)));
    }
    match asked.kind {
        Kind::Customer if config.billing_enforcement == Flag::On => {
            entitlement::entitled(client, &asked.user, &asked.slot, &asked.server_type).await?;
        }
        Kind::Customer => {}
        Kind::Preview => {
            entitlement::contained(Plan::Max, &asked.server_type)?;
            let others = db::machines::active_previews(client, &asked.user).await?;
            if existing.is_none() && others >= i64::from(config.preview_max_per_owner) {
                let detail = format!("The user has {others} previews; delete one.");
                return Err(Problem::new(Code::PreviewLimitReached, detail).retry_after(3600));
            }
        }
    }
    let owner = db::slots::handle_owner(client, &asked.handle).await?;
    if owner.is_some_and(|owner| owner != asked.user.as_str()) {
        return Err(handle_taken(&asked.handle));
    }
    Ok(existing)
}

/// The digest of a published bundle.
pub async fn digest(bucket: &Bucket, version: &ImageVersion) -> Result<String, Problem> {
    let found = bundle::digest(bucket, version).await?;
    found.ok_or_else(|| {
        Problem::new(Code::BundleNotFound, format!("No bundle of version {version} is published."))
    })
}

/// A slot with a snapshot, or with what should be one, never starts empty.
async fn restore_mode(platform: &Platform, asked: &Asked) -> Result<RestoreMode, Problem> {
    let slot = SlotPrefix::new(&asked.user, &asked.slot);
    match snapshot::latest(&platform.bucket, &slot).await {
        Ok(named) => {
            let side = snapshot::side_record(&platform.bucket, &slot, &named).await?;
            restorable::fits(platform, &side, &asked.server_type).await?;
            Ok(RestoreMode::Required)
        }
        Err(SnapshotUnusable::Absent) => {
            restorable::may_start_empty(platform, &asked.user, &asked.slot).await?;
            if asked.empty == EmptyStart::Refused {
                let session = platform.db.session().await?;
                restorable::has_no_unsaved_data(&session, &asked.user, &asked.slot).await?;
            }
            Ok(RestoreMode::Empty)
        }
        Err(error) => Err(fault::unusable(error)),
    }
}

fn has_failed(machine: &MachineRow) -> bool {
    machine.status == Status::Failed
}

/// What the new machine starts with is known when the last backup of the deleted one is.
fn being_deleted(deletion: &OperationRow) -> Problem {
    let OperationRow { id, machine, .. } = deletion;
    let what = format!("The deletion of the slot's machine {machine} (operation {id})");
    let (problem, state) = if deletion.question.is_some() {
        let answer = format!("answer it (`svcctl operation show {id}`), then provision again.");
        let detail = format!("{what} waits for an operator's decision: {answer}");
        (Problem::new(Code::InvalidState, detail), "waiting")
    } else {
        let wait = format!("provision again when it has ended (`svcctl operation show {id} --wait`).");
        let detail = format!("{what} is still taking its last backup: {wait}");
        (Problem::new(Code::InvalidState, detail).retry_after(5), "deleting")
    };
    problem.with("machineStatus", json!(state)).with("operationId", json!(id))
}

fn handle_taken(handle: &Handle) -> Problem {
    Problem::new(Code::HandleTaken, format!("The handle {handle} belongs to another user."))
}

fn gone(filed: Filed) -> Problem {
    fault::machine_not_found(&filed.machine.to_string())
}

fn body(machine: &MachineRow, operation: Option<OperationId>) -> Value {
    json!({
        "machineId": machine.id,
        "idpUserId": machine.user,
        "slot": machine.slot,
        "handle": machine.handle,
        "kind": machine.kind.as_str(),
        "status": machine.status,
        "epoch": machine.epoch,
        "operationId": operation,
    })
}

/// The route and its description.
pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "provision",
        method: Method::POST,
        path: "/vps/provision",
        summary: "Makes the machine of a slot; a slot that has one is answered with it.",
        credentials: &[OPERATOR],
        parameters: &[IDEMPOTENCY_KEY, PREFER],
        body: Some(|| {
            fields(
                &[("idpUserId", idp_user_id()), ("handle", handle_name())],
                &[
                    ("slot", slot_name()),
                    ("serverType", server_type()),
                    ("location", location()),
                    ("fallbackLocations", fallback_locations()),
                    ("imageVersion", image_version()),
                    ("kind", kind()),
                    ("acceptLoss", boolean()),
                    ("allowEmpty", boolean()),
                ],
            )
        }),
        answers: &[told(202, "The machine is being made.", made), told(200, "The slot has a machine.", made)],
        problems: &[
            Code::Disabled,
            Code::SubscriptionRequired,
            Code::ServerTypeNotAllowed,
            Code::BundleNotFound,
            Code::HandleTaken,
            Code::InvalidState,
            Code::SnapshotUnusable,
            Code::DiskTooSmall,
            Code::PreviewLimitReached,
            Code::StoreUnavailable,
            Code::Unavailable,
            Code::DatabaseUnavailable,
            Code::IdempotencyMismatch,
        ],
    },
    serve: || post(handle),
};

fn made() -> Value {
    object(
        &[
            ("machineId", uuid()),
            ("idpUserId", idp_user_id()),
            ("slot", slot_name()),
            ("handle", handle_name()),
            ("kind", kind()),
            ("status", status()),
            ("epoch", count()),
            ("operationId", nullable(uuid())),
        ],
        &[],
    )
}
