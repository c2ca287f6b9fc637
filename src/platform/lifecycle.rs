//! Changes machine states. All changes go through this module: it applies the pure transition, then writes the new
//! state and the effects in one transaction.
//!
//! The transition makes the decisions, except which predecessor is reinstated or deleted. Invariant: the new state is
//! written only if the machine's status, its epoch, and whether it holds its slot have not changed since its row was
//! read, and it is written together with all effects or not at all.

use std::time::Duration;

use deadpool_postgres::Transaction;

use super::db::machine_changes::{self, NewMachine, NextState, SlotTransition};
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

/// Maximum number of earlier machines that are considered for reinstatement.
const MAX_PREDECESSORS: i64 = 50;

/// The reason a change was not applied.
#[derive(Debug, thiserror::Error)]
pub enum LifecycleError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Db(#[from] DbError),
    /// The transition needs data that the caller did not provide.
    #[error("the state change requires {0}")]
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
    /// A preview's lifetime; `None` for other machines.
    pub preview_ttl: Option<Duration>,
    /// The key of the snapshot to restore; `None` means the snapshot that the pointer names.
    pub restore_snapshot: Option<String>,
    /// Whether the machine restores the owner's files at its first boot.
    pub should_restore_files: bool,
}

/// Event data that the transition itself does not read.
#[derive(Default, Clone)]
pub struct EventContext<'a> {
    /// The failure's stage and message.
    pub failure: Option<(&'a str, &'a str)>,
    /// The machine that replaces this one, if the event replaces it.
    pub successor: Option<&'a MachineRequest>,
    /// The operator's options for the created operation.
    pub options: OperationOptions,
    /// The highest epoch in the object store: a new machine's epoch must be above it.
    pub epoch_floor: Epoch,
}

/// A machine and the operation that was created for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CreatedOperation {
    pub machine: MachineId,
    pub operation: OperationId,
}

/// The result of applying an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    Unchanged,
    Moved { created: Option<CreatedOperation> },
}

/// Applies an event to a machine whose row the transaction has locked.
///
/// # Errors
/// [`LifecycleError::Refused`] if the machine's state does not allow the event; nothing has been written. After
/// [`LifecycleError::Db`] or [`LifecycleError::Missing`], part of the change may have been written, so the transaction
/// must not be committed. A refusal to reinstate a predecessor would also come after writes, but a registered machine
/// can always be reinstated.
pub async fn apply(
    tx: &Transaction<'_>,
    mint: &TokenMint,
    before: &MachineRow,
    event: &Event,
    context: EventContext<'_>,
) -> Result<Change, LifecycleError> {
    let (next, effects) = match transition(&before.to_lifecycle_machine(), event)? {
        Outcome::Unchanged => return Ok(Change::Unchanged),
        Outcome::Moved { next, effects } => (next, effects),
    };
    let successor = MachineId::new();
    let raised_epoch = effects.iter().find_map(|effect| match effect {
        Effect::Reinstate { epoch } => Some(*epoch),
        _ => None,
    });
    write_state(tx, before, &next, SlotChange { successor, raised_epoch }, &context).await?;
    let mut created = None;
    for effect in effects {
        created = apply_effect(tx, mint, before, effect, successor, &context).await?.or(created);
    }
    Ok(Change::Moved { created })
}

/// How an event changes which machine holds the slot.
struct SlotChange {
    /// The id of the machine that replaces this one; unused if the event replaces none.
    successor: MachineId,
    /// The epoch under which a reinstated machine holds its slot again.
    raised_epoch: Option<Epoch>,
}

