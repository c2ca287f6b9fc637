//! The only path of machine state changes: the pure transition, then its result and effects in one transaction.
//!
//! This module makes no decisions. The invariant: the row is written only if it has not changed since the transition
//! read it, and all effects are written with it or none.

use std::time::Duration;

use deadpool_postgres::Transaction;

use super::db::machine_changes::{self, NewMachine, NextState, SlotPlace};
use super::db::machine_row::{Failure, MachineRow};
use super::db::{self, DbError};
use super::tokens::{Generation, Purpose, TokenMint};
use svc_machine::epoch::Epoch;
use svc_machine::event::{Effect, Event, RestoreMode};
use svc_machine::id::{MachineId, OperationId};
use svc_machine::name::{Handle, IdpUserId, ImageVersion, Location, ServerType, Slot};
use svc_machine::operation::{OperationKind, OperationOptions};
use svc_machine::state::{State, Status};
use svc_machine::transition::{Outcome, Refusal, transition};
use svc_wire::machine::MachineKind;

/// Maximum earlier machines considered for a slot's reinstatement.
const MAX_PREDECESSORS: i64 = 50;

/// Why a change was not applied.
#[derive(Debug, thiserror::Error)]
pub enum LifecycleError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Db(#[from] DbError),
    /// The transition needs data that the caller did not provide.
    #[error("the change of state needs {0}")]
    Missing(&'static str),
}

/// The machine to create for a slot.
pub struct MachineRequest {
    pub user: IdpUserId,
    pub slot: Slot,
    pub handle: Handle,
    pub kind: MachineKind,
    pub server_type: ServerType,
    pub location: Location,
    pub fallback_locations: Vec<Location>,
    pub image_version: ImageVersion,
    pub bundle_sha256: String,
    pub https_port: u16,
    pub preview_ttl: Option<Duration>,
    /// The snapshot to restore; `None`: the one that the pointer names.
    pub restore_snapshot: Option<String>,
}

/// Data of an event that the transition itself does not read.
#[derive(Default, Clone)]
pub struct EventContext<'a> {
    /// Where and why it failed, for people.
    pub failed_at: Option<(&'a str, &'a str)>,
    /// The machine that replaces this one, if the event replaces it.
    pub successor: Option<&'a MachineRequest>,
    /// The operator's options for the created operation.
    pub options: OperationOptions,
    /// An epoch in the object store: the new machine's epoch is above it.
    pub epoch_floor: Epoch,
}

/// A machine and the operation that was created for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CreatedOperation {
    pub machine: MachineId,
    pub operation: OperationId,
}

/// The result of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    Unchanged,
    Moved { created: Option<CreatedOperation> },
}

/// Applies an event to a machine whose row the transaction has locked.
///
/// # Errors
/// [`LifecycleError`]; the transaction must then not be committed.
pub async fn apply(
    tx: &Transaction<'_>,
    mint: &TokenMint,
    was: &MachineRow,
    event: &Event,
    with: EventContext<'_>,
) -> Result<Change, LifecycleError> {
    let (next, effects) = match transition(&was.lifecycle(), event)? {
        Outcome::Unchanged => return Ok(Change::Unchanged),
        Outcome::Moved { next, effects } => (next, effects),
    };
    let successor = MachineId::new();
    let raised_epoch = effects.iter().find_map(|effect| match effect {
        Effect::Reinstate { epoch } => Some(*epoch),
        _ => None,
    });
    write_state(tx, was, &next, SlotChange { successor, raised_epoch }, &with).await?;
    let mut created = None;
    for effect in effects {
        created = apply_effect(tx, mint, was, effect, successor, &with).await?.or(created);
    }
    Ok(Change::Moved { created })
}

/// Data of a change of slot.
struct SlotChange {
    successor: MachineId,
    /// The epoch under which it holds its slot again.
    raised_epoch: Option<Epoch>,
}

async fn write_state(
    tx: &Transaction<'_>,
    was: &MachineRow,
    next: &State,
    slot_change: SlotChange,
    with: &EventContext<'_>,
) -> Result<(), DbError> {
    let mut written = NextState {
        status: next.status().unwrap_or(was.status),
        failure: None,
        server_type: &was.server_type,
        resize_to: None,
        place: slot_change.raised_epoch.map_or(SlotPlace::Unchanged, |epoch| SlotPlace::Reinstated { epoch }),
    };
    let failure;
    match next {
        State::Provisioning | State::Recovering => {}
        State::Running { server_type } => written.server_type = server_type,
        State::Resizing { from, to } => {
            written.server_type = from;
            written.resize_to = Some(to);
        }
        State::Failed { .. } => {
            failure = failure_of(next, with);
            written.failure = failure.as_ref();
        }
        // The machine has already left its slot: only the recorded state of its server changes.
        State::Retired { was: held } | State::Deleted { was: held } if has_already_left(was, next) => {
            failure = failure_of(held, with);
            written.failure = failure.as_ref();
        }
        State::Retired { .. } => {
            written.failure = was.failure.as_ref();
            written.place = SlotPlace::Retired { by: slot_change.successor };
        }
        State::Deleted { .. } => {
            written.failure = was.failure.as_ref();
            written.place = SlotPlace::Deleted;
        }
    }
    machine_changes::compare_and_set(tx, was, &written).await
}

