//! POST `/vps/recover`: another machine in the place of the slot's, from its latest snapshot.
//!
//! The snapshot is looked at before anything changes. Asked again while recovering, the answer is the same; with other
//! options the request is refused.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use deadpool_postgres::GenericClient;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::call::Call;
use super::endpoint::{
    Access, Endpoint, IDEMPOTENCY_KEY, OPERATE, OPERATOR, PREFER, fallback_locations, idp_user_id,
    image_version, kind, location, server_type, slot_name, status, told,
};
use super::locations::AskedLocations;
use super::mutation::{self, Changed, Mutation, Reply};
use super::restorable::EmptyStart;
use super::{entitlement, fault, provision, restorable, shape};
use crate::http::openapi::{Operation, boolean, count, fields, matching, object, uuid};
use crate::http::problem::{Code, Problem};
use crate::machine::epoch::Epoch;
use crate::machine::event::{Event, RestoreMode};
use crate::machine::id::{MachineId, OperationId};
use crate::machine::name::{IdpUserId, ImageVersion, Location, ServerType, Slot};
use crate::machine::state::Status;
use crate::platform::context::Platform;
use crate::platform::copies;
use crate::platform::db::machine_row::{Kind, MachineRow};
use crate::platform::db::{self};
use crate::platform::lifecycle::{self, Change, Circumstances, Wanted};
use crate::platform::operations::OperationOptions;
use crate::store::key::{SlotPrefix, SnapshotKey};
use crate::store::snapshot::{self, SideRecord, SnapshotUnusable};
use axum::routing::post;

struct Asked {
    user: IdpUserId,
    slot: Slot,
    empty: EmptyStart,
    /// The snapshot that the operator expects to be restored.
    snapshot_key: Option<SnapshotKey>,
    options: OperationOptions,
    /// Another than the slot's machine has.
    server_type: Option<ServerType>,
    locations: AskedLocations,
    /// Another than the slot runs.
    image_version: Option<ImageVersion>,
}

pub async fn handle(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    let operator = call.operator(&platform).await?;
    let asked = asked(&call)?;
    let mutation = Mutation::of(&call, &operator)?;
    let reply = recover(&platform, &asked, &mutation).await?;
    platform.nudge.notify_one();
    mutation::answer(&platform, &call, reply).await
}

fn asked(call: &Call) -> Result<Asked, Problem> {
    let mut fields = call.fields()?;
    let user = fields.required("idpUserId");
    let slot = fields.optional("slot").unwrap_or_default();
    let empty = EmptyStart::read(&mut fields);
    let snapshot_key = fields.optional("snapshotKey");
    let options = OperationOptions {
        accept_loss: fields.boolean("acceptLoss").unwrap_or(false),
        replace_first: fields.boolean("replaceFirst").unwrap_or(false),
        ..OperationOptions::default()
    };
    let server_type = fields.optional("serverType");
    let locations = AskedLocations::read(&mut fields);
    let image_version = fields.optional("imageVersion");
    let asked = user.map(|user| Asked {
        user,
        slot,
        empty,
        snapshot_key,
        options,
        server_type,
        locations,
        image_version,
    });
    fields.finish(asked)
}

/// What the new machine is made of, looked up before anything changes.
struct Prepared {
    restore: RestoreMode,
    snapshot: Option<String>,
    /// Stored, and newer than the one that is restored unless the host takes a last backup.
    newer: Option<SideRecord>,
    image_version: ImageVersion,
    bundle_sha256: String,
    server_type: ServerType,
    /// The highest epoch that the store knows of the slot.
    epoch_floor: Epoch,
}

