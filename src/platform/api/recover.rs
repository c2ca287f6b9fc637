//! POST `/vps/recover`: another machine in the place of the slot's, from its latest snapshot.
//!
//! The snapshot is looked at before anything changes; asked again while recovering, the answer is the same.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use deadpool_postgres::GenericClient;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::call::Call;
use super::endpoint::{Endpoint, IDEMPOTENCY_KEY, OPERATOR, PREFER, idp_user_id, slot_name, status, told};
use super::mutation::{self, Changed, Mutation, Reply};
use super::{fault, provision};
use crate::http::openapi::{Operation, boolean, count, fields, matching, object, uuid};
use crate::http::problem::{Code, Problem};
use crate::machine::event::{Event, RestoreMode};
use crate::machine::id::{MachineId, OperationId};
use crate::machine::name::{IdpUserId, Slot};
use crate::machine::state::Status;
use crate::platform::context::Platform;
use crate::platform::db::machine_row::{Kind, MachineRow};
use crate::platform::db::{self};
use crate::platform::lifecycle::{self, Change, Circumstances, Wanted};
use crate::store::key::{SlotPrefix, SnapshotKey};
use crate::store::snapshot::{self, Unusable};
use axum::routing::post;

struct Asked {
    user: IdpUserId,
    slot: Slot,
    empty: EmptyStart,
    /// The snapshot that the operator expects to be restored.
    snapshot_key: Option<SnapshotKey>,
}

/// Whether a slot without any snapshot may start with an empty database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EmptyStart {
    Allowed,
    Refused,
}

pub async fn handle(State(platform): State<Arc<Platform>>, request: Request) -> Result<Response, Problem> {
    let call = Call::read(request).await?;
    call.operator(&platform)?;
    let asked = asked(&call)?;
    let mutation = Mutation::of(&call)?;
    let reply = recover(&platform, &asked, &mutation).await?;
    platform.nudge.notify_one();
    mutation::answer(&platform, &call, reply).await
}

fn asked(call: &Call) -> Result<Asked, Problem> {
    let mut fields = call.fields()?;
    let user = fields.required("idpUserId");
    let slot = fields.optional("slot").unwrap_or_default();
    let empty =
        if fields.boolean("allowEmpty") == Some(true) { EmptyStart::Allowed } else { EmptyStart::Refused };
    let snapshot_key = fields.optional("snapshotKey");
    fields.finish(user.map(|user| Asked { user, slot, empty, snapshot_key }))
}

async fn recover(platform: &Platform, asked: &Asked, mutation: &Mutation) -> Result<Reply, Problem> {
    let mut session = platform.db.session().await?;
    if let Some(reply) = mutation.replay(&session).await? {
        return Ok(reply);
    }
    let machine = of_slot(db::machines::of_slot(&session, &asked.user, &asked.slot).await?, asked)?;
    let image_version = platform.config.provisioning.image_version.clone();
    // Under way, it needs nothing of the store.
    let prepared = if machine.status == Status::Recovering {
        None
    } else {
        Some((
            begins_with(platform, asked).await?,
            provision::digest(&platform.bucket, &image_version).await?,
        ))
    };

    let tx = db::begin(&mut session).await?;
    db::lock(&tx, &format!("user {}", asked.user)).await?;
    if let Some(reply) = mutation.begin(&tx).await? {
        return Ok(reply);
    }
    let machine = of_slot(db::machines::of_slot_locked(&tx, &asked.user, &asked.slot).await?, asked)?;
    if machine.status == Status::Recovering {
        // Kept for its key: once this recovery is over, the same request again must not begin another.
        let reply = under_way(&tx, &machine).await?;
        mutation.store(&tx, &reply).await?;
        db::commit(tx).await?;
        return Ok(reply);
    }
    let Some(((restore, restore_snapshot), bundle_sha256)) = prepared else {
        return Err(changed_meanwhile());
    };
    let wanted = Wanted {
        user: machine.user.clone(),
        slot: machine.slot.clone(),
        handle: machine.handle.clone(),
        kind: machine.kind,
        server_type: machine.server_type.clone(),
        location: machine.location.clone(),
        image_version,
        bundle_sha256,
        https_port: platform.config.hosts.https_port,
        lives_for: preview_life(platform, &machine),
        restore_snapshot,
    };
    let event = Event::RecoverRequested { restore };
    let with = Circumstances { failed_at: None, successor: Some(&wanted) };
    let change = lifecycle::apply(&tx, &platform.mint, &machine, &event, with).await;
    let filed = match change.map_err(|error| fault::lifecycle(error, &machine))? {
        Change::Moved { filed: Some(filed) } => filed,
        Change::Moved { filed: None } | Change::Unchanged => return Err(changed_meanwhile()),
    };
    let new = db::machines::get(&tx, filed.machine).await?;
    let new = new.ok_or_else(|| fault::machine_not_found(&filed.machine.to_string()))?;
    let reply = Reply::new(StatusCode::ACCEPTED, body(machine.id, &new, filed.operation));
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

/// What the new machine begins with: the latest snapshot, or the one that is asked for, which must be there whole.
async fn begins_with(platform: &Platform, asked: &Asked) -> Result<(RestoreMode, Option<String>), Problem> {
    let slot = SlotPrefix::new(&asked.user, &asked.slot);
    if let Some(key) = &asked.snapshot_key {
        let chosen =
            snapshot::by_key(&platform.bucket, &slot, key.as_str()).await.map_err(fault::unusable)?;
        return Ok((RestoreMode::Required, Some(chosen.key)));
    }
    match snapshot::latest(&platform.bucket, &slot).await {
        Ok(_) => Ok((RestoreMode::Required, None)),
        Err(Unusable::Absent) if asked.empty == EmptyStart::Allowed => Ok((RestoreMode::Empty, None)),
        Err(error) => Err(fault::unusable(error)),
    }
}

/// The answer that the recovery under way was given.
async fn under_way(client: &impl GenericClient, machine: &MachineRow) -> Result<Reply, Problem> {
    let old = db::machines::replaced_by(client, machine.id).await?;
    let operation = db::operations::newest(client, machine.id, "recover").await?;
    let (Some(old), Some(operation)) = (old, operation) else {
        return Err(fault::machine_not_found("that this one replaces"));
    };
    Ok(Reply::new(StatusCode::ACCEPTED, body(old.id, machine, operation.id)))
}

fn body(old: MachineId, new: &MachineRow, operation: OperationId) -> Value {
    json!({
        "oldMachineId": old,
        "machineId": new.id,
        "slot": new.slot,
        "status": new.status,
        "epoch": new.epoch,
        "operationId": operation,
    })
}

/// The route and its description.
pub static ENDPOINT: Endpoint = Endpoint {
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
                ],
            )
        }),
        answers: &[told(202, "The recovery is under way.", || {
            object(
                &[
                    ("oldMachineId", uuid()),
                    ("machineId", uuid()),
                    ("slot", slot_name()),
                    ("status", status()),
                    ("epoch", count()),
                    ("operationId", uuid()),
                ],
                &[],
            )
        })],
        problems: &[
            Code::MachineNotFound,
            Code::SnapshotUnusable,
            Code::BundleNotFound,
            Code::StoreUnavailable,
            Code::Unavailable,
            Code::DatabaseUnavailable,
            Code::IdempotencyMismatch,
        ],
    },
    serve: || post(handle),
};
