//! Detects a later holder of a slot that the store records and the database does not, because the database may have
//! been restored from an older copy. Its operations are then outdated, and must not take a serving machine out of
//! service.
//!
//! The invariants: only a fence signed by the platform is proof, since a host can write the pointer, too. A fence
//! that no current key verifies proves nothing and rules nothing out: an operator decides.

use std::time::Duration;

use serde_json::json;

use super::leased::HeldOperation;
use super::step::{Question, StepError, StepOutcome};
use super::{OperationKind, Step};
use crate::alarms::{self, Alarm};
use crate::context::Platform;
use crate::db::machine_row::MachineRow;
use crate::db::{self, Db, DbError};
use svc_http::problem::{Problem, chain};
use svc_machine::epoch::Epoch;
use svc_machine::id::MachineId;
use svc_machine::name::{IdpUserId, Slot};
use svc_store::StoreError;
use svc_store::key::SlotPrefix;
use svc_store::pointer::{Fenced, Pointer};
use svc_store::pointer_io::{self, PointerError};

/// Code of questions and failed operations where the database is older than the store.
pub const BEHIND_STORE: &str = "database_behind_store";
/// Code of a question about a fence that no current key verifies.
pub const UNVERIFIED_FENCE: &str = "unverified_fence";
/// Key of an operation's facts: an operator confirmed the deletion after the question.
pub const CONFIRMED: &str = "outdatedDeletionConfirmed";

/// Delay before an unavailable store is called again.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// Timeout of one pointer read. A longer one would let a hanging store block callers.
const READ_TIMEOUT: Duration = Duration::from_secs(5);

/// A machine that holds the slot under an epoch that the database does not record.
#[derive(Debug, Clone, Copy)]
pub struct LaterHolder {
    pub machine: MachineId,
    pub epoch: Epoch,
}

/// The claim of a slot's fence that the database does not have.
#[derive(Debug, Clone, Copy)]
pub enum FenceClaim {
    Nothing,
    /// The platform gave the slot to this machine.
    Holder(LaterHolder),
    /// The fence names this machine, but no current key verifies its signature: it was made with another platform
    /// key, or a host forged it.
    Unverified(LaterHolder),
}

impl FenceClaim {
    /// The proven holder.
    pub fn holder(self) -> Option<LaterHolder> {
        if let Self::Holder(holder) = self { Some(holder) } else { None }
    }

    fn named_holder(self) -> Option<LaterHolder> {
        match self {
            Self::Nothing => None,
            Self::Holder(holder) | Self::Unverified(holder) => Some(holder),
        }
    }
}

/// Why the slot's holder could not be determined.
#[derive(Debug, thiserror::Error)]
pub enum LookupError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Db(#[from] DbError),
}

impl From<LookupError> for Problem {
    fn from(error: LookupError) -> Self {
        match error {
            LookupError::Store(error) => error.into(),
            LookupError::Db(error) => error.into(),
        }
    }
}

/// Finds what the pointer's fence claims about a machine that the database does not know under that epoch. No
/// database session is held during the store call.
///
/// # Errors
/// [`LookupError`]; `Corrupt` if the pointer is unreadable.
pub async fn find(
    platform: &Platform,
    db: &Db,
    user: &IdpUserId,
    slot: &Slot,
) -> Result<FenceClaim, LookupError> {
    let Some(pointer) = read_pointer(platform, &SlotPrefix::new(user, slot)).await? else {
        return Ok(FenceClaim::Nothing);
    };
    Ok(claim_of_pointer(platform, db, (user, slot), &pointer).await?)
}

async fn read_pointer(platform: &Platform, slot: &SlotPrefix) -> Result<Option<Pointer>, StoreError> {
    let read = pointer_io::read(&platform.bucket, slot);
    let read = platform.bucket.run_with_timeout(&slot.pointer(), READ_TIMEOUT, read).await?;
    Ok(read.map(|read| read.value))
}

async fn claim_of_pointer(
    platform: &Platform,
    db: &Db,
    (user, slot): (&IdpUserId, &Slot),
    pointer: &Pointer,
) -> Result<FenceClaim, DbError> {
    let signed = pointer.fence_machine_id.zip(pointer.fence_proof.as_ref());
    let Some((machine, proof)) = signed else { return Ok(FenceClaim::Nothing) };
    let epoch = pointer.fence_epoch;
    let session = db.session().await?;
    let known = db::machines::get(&session, machine).await?;
    if known.is_some_and(|known| known.epoch >= epoch) {
        return Ok(FenceClaim::Nothing);
    }
    let holder = LaterHolder { machine, epoch };
    if platform.mint.has_signed_fence(&SlotPrefix::new(user, slot), epoch, machine, proof) {
        return Ok(FenceClaim::Holder(holder));
    }
    // No machine of the slot has had such an epoch: only a dishonest host writes it.
    let highest = db::machines::find_highest_epoch(&session, user, slot).await?;
    let is_plausible = epoch <= highest.max_plausible();
    Ok(if is_plausible { FenceClaim::Unverified(holder) } else { FenceClaim::Nothing })
}

