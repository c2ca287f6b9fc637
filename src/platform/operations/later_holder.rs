//! Whether the store knows of a later holder of a slot than the database, which may have been restored from an older copy:
//! then the operations in it are of the past, and must not take a serving machine out of service.
//!
//! Invariant: only a fence that the platform has signed proves it. A host can write the pointer, too.

use std::time::Duration;

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
use crate::platform::db::{self, Db, DbError};
use crate::store::StoreError;
use crate::store::key::SlotPrefix;
use crate::store::pointer::{Fenced, Pointer};
use crate::store::pointer_io::{self, PointerError};

/// The code of a question, and of an operation that ended, because the database is older than the store.
pub const BEHIND_STORE: &str = "database_behind_store";
/// That an operator was asked, among an operation's facts.
const ASKED: &str = "askedBehindStore";

/// Of one look at the pointer: longer, and a store that hangs would hold up what waits for the answer.
const READ_TIMEOUT: Duration = Duration::from_secs(5);

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

/// The holder that the pointer's fence names, if the database does not know it under that epoch. No session of the database
/// is held while the store is asked.
///
/// # Errors
/// [`LookError`]; `Corrupt` where the pointer is not readable.
pub async fn find(
    platform: &Platform,
    db: &Db,
    user: &IdpUserId,
    slot: &Slot,
) -> Result<Option<LaterHolder>, LookError> {
    let prefix = SlotPrefix::new(user, slot);
    let Some(pointer) = read(platform, &prefix).await? else { return Ok(None) };
    Ok(of_pointer(platform, db, &prefix, &pointer).await?)
}

async fn read(platform: &Platform, slot: &SlotPrefix) -> Result<Option<Pointer>, StoreError> {
    let read = pointer_io::read(&platform.bucket, slot);
    let read = platform.bucket.within(&slot.pointer(), READ_TIMEOUT, read).await?;
    Ok(read.map(|read| read.value))
}

async fn of_pointer(
    platform: &Platform,
    db: &Db,
    slot: &SlotPrefix,
    pointer: &Pointer,
) -> Result<Option<LaterHolder>, DbError> {
    let signed = pointer.fence_machine_id.zip(pointer.fence_proof.as_ref());
    let Some((machine, proof)) = signed else { return Ok(None) };
    let epoch = pointer.fence_epoch;
    if !platform.mint.has_signed_fence(slot, epoch, machine, proof) {
        return Ok(None);
    }
    let known = db::machines::get(&db.session().await?, machine).await?;
    let is_known = known.is_some_and(|known| known.epoch >= epoch);
    Ok((!is_known).then_some(LaterHolder { machine, epoch }))
}

/// What a later holder means for an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meaning {
    /// The operation goes on.
    Nothing,
    /// Its machine is the holder: it goes on, and the database learns the epoch.
    RaiseEpoch,
    /// The deletion was undone since: an operator decides.
    AskWhetherToDelete,
    /// The slot went back to the machine before this one, or on to another: this one is not to be made any more.
    FailMachine,
    /// Another machine holds the slot: this one does not get it back.
    EndOperation,
}

/// The machine that an operation is about.
#[derive(Debug, Clone, Copy)]
struct Subject {
    machine: MachineId,
    epoch: Epoch,
    is_registered: bool,
    /// An operator was asked and said so. A loss that was accepted at the request was accepted in the past.
    is_told_to_delete: bool,
}

fn meaning(kind: OperationKind, of: Subject, holder: LaterHolder) -> Meaning {
    let is_own = holder.machine == of.machine;
    match kind {
        OperationKind::Delete if is_own && !of.is_told_to_delete => Meaning::AskWhetherToDelete,
        OperationKind::Provision | OperationKind::Recover | OperationKind::Delete if is_own => {
            Meaning::RaiseEpoch
        }
        // A fence below its own was known when it was requested.
        OperationKind::Provision | OperationKind::Recover
            if !of.is_registered && holder.epoch >= of.epoch =>
        {
            Meaning::FailMachine
        }
        OperationKind::Reinstate if !is_own => Meaning::EndOperation,
        _ => Meaning::Nothing,
    }
}

/// Whether the step of an operation may stop, switch off, create, fence or delete what a later holder needs. The deletion of
/// a kept server looks for itself ([`serves_unknown_to_database`]).
fn looks(kind: OperationKind, step: Step) -> bool {
    match kind {
        OperationKind::Provision | OperationKind::Recover | OperationKind::Delete => true,
        OperationKind::Reinstate => step == Step::Fence,
        OperationKind::RemoveServer
        | OperationKind::Resize
        | OperationKind::PowerOn
        | OperationKind::PowerOff
        | OperationKind::Reboot => false,
    }
}

