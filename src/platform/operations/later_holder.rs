//! Detects a later holder of a slot: a machine that holds the slot according to the store, but not according to the
//! database. This happens if the database was restored from an older copy. The operations in the database are then
//! outdated, and must not take a serving machine out of service.
//!
//! Invariants: only a fence signed by the platform is proof, because a host can write the pointer, too. A fence that no
//! active platform key verifies proves nothing and rules nothing out: an operator decides.

use std::time::Duration;

use serde_json::json;

use super::leased::LeasedOperation;
use super::step::{Question, StepError, StepOutcome};
use super::{OperationKind, Step};
use crate::alarms::{self, Alarm};
use crate::context::Platform;
use crate::db::machine_row::MachineRow;
use crate::db::{self, Db, DbError};
use svc_http::problem::{Problem, format_chain};
use svc_machine::epoch::Epoch;
use svc_machine::id::MachineId;
use svc_machine::name::{IdpUserId, Slot};
use svc_store::StoreError;
use svc_store::key::SlotPrefix;
use svc_store::pointer::{FencedError, Pointer};
use svc_store::pointer_io::{self, PointerError};

/// The code of questions and failed operations if the database is older than the store.
pub const BEHIND_STORE: &str = "database_behind_store";
/// The code of a question about a fence that no active platform key verifies.
pub const UNVERIFIED_FENCE: &str = "unverified_fence";
/// Key in an operation's facts, set when an operator has confirmed the deletion in answer to the question.
pub const DELETION_CONFIRMED: &str = "outdatedDeletionConfirmed";

/// Delay before a retry while the store or the database is unavailable.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// Timeout for reading the pointer. With a longer timeout, a hung store would block the callers.
const READ_TIMEOUT: Duration = Duration::from_secs(5);

/// A machine that holds the slot under an epoch that the database does not record.
#[derive(Debug, Clone, Copy)]
pub struct LaterHolder {
    pub machine: MachineId,
    pub epoch: Epoch,
}

/// What a slot's fence claims beyond what the database records.
#[derive(Debug, Clone, Copy)]
pub enum FenceClaim {
    Nothing,
    /// The platform gave the slot to this machine.
    Holder(LaterHolder),
    /// The fence names this machine, but no active platform key verifies the fence's signature: it was made with a
    /// different platform key, or a host forged it.
    Unverified(LaterHolder),
}

impl FenceClaim {
    /// Returns the proven holder.
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

/// The reason the slot's holder could not be determined.
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

/// Finds what the pointer's fence claims, unless the database records the fence's machine under that epoch or a later
/// one. No database session is held during the store call.
///
/// # Errors
/// [`LookupError`]; `Corrupt` if the pointer is unreadable.
pub async fn find_claim(
    platform: &Platform,
    db: &Db,
    user: &IdpUserId,
    slot: &Slot,
) -> Result<FenceClaim, LookupError> {
    let Some(pointer) = read_pointer(platform, &SlotPrefix::new(user, slot)).await? else {
        return Ok(FenceClaim::Nothing);
    };
    Ok(evaluate_fence(platform, db, (user, slot), &pointer).await?)
}

async fn read_pointer(platform: &Platform, slot: &SlotPrefix) -> Result<Option<Pointer>, StoreError> {
    let read = pointer_io::read(&platform.bucket, slot);
    let pointer = platform.bucket.run_with_timeout(&slot.pointer(), READ_TIMEOUT, read).await?;
    Ok(pointer.map(|pointer| pointer.value))
}

async fn evaluate_fence(
    platform: &Platform,
    db: &Db,
    (user, slot): (&IdpUserId, &Slot),
    pointer: &Pointer,
) -> Result<FenceClaim, DbError> {
    let signed = pointer.fence_machine_id.zip(pointer.fence_proof.as_ref());
    let Some((machine, proof)) = signed else { return Ok(FenceClaim::Nothing) };
    let epoch = pointer.fence_epoch;
    let session = db.session().await?;
    let recorded = db::machines::get(&session, machine).await?;
    if recorded.is_some_and(|recorded| recorded.epoch >= epoch) {
        return Ok(FenceClaim::Nothing);
    }
    let holder = LaterHolder { machine, epoch };
    if platform.mint.is_fence_signed(&SlotPrefix::new(user, slot), epoch, machine, proof) {
        return Ok(FenceClaim::Holder(holder));
    }
    // No machine in the slot can have had an implausible epoch: only a dishonest host writes one.
    let highest = db::machines::find_highest_epoch(&session, user, slot).await?;
    let is_plausible = epoch <= highest.max_plausible();
    Ok(if is_plausible { FenceClaim::Unverified(holder) } else { FenceClaim::Nothing })
}

/// How an operation continues if the store names a later holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HolderDecision {
    /// The operation continues.
    Continue,
    /// The operation's machine is the holder: the operation continues, and the database adopts the epoch.
    RaiseEpoch,
    /// The machine got its slot back after this deletion: an operator decides.
    RequireConfirmation,
    /// The slot returned to the previous machine, or another machine took it over: the operation's machine must not be
    /// created.
    FailMachine,
    /// Another machine holds the slot: the operation's machine is not reinstated, powered on or rebooted.
    EndOperation,
}