async fn prepare(platform: &Platform, asked: &Asked, machine: &MachineRow) -> Result<Prepared, Problem> {
    asked.locations.check(platform).await?;
    let server_type = asked.server_type.clone().unwrap_or_else(|| machine.server_type.clone());
    if server_type != machine.server_type {
        entitlement::of_machine(platform, &platform.db.session().await?, machine, &server_type).await?;
    }
    let starts = starts_with(platform, asked, machine).await?;
    if let Some(side) = &starts.side {
        restorable::fits(platform, side, &server_type).await?;
    }
    let image_version = match &asked.image_version {
        Some(version) => version.clone(),
        None => provision::release(platform, &asked.user, &asked.slot).await?,
    };
    let bundle_sha256 = provision::digest(&platform.bucket, &image_version).await?;
    let whose = (&asked.user, &asked.slot);
    let accepted = asked.options.accept_loss;
    restorable::ensure_no_forgotten_holder(platform, whose, Some(machine), accepted).await?;
    let epoch_floor = restorable::epoch_floor(platform, &asked.user, &asked.slot).await?;
    let newer = match &starts.side {
        Some(side) => copies::newer_than(&platform.bucket, machine, &side.named()).await,
        None => None,
    };
    let (restore, snapshot) = (starts.restore, starts.key);
    Ok(Prepared { restore, snapshot, newer, image_version, bundle_sha256, server_type, epoch_floor })
}

async fn recover(platform: &Platform, asked: &Asked, mutation: &Mutation) -> Result<Reply, Problem> {
    let session = platform.db.session().await?;
    if let Some(reply) = mutation.replay(&session).await? {
        return Ok(reply);
    }
    let machine = of_slot(db::machines::of_slot(&session, &asked.user, &asked.slot).await?, asked)?;
    drop(session);
    // Under way, it needs nothing of the store. Neither row nor session is held while that is asked.
    let prepared = if machine.status == Status::Recovering {
        None
    } else {
        Some(prepare(platform, asked, &machine).await?)
    };

    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    db::lock(&tx, &format!("user {}", asked.user)).await?;
    if let Some(reply) = mutation.begin(&tx).await? {
        return Ok(reply);
    }
    let machine = of_slot(db::machines::of_slot_locked(&tx, &asked.user, &asked.slot).await?, asked)?;
    if machine.status == Status::Recovering {
        // Kept for its key: once this recovery is over, the same request again must not begin another.
        let reply = under_way(&tx, &machine, asked).await?;
        mutation.store(&tx, &reply).await?;
        db::commit(tx).await?;
        return Ok(reply);
    }
    let Some(prepared) = prepared else {
        return Err(changed_meanwhile());
    };
    restorable::ensure_not_switched_off(&machine, asked.options.accept_loss)?;
    let location = asked.locations.location.clone().unwrap_or_else(|| machine.location.clone());
    let wanted = Wanted {
        user: machine.user.clone(),
        slot: machine.slot.clone(),
        handle: machine.handle.clone(),
        kind: machine.kind,
        server_type: prepared.server_type,
        fallback_locations: asked.locations.fallback_of(platform, &location),
        location,
        image_version: prepared.image_version,
        bundle_sha256: prepared.bundle_sha256,
        https_port: platform.config.hosts.https_port,
        lives_for: preview_life(platform, &machine),
        restore_snapshot: prepared.snapshot,
    };
    let event = Event::RecoverRequested { restore: prepared.restore };
    let with = Circumstances {
        successor: Some(&wanted),
        options: asked.options,
        epoch_floor: prepared.epoch_floor,
        ..Circumstances::default()
    };
    let change = lifecycle::apply(&tx, &platform.mint, &machine, &event, with).await;
    let filed = match change.map_err(|error| fault::lifecycle(error, &machine))? {
        Change::Moved { filed: Some(filed) } => filed,
        Change::Moved { filed: None } | Change::Unchanged => return Err(changed_meanwhile()),
    };
    let new = db::machines::get(&tx, filed.machine).await?;
    let new = new.ok_or_else(|| fault::machine_not_found(&filed.machine.to_string()))?;
    let mut answer = body(machine.id, &new, filed.operation);
    if let Some(newer) = &prepared.newer {
        answer["newerSnapshot"] = copies::newer_record(newer);
    }
    let reply = Reply::new(StatusCode::ACCEPTED, answer);
    let target = format!("{}/{}", asked.user, asked.slot);
    let (before, after) = (machine.record(), new.record());
    let changed = Changed { action: "recover", target: &target, before: Some(&before), after: Some(&after) };
    mutation.record(&tx, &reply, &changed).await?;
    db::commit(tx).await?;
    Ok(reply)
}

