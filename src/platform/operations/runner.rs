//! The runner: executes one step of an operation that `drive` has claimed, and stores the step's outcome.
//!
//! Invariant: a step's outcome is written only while the lease is valid by the database's clock.

use std::time::{Duration, Instant};

use deadpool_postgres::Transaction;
use jiff::Timestamp;
use serde_json::{Value, json};
use uuid::Uuid;

pub use super::drive::run;
use super::leased::LeasedOperation;
use super::resize::{self, RetryDecision};
use super::step::{self, Question, StepError, StepOutcome, StepRecord};
use super::step_failure::classify_creation_failure;
use super::{OperationKind, Step, StepPoint};
use crate::alarms;
use crate::context::Platform;
use crate::db::operation_log::RETRY;
use crate::db::operations::{OperationRow, OperationUpdate};
use crate::db::{self, DbError, machine_changes, machine_server, operation_metrics};
use svc_base::clock::rfc3339_ms;
use svc_http::problem::format_chain;
use svc_http::request_id;
use svc_machine::event::Event;
use svc_machine::id::MachineId;
use svc_provider::{ErrorKind, ProviderError};

/// A new machine fails if all attempts at a step fail for this long. A recovery can then be requested again.
const FAILING_STEP_TIMEOUT: Duration = Duration::from_secs(3600);
/// Minimum number of consecutive failures of a step before a new machine fails.
const MIN_CONSECUTIVE_FAILURES: i32 = 5;
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// Runs the operation's current step. Returns the operation if its next step is due immediately.
///
/// # Errors
/// [`StepError::LeaseLost`] if this process no longer leases the operation or the operation has ended; another error if
/// the operation cannot be read or its progress cannot be stored.
pub async fn run_current_step(
    platform: &Platform,
    operation: &OperationRow,
    owner: Uuid,
) -> Result<Option<OperationRow>, StepError> {
    let unreadable = |reason: String| DbError::Unreadable { what: "operation", reason };
    let kind: OperationKind = operation.kind.parse().map_err(unreadable)?;
    let step: Step = operation.step.parse().map_err(unreadable)?;
    let operation = start_step(platform, operation, owner, step).await?;
    let leased = LeasedOperation { platform, operation: &operation, kind, owner };
    let work = async {
        leased.hit_fail_point(step, StepPoint::Before)?;
        tracing::debug!(step = step.as_str(), "step begins");
        let outcome = step::run(&leased, step).await?;
        leased.hit_fail_point(step, StepPoint::After)?;
        Ok(outcome)
    };
    let start = Instant::now();
    let outcome = tokio::select! {
        outcome = work => outcome,
        () = renew_lease_until_lost(&leased) => Err(StepError::LeaseLost),
    };
    step::record_step(kind, step, &outcome, start.elapsed());
    match outcome {
        Ok(StepOutcome::Done { note, record }) => finish_step(&leased, step, note.as_deref(), record).await,
        Ok(StepOutcome::Abandon { reason }) => abandon_resize(&leased, reason).await.map(Some),
        Ok(StepOutcome::End { event, note }) => leased.end_with_event(&event, note).await.map(|()| None),
        Ok(StepOutcome::Fail { code, note }) => leased.end_as_failed(code, note).await.map(|()| None),
        Ok(StepOutcome::NeedsDecision(question)) => {
            suspend_for_decision(&leased, step, question).await.map(|()| None)
        }
        Ok(StepOutcome::Wait { delay, facts }) => {
            if kind == OperationKind::Resize
                && let Some(next) = apply_retry_decision(&leased, step, None).await?
            {
                return Ok(next);
            }
            let facts = facts.map_or_else(|| operation.facts.clone(), Value::Object);
            let next_step = NextStep { step, facts: &facts, attempts: 0, due_in: delay };
            store_waiting(&leased, next_step, None).await.map(|()| None)
        }
        Ok(StepOutcome::WaitFor { delay, code, reason }) => {
            let next_step = NextStep { step, facts: &operation.facts, attempts: 0, due_in: delay };
            store_waiting_with_code(&leased, next_step, code, &reason).await.map(|()| None)
        }
        Err(StepError::LeaseLost) => Err(StepError::LeaseLost),
        // While the provider restricts the account, no server can be powered on. That is not a machine failure.
        Err(error) if step == Step::PowerOn && as_account_error(&error).is_some() => {
            retry_step(&leased, step, &error).await.map(|()| None)
        }
        Err(error) if kind == OperationKind::Resize => {
            match apply_retry_decision(&leased, step, Some(&error)).await? {
                Some(next) => Ok(next),
                None => retry_step(&leased, step, &error).await.map(|()| None),
            }
        }
        Err(StepError::Permanent { what, source }) if creates_machine(kind) => {
            tracing::error!(operation = %operation.id, step = step.as_str(), %what,
                error = %format_chain(source.as_ref()), "a step failed permanently");
            leased.fail_creation(classify_creation_failure(source.as_ref()), step.as_str(), &what).await?;
            Ok(None)
        }
        Err(error) => retry_step(&leased, step, &error).await.map(|()| None),
    }
}