/// How an operation continues if the store has a later holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HolderDecision {
    /// The operation continues.
    Nothing,
    /// Its machine is the holder: it continues, and the database adopts the epoch.
    RaiseEpoch,
    /// The deletion was undone later: an operator decides.
    AskWhetherToDelete,
    /// The slot went back to the previous machine, or on to another: this one must not be created.
    FailMachine,
    /// Another machine holds the slot: this one is not reinstated.
    EndOperation,
}

/// The machine of an operation.
#[derive(Debug, Clone, Copy)]
struct OperationSubject {
    machine: MachineId,
    epoch: Epoch,
    is_registered: bool,
    /// By an operator, after the question. A loss accepted with the request concerned an earlier state.
    is_deletion_confirmed: bool,
}

fn decide(kind: OperationKind, of: OperationSubject, holder: LaterHolder) -> HolderDecision {
    let is_own = holder.machine == of.machine;
    match kind {
        OperationKind::Delete if is_own && !of.is_deletion_confirmed => HolderDecision::AskWhetherToDelete,
        OperationKind::Provision | OperationKind::Recover | OperationKind::Delete if is_own => {
            HolderDecision::RaiseEpoch
        }
        // A fence below its own was known when it was requested.
        OperationKind::Provision | OperationKind::Recover
            if !of.is_registered && holder.epoch >= of.epoch =>
        {
            HolderDecision::FailMachine
        }
        OperationKind::Reinstate if !is_own => HolderDecision::EndOperation,
        OperationKind::PowerOn | OperationKind::Reboot if !is_own && holder.epoch > of.epoch => {
            HolderDecision::EndOperation
        }
        _ => HolderDecision::Nothing,
    }
}

/// Whether an unverified fence makes an operation wait for an operator. The machine that it names may be forged, so
/// it has no other effect.
fn needs_decision(kind: OperationKind, step: Step, of: OperationSubject, named: LaterHolder) -> bool {
    let is_other = named.machine != of.machine;
    match kind {
        OperationKind::Delete => true,
        // A fence below its own was known when it was requested. A booting machine destroys nothing.
        OperationKind::Provision | OperationKind::Recover => {
            step != Step::AwaitRegistration && !of.is_registered && named.epoch >= of.epoch
        }
        OperationKind::Reinstate => is_other,
        OperationKind::PowerOn | OperationKind::Reboot => is_other && named.epoch > of.epoch,
        OperationKind::RemoveServer | OperationKind::Resize | OperationKind::PowerOff => false,
    }
}

/// Whether the step may stop, switch off, create, fence or delete something that a later holder needs. The deletion
/// of a kept server has its own check ([`serves_unknown_to_database`]).
fn is_checked(kind: OperationKind, step: Step) -> bool {
    match kind {
        OperationKind::Provision | OperationKind::Recover | OperationKind::Delete => true,
        OperationKind::Reinstate => step == Step::Fence,
        // A replaced machine that is switched on would be routed, and could not be backed up.
        OperationKind::PowerOn | OperationKind::Reboot => step != Step::AwaitHeartbeat,
        OperationKind::RemoveServer | OperationKind::Resize | OperationKind::PowerOff => false,
    }
}

/// Ends or suspends an outdated operation; `None`: it continues.
pub async fn check_step(held: &HeldOperation<'_>, step: Step) -> Result<Option<StepOutcome>, StepError> {
    if !is_checked(held.kind, step) {
        return Ok(None);
    }
    let machine = held.machine().await?;
    let found = match find(held.platform, &held.platform.db, &machine.user, &machine.slot).await {
        Ok(found) => found,
        // The step that needs the pointer reports the damage.
        Err(LookupError::Store(StoreError::Corrupt { .. })) => FenceClaim::Nothing,
        // An unavailable store does not fail a long wait: the next check, or the registration, checks again.
        Err(error) if step == Step::AwaitRegistration => {
            tracing::debug!(error = %chain(&error), "cannot read the fence of the slot");
            FenceClaim::Nothing
        }
        Err(error) if step == Step::LastBackup => {
            tracing::info!(error = %chain(&error), "cannot read the fence of the slot; retrying");
            let (code, source) = match error {
                LookupError::Store(_) => ("store_unavailable", "object store"),
                LookupError::Db(_) => ("database_unavailable", "database"),
            };
            let why = format!("the {source} is unavailable: cannot check who holds the slot");
            return Ok(Some(StepOutcome::wait_for(RETRY_INTERVAL, code, why)));
        }
        Err(error) => return Err(StepError::transient("cannot read the fence of the slot", error)),
    };
    let subject = OperationSubject {
        machine: machine.id,
        epoch: machine.epoch,
        is_registered: machine.registered_at.is_some(),
        is_deletion_confirmed: held.facts().contains_key(CONFIRMED),
    };
    match found {
        FenceClaim::Nothing => Ok(None),
        FenceClaim::Unverified(named) => {
            Ok(require_fence_decision(held, step, (&machine, subject), named).await)
        }
        FenceClaim::Holder(holder) => apply_decision(held, (&machine, subject), holder).await,
    }
}