async fn write_state(
    tx: &Transaction<'_>,
    before: &MachineRow,
    next: &State,
    slot_change: SlotChange,
    context: &EventContext<'_>,
) -> Result<(), DbError> {
    let mut columns = NextState {
        status: next.status().unwrap_or(before.status),
        failure: None,
        server_type: &before.server_type,
        resize_to: None,
        slot_transition: slot_change
            .raised_epoch
            .map_or(SlotTransition::Unchanged, |epoch| SlotTransition::Reinstated { epoch }),
    };
    let failure;
    match next {
        State::Provisioning | State::Recovering => {}
        State::Running { server_type } => columns.server_type = server_type,
        State::Resizing { from, to } => {
            columns.server_type = from;
            columns.resize_to = Some(to);
        }
        State::Failed { .. } => {
            failure = to_failure(next, context);
            columns.failure = failure.as_ref();
        }
        // The machine has already left its slot, so only its recorded previous state is updated.
        State::Retired { previous } | State::Deleted { previous } if has_already_left(before, next) => {
            failure = to_failure(previous, context);
            columns.failure = failure.as_ref();
        }
        State::Retired { .. } => {
            columns.failure = before.failure.as_ref();
            columns.slot_transition = SlotTransition::Retired { by: slot_change.successor };
        }
        State::Deleted { .. } => {
            columns.failure = before.failure.as_ref();
            columns.slot_transition = SlotTransition::Deleted;
        }
    }
    machine_changes::compare_and_set(tx, before, &columns).await
}

/// Returns whether the machine had already left its slot in the way that `next` describes.
fn has_already_left(before: &MachineRow, next: &State) -> bool {
    match next {
        State::Retired { .. } => before.retired_at.is_some(),
        State::Deleted { .. } => before.deleted_at.is_some(),
        _ => false,
    }
}

fn to_failure(state: &State, context: &EventContext<'_>) -> Option<Failure> {
    let State::Failed { cause } = state else { return None };
    let (stage, message) =
        context.failure.map(|(stage, message)| (stage.to_owned(), message.to_owned())).unzip();
    Some(Failure { cause: *cause, stage, message })
}

async fn apply_effect(
    tx: &Transaction<'_>,
    mint: &TokenMint,
    before: &MachineRow,
    effect: Effect,
    successor: MachineId,
    context: &EventContext<'_>,
) -> Result<Option<CreatedOperation>, LifecycleError> {
    match effect {
        Effect::CancelOperation => db::operations::end_running(tx, before.id, "cancelled", None).await?,
        Effect::FailOperation { cause } => {
            db::operations::end_running(tx, before.id, "failed", Some(cause.as_str())).await?;
        }
        Effect::Replace { status, restore, epoch } => {
            let request = context.successor.ok_or(LifecycleError::Missing("a successor"))?;
            let epoch = epoch.max(context.epoch_floor.next());
            let plan = StartPlan { id: successor, status, restore, epoch, options: context.options };
            return insert_machine(tx, mint, request, plan).await.map(Some);
        }
        Effect::DeleteServer => {
            return Ok(Some(create_operation(tx, before.id, OperationKind::Delete, context.options).await?));
        }
        // The operation reads the new type from the row.
        Effect::ChangeType { .. } => {
            return Ok(Some(create_operation(tx, before.id, OperationKind::Resize, context.options).await?));
        }
        // An operator has powered the server off, so it stays off.
        Effect::PowerOn if before.powered_off_at.is_some() => {}
        Effect::PowerOn => {
            return Ok(Some(
                create_operation(tx, before.id, OperationKind::PowerOn, OperationOptions::default()).await?,
            ));
        }
        Effect::Reinstate { .. } => {
            return Ok(Some(
                create_operation(tx, before.id, OperationKind::Reinstate, context.options).await?,
            ));
        }
        Effect::ReinstatePredecessor => reinstate_predecessor(tx, mint, before, context).await?,
        Effect::DeletePredecessor => delete_predecessor(tx, mint, before, context).await?,
        // Routers close the connections: they poll the row's change sequence, which a database trigger increments.
        Effect::CloseConnections => {}
    }
    Ok(None)
}

/// Returns the slot to the machine whose server has the newest data. Without such a machine, the failed machine keeps
/// the slot, so that its failure stays visible.
async fn reinstate_predecessor(
    tx: &Transaction<'_>,
    mint: &TokenMint,
    before: &MachineRow,
    context: &EventContext<'_>,
) -> Result<(), LifecycleError> {
    let Some(predecessor) = find_reinstatable(tx, before).await? else { return Ok(()) };
    machine_changes::leave_slot(tx, before.id, predecessor.id).await?;
    let highest = db::machines::find_highest_epoch(tx, &before.user, &before.slot).await?;
    let event = Event::Reinstated { epoch: highest.next(), power: predecessor.server_power() };
    // A failure that no heartbeat clears keeps its reason.
    let previous_failure =
        predecessor.failure.as_ref().filter(|failure| !failure.cause.is_cleared_by_heartbeat());
    let failure =
        previous_failure.and_then(|failure| failure.stage.as_deref().zip(failure.message.as_deref()));
    let reason = "the machine that was meant to replace this one did not register";
    let context = EventContext { failure: failure.or(Some(("reinstate", reason))), ..context.clone() };
    Box::pin(apply(tx, mint, &predecessor, &event, context)).await?;
    write_audit_entry(tx, "reinstate", &predecessor).await?;
    tracing::warn!(machine = %before.id, reinstated = %predecessor.id, "returned a slot to an earlier machine");
    Ok(())
}