/// Stores the start of the step, once, before it runs.
async fn start_step(
    platform: &Platform,
    operation: &OperationRow,
    owner: Uuid,
    step: Step,
) -> Result<OperationRow, StepError> {
    if operation.facts.get("begun").and_then(Value::as_str) == Some(step.as_str()) {
        return Ok(operation.clone());
    }
    let mut operation = operation.clone();
    // The facts of the previous step do not apply to this one.
    operation.facts = json!({"begun": step.as_str()});
    operation.attempts = 0;
    operation.error_code = None;
    let kind: OperationKind =
        operation.kind.parse().map_err(|reason| DbError::Unreadable { what: "operation", reason })?;
    let leased = LeasedOperation { platform, operation: &operation, kind, owner };
    let lease = Some(platform.config.timing.lease_ttl);
    let facts = &operation.facts;
    let next_step = NextStep { step, facts, attempts: 0, due_in: Duration::ZERO };
    store_step(&leased, next_step, lease, Some(("begun", None)), StepRecord::Nothing).await?;
    Ok(operation)
}

async fn finish_step(
    leased: &LeasedOperation<'_>,
    step: Step,
    note: Option<&str>,
    record: StepRecord,
) -> Result<Option<OperationRow>, StepError> {
    let operation = leased.operation;
    let lease = Some(leased.platform.config.timing.lease_ttl);
    let Some(next) = leased.kind.next_step(step) else {
        end_operation(leased, step, note, record).await?;
        return Ok(None);
    };
    let next_step = NextStep { step: next, facts: &operation.facts, attempts: 0, due_in: Duration::ZERO };
    store_step(leased, next_step, lease, Some(("done", note)), record).await?;
    let next = OperationRow { step: next.as_str().to_owned(), attempts: 0, ..operation.clone() };
    Ok(Some(next))
}

/// Abandons or ends a resize if this step cannot succeed, and returns the operation if it continues with another step.
/// The outer `None` means that the step runs again.
async fn apply_retry_decision(
    leased: &LeasedOperation<'_>,
    step: Step,
    error: Option<&StepError>,
) -> Result<Option<Option<OperationRow>>, StepError> {
    let decision = resize::decide_retry(leased, step, error).await?;
    if let Some(error) = error.filter(|_| !matches!(decision, RetryDecision::Retry)) {
        tracing::error!(operation = %leased.operation.id, step = step.as_str(), error = %format_chain(error), "a step failed");
    }
    Ok(match decision {
        RetryDecision::Retry => None,
        RetryDecision::Abandon => {
            let reason = error.map_or_else(|| "the step took too long".to_owned(), ToString::to_string);
            Some(Some(abandon_resize(leased, &reason).await?))
        }
        RetryDecision::Fail => {
            leased.end_with_event(&Event::ResizeFailed, "the host did not come back in time").await?;
            Some(None)
        }
    })
}

/// Skips the rest of the resize, and continues with the step that powers the server on.
async fn abandon_resize(leased: &LeasedOperation<'_>, reason: &str) -> Result<OperationRow, StepError> {
    let operation = leased.operation;
    tracing::warn!(operation = %operation.id, step = operation.step, reason, "abandoning a resize");
    let lease = Some(leased.platform.config.timing.lease_ttl);
    let next_step =
        NextStep { step: Step::PowerOn, facts: &operation.facts, attempts: 0, due_in: Duration::ZERO };
    store_step(leased, next_step, lease, Some(("given_up", Some(reason))), StepRecord::Nothing).await?;
    Ok(OperationRow { step: Step::PowerOn.as_str().to_owned(), attempts: 0, ..operation.clone() })
}