/// An operation's machine.
#[derive(Debug, Clone, Copy)]
struct OperationSubject {
    machine: MachineId,
    epoch: Epoch,
    is_registered: bool,
    /// Whether an operator confirmed the deletion in answer to the question. A loss that was accepted in the request to
    /// delete the machine does not count, because it referred to an earlier state.
    is_deletion_confirmed: bool,
}

fn decide_for_holder(kind: OperationKind, subject: OperationSubject, holder: LaterHolder) -> HolderDecision {
    let is_holder = holder.machine == subject.machine;
    match kind {
        OperationKind::Delete if is_holder && !subject.is_deletion_confirmed => {
            HolderDecision::RequireConfirmation
        }
        OperationKind::Provision | OperationKind::Recover | OperationKind::Delete if is_holder => {
            HolderDecision::RaiseEpoch
        }
        // A fence below the machine's own epoch was already checked when the operation was requested.
        OperationKind::Provision | OperationKind::Recover
            if !subject.is_registered && holder.epoch >= subject.epoch =>
        {
            HolderDecision::FailMachine
        }
        OperationKind::Reinstate if !is_holder => HolderDecision::EndOperation,
        OperationKind::PowerOn | OperationKind::Reboot if !is_holder && holder.epoch > subject.epoch => {
            HolderDecision::EndOperation
        }
        _ => HolderDecision::Continue,
    }
}

/// Returns whether an unverified fence makes an operation wait for an operator. The fence has no other effect, because
/// the machine id in it may be forged.
fn needs_decision(kind: OperationKind, step: Step, subject: OperationSubject, claimed: LaterHolder) -> bool {
    let is_other = claimed.machine != subject.machine;
    match kind {
        OperationKind::Delete => true,
        // A fence below the machine's own epoch was already checked when the operation was requested. A booting machine
        // cannot destroy data.
        OperationKind::Provision | OperationKind::Recover => {
            step != Step::AwaitRegistration && !subject.is_registered && claimed.epoch >= subject.epoch
        }
        OperationKind::Reinstate => is_other,
        OperationKind::PowerOn | OperationKind::Reboot => is_other && claimed.epoch > subject.epoch,
        OperationKind::RemoveServer | OperationKind::Resize | OperationKind::PowerOff => false,
    }
}

/// Returns whether the holder is checked before the step: the step may stop, power off, create, fence or delete
/// something that a later holder needs, or may power on a machine that no longer holds the slot. The deletion of a kept
/// server has its own check ([`should_keep_server`]).
fn needs_holder_check(kind: OperationKind, step: Step) -> bool {
    match kind {
        OperationKind::Provision | OperationKind::Recover | OperationKind::Delete => true,
        OperationKind::Reinstate => step == Step::Fence,
        // If a replaced machine were powered on, requests would be routed to it, but it could not be backed up.
        OperationKind::PowerOn | OperationKind::Reboot => step != Step::AwaitHeartbeat,
        OperationKind::RemoveServer | OperationKind::Resize | OperationKind::PowerOff => false,
    }
}

