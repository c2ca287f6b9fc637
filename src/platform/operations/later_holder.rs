//! Whether the store knows of a later holder of a slot than the database, which may have been restored from an older copy:
//! then the operations in it are of the past, and must not take a serving machine out of service.
//!
//! Invariant: only a fence that the platform has signed proves it. A host can write the pointer, too.

use deadpool_postgres::GenericClient;
use serde_json::json;

use super::held::Held;
use super::step::{Answer, Question, StepError};
use super::{OperationKind, Step};
use crate::machine::epoch::Epoch;
use crate::machine::id::MachineId;
use crate::machine::name::{IdpUserId, Slot};
use crate::platform::alarms::{self, Alarm};
use crate::platform::context::Platform;
use crate::platform::db::machine_row::MachineRow;
use crate::platform::db::{self, DbError};
use crate::store::StoreError;
use crate::store::key::SlotPrefix;
use crate::store::pointer::{Fenced, Pointer};
use crate::store::pointer_io::{self, PointerError};

/// The code of a question, and of an operation that ended, because the database is older than the store.
pub const BEHIND_STORE: &str = "database_behind_store";

/// The machine that the platform gave the slot to, under an epoch that the database does not know.
#[derive(Debug, Clone, Copy)]
pub struct LaterHolder {
    pub machine: MachineId,
    pub epoch: Epoch,
}

/// Why it is not known who holds the slot.
#[derive(Debug, thiserror::Error)]
pub enum LookError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Db(#[from] DbError),
}

/// The holder that the pointer's fence names, if the database does not know it under that epoch.
///
/// # Errors
/// [`LookError`]; `Corrupt` where the pointer is not readable.
pub async fn find(
    platform: &Platform,
    client: &impl GenericClient,
    user: &IdpUserId,
    slot: &Slot,
) -> Result<Option<LaterHolder>, LookError> {
    let prefix = SlotPrefix::new(user, slot);
    let Some(read) = pointer_io::read(&platform.bucket, &prefix).await? else { return Ok(None) };
    Ok(of_pointer(platform, client, &prefix, &read.value).await?)
}

async fn of_pointer(
    platform: &Platform,
    client: &impl GenericClient,
    slot: &SlotPrefix,
    pointer: &Pointer,
) -> Result<Option<LaterHolder>, DbError> {
    let signed = pointer.fence_machine_id.zip(pointer.fence_proof.as_ref());
    let Some((machine, proof)) = signed else { return Ok(None) };
    let epoch = pointer.fence_epoch;
    if !platform.mint.has_signed_fence(slot, epoch, machine, proof) {
        return Ok(None);
    }
    let known = db::machines::get(client, machine).await?;
    let is_known = known.is_some_and(|known| known.epoch >= epoch);
    Ok((!is_known).then_some(LaterHolder { machine, epoch }))
}

/// What becomes of an operation that is of the past; `None`: it is not. Looked at before each step that stops, switches
/// off, creates or deletes.
///
/// # Errors
/// [`StepError`].
pub async fn answer(held: &Held<'_>, step: Step) -> Result<Option<Answer>, StepError> {
    let looks = match held.kind {
        OperationKind::Provision | OperationKind::Recover | OperationKind::Delete => true,
        OperationKind::Reinstate => step == Step::Fence,
        OperationKind::RemoveServer
        | OperationKind::Resize
        | OperationKind::PowerOn
        | OperationKind::PowerOff
        | OperationKind::Reboot => false,
    };
    if !looks {
        return Ok(None);
    }
    let machine = held.machine().await?;
    let session = held.platform.db.session().await?;
    let found = match find(held.platform, &session, &machine.user, &machine.slot).await {
        Ok(found) => found,
        // Whoever needs the pointer says that it is damaged.
        Err(LookError::Store(StoreError::Corrupt { .. })) => None,
        Err(error) => return Err(StepError::transient("the fence of the slot is not known", error)),
    };
    drop(session);
    let Some(holder) = found else { return Ok(None) };
    decide(held, &machine, holder).await
}

async fn decide(
    held: &Held<'_>,
    machine: &MachineRow,
    holder: LaterHolder,
) -> Result<Option<Answer>, StepError> {
    let is_own = holder.machine == machine.id;
    match held.kind {
        OperationKind::Delete if is_own => {
            if held.operation.options.accept_loss {
                return Ok(None);
            }
            warn(held.platform, machine, holder).await;
            let detail = format!(
                "This database is older than the store, which says that {} got its slot back under epoch {} after it was \
                 deleted. Abandon brings it back here as well; continue with acceptLoss deletes it again.",
                machine.id, holder.epoch
            );
            Ok(Some(Answer::Ask(Question { code: BEHIND_STORE, detail, facts: held.facts() })))
        }
        OperationKind::Provision | OperationKind::Recover if is_own => {
            held.raise_epoch(holder.epoch).await?;
            Ok(None)
        }
        // The slot went back to the machine before this one, or on to another: this one is not to be made any more.
        OperationKind::Provision | OperationKind::Recover if holder.epoch >= machine.epoch => {
            if machine.registered_at.is_some() {
                return Ok(None);
            }
            warn(held.platform, machine, holder).await;
            let fenced = Fenced { fence: holder.epoch, holder: Some(holder.machine), mine: machine.epoch };
            let what = "the store knows of a later holder of the slot: this database is older than the store";
            Err(StepError::permanent(what, PointerError::Fenced(fenced)))
        }
        OperationKind::Reinstate if !is_own => {
            warn(held.platform, machine, holder).await;
            let note = "the store says that another machine holds the slot, which this database does not know: \
                        recover with acceptLoss replaces both";
            Ok(Some(Answer::Fail { code: BEHIND_STORE, note }))
        }
        _ => Ok(None),
    }
}

/// Whether the kept server of this machine must stay: the machine got its slot back, or has served, and this database
/// does not know it.
///
/// # Errors
/// [`LookError`].
pub async fn serves_unknown_to_database(
    platform: &Platform,
    machine: &MachineRow,
) -> Result<bool, LookError> {
    let slot = SlotPrefix::new(&machine.user, &machine.slot);
    let Some(read) = pointer_io::read(&platform.bucket, &slot).await? else { return Ok(false) };
    let session = platform.db.session().await?;
    let holder = of_pointer(platform, &session, &slot, &read.value).await?;
    let own = holder.filter(|holder| holder.machine == machine.id);
    if let Some(holder) = own {
        warn(platform, machine, holder).await;
    }
    let named = read.value.snapshot.filter(|named| named.machine_id == machine.id);
    Ok(own.is_some() || machine.registered_at.is_none() && named.is_some())
}

/// Raises the alarm that names the slot.
pub async fn warn(platform: &Platform, machine: &MachineRow, holder: LaterHolder) {
    let detail = json!({
        "idpUserId": machine.user,
        "slot": machine.slot,
        "machineId": holder.machine,
        "epoch": holder.epoch,
    });
    alarms::inform(platform, Alarm::DatabaseBehindStore, &detail).await;
}