async fn retry_step(leased: &LeasedOperation<'_>, step: Step, error: &StepError) -> Result<(), StepError> {
    let operation = leased.operation;
    let account_error = as_account_error(error);
    let was_blocked = operation.error_code.as_deref() == Some(db::operations::PROVIDER_ACCOUNT_BLOCKED);
    // Failures because of a problem with the provider account do not count once it no longer blocks the operation.
    let attempts =
        if was_blocked && account_error.is_none() { 1 } else { operation.attempts.saturating_add(1) };
    tracing::warn!(operation = %operation.id, step = step.as_str(), attempts, error = %format_chain(error), "a step failed");
    if let Some(cause) = account_error {
        alarms::raise_for_provider_error(leased.platform, cause).await;
        let next_step = NextStep { step, facts: &operation.facts, attempts, due_in: backoff(attempts) };
        let reason = format!("{error}; retrying within {} s", max_backoff(attempts).as_secs_f64().ceil());
        // While the provider restricts the account, the operation has no deadline.
        return store_waiting_with_code(leased, next_step, db::operations::PROVIDER_ACCOUNT_BLOCKED, &reason)
            .await;
    }
    // A single failure is not a reason to give up, even if no process has retried the step for a long time.
    if creates_machine(leased.kind)
        && attempts >= MIN_CONSECUTIVE_FAILURES
        && leased.failure_age().await? > FAILING_STEP_TIMEOUT
    {
        let message = format!("retries exhausted after 1 h: {error}");
        leased.fail_creation(error.creation_failure(), step.as_str(), &message).await?;
        return Ok(());
    }
    let next_step = NextStep { step, facts: &operation.facts, attempts, due_in: backoff(attempts) };
    store_waiting(leased, next_step, Some((RETRY, Some(&error.to_string())))).await
}

/// Returns whether operations of this kind create a machine. If such an operation fails, its machine fails too, and the
/// slot returns to an earlier machine if one can be reinstated.
fn creates_machine(kind: OperationKind) -> bool {
    matches!(kind, OperationKind::Provision | OperationKind::Recover)
}

/// Suspends the operation until an operator decides.
async fn suspend_for_decision(
    leased: &LeasedOperation<'_>,
    step: Step,
    question: Question,
) -> Result<(), StepError> {
    let operation = leased.operation;
    tracing::error!(operation = %operation.id, step = step.as_str(), code = question.code, detail = question.detail,
        "an operation is waiting for an operator's decision");
    let mut session = leased.platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    let mut stored_question = json!({"code": question.code, "detail": question.detail});
    if let Some(key) = &question.snapshot {
        stored_question["snapshotKey"] = json!(key);
    }
    let facts = Value::Object(question.facts);
    if !db::operations::suspend(&tx, operation.id, leased.owner, &stored_question, &facts).await? {
        return Err(StepError::LeaseLost);
    }
    db::operations::log(&tx, operation.id, step.as_str(), "asked", Some(&question.detail)).await?;
    Ok(db::commit(tx).await?)
}

/// Returns the cause if the provider restricts the account. That is not a machine failure: the step is retried
/// indefinitely.
fn as_account_error(error: &StepError) -> Option<&ProviderError> {
    let StepError::Transient { source, .. } = error else { return None };
    source.downcast_ref::<ProviderError>().filter(|error| error.kind() == ErrorKind::Account)
}

/// Returns the maximum delay before the next attempt, which doubles from half a second to a minute.
fn max_backoff(attempts: i32) -> Duration {
    let exponent = u32::try_from(attempts.clamp(1, 10)).unwrap_or(10) - 1;
    (Duration::from_millis(500) * 2u32.pow(exponent)).min(MAX_BACKOFF)
}

