//! The one way in which a machine's state changes: the pure transition, then its result and effects in one transaction.
//!
//! Decides nothing itself. The invariant: the row is written only if it still is what the transition looked at, and
//! every effect is written with it or not at all.

use std::time::Duration;

use deadpool_postgres::Transaction;

use super::db::machine_changes::{self, End, NewMachine, NextState};
use super::db::machine_row::{Failure, Kind, MachineRow};
use super::db::{self, DbError};
use super::operations::OperationKind;
use super::tokens::{Purpose, TokenMint};
use crate::machine::epoch::Epoch;
use crate::machine::event::{Effect, Event, RestoreMode};
use crate::machine::id::{MachineId, OperationId};
use crate::machine::name::{Handle, IdpUserId, ImageVersion, Location, ServerType, Slot};
use crate::machine::state::{State, Status};
use crate::machine::transition::{Outcome, Refusal, transition};

/// Why a change did not happen.
#[derive(Debug, thiserror::Error)]
pub enum LifecycleError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Db(#[from] DbError),
    /// The transition asks for what the caller did not bring.
    #[error("the change of state needs {0}")]
    Missing(&'static str),
}

/// The machine that is to be made for a slot.
pub struct Wanted {
    pub user: IdpUserId,
    pub slot: Slot,
    pub handle: Handle,
    pub kind: Kind,
    pub server_type: ServerType,
    pub location: Location,
    pub image_version: ImageVersion,
    pub bundle_sha256: String,
    pub https_port: u16,
    pub lives_for: Option<Duration>,
    /// The snapshot to begin with; `None`: the one that the pointer names.
    pub restore_snapshot: Option<String>,
}

/// What goes with an event besides what the transition looks at.
#[derive(Default)]
pub struct Circumstances<'a> {
    /// Where and why it failed, for people.
    pub failed_at: Option<(&'a str, &'a str)>,
    /// The machine that takes this one's place, where the event replaces it.
    pub successor: Option<&'a Wanted>,
}

/// A machine with the operation that was filed for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Filed {
    pub machine: MachineId,
    pub operation: OperationId,
}

/// What came of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    Unchanged,
    Moved { filed: Option<Filed> },
}

/// Applies an event to a machine whose row the transaction holds.
///
/// # Errors
/// [`LifecycleError`]; then the transaction must not be committed.
pub async fn apply(
    tx: &Transaction<'_>,
    mint: &TokenMint,
    was: &MachineRow,
    event: &Event,
    with: Circumstances<'_>,
) -> Result<Change, LifecycleError> {
    let (next, effects) = match transition(&was.lifecycle(), event)? {
        Outcome::Unchanged => return Ok(Change::Unchanged),
        Outcome::Moved { next, effects } => (next, effects),
    };
    let successor = MachineId::new();
    write_state(tx, was, &next, successor, &with).await?;
    let mut filed = None;
    for effect in effects {
        filed = effect_of(tx, mint, was, effect, successor, &with).await?.or(filed);
    }
    Ok(Change::Moved { filed })
}

async fn write_state(
    tx: &Transaction<'_>,
    was: &MachineRow,
    next: &State,
    successor: MachineId,
    with: &Circumstances<'_>,
) -> Result<(), DbError> {
    let mut written = NextState {
        status: next.status().unwrap_or(was.status),
        failure: None,
        server_type: &was.server_type,
        resize_to: None,
        end: End::Stays,
    };
    let failure;
    match next {
        State::Provisioning | State::Recovering => {}
        State::Running { server_type } => written.server_type = server_type,
        State::Resizing { from, to } => {
            written.server_type = from;
            written.resize_to = Some(to);
        }
        State::Failed { cause } => {
            let (stage, message) = with.failed_at.unzip();
            failure = Failure {
                cause: *cause,
                stage: stage.map(str::to_owned),
                message: message.map(str::to_owned),
            };
            written.failure = Some(&failure);
        }
        State::Retired => {
            written.failure = was.failure.as_ref();
            written.end = End::Retired { by: successor };
        }
        State::Deleted => {
            written.failure = was.failure.as_ref();
            written.end = End::Deleted;
        }
    }
    machine_changes::compare_and_set(tx, was, &written).await
}

async fn effect_of(
    tx: &Transaction<'_>,
    mint: &TokenMint,
    was: &MachineRow,
    effect: Effect,
    successor: MachineId,
    with: &Circumstances<'_>,
) -> Result<Option<Filed>, LifecycleError> {
    match effect {
        Effect::CancelOperation => db::operations::end_running(tx, was.id, "cancelled", None).await?,
        Effect::FailOperation { cause } => {
            db::operations::end_running(tx, was.id, "failed", Some(cause.as_str())).await?;
        }
        Effect::Replace { status, restore, epoch } => {
            let wanted = with.successor.ok_or(LifecycleError::Missing("a successor"))?;
            return insert(tx, mint, successor, wanted, status, restore, epoch).await.map(Some);
        }
        Effect::DeleteServer => {
            return Ok(Some(file(tx, was.id, OperationKind::Delete).await?));
        }
        // The type is in the row.
        Effect::ChangeType { .. } => return Ok(Some(file(tx, was.id, OperationKind::Resize).await?)),
        // Routers see the row's change sequence, which the database's trigger moves.
        Effect::CloseConnections => {}
    }
    Ok(None)
}

async fn file(tx: &Transaction<'_>, machine: MachineId, kind: OperationKind) -> Result<Filed, DbError> {
    let operation = db::operations::file(tx, machine, kind.as_str(), kind.first_step().as_str()).await?;
    Ok(Filed { machine, operation })
}

/// Makes the machine of a slot that no machine holds.
///
/// # Errors
/// [`LifecycleError`]; `user_machines_active` is violated where the slot is held after all.
pub async fn begin(
    tx: &Transaction<'_>,
    mint: &TokenMint,
    wanted: &Wanted,
    restore: RestoreMode,
) -> Result<Filed, LifecycleError> {
    let epoch = db::machines::highest_epoch(tx, &wanted.user, &wanted.slot).await?.next();
    insert(tx, mint, MachineId::new(), wanted, Status::Provisioning, restore, epoch).await
}

async fn insert(
    tx: &Transaction<'_>,
    mint: &TokenMint,
    id: MachineId,
    wanted: &Wanted,
    status: Status,
    restore: RestoreMode,
    epoch: Epoch,
) -> Result<Filed, LifecycleError> {
    let kind = match status {
        Status::Recovering => OperationKind::Recover,
        Status::Provisioning | Status::Running | Status::Resizing | Status::Failed => {
            OperationKind::Provision
        }
    };
    let machine = NewMachine {
        id,
        user: wanted.user.clone(),
        slot: wanted.slot.clone(),
        handle: wanted.handle.clone(),
        kind: wanted.kind,
        status,
        epoch,
        restore,
        server_type: wanted.server_type.clone(),
        location: wanted.location.clone(),
        image_version: wanted.image_version.clone(),
        bundle_sha256: wanted.bundle_sha256.clone(),
        https_port: wanted.https_port,
        registration_token_hash: mint.hash(id, Purpose::Registration),
        upgrade_token_hash: mint.hash(id, Purpose::Upgrade),
        lives_for: wanted.lives_for,
        restore_snapshot: wanted.restore_snapshot.clone(),
    };
    machine_changes::insert(tx, &machine).await?;
    Ok(file(tx, id, kind).await?)
}
