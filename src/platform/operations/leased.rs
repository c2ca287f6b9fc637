//! Gives the steps of a leased operation access to its data. Each write that requires the lease renews it in the same
//! transaction.

use std::time::Duration;

use deadpool_postgres::Transaction;
use jiff::Timestamp;
use serde_json::{Map, Value};
use uuid::Uuid;

use super::step::StepError;
use super::{OperationKind, Step, StepPoint, fail_point_name};
use crate::context::Platform;
use crate::db::machine_row::MachineRow;
use crate::db::operations::OperationRow;
use crate::db::{self, DbError};
use crate::lifecycle::{self, EventContext, LifecycleError};
use svc_base::failpoint;
use svc_machine::epoch::Epoch;
use svc_machine::event::{CreationFailure, Event};
use svc_machine::id::{MachineId, OperationId};
use svc_provider::ServerId;

/// An operation leased by this process.
pub struct LeasedOperation<'a> {
    pub platform: &'a Platform,
    pub operation: &'a OperationRow,
    pub kind: OperationKind,
    /// The lease's owner.
    pub owner: Uuid,
}

impl LeasedOperation<'_> {
    pub async fn machine(&self) -> Result<MachineRow, DbError> {
        let session = self.platform.db.session().await?;
        let machine = db::machines::get(&session, self.operation.machine).await?;
        machine.ok_or(DbError::Unreadable { what: "operation", reason: "its machine is missing".to_owned() })
    }

    pub fn facts(&self) -> Map<String, Value> {
        self.operation.facts.as_object().cloned().unwrap_or_default()
    }

    pub fn hit_fail_point(&self, step: Step, point: StepPoint) -> Result<(), StepError> {
        Ok(failpoint::trigger(&fail_point_name(self.kind, step, point))?)
    }

    /// Records, under the lease, that a create request is about to be sent.
    pub async fn record_create_request(&self) -> Result<(), StepError> {
        self.write_under_lease(LeasedWrite::CreateRequested).await
    }

    /// Records, under the lease, that the create request had no effect.
    pub async fn clear_create_request(&self) -> Result<(), StepError> {
        self.write_under_lease(LeasedWrite::CreateRequestCleared).await
    }

    /// Records, under the lease, that the create request had no effect, and selects the machine's next location.
    pub async fn move_to_next_location(&self, reason: &str) -> Result<(), StepError> {
        self.write_under_lease(LeasedWrite::NextLocation(reason.to_owned())).await
    }

    /// Records, under the lease, that the server is about to be powered on.
    pub async fn record_power_on_request(&self) -> Result<(), StepError> {
        self.write_under_lease(LeasedWrite::PowerOnRequested).await
    }

    /// Records, under the lease, that the server of a machine that has left its slot is about to be powered off.
    pub async fn record_power_off_request(&self, machine: MachineId) -> Result<(), StepError> {
        self.write_under_lease(LeasedWrite::PowerOffRequested(machine)).await
    }

    /// Records, under the lease, that the machine no longer counts as powered off.
    pub async fn clear_powered_off(&self) -> Result<(), StepError> {
        self.write_under_lease(LeasedWrite::PoweredOffCleared).await
    }

    /// Records, under the lease, that the machine's server is kept, because the machine may be serving without a record
    /// in this database.
    pub async fn mark_kept(&self, machine: MachineId) -> Result<(), StepError> {
        self.write_under_lease(LeasedWrite::Kept(machine)).await
    }

    /// Looks up the server of a machine that failed because the server was missing. If the provider has it, records
    /// that the machine has a server again, and returns `true`.
    pub async fn detect_returned_server(&self, machine: &MachineRow) -> Result<bool, StepError> {
        let may_have_returned = machine.has_lost_server() && machine.may_have_server();
        let Some(server) = machine.provider_server_id.filter(|_| may_have_returned) else { return Ok(false) };
        if self.platform.provider.get(ServerId(server)).await?.is_none() {
            return Ok(false);
        }
        let failure = (self.operation.step.as_str(), "the provider has the machine's server after all");
        apply_event(self.platform, machine.id, &Event::ServerFound, failure).await?;
        db::servers::record_seen(&self.platform.db.session().await?, &[server]).await?;
        Ok(true)
    }

    /// Records, under the lease, that the machine's server may hold data that no snapshot contains.
    pub async fn mark_unsaved(&self, machine: MachineId) -> Result<(), StepError> {
        self.write_under_lease(LeasedWrite::Unsaved(machine)).await
    }

    /// Records, under the lease, a snapshot that is newer than the one from which the machine is restored.
    pub async fn record_unrestored_snapshot(&self, key: String) -> Result<(), StepError> {
        self.write_under_lease(LeasedWrite::UnrestoredSnapshot(key)).await
    }

    /// Raises, under the lease, the machine's epoch to at least `epoch`.
    pub async fn raise_epoch(&self, epoch: Epoch) -> Result<(), StepError> {
        self.write_under_lease(LeasedWrite::EpochRaised(epoch)).await
    }

    /// Finds the newest operation that was to take this machine out of service, and so may have stopped its writers.
    pub async fn find_retiring_operation(&self) -> Result<Option<OperationId>, DbError> {
        let session = self.platform.db.session().await?;
        db::slot_operations::find_retiring_operation(&session, self.operation.machine).await
    }

    /// Reads the database's clock.
    pub async fn now(&self) -> Result<Timestamp, DbError> {
        let session = self.platform.db.session().await?;
        db::servers::now(&session).await
    }

    async fn write_under_lease(&self, write: LeasedWrite) -> Result<(), StepError> {
        let mut session = self.platform.db.session().await?;
        let tx = db::begin(&mut session).await?;
        let lease = self.platform.config.timing.lease_ttl;
        // Lock order everywhere: machines before their operations.
        db::machines::lock(&tx, self.operation.machine).await?;
        if !db::operations::renew(&tx, self.operation.id, self.owner, lease).await? {
            return Err(StepError::LeaseLost);
        }
        let machine = self.operation.machine;
        match write {
            LeasedWrite::CreateRequested => db::machine_changes::record_create_request(&tx, machine).await?,
            LeasedWrite::CreateRequestCleared => {
                db::machine_changes::clear_create_request(&tx, machine).await?;
            }
            LeasedWrite::PowerOnRequested => {
                db::machine_server::record_power_on_request(&tx, machine).await?;
            }
            LeasedWrite::PowerOffRequested(outgoing) => {
                db::machine_server::record_power_off_request(&tx, outgoing).await?;
            }
            LeasedWrite::NextLocation(reason) => {
                db::machine_server::move_to_next_location(&tx, machine).await?;
                let (id, step) = (self.operation.id, &self.operation.step);
                db::operation_log::log_location_change(&tx, id, step, &reason).await?;
            }
            LeasedWrite::PoweredOffCleared => db::machine_server::clear_powered_off(&tx, machine).await?,
            LeasedWrite::UnrestoredSnapshot(key) => {
                db::machine_changes::record_unrestored_snapshot(&tx, machine, &key).await?;
            }
            LeasedWrite::Unsaved(machine) => db::machine_changes::mark_unsaved(&tx, machine).await?,
            LeasedWrite::Kept(machine) => db::machine_changes::mark_kept(&tx, machine).await?,
            LeasedWrite::EpochRaised(epoch) => db::machine_changes::raise_epoch(&tx, machine, epoch).await?,
        }
        Ok(db::commit(tx).await?)
    }

    /// Marks the machine as failed because it did not register in time, unless it has registered in the meantime.
    pub async fn expire_registration(&self) -> Result<(), StepError> {
        expire_registration(self.platform, self.operation.machine).await?;
        Ok(())
    }

    /// Marks as failed, under the lease, the machine that the operation is creating.
    pub async fn fail_creation(
        &self,
        failure: CreationFailure,
        stage: &str,
        message: &str,
    ) -> Result<(), StepError> {
        let mut session = self.platform.db.session().await?;
        let tx = db::begin(&mut session).await?;
        let row = db::machines::lock(&tx, self.operation.machine).await?.ok_or(StepError::LeaseLost)?;
        let lease = self.platform.config.timing.lease_ttl;
        if !db::operations::renew(&tx, self.operation.id, self.owner, lease).await? {
            return Err(StepError::LeaseLost);
        }
        let event = Event::CreationFailed { failure };
        Ok(apply_to_locked(self.platform, tx, &row, &event, (stage, message)).await?)
    }

    /// Returns the operation's age, by the database's clock.
    pub async fn age(&self) -> Result<Duration, DbError> {
        let session = self.platform.db.session().await?;
        db::operations::load_age(&session, self.operation.id).await
    }

    /// Returns the time since the current step was first started, by the database's clock.
    pub async fn step_age(&self) -> Result<Duration, DbError> {
        let session = self.platform.db.session().await?;
        db::operations::load_step_age(&session, self.operation.id, &self.operation.step).await
    }

    /// Like [`Self::step_age`], but counts from when a problem with the provider account last stopped blocking the
    /// operation, if that is later; zero while such a problem is blocking it.
    pub async fn unblocked_step_age(&self) -> Result<Duration, DbError> {
        let session = self.platform.db.session().await?;
        db::operations::load_unblocked_step_age(&session, self.operation.id, &self.operation.step).await
    }

    /// Returns the time since the first of the step's consecutive failures, by the database's clock.
    pub async fn failure_age(&self) -> Result<Duration, DbError> {
        let session = self.platform.db.session().await?;
        db::operations::load_failure_age(&session, self.operation.id).await
    }

    /// Ends the operation, and applies the event to its machine.
    pub async fn end_with_event(&self, event: &Event, note: &str) -> Result<(), StepError> {
        let mut session = self.platform.db.session().await?;
        let tx = db::begin(&mut session).await?;
        let machine = self.operation.machine;
        let row = db::machines::lock(&tx, machine).await?.ok_or(StepError::LeaseLost)?;
        let lease = self.platform.config.timing.lease_ttl;
        if !db::operations::renew(&tx, self.operation.id, self.owner, lease).await? {
            return Err(StepError::LeaseLost);
        }
        db::operations::log(&tx, self.operation.id, &self.operation.step, "done", Some(note)).await?;
        let context = EventContext { failure: Some((&self.operation.step, note)), ..EventContext::default() };
        match lifecycle::apply(&tx, &self.platform.mint, &row, event, context).await {
            // A refused event has written nothing: the events that end operations need no successor and reinstate no
            // predecessor.
            Ok(_) | Err(LifecycleError::Refused(_) | LifecycleError::Missing(_)) => {}
            Err(LifecycleError::Db(error)) => return Err(error.into()),
        }
        // If the change to the machine has ended the operation as failed, this has no effect. Operations that the
        // change created keep running.
        db::operations::end(&tx, self.operation.id, "succeeded", None).await?;
        Ok(db::commit(tx).await?)
    }

    /// Ends the operation as failed; the machine is unchanged.
    pub async fn end_as_failed(&self, code: &str, note: &str) -> Result<(), StepError> {
        let mut session = self.platform.db.session().await?;
        let tx = db::begin(&mut session).await?;
        let lease = self.platform.config.timing.lease_ttl;
        if !db::operations::renew(&tx, self.operation.id, self.owner, lease).await? {
            return Err(StepError::LeaseLost);
        }
        db::operations::log(&tx, self.operation.id, &self.operation.step, "done", Some(note)).await?;
        db::operations::end(&tx, self.operation.id, "failed", Some(code)).await?;
        Ok(db::commit(tx).await?)
    }
}