/// Asks an operator about a fence that no current key verifies.
async fn require_fence_decision(
    held: &HeldOperation<'_>,
    step: Step,
    (machine, subject): (&MachineRow, OperationSubject),
    named: LaterHolder,
) -> Option<StepOutcome> {
    if held.operation.options.disregard_fence || !needs_decision(held.kind, step, subject, named) {
        return None;
    }
    raise_unverified_alarm(held.platform, machine, named).await;
    let operation = held.operation.id;
    let detail = format!(
        "{} The operation waits: with the right keys, `svcctl operation continue {operation}` checks again. If the keys are \
         right, the slot's host forged the signature, and `svcctl operation continue {operation} --accept-loss` disregards it.",
        describe_unverified(named)
    );
    Some(StepOutcome::NeedsDecision(Question {
        code: UNVERIFIED_FENCE,
        detail,
        snapshot: None,
        facts: held.facts(),
    }))
}

/// Describes an unverified fence, and what to check.
pub fn describe_unverified(named: LaterHolder) -> String {
    let LaterHolder { machine, epoch } = named;
    format!(
        "The store says that machine {machine} holds the slot under epoch {epoch}, which this database does not know, and no \
         platform key in force verifies that signature. Check whether PLATFORM_KEY is the current key, or an older one \
         restored with the database: `svcctl doctor platform` compares it with the store."
    )
}

async fn apply_decision(
    held: &HeldOperation<'_>,
    (machine, subject): (&MachineRow, OperationSubject),
    holder: LaterHolder,
) -> Result<Option<StepOutcome>, StepError> {
    let decision = decide(held.kind, subject, holder);
    if !matches!(decision, HolderDecision::Nothing | HolderDecision::RaiseEpoch) {
        raise_alarm(held.platform, machine, holder).await;
    }
    match decision {
        HolderDecision::Nothing => Ok(None),
        HolderDecision::RaiseEpoch => {
            held.raise_epoch(holder.epoch).await?;
            Ok(None)
        }
        HolderDecision::AskWhetherToDelete => {
            let operation = held.operation.id;
            let detail = format!(
                "This database is older than the store, which says that {} got its slot back under epoch {} after it was \
                 deleted. `svcctl operation abandon {operation}` brings it back here as well; `svcctl operation continue \
                 {operation} --accept-loss` deletes it again.",
                machine.id, holder.epoch
            );
            Ok(Some(StepOutcome::NeedsDecision(Question {
                code: BEHIND_STORE,
                detail,
                snapshot: None,
                facts: held.facts(),
            })))
        }
        HolderDecision::FailMachine => {
            let fenced = Fenced { fence: holder.epoch, holder: Some(holder.machine), mine: machine.epoch };
            let what = "the store knows of a later holder of the slot: this database is older than the store";
            Err(StepError::permanent(what, PointerError::Fenced(fenced)))
        }
        HolderDecision::EndOperation => {
            let note = "the store says that another machine holds the slot, which this database does not know: \
                        `svcctl recover` with `--accept-loss` replaces both machines";
            Ok(Some(StepOutcome::Fail { code: BEHIND_STORE, note }))
        }
    }
}

/// Whether the kept server of this machine must stay: the machine was reinstated, or has served, and this database
/// does not know it.
pub async fn serves_unknown_to_database(
    platform: &Platform,
    machine: &MachineRow,
) -> Result<bool, LookupError> {
    let (user, slot) = (&machine.user, &machine.slot);
    let Some(pointer) = read_pointer(platform, &SlotPrefix::new(user, slot)).await? else { return Ok(false) };
    let claim = claim_of_pointer(platform, &platform.db, (user, slot), &pointer).await?;
    let own = claim.named_holder().filter(|named| named.machine == machine.id);
    match (claim, own) {
        (FenceClaim::Unverified(_), Some(named)) => raise_unverified_alarm(platform, machine, named).await,
        (_, Some(holder)) => raise_alarm(platform, machine, holder).await,
        (_, None) => {}
    }
    let named = pointer.snapshot.filter(|named| named.machine_id == machine.id);
    Ok(own.is_some() || machine.registered_at.is_none() && named.is_some())
}