fn changed_meanwhile() -> Problem {
    Problem::new(Code::Unavailable, "The slot changed meanwhile; ask again.").retry_after(1)
}

fn preview_life(platform: &Platform, machine: &MachineRow) -> Option<std::time::Duration> {
    (machine.kind == Kind::Preview).then_some(platform.config.provisioning.preview_ttl)
}

fn of_slot(found: Option<MachineRow>, asked: &Asked) -> Result<MachineRow, Problem> {
    found.ok_or_else(|| fault::machine_not_found(&format!("in slot {} of {}", asked.slot, asked.user)))
}

/// The data that the new machine starts with.
struct StartsWith {
    restore: RestoreMode,
    /// `None`: the snapshot that the pointer names.
    key: Option<String>,
    side: Option<SideRecord>,
}

/// The latest snapshot, or the one that is asked for, which must be there whole. The pointer must be readable in any
/// case: the fence is written into it.
async fn starts_with(
    platform: &Platform,
    asked: &Asked,
    machine: &MachineRow,
) -> Result<StartsWith, Problem> {
    let slot = SlotPrefix::new(&asked.user, &asked.slot);
    if let Some(key) = &asked.snapshot_key {
        let side = snapshot::by_key(&platform.bucket, &slot, key.as_str()).await.map_err(fault::unusable)?;
        return Ok(StartsWith {
            restore: RestoreMode::Required,
            key: Some(side.key.clone()),
            side: Some(side),
        });
    }
    match snapshot::latest(&platform.bucket, &slot).await {
        Ok(named) => {
            let side = snapshot::side_record(&platform.bucket, &slot, &named).await?;
            Ok(StartsWith { restore: RestoreMode::Required, key: None, side: Some(side) })
        }
        Err(SnapshotUnusable::Absent) => {
            restorable::may_start_empty(platform, &asked.user, &asked.slot).await?;
            if asked.empty == EmptyStart::Refused {
                return Err(
                    never_backed_up(machine).unwrap_or_else(|| fault::unusable(SnapshotUnusable::Absent))
                );
            }
            Ok(StartsWith { restore: RestoreMode::Empty, key: None, side: None })
        }
        Err(error) => Err(fault::unusable(error)),
    }
}

/// The refusal where the server of the machine alone holds the slot's data: a backup of it can be taken first.
fn never_backed_up(machine: &MachineRow) -> Option<Problem> {
    if machine.registered_at.is_none() || !machine.server_exists() {
        return None;
    }
    let id = machine.id;
    let first = match machine.status {
        Status::Running => format!("`svcctl backup now {id} --wait`"),
        _ => format!("`svcctl resume {id}` where its host is well, then `svcctl backup now {id} --wait`"),
    };
    let detail = format!(
        "The slot has no snapshot, and the data of machine {id} is on its server alone. Take a backup first: {first}."
    );
    Some(Problem::new(Code::SnapshotUnusable, detail))
}

/// The answer that the recovery under way was given. It keeps its own options: a request with others is refused.
async fn under_way(
    client: &impl GenericClient,
    machine: &MachineRow,
    asked: &Asked,
) -> Result<Reply, Problem> {
    let old = db::machines::replaced_by(client, machine.id).await?;
    let operation = db::operations::newest(client, machine.id, "recover").await?;
    let (Some(old), Some(operation)) = (old, operation) else {
        return Err(fault::machine_not_found("that this one replaces"));
    };
    let has_moved = db::operation_log::has(client, operation.id, "location").await?;
    let other = other_options(asked, machine, operation.options, has_moved);
    if !other.is_empty() {
        let detail = format!(
            "A recovery of the slot is under way, operation {}, and keeps its own options. This request differs in: {}.",
            operation.id,
            other.join(", ")
        );
        return Err(Problem::new(Code::InvalidState, detail)
            .with("machineStatus", json!(machine.status))
            .with("allowed", json!([]))
            .with("operationId", json!(operation.id)));
    }
    Ok(Reply::new(StatusCode::ACCEPTED, body(old.id, machine, operation.id)))
}

