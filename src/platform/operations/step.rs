//! Runs an operation's current step, and defines what a step returns.

use std::borrow::Cow;
use std::net::Ipv4Addr;
use std::time::Duration;

use futures_util::future::BoxFuture;
use jiff::Timestamp;
use serde_json::{Map, Value};

use super::leased::LeasedOperation;
use super::{
    OperationKind, Step, create, delete, final_backup, later_holder, power, predecessor, reinstate, resize,
};
use crate::db::machine_row::MachineRow;
use crate::db::{self, DbError};
use crate::keys::KeyError;
use svc_base::failpoint::InjectedFailure;
use svc_base::metrics::{OPERATION_STEP_DURATION, OPERATION_STEPS};
use svc_http::problem::format_chain;
use svc_machine::event::Event;
use svc_machine::id::MachineId;
use svc_provider::{ErrorKind, ProviderError};
use svc_store::StoreError;
use svc_store::files_pointer;
use svc_store::key::SlotPrefix;
use svc_store::pointer::Fence;
use svc_store::pointer_io::{self, PointerError};

/// How a step ended without an error.
pub enum StepOutcome {
    /// The operation continues with the next step, or succeeds after its last step. The record is written in the same
    /// transaction.
    Done { note: Option<Cow<'static, str>>, record: StepRecord },
    /// The step runs again later with these facts; `None` keeps the stored ones.
    Wait { delay: Duration, facts: Option<Map<String, Value>> },
    /// The step runs again later. In the meantime, the operation's error code and log show what it is waiting for.
    WaitFor { delay: Duration, code: &'static str, reason: Cow<'static, str> },
    /// The rest of the resize is skipped, and the operation continues with the step that powers the server on.
    Abandon { reason: &'static str },
    /// The operation ends here, and the event is applied to the machine.
    End { event: Event, note: &'static str },
    /// The operation ends here as failed; the machine is unchanged.
    Fail { code: &'static str, note: &'static str },
    /// The operation is waiting for an operator's decision.
    NeedsDecision(Question),
}

/// A question for an operator.
pub struct Question {
    pub code: &'static str,
    pub detail: String,
    /// The object key of the snapshot that the answer may select.
    pub snapshot: Option<String>,
    /// The step's facts for its next run.
    pub facts: Map<String, Value>,
}

impl StepOutcome {
    pub fn done() -> Self {
        Self::Done { note: None, record: StepRecord::Nothing }
    }

    pub fn done_with_note(note: impl Into<Cow<'static, str>>) -> Self {
        Self::Done { note: Some(note.into()), record: StepRecord::Nothing }
    }

    pub fn wait_for(delay: Duration, code: &'static str, reason: impl Into<Cow<'static, str>>) -> Self {
        Self::WaitFor { delay, code, reason: reason.into() }
    }

    pub fn wait(delay: Duration) -> Self {
        Self::Wait { delay, facts: None }
    }
}

/// A change to a machine's row, written in the transaction that ends the step.
pub enum StepRecord {
    Nothing,
    /// The provider has accepted the request to create the machine's server.
    CreateAccepted {
        server: i64,
        address: Option<Ipv4Addr>,
        /// The provider's actions that create and start the server.
        actions: Vec<i64>,
    },
    /// The machine's final snapshot, taken after its writers had stopped.
    Saved {
        machine: MachineId,
        taken_at: Timestamp,
    },
    /// No snapshot contains the data written after `since`.
    Unsaved {
        machine: MachineId,
        since: Option<Timestamp>,
    },
    /// An operator accepted the loss of the data written after `since`. The machine no longer counts as holding unsaved
    /// data, until a later machine in its slot reports that it could not restore the owner's files.
    LossAccepted {
        machine: MachineId,
        since: Option<Timestamp>,
    },
    /// The provider no longer has a server for this machine.
    ServerGone {
        machine: MachineId,
    },
    /// The deleted machine's server is not kept, unless it holds unsaved data.
    Released {
        machine: MachineId,
    },
    /// The server of a reinstated machine is on.
    ReinstatedServerOn {
        machine: MachineId,
    },
    /// The server is on, and its host is healthy or has never registered. The machine no longer counts as powered off.
    HealthyAfterPowerOn {
        machine: MachineId,
    },
}

/// The reason a step failed.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// Retried with backoff.
    #[error("{what}")]
    Transient {
        what: Cow<'static, str>,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A retry is not expected to help: a machine that is being created fails, and a resize is abandoned unless it is
    /// already powering the server on. Other operations still retry the step.
    #[error("{what}")]
    Permanent {
        what: Cow<'static, str>,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Another process leases the operation, or the operation has ended.
    #[error("this process no longer leases the operation")]
    LeaseLost,
}

impl StepError {
    pub fn transient(
        what: impl Into<Cow<'static, str>>,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self::Transient { what: what.into(), source: Box::new(source) }
    }

    pub fn permanent(
        what: impl Into<Cow<'static, str>>,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self::Permanent { what: what.into(), source: Box::new(source) }
    }
}

impl From<DbError> for StepError {
    fn from(error: DbError) -> Self {
        Self::transient("database error", error)
    }
}

impl From<KeyError> for StepError {
    fn from(error: KeyError) -> Self {
        Self::transient("cannot use the signing keys", error)
    }
}

impl From<InjectedFailure> for StepError {
    fn from(error: InjectedFailure) -> Self {
        Self::transient("a test injected a failure", error)
    }
}

impl From<ProviderError> for StepError {
    fn from(error: ProviderError) -> Self {
        match error.kind() {
            ErrorKind::Refused => Self::permanent("the provider refused the request", error),
            ErrorKind::Account => {
                Self::transient("a problem with the provider account blocks the call", error)
            }
            ErrorKind::NotFound | ErrorKind::Conflict | ErrorKind::Transient | ErrorKind::Ambiguous => {
                Self::transient("the call to the provider failed", error)
            }
        }
    }
}

/// Runs the operation's current step.
pub async fn run(leased: &LeasedOperation<'_>, step: Step) -> Result<StepOutcome, StepError> {
    if let Some(outcome) = Box::pin(later_holder::check_step(leased, step)).await? {
        return Ok(outcome);
    }
    // Each step is boxed: a future is as large as its largest branch, and nested polls would exhaust the thread's
    // stack.
    let work: BoxFuture<'_, Result<StepOutcome, StepError>> = match step {
        Step::FinalBackup => Box::pin(final_backup::take_final_backup(leased)),
        Step::Fence => Box::pin(fence_slot(leased)),
        Step::PowerOffServer => Box::pin(predecessor::power_off_server(leased)),
        Step::DeletePredecessor => Box::pin(predecessor::delete_predecessor(leased)),
        Step::CreateServer => Box::pin(create::create_server(leased)),
        Step::AwaitRegistration => Box::pin(await_registration(leased)),
        Step::DeleteServer => Box::pin(delete::delete_own_server(leased)),
        Step::ShutDown => Box::pin(resize::shut_down(leased)),
        Step::PowerOff => Box::pin(resize::power_off(leased)),
        Step::ChangeType => Box::pin(resize::change_type(leased)),
        Step::PowerOn => Box::pin(resize::power_on(leased)),
        Step::AwaitHealth => Box::pin(resize::await_health(leased)),
        Step::SwitchOn => Box::pin(reinstate::power_on(leased)),
        Step::AwaitHost => Box::pin(reinstate::await_host(leased)),
        Step::StartServer => Box::pin(power::start_server(leased)),
        Step::StopServer => Box::pin(power::stop_server(leased)),
        Step::RebootServer => Box::pin(power::reboot_server(leased)),
        Step::AwaitHeartbeat => Box::pin(power::await_heartbeat(leased)),
    };
    work.await
}

async fn fence_slot(leased: &LeasedOperation<'_>) -> Result<StepOutcome, StepError> {
    let machine = leased.machine().await?;
    let slot = SlotPrefix::new(&machine.user, &machine.slot);
    match pointer_io::fence(&leased.platform.bucket, &slot, &build_fence(leased, &machine)).await {
        Ok(()) => fence_files(leased, &machine, &slot).await,
        // A host raised the fence, or an operator is reinstating a machine in a database that is older than the store:
        // this machine's epoch is raised above the store's.
        Err(PointerError::Fenced(fenced))
            if (machine.provider_server_id.is_none() || leased.kind == OperationKind::Reinstate)
                && fenced.fence_epoch <= machine.epoch.max_plausible() =>
        {
            leased.raise_epoch(fenced.fence_epoch.next()).await?;
            Ok(StepOutcome::wait(Duration::ZERO))
        }
        Err(error @ PointerError::Fenced(_)) => {
            Err(StepError::permanent("a later machine has fenced the slot", error))
        }
        Err(error @ PointerError::Store(StoreError::Corrupt { .. })) => {
            Err(StepError::permanent("cannot read the snapshot pointer", error))
        }
        Err(error) => Err(StepError::transient("cannot write the fence to the object store", error)),
    }
}

/// Fences the pointer of the file backups, after that of the database's snapshots.
async fn fence_files(
    leased: &LeasedOperation<'_>,
    machine: &MachineRow,
    slot: &SlotPrefix,
) -> Result<StepOutcome, StepError> {
    match files_pointer::set_fence(&leased.platform.bucket, slot, machine.epoch, machine.id).await {
        Ok(()) => {}
        // Hosts write this pointer, so a corrupt one must not prevent the machine's replacement. The new host reports
        // that it cannot restore the files.
        Err(error @ PointerError::Store(StoreError::Corrupt { .. })) => {
            tracing::error!(slot = %slot.root(), error = %format_chain(&error), "cannot read the pointer of the slot's file backups");
        }
        Err(error) => {
            return Err(StepError::transient(
                "cannot write the fence of the file backups to the object store",
                error,
            ));
        }
    }
    Ok(StepOutcome::done())
}

/// Builds the signed fence that admits this machine.
pub fn build_fence(leased: &LeasedOperation<'_>, machine: &MachineRow) -> Fence {
    let slot = SlotPrefix::new(&machine.user, &machine.slot);
    let proof = leased.platform.mint.fence_proof(&slot, machine.epoch, machine.id);
    Fence { epoch: machine.epoch, machine: machine.id, proof: Some(proof) }
}

/// The registration itself ends the operation. This step only detects that the provider has failed to start the server
/// or that the registration has expired.
async fn await_registration(leased: &LeasedOperation<'_>) -> Result<StepOutcome, StepError> {
    let machine = leased.machine().await?;
    if machine.registered_at.is_some() {
        return Ok(StepOutcome::done());
    }
    let session = leased.platform.db.session().await?;
    let remaining = db::machines::load_remaining_registration_time(&session, machine.id).await?;
    if remaining.is_zero() {
        leased.expire_registration().await?;
        return Err(StepError::LeaseLost);
    }
    let next_check = create::check_actions(leased, machine.id).await?;
    Ok(StepOutcome::wait(remaining.min(next_check.unwrap_or(Duration::from_secs(30)))))
}

/// Records one execution of a step in the metrics.
pub fn record_step(
    kind: OperationKind,
    step: Step,
    result: &Result<StepOutcome, StepError>,
    duration: Duration,
) {
    let outcome = match result {
        Ok(StepOutcome::Done { .. } | StepOutcome::End { .. }) => "done",
        Ok(StepOutcome::Wait { .. } | StepOutcome::WaitFor { .. } | StepOutcome::NeedsDecision(_)) => {
            "waiting"
        }
        Ok(StepOutcome::Abandon { .. } | StepOutcome::Fail { .. })
        | Err(StepError::Transient { .. } | StepError::Permanent { .. }) => "failed",
        Err(StepError::LeaseLost) => "lost",
    };
    OPERATION_STEPS.add_one([kind.as_str(), step.as_str(), outcome]);
    OPERATION_STEP_DURATION.record([kind.as_str(), step.as_str()], duration);
}