/// Returns a random delay between half of [`max_backoff`] and all of it.
fn backoff(attempts: i32) -> Duration {
    let max = max_backoff(attempts);
    let jitter =
        f64::from(u16::from_be_bytes([Uuid::new_v4().as_bytes()[0], Uuid::new_v4().as_bytes()[1]])) / 65536.0;
    max.mul_f64(0.5 + jitter / 2.0)
}

struct NextStep<'a> {
    step: Step,
    facts: &'a Value,
    attempts: i32,
    due_in: Duration,
}

/// The outcome and the detail of a line in the operation's log, if a line is written.
type LogLine<'a> = Option<(&'a str, Option<&'a str>)>;

async fn store_waiting(
    leased: &LeasedOperation<'_>,
    next_step: NextStep<'_>,
    line: LogLine<'_>,
) -> Result<(), StepError> {
    store_step(leased, next_step, None, line, StepRecord::Nothing).await
}

/// Like [`store_waiting`], but with an error code that shows what the operation is waiting for.
async fn store_waiting_with_code(
    leased: &LeasedOperation<'_>,
    next_step: NextStep<'_>,
    code: &str,
    reason: &str,
) -> Result<(), StepError> {
    let options = AdvanceOptions { lease: None, line: Some((RETRY, Some(reason))), error_code: Some(code) };
    advance_operation(leased, next_step, options, StepRecord::Nothing).await
}

async fn store_step(
    leased: &LeasedOperation<'_>,
    next_step: NextStep<'_>,
    lease: Option<Duration>,
    line: LogLine<'_>,
    record: StepRecord,
) -> Result<(), StepError> {
    advance_operation(leased, next_step, AdvanceOptions { lease, line, error_code: None }, record).await
}

struct AdvanceOptions<'a> {
    lease: Option<Duration>,
    line: LogLine<'a>,
    error_code: Option<&'a str>,
}

async fn advance_operation(
    leased: &LeasedOperation<'_>,
    next_step: NextStep<'_>,
    AdvanceOptions { lease, line, error_code }: AdvanceOptions<'_>,
    record: StepRecord,
) -> Result<(), StepError> {
    let id = leased.operation.id;
    let mut session = leased.platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    lock_machine_for_record(leased, &tx, &record).await?;
    let update = OperationUpdate {
        state: "running",
        step: next_step.step.as_str(),
        facts: next_step.facts,
        attempts: next_step.attempts,
        error_code,
        due_in: next_step.due_in,
        lease,
    };
    if !db::operations::advance(&tx, id, leased.owner, &update).await? {
        return Err(StepError::LeaseLost);
    }
    match line {
        Some((RETRY, detail)) => {
            db::operation_log::log_retry(&tx, id, &leased.operation.step, detail).await?;
        }
        Some((outcome, detail)) => {
            db::operations::log(&tx, id, &leased.operation.step, outcome, detail).await?;
        }
        None => {}
    }
    write_record(leased, &tx, record).await?;
    Ok(db::commit(tx).await?)
}

/// Locks the machine whose row the record changes. Lock order everywhere: machines before their operations.
async fn lock_machine_for_record(
    leased: &LeasedOperation<'_>,
    tx: &Transaction<'_>,
    record: &StepRecord,
) -> Result<(), DbError> {
    let machine = match record {
        StepRecord::Nothing => return Ok(()),
        StepRecord::CreateAccepted { .. } => leased.operation.machine,
        StepRecord::Saved { machine, .. }
        | StepRecord::Unsaved { machine, .. }
        | StepRecord::LossAccepted { machine, .. }
        | StepRecord::ServerGone { machine }
        | StepRecord::Released { machine }
        | StepRecord::ReinstatedServerOn { machine }
        | StepRecord::HealthyAfterPowerOn { machine } => *machine,
    };
    db::machines::lock(tx, machine).await.map(drop)
}