/// Raises the alarm that names the slot with the unverified fence.
pub async fn raise_unverified_alarm(platform: &Platform, machine: &MachineRow, named: LaterHolder) {
    let LaterHolder { machine: holder, epoch } = named;
    let slot = format!("{}/{}", machine.user, machine.slot);
    tracing::warn!(slot, %holder, %epoch, "no platform key in force verifies the fence of the slot");
    let detail = json!({slot: {"machineId": holder, "epoch": epoch}});
    alarms::raise_or_log(platform, Alarm::UnverifiedFence, &detail).await;
}

/// Raises the alarm that names the slot with the later holder.
pub async fn raise_alarm(platform: &Platform, machine: &MachineRow, holder: LaterHolder) {
    let LaterHolder { machine: holder, epoch } = holder;
    let slot = format!("{}/{}", machine.user, machine.slot);
    tracing::warn!(slot, %holder, %epoch, "the store knows of a later holder of the slot than the database");
    let detail = json!({slot: {"machineId": holder, "epoch": epoch}});
    alarms::raise_or_log(platform, Alarm::DatabaseBehindStore, &detail).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decide_stops_outdated_operations() {
        let (own, other) = (MachineId::new(), MachineId::new());
        let subject = |is_registered, is_deletion_confirmed| OperationSubject {
            machine: own,
            epoch: Epoch(5),
            is_registered,
            is_deletion_confirmed,
        };
        let holder = |machine, epoch| LaterHolder { machine, epoch: Epoch(epoch) };
        let booting = subject(false, false);
        for kind in [OperationKind::Provision, OperationKind::Recover] {
            assert_eq!(decide(kind, booting, holder(own, 6)), HolderDecision::RaiseEpoch);
            assert_eq!(decide(kind, booting, holder(other, 6)), HolderDecision::FailMachine);
            assert_eq!(decide(kind, booting, holder(other, 5)), HolderDecision::FailMachine);
            assert_eq!(
                decide(kind, booting, holder(other, 4)),
                HolderDecision::Nothing,
                "known when it was requested"
            );
            assert_eq!(
                decide(kind, subject(true, false), holder(other, 6)),
                HolderDecision::Nothing,
                "it serves"
            );
        }
        let deleted = subject(true, false);
        assert_eq!(
            decide(OperationKind::Delete, deleted, holder(own, 6)),
            HolderDecision::AskWhetherToDelete
        );
        let confirmed = subject(true, true);
        assert_eq!(decide(OperationKind::Delete, confirmed, holder(own, 6)), HolderDecision::RaiseEpoch);
        assert_eq!(decide(OperationKind::Delete, deleted, holder(other, 6)), HolderDecision::Nothing);
        assert_eq!(decide(OperationKind::Reinstate, deleted, holder(other, 4)), HolderDecision::EndOperation);
        assert_eq!(decide(OperationKind::Reinstate, deleted, holder(own, 6)), HolderDecision::Nothing);
        for kind in [OperationKind::PowerOn, OperationKind::Reboot] {
            assert_eq!(decide(kind, deleted, holder(other, 6)), HolderDecision::EndOperation);
            assert_eq!(decide(kind, deleted, holder(own, 6)), HolderDecision::Nothing);
        }
    }

    #[test]
    fn unverified_fence_makes_operations_wait() {
        let (own, other) = (MachineId::new(), MachineId::new());
        let of = |is_registered| OperationSubject {
            machine: own,
            epoch: Epoch(5),
            is_registered,
            is_deletion_confirmed: true,
        };
        let named = |machine, epoch| LaterHolder { machine, epoch: Epoch(epoch) };
        for (kind, is_registered, named, expected) in [
            (OperationKind::Delete, true, named(other, 1), true),
            (OperationKind::Delete, true, named(own, 6), true),
            (OperationKind::Recover, false, named(other, 5), true),
            (OperationKind::Provision, false, named(own, 6), true),
            (OperationKind::Recover, false, named(other, 4), false),
            (OperationKind::Recover, true, named(other, 6), false),
            (OperationKind::Reinstate, true, named(other, 1), true),
            (OperationKind::Reinstate, true, named(own, 6), false),
            (OperationKind::PowerOn, true, named(other, 6), true),
            (OperationKind::Reboot, true, named(other, 5), false),
            (OperationKind::PowerOff, true, named(other, 6), false),
        ] {
            let step = Step::Fence;
            assert_eq!(needs_decision(kind, step, of(is_registered), named), expected, "{kind:?} {named:?}");
        }
        let boots =
            needs_decision(OperationKind::Recover, Step::AwaitRegistration, of(false), named(other, 6));
        assert!(!boots, "an old host must not stop its successor");
    }

    #[test]
    fn every_step_of_these_kinds_is_checked() {
        for kind in [OperationKind::Provision, OperationKind::Recover, OperationKind::Delete] {
            assert!(kind.steps().iter().all(|step| is_checked(kind, *step)));
        }
    }
}