/// Finds the slot's last registered machine that has a server; `None` if that machine was deleted. Does not go back
/// past a deleted machine or a machine that has stored a snapshot: an older machine would replace that snapshot with an
/// older state.
async fn find_reinstatable(tx: &Transaction<'_>, before: &MachineRow) -> Result<Option<MachineRow>, DbError> {
    for unlocked in db::machines::list_registered_before(tx, before, MAX_PREDECESSORS).await? {
        let Some(machine) = db::machines::lock(tx, unlocked.id).await? else { continue };
        if machine.has_server() {
            return Ok(Some(machine).filter(|machine| machine.deleted_at.is_none()));
        }
        if machine.deleted_at.is_some() || machine.backup_taken_at.max(machine.final_backup_at).is_some() {
            return Ok(None);
        }
    }
    Ok(None)
}

/// Deletes the predecessor of a machine that is being deleted before it has registered. An operator's request to delete
/// the server without a grace period does not extend to the predecessor's server.
async fn delete_predecessor(
    tx: &Transaction<'_>,
    mint: &TokenMint,
    before: &MachineRow,
    context: &EventContext<'_>,
) -> Result<(), LifecycleError> {
    if before.registered_at.is_some() {
        return Ok(());
    }
    let Some(predecessor) = db::machines::lock_last_registered(tx, before).await? else { return Ok(()) };
    if predecessor.has_server() {
        let options = OperationOptions { now: false, ..context.options };
        let context = EventContext { options, ..context.clone() };
        let change = Box::pin(apply(tx, mint, &predecessor, &Event::SuccessorDeleted, context)).await?;
        if change != Change::Unchanged {
            write_audit_entry(tx, "delete.predecessor", &predecessor).await?;
        }
    }
    Ok(())
}

/// Writes the audit entry for the effect of one machine's change on another machine in its slot.
async fn write_audit_entry(tx: &Transaction<'_>, action: &str, before: &MachineRow) -> Result<(), DbError> {
    let after = db::machines::get(tx, before.id).await?.map(|after| after.audit_record());
    let entry = db::audit::AuditEntry {
        actor: "platform",
        action,
        target: &before.id.to_string(),
        before: Some(&before.audit_record()),
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

/// Creates a machine in a free slot.
///
/// # Errors
/// [`LifecycleError::Db`] if a read or write fails: [`DbError::Violated`] with the constraint `user_machines_active` if
/// another machine holds the slot.
pub async fn create_machine(
    tx: &Transaction<'_>,
    mint: &TokenMint,
    request: &MachineRequest,
    restore: RestoreMode,
    context: &EventContext<'_>,
) -> Result<CreatedOperation, LifecycleError> {
    let highest = db::machines::find_highest_epoch(tx, &request.user, &request.slot).await?;
    let epoch = highest.max(context.epoch_floor).next();
    let (id, status, options) = (MachineId::new(), Status::Provisioning, context.options);
    insert_machine(tx, mint, request, StartPlan { id, status, restore, epoch, options }).await
}

/// How a new machine starts.
struct StartPlan {
    id: MachineId,
    status: Status,
    restore: RestoreMode,
    epoch: Epoch,
    options: OperationOptions,
}

async fn insert_machine(
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
        registration_token_hash: mint.token_hash(id, Purpose::Registration, Generation::FIRST),
        upgrade_token_hash: mint.token_hash(id, Purpose::Upgrade, Generation::FIRST),
        preview_ttl: request.preview_ttl,
        restore_snapshot: request.restore_snapshot.clone(),
        should_restore_files: request.should_restore_files,
    };
    machine_changes::insert(tx, &machine).await?;
    Ok(create_operation(tx, id, kind, options).await?)
}