/// Returns the outcome that ends or suspends an outdated operation, or `None` if the operation continues.
pub async fn check_step(leased: &LeasedOperation<'_>, step: Step) -> Result<Option<StepOutcome>, StepError> {
    if !needs_holder_check(leased.kind, step) {
        return Ok(None);
    }
    let machine = leased.machine().await?;
    let claim = match find_claim(leased.platform, &leased.platform.db, &machine.user, &machine.slot).await {
        Ok(claim) => claim,
        // The step that needs the pointer reports an unreadable one.
        Err(LookupError::Store(StoreError::Corrupt { .. })) => FenceClaim::Nothing,
        // An unavailable store does not end a long wait: the next poll, or the registration, checks again.
        Err(error) if step == Step::AwaitRegistration => {
            tracing::debug!(error = %format_chain(&error), "cannot read the slot's fence");
            FenceClaim::Nothing
        }
        Err(error) if step == Step::FinalBackup => {
            tracing::info!(error = %format_chain(&error), "cannot read the slot's fence; retrying");
            let (code, source) = match error {
                LookupError::Store(_) => ("store_unavailable", "object store"),
                LookupError::Db(_) => ("database_unavailable", "database"),
            };
            let reason = format!("the {source} is unavailable: cannot check who holds the slot");
            return Ok(Some(StepOutcome::wait_for(RETRY_INTERVAL, code, reason)));
        }
        Err(error) => return Err(StepError::transient("cannot read the slot's fence", error)),
    };
    let subject = OperationSubject {
        machine: machine.id,
        epoch: machine.epoch,
        is_registered: machine.registered_at.is_some(),
        is_deletion_confirmed: leased.facts().contains_key(DELETION_CONFIRMED),
    };
    match claim {
        FenceClaim::Nothing => Ok(None),
        FenceClaim::Unverified(claimed) => {
            Ok(require_fence_decision(leased, step, (&machine, subject), claimed).await)
        }
        FenceClaim::Holder(holder) => apply_decision(leased, (&machine, subject), holder).await,
    }
}

/// Requires an operator's decision about a fence that no active platform key verifies, if the operation depends on it.
async fn require_fence_decision(
    leased: &LeasedOperation<'_>,
    step: Step,
    (machine, subject): (&MachineRow, OperationSubject),
    claimed: LaterHolder,
) -> Option<StepOutcome> {
    if leased.operation.options.disregard_fence || !needs_decision(leased.kind, step, subject, claimed) {
        return None;
    }
    raise_unverified_alarm(leased.platform, machine, claimed).await;
    let operation = leased.operation.id;
    let detail = format!(
        "{} The operation is waiting: after you have corrected the keys, `svcctl operation continue {operation}` checks again. \
         If the keys are correct, the slot's host forged the signature, and `svcctl operation continue {operation} \
         --accept-loss` disregards it.",
        describe_unverified(claimed)
    );
    Some(StepOutcome::NeedsDecision(Question {
        code: UNVERIFIED_FENCE,
        detail,
        snapshot: None,
        facts: leased.facts(),
    }))
}

/// Describes an unverified fence, and what to check.
pub fn describe_unverified(claimed: LaterHolder) -> String {
    let LaterHolder { machine, epoch } = claimed;
    format!(
        "According to the store, machine {machine} holds the slot under epoch {epoch}. This database does not record that \
         epoch, and no active platform key verifies the signature. Check whether PLATFORM_KEY is the current key, or an \
         older one restored with the database: `svcctl doctor platform` compares it with the store."
    )
}