/// A write that requires the lease.
enum LeasedWrite {
    CreateRequested,
    CreateRequestCleared,
    NextLocation(String),
    PowerOnRequested,
    PowerOffRequested(MachineId),
    PoweredOffCleared,
    EpochRaised(Epoch),
    Kept(MachineId),
    Unsaved(MachineId),
    UnrestoredSnapshot(String),
}

/// Marks a machine as failed because it did not register in time, unless it has registered in the meantime.
pub async fn expire_registration(platform: &Platform, machine: MachineId) -> Result<(), DbError> {
    let message = "the host did not register before its registration period ended";
    apply_event(platform, machine, &Event::RegistrationExpired, ("register", message)).await
}

async fn apply_event(
    platform: &Platform,
    machine: MachineId,
    event: &Event,
    failure: (&str, &str),
) -> Result<(), DbError> {
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    let Some(row) = db::machines::lock(&tx, machine).await? else { return Ok(()) };
    apply_to_locked(platform, tx, &row, event, failure).await
}

/// Applies the event to a machine whose row the transaction has locked, and commits.
async fn apply_to_locked(
    platform: &Platform,
    tx: Transaction<'_>,
    row: &MachineRow,
    event: &Event,
    failure: (&str, &str),
) -> Result<(), DbError> {
    let context = EventContext { failure: Some(failure), ..EventContext::default() };
    match lifecycle::apply(&tx, &platform.mint, row, event, context).await {
        Ok(_) => db::commit(tx).await,
        Err(LifecycleError::Db(error)) => Err(error),
        // The machine has left its slot or changed state: the event came too late.
        Err(LifecycleError::Refused(_) | LifecycleError::Missing(_)) => Ok(()),
    }
}
