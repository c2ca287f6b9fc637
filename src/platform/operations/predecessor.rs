//! Finds the machine that an operation takes out of service: the last earlier machine in the slot whose host has
//! registered or, in a deletion, the deleted machine itself. Also contains the steps that power its server off and, if
//! an operator chose to replace it first, delete the server.
//!
//! Invariant: a replaced machine's server is powered off after the fence is set. It is deleted here only if it is not
//! recorded as holding unsaved data, or an operator accepted the loss; otherwise it is kept until its machine's
//! successor is proven healthy.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::leased::LeasedOperation;
use super::step::{Question, StepError, StepOutcome, StepRecord};
use super::{OperationKind, delete, resize};
use crate::db;
use crate::db::machine_row::MachineRow;
use svc_http::problem::format_chain;
use svc_provider::{ErrorKind, ProviderError, Server, ServerId, ServerStatus};

const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Key in an operation's facts for the step's age, in seconds, when the first attempt to power the server off was made.
const FIRST_ATTEMPT_AT: &str = "firstAttemptAt";
/// Key in an operation's facts for the step's age, in seconds, when the provider accepted a shutdown request.
pub(super) const SHUTDOWN_ACCEPTED_AT: &str = "shutdownAcceptedAt";
/// Key in an operation's facts for the step's age, in seconds, when the power was last cut.
const POWER_CUT_AT: &str = "powerCutAt";
/// Delay before the power is cut again if the server is still on.
const POWER_CUT_RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// Key in an operation's facts, set when the provider has reported the server missing once.
const ABSENT: &str = "absent";
/// Time between the two reports that confirm a missing server.
const CONFIRM_INTERVAL: Duration = Duration::from_secs(2);

/// Returns the machine that the operation takes out of service; `None` if there is none, or its host has never
/// registered.
///
/// # Errors
/// [`StepError`] if the rows cannot be read.
pub async fn find_outgoing_machine(leased: &LeasedOperation<'_>) -> Result<Option<MachineRow>, StepError> {
    let machine = leased.machine().await?;
    if leased.kind == OperationKind::Delete {
        return Ok(machine.registered_at.is_some().then_some(machine));
    }
    let session = leased.platform.db.session().await?;
    Ok(db::machines::find_last_registered(&session, &machine).await?)
}

/// Returns the name that notes use for the machine that an operation of this kind takes out of service.
pub(super) fn outgoing_machine_label(kind: OperationKind) -> &'static str {
    if kind == OperationKind::Delete { "the machine" } else { "the predecessor" }
}

/// Returns the note for a step that has nothing to do because there is no outgoing machine.
pub(super) fn no_outgoing_machine_note(kind: OperationKind) -> &'static str {
    if kind == OperationKind::Delete {
        "the machine never served traffic"
    } else {
        "no earlier machine has served traffic"
    }
}

/// Powers off the server: requests a shutdown, then cuts the power.
pub async fn power_off_server(leased: &LeasedOperation<'_>) -> Result<StepOutcome, StepError> {
    let outcome = try_power_off(leased).await?;
    let options = leased.operation.options;
    match outcome {
        // Unless an operator accepted the loss, a server that seemed to be missing is not released: the reconciler
        // checks again at the end of its retention.
        StepOutcome::Done { note, record: StepRecord::Nothing }
            if leased.kind == OperationKind::Delete
                && options.now
                && (options.accept_loss || !leased.machine().await?.has_lost_server()) =>
        {
            Ok(StepOutcome::Done { note, record: StepRecord::Released { machine: leased.operation.machine } })
        }
        other => Ok(other),
    }
}

async fn try_power_off(leased: &LeasedOperation<'_>) -> Result<StepOutcome, StepError> {
    let Some(machine) = find_outgoing_machine(leased).await? else {
        return Ok(StepOutcome::done_with_note(no_outgoing_machine_note(leased.kind)));
    };
    let Some(id) = machine.provider_server_id.filter(|_| machine.has_server()) else {
        return Ok(StepOutcome::done_with_note(format!(
            "{} has no server",
            outgoing_machine_label(leased.kind)
        )));
    };
    let age = leased.step_age().await?;
    let timing = &leased.platform.config.timing;
    let facts = leased.facts();
    let since_attempt = time_since(&facts, FIRST_ATTEMPT_AT, age);
    // Counts from the accepted shutdown request or, without one, from the first attempt, which may be long after the
    // step's start, for example after an outage of the database.
    let waited = time_since(&facts, SHUTDOWN_ACCEPTED_AT, age).or(since_attempt);
    if waited.is_some_and(|waited| waited >= timing.shutdown_timeout + timing.power_off_retry_timeout) {
        // A deletion sets no fence.
        return Ok(StepOutcome::done_with_note(if leased.kind == OperationKind::Delete {
            "the provider did not power the server off"
        } else {
            "the provider did not power the server off; the fence protects the data"
        }));
    }
    leased.record_power_off_request(machine.id).await?;
    let outcome = match power_off(leased, ServerId(id), age, since_attempt.unwrap_or_default()).await {
        Ok(Some(outcome)) => clear_absence(outcome, facts.clone()),
        Ok(None) => confirm_server_gone(leased, &machine),
        // Retried only until the deadline above: a provider error must not block the slot's new machine.
        Err(error) => {
            tracing::warn!(machine = %machine.id, error = %format_chain(&error), "cannot power a server off yet");
            let code = Some(error.code()).filter(|code| !code.is_empty()).unwrap_or("no response");
            let reason = format!("the provider did not power the server off: {code}");
            StepOutcome::wait_for(resize::poll_interval(age).max(POLL_INTERVAL), "provider_error", reason)
        }
    };
    Ok(if since_attempt.is_none() { record_first_attempt(outcome, facts, age) } else { outcome })
}