/// What becomes of an operation that is of the past; `None`: it goes on.
///
/// # Errors
/// [`StepError`].
pub async fn answer(held: &Held<'_>, step: Step) -> Result<Option<Answer>, StepError> {
    if !looks(held.kind, step) {
        return Ok(None);
    }
    let machine = held.machine().await?;
    let found = match find(held.platform, &held.platform.db, &machine.user, &machine.slot).await {
        Ok(found) => found,
        // Whoever needs the pointer says that it is damaged.
        Err(LookError::Store(StoreError::Corrupt { .. })) => None,
        Err(error) => return Err(StepError::transient("the fence of the slot is not known", error)),
    };
    let Some(holder) = found else { return Ok(None) };
    let subject = Subject {
        machine: machine.id,
        epoch: machine.epoch,
        is_registered: machine.registered_at.is_some(),
        is_told_to_delete: held.facts().contains_key(ASKED) && held.operation.options.accept_loss,
    };
    let meaning = meaning(held.kind, subject, holder);
    if !matches!(meaning, Meaning::Nothing | Meaning::RaiseEpoch) {
        warn(held.platform, &machine, holder).await;
    }
    match meaning {
        Meaning::Nothing => Ok(None),
        Meaning::RaiseEpoch => {
            held.raise_epoch(holder.epoch).await?;
            Ok(None)
        }
        Meaning::AskWhetherToDelete => {
            let detail = format!(
                "This database is older than the store, which says that {} got its slot back under epoch {} after it was \
                 deleted. Abandon brings it back here as well; continue with acceptLoss deletes it again.",
                machine.id, holder.epoch
            );
            let mut facts = held.facts();
            facts.insert(ASKED.to_owned(), json!(true));
            Ok(Some(Answer::Ask(Question { code: BEHIND_STORE, detail, facts })))
        }
        Meaning::FailMachine => {
            let fenced = Fenced { fence: holder.epoch, holder: Some(holder.machine), mine: machine.epoch };
            let what = "the store knows of a later holder of the slot: this database is older than the store";
            Err(StepError::permanent(what, PointerError::Fenced(fenced)))
        }
        Meaning::EndOperation => {
            let note = "the store says that another machine holds the slot, which this database does not know: \
                        recover with acceptLoss replaces both";
            Ok(Some(Answer::Fail { code: BEHIND_STORE, note }))
        }
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
    let Some(pointer) = read(platform, &slot).await? else { return Ok(false) };
    let holder = of_pointer(platform, &platform.db, &slot, &pointer).await?;
    let own = holder.filter(|holder| holder.machine == machine.id);
    if let Some(holder) = own {
        warn(platform, machine, holder).await;
    }
    let named = pointer.snapshot.filter(|named| named.machine_id == machine.id);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_holder_stops_what_is_of_the_past() {
        let (own, other) = (MachineId::new(), MachineId::new());
        let subject = |is_registered, is_told_to_delete| Subject {
            machine: own,
            epoch: Epoch(5),
            is_registered,
            is_told_to_delete,
        };
        let holder = |machine, epoch| LaterHolder { machine, epoch: Epoch(epoch) };
        let booting = subject(false, false);
        for kind in [OperationKind::Provision, OperationKind::Recover] {
            assert_eq!(meaning(kind, booting, holder(own, 6)), Meaning::RaiseEpoch);
            assert_eq!(meaning(kind, booting, holder(other, 6)), Meaning::FailMachine);
            assert_eq!(meaning(kind, booting, holder(other, 5)), Meaning::FailMachine);
            assert_eq!(
                meaning(kind, booting, holder(other, 4)),
                Meaning::Nothing,
                "known when it was requested"
            );
            assert_eq!(meaning(kind, subject(true, false), holder(other, 6)), Meaning::Nothing, "it serves");
            let accepted = subject(false, true);
            assert_eq!(
                meaning(kind, accepted, holder(other, 6)),
                Meaning::FailMachine,
                "accepted in the past"
            );
        }
        let deleted = subject(true, false);
        assert_eq!(meaning(OperationKind::Delete, deleted, holder(own, 6)), Meaning::AskWhetherToDelete);
        let told = subject(true, true);
        assert_eq!(meaning(OperationKind::Delete, told, holder(own, 6)), Meaning::RaiseEpoch);
        assert_eq!(meaning(OperationKind::Delete, deleted, holder(other, 6)), Meaning::Nothing);
        assert_eq!(meaning(OperationKind::Reinstate, deleted, holder(other, 4)), Meaning::EndOperation);
        assert_eq!(meaning(OperationKind::Reinstate, deleted, holder(own, 6)), Meaning::Nothing);
    }

    #[test]
    fn every_step_that_takes_out_of_service_looks() {
        for kind in [OperationKind::Provision, OperationKind::Recover, OperationKind::Delete] {
            assert!(kind.steps().iter().all(|step| looks(kind, *step)));
        }
    }
}