/// The options of a request that the recovery under way does not have. `has_moved`: its server was ordered elsewhere than
/// first asked for.
fn other_options(
    asked: &Asked,
    machine: &MachineRow,
    options: OperationOptions,
    has_moved: bool,
) -> Vec<&'static str> {
    let knows =
        |location: &Location| machine.location == *location || machine.fallback_locations.contains(location);
    let (server_type, image, snapshot) = (&asked.server_type, &asked.image_version, &asked.snapshot_key);
    let location = asked.locations.location.as_ref();
    [
        (
            "the snapshot",
            snapshot.as_ref().is_some_and(|key| machine.restore_snapshot.as_deref() != Some(key.as_str())),
        ),
        ("the server type", server_type.as_ref().is_some_and(|wanted| *wanted != machine.server_type)),
        ("the image version", image.as_ref().is_some_and(|wanted| *wanted != machine.image_version)),
        (
            "the location",
            location
                .is_some_and(|wanted| if has_moved { !knows(wanted) } else { *wanted != machine.location }),
        ),
        ("the fallback locations", asked.locations.fallback.iter().flatten().any(|wanted| !knows(wanted))),
        ("an accepted loss", asked.options.accept_loss && !options.accept_loss),
        ("replacing first", asked.options.replace_first && !options.replace_first),
    ]
    .into_iter()
    .filter_map(|(name, differs)| differs.then_some(name))
    .collect()
}

fn body(old: MachineId, new: &MachineRow, operation: OperationId) -> Value {
    json!({
        "oldMachineId": old,
        "machineId": new.id,
        "slot": new.slot,
        "kind": new.kind.as_str(),
        "status": new.status,
        "epoch": new.epoch,
        "operationId": operation,
    })
}

/// The route and its description.
pub static ENDPOINT: Endpoint = Endpoint {
    access: Access::Operator(OPERATE),
    operation: Operation {
        id: "recover",
        method: Method::POST,
        path: "/vps/recover",
        summary: "Puts another machine in the place of the slot's, from its latest snapshot.",
        credentials: &[OPERATOR],
        parameters: &[IDEMPOTENCY_KEY, PREFER],
        body: Some(|| {
            fields(
                &[("idpUserId", idp_user_id())],
                &[
                    ("slot", slot_name()),
                    ("allowEmpty", boolean()),
                    ("snapshotKey", matching(SnapshotKey::PATTERN)),
                    ("acceptLoss", boolean()),
                    ("replaceFirst", boolean()),
                    ("serverType", server_type()),
                    ("location", location()),
                    ("fallbackLocations", fallback_locations()),
                    ("imageVersion", image_version()),
                ],
            )
        }),
        answers: &[told(202, "The recovery is under way.", || {
            object(
                &[
                    ("oldMachineId", uuid()),
                    ("machineId", uuid()),
                    ("slot", slot_name()),
                    ("kind", kind()),
                    ("status", status()),
                    ("epoch", count()),
                    ("operationId", uuid()),
                ],
                // Of the request that began the recovery.
                &[("newerSnapshot", shape::newer_snapshot())],
            )
        })],
        problems: &[
            Code::MachineNotFound,
            Code::InvalidState,
            Code::SnapshotUnusable,
            Code::InvalidState,
            Code::DiskTooSmall,
            Code::SubscriptionRequired,
            Code::ServerTypeNotAllowed,
            Code::BundleNotFound,
            Code::StoreUnavailable,
            Code::Unavailable,
            Code::DatabaseUnavailable,
            Code::IdempotencyMismatch,
        ],
    },
    serve: || post(handle),
};