async fn apply_decision(
    leased: &LeasedOperation<'_>,
    (machine, subject): (&MachineRow, OperationSubject),
    holder: LaterHolder,
) -> Result<Option<StepOutcome>, StepError> {
    let decision = decide_for_holder(leased.kind, subject, holder);
    if !matches!(decision, HolderDecision::Continue | HolderDecision::RaiseEpoch) {
        raise_alarm(leased.platform, machine, holder).await;
    }
    match decision {
        HolderDecision::Continue => Ok(None),
        HolderDecision::RaiseEpoch => {
            leased.raise_epoch(holder.epoch).await?;
            Ok(None)
        }
        HolderDecision::RequireConfirmation => {
            let operation = leased.operation.id;
            let detail = format!(
                "This database is older than the store: according to the store, {} got its slot back under epoch {} after it \
                 was deleted. `svcctl operation abandon {operation}` returns it to its slot in this database, too; `svcctl \
                 operation continue {operation} --accept-loss` deletes it again.",
                machine.id, holder.epoch
            );
            Ok(Some(StepOutcome::NeedsDecision(Question {
                code: BEHIND_STORE,
                detail,
                snapshot: None,
                facts: leased.facts(),
            })))
        }
        HolderDecision::FailMachine => {
            let fenced = FencedError {
                fence_epoch: holder.epoch,
                holder: Some(holder.machine),
                writer_epoch: machine.epoch,
            };
            let what = "the store records a later holder of the slot: this database is older than the store";
            Err(StepError::permanent(what, PointerError::Fenced(fenced)))
        }
        HolderDecision::EndOperation => {
            let note = "according to the store, another machine holds the slot, which this database does not record: \
                        `svcctl recover USER --accept-loss` replaces both machines";
            Ok(Some(StepOutcome::Fail { code: BEHIND_STORE, note }))
        }
    }
}

/// Returns whether the machine's kept server must stay because, according to the store, the machine was reinstated or
/// has served traffic without a record in this database.
pub async fn should_keep_server(platform: &Platform, machine: &MachineRow) -> Result<bool, LookupError> {
    let (user, slot) = (&machine.user, &machine.slot);
    let Some(pointer) = read_pointer(platform, &SlotPrefix::new(user, slot)).await? else { return Ok(false) };
    let claim = evaluate_fence(platform, &platform.db, (user, slot), &pointer).await?;
    let own_claim = claim.named_holder().filter(|claimed| claimed.machine == machine.id);
    match (claim, own_claim) {
        (FenceClaim::Unverified(_), Some(claimed)) => {
            raise_unverified_alarm(platform, machine, claimed).await;
        }
        (_, Some(holder)) => raise_alarm(platform, machine, holder).await,
        (_, None) => {}
    }
    // A machine whose snapshot the pointer names has served traffic, so it had registered, even if the database does
    // not record that.
    let own_snapshot = pointer.snapshot.filter(|snapshot| snapshot.machine_id == machine.id);
    Ok(own_claim.is_some() || machine.registered_at.is_none() && own_snapshot.is_some())
}

/// Raises the alarm that names the slot with the unverified fence.
pub async fn raise_unverified_alarm(platform: &Platform, machine: &MachineRow, claimed: LaterHolder) {
    let LaterHolder { machine: holder, epoch } = claimed;
    let slot = format!("{}/{}", machine.user, machine.slot);
    tracing::warn!(slot, %holder, %epoch, "no active platform key verifies the slot's fence");
    let detail = json!({slot: {"machineId": holder, "epoch": epoch}});
    alarms::raise_or_log(platform, Alarm::UnverifiedFence, &detail).await;
}