async fn write_record(
    leased: &LeasedOperation<'_>,
    tx: &Transaction<'_>,
    record: StepRecord,
) -> Result<(), DbError> {
    match record {
        StepRecord::Nothing => Ok(()),
        StepRecord::CreateAccepted { server, address, actions } => {
            let (machine, ttl) = (leased.operation.machine, leased.platform.config.timing.registration_ttl);
            machine_changes::record_server(tx, machine, server, address, ttl).await?;
            machine_server::record_create_actions(tx, machine, &actions).await
        }
        StepRecord::Saved { machine, taken_at } => {
            machine_changes::record_final_backup(tx, machine, taken_at).await
        }
        StepRecord::Unsaved { machine, since } => machine_changes::record_unsaved(tx, machine, since).await,
        StepRecord::LossAccepted { machine, since } => {
            machine_changes::record_unsaved(tx, machine, None).await?;
            audit_loss(leased, tx, machine, since).await
        }
        StepRecord::ServerGone { machine } => machine_changes::record_server_deleted(tx, machine).await,
        StepRecord::Released { machine } => machine_changes::release_server(tx, machine).await,
        StepRecord::ReinstatedServerOn { machine } => machine_server::record_power_on(tx, machine).await,
        StepRecord::HealthyAfterPowerOn { machine } => machine_server::clear_powered_off(tx, machine).await,
    }
}

/// Writes an audit entry for an accepted loss of a server's data, with the time from which data was lost.
async fn audit_loss(
    leased: &LeasedOperation<'_>,
    tx: &Transaction<'_>,
    machine: MachineId,
    since: Option<Timestamp>,
) -> Result<(), DbError> {
    let entry = db::audit::AuditEntry {
        actor: "platform",
        action: "last_backup.loss_accepted",
        target: &machine.to_string(),
        before: None,
        after: Some(&json!({"operationId": leased.operation.id, "lostSince": since.map(rfc3339_ms)})),
        request_id: &request_id::current(),
    };
    db::audit::write(tx, &entry).await
}

async fn end_operation(
    leased: &LeasedOperation<'_>,
    step: Step,
    note: Option<&str>,
    record: StepRecord,
) -> Result<(), StepError> {
    let id = leased.operation.id;
    let mut session = leased.platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    lock_machine_for_record(leased, &tx, &record).await?;
    let update = OperationUpdate {
        state: "succeeded",
        step: step.as_str(),
        facts: &leased.operation.facts,
        attempts: leased.operation.attempts,
        error_code: None,
        due_in: Duration::ZERO,
        lease: None,
    };
    if !db::operations::advance(&tx, id, leased.owner, &update).await? {
        return Err(StepError::LeaseLost);
    }
    db::operations::log(&tx, id, step.as_str(), "done", note).await?;
    db::operations::log(&tx, id, step.as_str(), "succeeded", None).await?;
    write_record(leased, &tx, record).await?;
    db::commit(tx).await?;
    // Wakes the reconciler for follow-up work, such as a server whose retention period has ended.
    leased.platform.reconciler_wake.notify_one();
    operation_metrics::record_end(leased.kind.as_str(), "succeeded", leased.operation.created_at);
    tracing::info!("an operation succeeded");
    Ok(())
}

/// Renews the lease while the step is running. Returns when this process no longer holds the lease, or could not renew
/// it before it expired.
async fn renew_lease_until_lost(leased: &LeasedOperation<'_>) {
    let lease_ttl = leased.platform.config.timing.lease_ttl;
    let mut renewed_at = tokio::time::Instant::now();
    let mut delay = lease_ttl / 4;
    loop {
        tokio::time::sleep(delay).await;
        let attempted_at = tokio::time::Instant::now();
        let remaining = lease_ttl.saturating_sub(renewed_at.elapsed());
        if remaining.is_zero() {
            return;
        }
        let renewal = async {
            let session = leased.platform.db.session().await?;
            db::operations::renew(&session, leased.operation.id, leased.owner, lease_ttl).await
        };
        match tokio::time::timeout(remaining.min(lease_ttl / 2), renewal).await {
            Ok(Ok(true)) => (renewed_at, delay) = (attempted_at, lease_ttl / 4),
            Ok(Ok(false)) => return,
            Ok(Err(_)) | Err(_) => delay = lease_ttl / 20,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_grows_to_maximum() {
        for attempts in [1, 5, 10, i32::MAX] {
            assert!(backoff(attempts) <= MAX_BACKOFF);
        }
        assert!(backoff(1) < Duration::from_millis(501));
        assert!(backoff(20) >= MAX_BACKOFF / 2);
    }
}