/// Requests a shutdown, and cuts the power `shutdown_timeout` after the provider has accepted the request. If the
/// request fails, the power is cut without it only if the provider refuses it, or if `failing_for`, the time for which
/// attempts have failed, is at least `shutdown_timeout`. Returns `None` if the provider has no such server. The polling
/// interval grows with time, because all machines share the provider's rate limit.
pub(super) async fn power_off(
    leased: &LeasedOperation<'_>,
    id: ServerId,
    age: Duration,
    failing_for: Duration,
) -> Result<Option<StepOutcome>, ProviderError> {
    let provider = &leased.platform.provider;
    let Some(Server { status, is_locked, .. }) = provider.get(id).await? else { return Ok(None) };
    let mut facts = leased.facts();
    let since_shutdown = time_since(&facts, SHUTDOWN_ACCEPTED_AT, age);
    let since_cut = time_since(&facts, POWER_CUT_AT, age);
    if status == ServerStatus::Off {
        return Ok(Some(if since_cut.is_some() && since_shutdown.is_none() {
            StepOutcome::done_with_note(
                "the power was cut, because the provider accepted no shutdown request",
            )
        } else {
            StepOutcome::done()
        }));
    }
    if is_locked {
        let delay = resize::poll_interval(since_cut.unwrap_or(age));
        let reason = "the provider has locked the server for another action";
        return Ok(Some(StepOutcome::wait_for(delay, "server_locked", reason)));
    }
    let timeout = leased.platform.config.timing.shutdown_timeout;
    match since_shutdown {
        Some(since) if since < timeout => {
            return Ok(Some(StepOutcome::wait(resize::poll_interval(since))));
        }
        None if since_cut.is_none() => match provider.shutdown(id).await {
            Ok(_) => {
                facts.insert(SHUTDOWN_ACCEPTED_AT.to_owned(), json!(age.as_secs_f64()));
                let delay = resize::poll_interval(Duration::ZERO);
                return Ok(Some(StepOutcome::Wait { delay, facts: Some(facts) }));
            }
            Err(error) if error.kind() != ErrorKind::Refused && failing_for < timeout => return Err(error),
            Err(error) => {
                tracing::warn!(operation = %leased.operation.id, error = %format_chain(&error),
                    "cannot request a shutdown: cutting the power");
            }
        },
        _ => {}
    }
    if since_cut.is_none_or(|since_cut| since_cut >= POWER_CUT_RETRY_INTERVAL) {
        provider.power_off(id).await?;
        facts.insert(POWER_CUT_AT.to_owned(), json!(age.as_secs_f64()));
        return Ok(Some(StepOutcome::Wait { delay: POLL_INTERVAL, facts: Some(facts) }));
    }
    Ok(Some(StepOutcome::wait(resize::poll_interval(since_cut.unwrap_or(age)))))
}

/// Returns the time since an event; `None` if the fact `name` is not set. The fact holds the step's age at the event,
/// in seconds.
pub(super) fn time_since(facts: &Map<String, Value>, name: &str, age: Duration) -> Option<Duration> {
    let at = facts.get(name)?.as_f64()?;
    Some(age.saturating_sub(Duration::try_from_secs_f64(at).unwrap_or_default()))
}

/// Records a server as gone after two consecutive reports that it is missing, so that it cannot be kept or reinstated.
fn confirm_server_gone(leased: &LeasedOperation<'_>, machine: &MachineRow) -> StepOutcome {
    let mut facts = leased.facts();
    if facts.contains_key(ABSENT) {
        let note = format!("the provider no longer has {}'s server", outgoing_machine_label(leased.kind));
        let note = Some(note.into());
        return StepOutcome::Done { note, record: StepRecord::ServerGone { machine: machine.id } };
    }
    facts.insert(ABSENT.to_owned(), json!(true));
    StepOutcome::Wait { delay: CONFIRM_INTERVAL, facts: Some(facts) }
}