/// Whether the machine had already left its slot in this way.
fn has_already_left(was: &MachineRow, next: &State) -> bool {
    match next {
        State::Retired { .. } => was.retired_at.is_some(),
        State::Deleted { .. } => was.deleted_at.is_some(),
        _ => false,
    }
}

fn failure_of(state: &State, with: &EventContext<'_>) -> Option<Failure> {
    let State::Failed { cause } = state else { return None };
    let (stage, message) =
        with.failed_at.map(|(stage, message)| (stage.to_owned(), message.to_owned())).unzip();
    Some(Failure { cause: *cause, stage, message })
}

async fn apply_effect(
    tx: &Transaction<'_>,
    mint: &TokenMint,
    was: &MachineRow,
    effect: Effect,
    successor: MachineId,
    with: &EventContext<'_>,
) -> Result<Option<CreatedOperation>, LifecycleError> {
    match effect {
        Effect::CancelOperation => db::operations::end_running(tx, was.id, "cancelled", None).await?,
        Effect::FailOperation { cause } => {
            db::operations::end_running(tx, was.id, "failed", Some(cause.as_str())).await?;
        }
        Effect::Replace { status, restore, epoch } => {
            let request = with.successor.ok_or(LifecycleError::Missing("a successor"))?;
            let epoch = epoch.max(with.epoch_floor.next());
            let plan = StartPlan { id: successor, status, restore, epoch, options: with.options };
            return insert(tx, mint, request, plan).await.map(Some);
        }
        Effect::DeleteServer => {
            return Ok(Some(create_operation(tx, was.id, OperationKind::Delete, with.options).await?));
        }
        // The type is in the row.
        Effect::ChangeType { .. } => {
            return Ok(Some(create_operation(tx, was.id, OperationKind::Resize, with.options).await?));
        }
        // An operator has switched it off.
        Effect::SwitchOn if was.powered_off_at.is_some() => {}
        Effect::SwitchOn => {
            return Ok(Some(
                create_operation(tx, was.id, OperationKind::PowerOn, OperationOptions::default()).await?,
            ));
        }
        Effect::Reinstate { .. } => {
            return Ok(Some(create_operation(tx, was.id, OperationKind::Reinstate, with.options).await?));
        }
        Effect::ReinstatePredecessor => reinstate_predecessor(tx, mint, was, with).await?,
        Effect::DeletePredecessor => delete_predecessor(tx, mint, was, with).await?,
        // Routers observe the row's change sequence, which a database trigger increments.
        Effect::CloseConnections => {}
    }
    Ok(None)
}

/// Gives the slot back to the machine whose server has the newest data. Without such a machine, the failed one keeps
/// the slot, so that its failure stays visible.
async fn reinstate_predecessor(
    tx: &Transaction<'_>,
    mint: &TokenMint,
    was: &MachineRow,
    with: &EventContext<'_>,
) -> Result<(), LifecycleError> {
    let Some(last) = reinstatable(tx, was).await? else { return Ok(()) };
    machine_changes::leave_slot(tx, was.id, last.id).await?;
    let highest = db::machines::find_highest_epoch(tx, &was.user, &was.slot).await?;
    let event = Event::Reinstated { epoch: highest.next(), power: last.server_power() };
    // If it has its own failure, it keeps that message.
    let failed_at =
        last.failure.as_ref().and_then(|failure| failure.stage.as_deref().zip(failure.message.as_deref()));
    let reason = "the machine that was to replace it did not register";
    let with = EventContext { failed_at: failed_at.or(Some(("reinstate", reason))), ..with.clone() };
    Box::pin(apply(tx, mint, &last, &event, with)).await?;
    audit(tx, "reinstate", &last).await?;
    tracing::warn!(machine = %was.id, reinstated = %last.id, "gave a slot back to its last machine");
    Ok(())
}