/// Raises the alarm that names the slot with the later holder.
pub async fn raise_alarm(platform: &Platform, machine: &MachineRow, holder: LaterHolder) {
    let LaterHolder { machine: holder, epoch } = holder;
    let slot = format!("{}/{}", machine.user, machine.slot);
    tracing::warn!(slot, %holder, %epoch, "the store records a later holder of the slot than the database");
    let detail = json!({slot: {"machineId": holder, "epoch": epoch}});
    alarms::raise_or_log(platform, Alarm::DatabaseBehindStore, &detail).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decide_for_holder_stops_outdated_operations() {
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
            assert_eq!(decide_for_holder(kind, booting, holder(own, 6)), HolderDecision::RaiseEpoch);
            assert_eq!(decide_for_holder(kind, booting, holder(other, 6)), HolderDecision::FailMachine);
            assert_eq!(decide_for_holder(kind, booting, holder(other, 5)), HolderDecision::FailMachine);
            assert_eq!(
                decide_for_holder(kind, booting, holder(other, 4)),
                HolderDecision::Continue,
                "the fence was already checked when the operation was requested"
            );
            assert_eq!(
                decide_for_holder(kind, subject(true, false), holder(other, 6)),
                HolderDecision::Continue,
                "the machine is serving"
            );
        }
        let deleted = subject(true, false);
        assert_eq!(
            decide_for_holder(OperationKind::Delete, deleted, holder(own, 6)),
            HolderDecision::RequireConfirmation
        );
        let confirmed = subject(true, true);
        assert_eq!(
            decide_for_holder(OperationKind::Delete, confirmed, holder(own, 6)),
            HolderDecision::RaiseEpoch
        );
        assert_eq!(
            decide_for_holder(OperationKind::Delete, deleted, holder(other, 6)),
            HolderDecision::Continue
        );
        assert_eq!(
            decide_for_holder(OperationKind::Reinstate, deleted, holder(other, 4)),
            HolderDecision::EndOperation
        );
        assert_eq!(
            decide_for_holder(OperationKind::Reinstate, deleted, holder(own, 6)),
            HolderDecision::Continue
        );
        for kind in [OperationKind::PowerOn, OperationKind::Reboot] {
            assert_eq!(decide_for_holder(kind, deleted, holder(other, 6)), HolderDecision::EndOperation);
            assert_eq!(decide_for_holder(kind, deleted, holder(own, 6)), HolderDecision::Continue);
        }
    }

    #[test]
    fn unverified_fence_makes_operations_wait() {
        let (own, other) = (MachineId::new(), MachineId::new());
        let subject = |is_registered| OperationSubject {
            machine: own,
            epoch: Epoch(5),
            is_registered,
            is_deletion_confirmed: true,
        };
        let claimed = |machine, epoch| LaterHolder { machine, epoch: Epoch(epoch) };
        for (kind, is_registered, claimed, expected) in [
            (OperationKind::Delete, true, claimed(other, 1), true),
            (OperationKind::Delete, true, claimed(own, 6), true),
            (OperationKind::Recover, false, claimed(other, 5), true),
            (OperationKind::Provision, false, claimed(own, 6), true),
            (OperationKind::Recover, false, claimed(other, 4), false),
            (OperationKind::Recover, true, claimed(other, 6), false),
            (OperationKind::Reinstate, true, claimed(other, 1), true),
            (OperationKind::Reinstate, true, claimed(own, 6), false),
            (OperationKind::PowerOn, true, claimed(other, 6), true),
            (OperationKind::Reboot, true, claimed(other, 5), false),
            (OperationKind::PowerOff, true, claimed(other, 6), false),
        ] {
            let step = Step::Fence;
            assert_eq!(
                needs_decision(kind, step, subject(is_registered), claimed),
                expected,
                "{kind:?} {claimed:?}"
            );
        }
        let waits = needs_decision(
            OperationKind::Recover,
            Step::AwaitRegistration,
            subject(false),
            claimed(other, 6),
        );
        assert!(!waits, "a replaced host must not stop its successor from booting");
    }

    #[test]
    fn every_creation_and_deletion_step_is_checked() {
        for kind in [OperationKind::Provision, OperationKind::Recover, OperationKind::Delete] {
            assert!(kind.steps().iter().all(|step| needs_holder_check(kind, *step)));
        }
    }
}