/// Discards an earlier report that the server was missing, because the provider has it.
fn clear_absence(outcome: StepOutcome, facts: Map<String, Value>) -> StepOutcome {
    if !facts.contains_key(ABSENT) {
        return outcome;
    }
    change_facts(outcome, facts, |facts| {
        facts.remove(ABSENT);
    })
}

fn record_first_attempt(outcome: StepOutcome, facts: Map<String, Value>, age: Duration) -> StepOutcome {
    change_facts(outcome, facts, |facts| {
        facts.insert(FIRST_ATTEMPT_AT.to_owned(), json!(age.as_secs_f64()));
    })
}

/// Changes the facts for the step's next run, if there is one.
fn change_facts(
    outcome: StepOutcome,
    facts: Map<String, Value>,
    change: impl FnOnce(&mut Map<String, Value>),
) -> StepOutcome {
    let (delay, mut facts) = match outcome {
        StepOutcome::Wait { delay, facts: changed } => (delay, changed.unwrap_or(facts)),
        // `WaitFor` cannot change the facts, so `Wait` replaces it. If the reason still applies, the next run of the
        // step returns `WaitFor` again.
        StepOutcome::WaitFor { delay, .. } => (delay, facts),
        other => return other,
    };
    change(&mut facts);
    StepOutcome::Wait { delay, facts: Some(facts) }
}

/// Keeps the predecessor's server or, if the operator chose to replace it first, deletes it before the new server is
/// created.
pub async fn delete_predecessor(leased: &LeasedOperation<'_>) -> Result<StepOutcome, StepError> {
    let options = leased.operation.options;
    let Some(machine) = find_outgoing_machine(leased).await?.filter(MachineRow::has_server) else {
        return Ok(StepOutcome::done());
    };
    if !options.replace_first {
        return Ok(StepOutcome::done_with_note(
            "the predecessor's server is kept until the new machine is healthy",
        ));
    }
    if let Some(since) = machine.unsaved_since.filter(|_| !options.accept_loss) {
        let data = if machine.has_unsaved_files_only {
            "the owner's files, without which a later machine started".to_owned()
        } else {
            format!("data written since {since:.0} that no snapshot contains")
        };
        let detail = format!(
            "The predecessor's server, which would be deleted first, holds {data}. Run `svcctl operation \
             continue {operation} --accept-loss` to delete the server, or `svcctl operation abandon {operation}` \
             to return the slot to the predecessor.",
            operation = leased.operation.id
        );
        let code = "replace_first_loses_data";
        return Ok(StepOutcome::NeedsDecision(Question {
            code,
            detail,
            snapshot: None,
            facts: leased.facts(),
        }));
    }
    Ok(if delete::delete_server(leased, &machine).await? {
        StepOutcome::done()
    } else {
        StepOutcome::wait(POLL_INTERVAL)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clear_absence_removes_only_absent_fact() {
        let facts = || {
            let names = [ABSENT, SHUTDOWN_ACCEPTED_AT];
            names.map(|name| (name.to_owned(), json!(true))).into_iter().collect::<Map<_, _>>()
        };
        for outcome in [
            StepOutcome::wait(POLL_INTERVAL),
            StepOutcome::Wait { delay: POLL_INTERVAL, facts: Some(facts()) },
            StepOutcome::wait_for(POLL_INTERVAL, "server_locked", "locked"),
        ] {
            let StepOutcome::Wait { delay, facts: Some(cleared) } = clear_absence(outcome, facts()) else {
                panic!("expected a wait with changed facts");
            };
            assert_eq!(delay, POLL_INTERVAL);
            assert_eq!(cleared.keys().collect::<Vec<_>>(), [SHUTDOWN_ACCEPTED_AT]);
        }
        assert!(matches!(clear_absence(StepOutcome::done(), facts()), StepOutcome::Done { .. }));
    }

    #[test]
    fn first_attempt_is_recorded_while_server_is_locked() {
        let locked = StepOutcome::wait_for(POLL_INTERVAL, "server_locked", "locked");
        let recorded = record_first_attempt(locked, Map::new(), Duration::from_secs(300));
        let StepOutcome::Wait { facts: Some(facts), .. } = recorded else {
            panic!("expected a wait with changed facts");
        };
        let since = |age| time_since(&facts, FIRST_ATTEMPT_AT, Duration::from_secs(age));
        assert_eq!(since(310), Some(Duration::from_secs(10)));
        assert_eq!(time_since(&facts, SHUTDOWN_ACCEPTED_AT, Duration::from_secs(310)), None);
    }
}