/// The last registered machine of the slot. If its server is gone, an earlier one, unless a snapshot holds the later
/// one's data: an older server would then replace that snapshot by an older state.
async fn reinstatable(tx: &Transaction<'_>, was: &MachineRow) -> Result<Option<MachineRow>, DbError> {
    for seen in db::machines::list_registered_before(tx, was, MAX_PREDECESSORS).await? {
        let Some(one) = db::machines::lock(tx, seen.id).await? else { continue };
        if one.server_exists() {
            return Ok(Some(one).filter(|one| one.deleted_at.is_none()));
        }
        if one.deleted_at.is_some() || one.backup_taken_at.max(one.final_backup_at).is_some() {
            return Ok(None);
        }
    }
    Ok(None)
}

/// Deletes the machine that was to be replaced along with its intended successor. An operator's order to delete one
/// server at once does not extend to the other.
async fn delete_predecessor(
    tx: &Transaction<'_>,
    mint: &TokenMint,
    was: &MachineRow,
    with: &EventContext<'_>,
) -> Result<(), LifecycleError> {
    if was.registered_at.is_some() {
        return Ok(());
    }
    let Some(last) = db::machines::lock_last_registered(tx, was).await? else { return Ok(()) };
    if last.server_exists() {
        let options = OperationOptions { now: false, ..with.options };
        let with = EventContext { options, ..with.clone() };
        let change = Box::pin(apply(tx, mint, &last, &Event::SuccessorDeleted, with)).await?;
        if change != Change::Unchanged {
            audit(tx, "delete.predecessor", &last).await?;
        }
    }
    Ok(())
}

/// The audit entry for the effect of one machine's change on another machine of its slot.
async fn audit(tx: &Transaction<'_>, action: &str, was: &MachineRow) -> Result<(), DbError> {
    let after = db::machines::get(tx, was.id).await?.map(|after| after.record());
    let entry = db::audit::AuditEntry {
        actor: "platform",
        action,
        target: &was.id.to_string(),
        before: Some(&was.record()),
        after: after.as_ref(),
        request_id: &svc_http::request_id::current(),
    };
    db::audit::write(tx, &entry).await
}

async fn create_operation(
    tx: &Transaction<'_>,
    machine: MachineId,
    kind: OperationKind,
    options: OperationOptions,
) -> Result<CreatedOperation, DbError> {
    let operation = db::operations::create(tx, machine, kind, options).await?;
    Ok(CreatedOperation { machine, operation })
}

/// Creates the machine of a free slot.
///
/// # Errors
/// [`LifecycleError`]; `user_machines_active` is violated if another machine holds the slot.
pub async fn create_machine(
    tx: &Transaction<'_>,
    mint: &TokenMint,
    request: &MachineRequest,
    restore: RestoreMode,
    with: &EventContext<'_>,
) -> Result<CreatedOperation, LifecycleError> {
    let highest = db::machines::find_highest_epoch(tx, &request.user, &request.slot).await?;
    let epoch = highest.max(with.epoch_floor).next();
    let (id, status, options) = (MachineId::new(), Status::Provisioning, with.options);
    insert(tx, mint, request, StartPlan { id, status, restore, epoch, options }).await
}

/// How a new machine starts.
struct StartPlan {
    id: MachineId,
    status: Status,
    restore: RestoreMode,
    epoch: Epoch,
    options: OperationOptions,
}

async fn insert(
    tx: &Transaction<'_>,
    mint: &TokenMint,
    request: &MachineRequest,
    plan: StartPlan,
) -> Result<CreatedOperation, LifecycleError> {
    let StartPlan { id, status, restore, epoch, options } = plan;
    let kind = match status {
        Status::Recovering => OperationKind::Recover,
        Status::Provisioning | Status::Running | Status::Resizing | Status::Failed => {
            OperationKind::Provision
        }
    };
    let machine = NewMachine {
        id,
        user: request.user.clone(),
        slot: request.slot.clone(),
        handle: request.handle.clone(),
        kind: request.kind,
        status,
        epoch,
        restore,
        server_type: request.server_type.clone(),
        location: request.location.clone(),
        fallback_locations: request.fallback_locations.clone(),
        image_version: request.image_version.clone(),
        bundle_sha256: request.bundle_sha256.clone(),
        https_port: request.https_port,
        registration_token_hash: mint.hash(id, Purpose::Registration, Generation::FIRST),
        upgrade_token_hash: mint.hash(id, Purpose::Upgrade, Generation::FIRST),
        preview_ttl: request.preview_ttl,
        restore_snapshot: request.restore_snapshot.clone(),
    };
    machine_changes::insert(tx, &machine).await?;
    Ok(create_operation(tx, id, kind, options).await?)
}
