//! Waits for an operation to finish and its machine to settle, reporting progress. Also stops waiting if the operation
//! needs a decision, since it can't proceed until an operator answers.

use std::time::Duration;

use anyhow::anyhow;
use tokio::time::{Instant, sleep, timeout_at};

use super::api::{ApiClient, ApiResponse, CallError};
use super::interrupt;
use super::progress::Progress;
use super::show::{boot, failure, machine, operation};
use svc_base::applet::{Exit, Failure};
use svc_base::untrusted_text::one_line;
use svc_wire::machine::{BootProgress, MachineDetail};
use svc_wire::operation::Operation;

const MIN_POLL_INTERVAL: Duration = Duration::from_millis(200);
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(2);
/// How long before the deadline the last poll starts, capped at a quarter of the timeout. A poll started at the
/// deadline would be cancelled right away.
const LAST_POLL_MARGIN: Duration = Duration::from_secs(1);

/// Condition for a successful wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// The followed operation, if any, succeeds, and the machine is then running, unless the operation deletes it,
    /// removes its server or changes its power state.
    Success,
    /// The machine is running, regardless of the operation's outcome.
    MachineRunning,
}

/// A time limit that several waits can share.
#[derive(Debug, Clone, Copy)]
pub struct TimeLimit {
    timeout: Duration,
    deadline: Instant,
}

impl TimeLimit {
    pub fn from_now(timeout: Duration) -> Self {
        Self { timeout, deadline: Instant::now() + timeout }
    }

    /// Returns the latest start time for any poll but the first.
    fn last_poll_at(self) -> Instant {
        self.deadline - LAST_POLL_MARGIN.min(self.timeout / 4)
    }
}

/// Follows a machine's operation, or its status if there is no operation. Returns the last response and the machine
/// parsed from it.
///
/// # Errors
/// [`Exit::Unavailable`] if the goal isn't reached; [`Exit::TryAgain`] if the machine hasn't settled by the deadline or
/// the operation is waiting for a decision; any non-transient API error.
pub async fn wait_until_settled(
    api: &ApiClient,
    machine_id: &str,
    operation_id: Option<&str>,
    goal: Goal,
    limit: TimeLimit,
) -> Result<(ApiResponse, MachineDetail), Failure> {
    let command = command_to_follow(machine_id, operation_id);
    let followed = follow(api, machine_id, operation_id, limit);
    let (response, machine) = interrupt::run_until_interrupted(&command, followed).await?;
    let operation = find_operation(&machine, operation_id).filter(|_| goal == Goal::Success);
    check_result(api, &machine, operation).await?;
    Ok((response, machine))
}

fn find_operation<'a>(machine: &'a MachineDetail, id: Option<&str>) -> Option<&'a Operation> {
    id.and_then(|id| machine.operations.iter().find(|operation| operation.operation_id == id))
}

async fn follow(
    api: &ApiClient,
    machine_id: &str,
    operation_id: Option<&str>,
    limit: TimeLimit,
) -> Result<(ApiResponse, MachineDetail), Failure> {
    let mut reporter = ProgressReporter::new();
    let settled = poll_until_deadline(limit, async || {
        let (response, machine) = match poll_machine(api, machine_id).await? {
            Ok(polled) => polled,
            Err(error) => {
                reporter.report_error(&error);
                return Ok(None);
            }
        };
        let operation = find_operation(&machine, operation_id);
        reporter.report(&machine, operation);
        if let Some(waiting) = operation.filter(|operation| operation.question().is_some()) {
            return Err(Failure::new(Exit::TryAgain, decision_error(waiting)));
        }
        Ok(is_settled(&machine, operation).then_some((response, machine)))
    });
    let settled = settled.await?;
    settled
        .ok_or_else(|| Failure::new(Exit::TryAgain, timeout_error(machine_id, operation_id, limit.timeout)))
}

/// Polls with backoff until `poll` returns a value, or returns `None` on timeout. A poll in flight at the timeout is
/// cancelled, since its retries could take minutes.
///
/// # Errors
/// The first error from `poll`.
pub async fn poll_until<T>(
    timeout: Duration,
    poll: impl AsyncFnMut() -> Result<Option<T>, Failure>,
) -> Result<Option<T>, Failure> {
    poll_until_deadline(TimeLimit::from_now(timeout), poll).await
}

async fn poll_until_deadline<T>(
    limit: TimeLimit,
    mut poll: impl AsyncFnMut() -> Result<Option<T>, Failure>,
) -> Result<Option<T>, Failure> {
    let last_poll_at = limit.last_poll_at();
    let mut interval = MIN_POLL_INTERVAL;
    loop {
        let Ok(polled) = timeout_at(limit.deadline, poll()).await else { return Ok(None) };
        if let Some(value) = polled? {
            return Ok(Some(value));
        }
        let now = Instant::now();
        if now >= last_poll_at {
            return Ok(None);
        }
        sleep(interval.min(last_poll_at - now)).await;
        interval = (interval * 3 / 2).min(MAX_POLL_INTERVAL);
    }
}

/// Fetches the awaited resource. Transient errors are returned as the inner `Err`, so that the caller keeps polling.
pub async fn poll_once(
    api: &ApiClient,
    path: &[&str],
    query: &[(&str, String)],
) -> Result<Result<ApiResponse, CallError>, Failure> {
    match api.poll(path, query).await {
        Err(error) if !error.is_transient() => Err(error.into()),
        polled => Ok(polled),
    }
}

/// Like [`poll_once`], but for a machine. The inner `Err` is the error message.
pub async fn poll_machine(
    api: &ApiClient,
    machine_id: &str,
) -> Result<Result<(ApiResponse, MachineDetail), String>, Failure> {
    match poll_once(api, &["vps", machine_id], &[]).await? {
        Ok(response) => {
            let machine = response.parse()?;
            Ok(Ok((response, machine)))
        }
        Err(error) => Ok(Err(error.to_string())),
    }
}

fn command_to_follow(machine_id: &str, operation_id: Option<&str>) -> String {
    operation_id
        .map_or_else(|| format!("svcctl status {machine_id}"), |id| format!("svcctl operation {id} --wait"))
}

fn timeout_error(machine_id: &str, operation_id: Option<&str>, timeout: Duration) -> anyhow::Error {
    let command = command_to_follow(machine_id, operation_id);
    anyhow!("the operation is still in progress after {} s\n  next: `{command}`", timeout.as_secs())
}

fn is_settled(machine: &MachineDetail, operation: Option<&Operation>) -> bool {
    let has_ended = operation.is_none_or(|operation| operation.state != "running");
    let is_transitional = matches!(machine.display_state(), "provisioning" | "recovering" | "resizing");
    // A failed operation may leave the machine in a transitional state permanently.
    has_ended && (!is_transitional || operation.is_some_and(|operation| operation.state != "succeeded"))
}

/// Describes the machine's activity during an operation, or its state otherwise.
fn describe_activity(machine: &MachineDetail, operation: Option<&Operation>) -> String {
    let in_progress = operation.filter(|operation| operation.is_in_progress());
    let is_being_reinstated = machine.failure.as_ref().is_some_and(failure::is_reinstating)
        && machine.display_state() == "failed"
        && operation.is_none_or(Operation::is_in_progress);
    match in_progress.map(|operation| operation.kind.as_str()) {
        Some("power_off") => "is being powered off".to_owned(),
        Some("power_on") => "is being powered on".to_owned(),
        Some("reboot") => "is being restarted".to_owned(),
        Some("delete") => "is being deleted".to_owned(),
        Some("reinstate") => "is being reinstated".to_owned(),
        _ if is_being_reinstated => "is being reinstated".to_owned(),
        _ if machine::state_or_off(machine) == "off" => "is powered off".to_owned(),
        _ => format!("is {}", machine::state_or_off(machine)),
    }
}

/// Builds an error from an operation's question and the commands that answer it.
fn decision_error(operation: &Operation) -> anyhow::Error {
    let question = operation.question().map(|question| one_line(&question.detail)).unwrap_or_default();
    let answers = operation::format_answers(operation).join("\n        or ");
    anyhow!(
        "the {} is waiting for your decision: {question}\n  next: either {answers}",
        operation::kind_noun(&operation.kind)
    )
}

/// Checks that the operation, if any, succeeded, and that the machine is in the expected state. The error includes the
/// next step.
async fn check_result(
    api: &ApiClient,
    machine: &MachineDetail,
    operation: Option<&Operation>,
) -> Result<(), Failure> {
    let kind = operation.map_or("", |operation| operation.kind.as_str());
    let failed = operation.filter(|operation| operation.state != "succeeded");
    let outcome = match (failed, machine.display_state()) {
        (None, "running") => return Ok(()),
        (None, _) if matches!(kind, "power_on" | "power_off" | "reboot") => return Ok(()),
        (None, "deleted") if kind == "delete" => return Ok(()),
        (None, "deleted" | "replaced") if kind == "remove_server" => return Ok(()),
        (None, state) => format!("is {state}"),
        (Some(operation), _) => {
            let code = operation.error_code.as_deref().map(|code| format!(" ({code})")).unwrap_or_default();
            format!(
                "is {}: its {} {}{code}",
                machine.display_state(),
                operation::kind_noun(&operation.kind),
                outcome_phrase(operation)
            )
        }
    };
    let id = &machine.machine_id;
    let reason = machine
        .failure
        .as_ref()
        .map(|failure| format!("; {}", failure::summary_line(failure)))
        .unwrap_or_default();
    let (holder, next) = match (SlotHolder::find(api, machine).await?, &machine.failure) {
        (Some(slot_holder), failure) => {
            let advice = failure.as_ref().and_then(|failure| failure::restore_next_step(failure, machine));
            (format!("\n{}", slot_holder.line()), advice.unwrap_or_else(|| slot_holder.advice()))
        }
        (None, Some(failure)) => (String::new(), failure::next_step(failure, machine)),
        (None, None) => (String::new(), format!("run `svcctl status {id}` to see its operations")),
    };
    let error = anyhow!("machine {id} {outcome}{reason}{holder}\n  next: {next}");
    Err(Failure::new(Exit::Unavailable, error))
}

fn outcome_phrase(operation: &Operation) -> &str {
    match operation.state.as_str() {
        "cancelled" => "was cancelled",
        state => state,
    }
}

/// The machine holding the slot instead of the awaited one.
struct SlotHolder {
    machine: MachineDetail,
}

impl SlotHolder {
    /// Finds the holder. Returns `None` if the machine itself or no machine holds the slot, if the platform doesn't
    /// report the holder, or on a transient error.
    async fn find(api: &ApiClient, machine: &MachineDetail) -> Result<Option<Self>, Failure> {
        let live = machine.copies.as_ref().and_then(|copies| copies.live.as_ref());
        let Some(live) = live.filter(|live| live.machine_id != machine.machine_id) else { return Ok(None) };
        Ok(poll_machine(api, &live.machine_id).await?.ok().map(|(_, machine)| Self { machine }))
    }

    fn line(&self) -> String {
        let id = &self.machine.machine_id;
        match (self.machine.display_state(), self.machine.failure.as_ref()) {
            ("running", _) => format!("machine {id} is now serving the slot"),
            (_, Some(failure)) if failure::is_reinstating(failure) => {
                format!("machine {id} has the slot; it runs again after its next healthy heartbeat")
            }
            (_, Some(failure)) => {
                format!("machine {id} has the slot and has failed: {}", failure::summary_line(failure))
            }
            (state, None) => format!("machine {id} has the slot; it is {state}"),
        }
    }

    fn advice(&self) -> String {
        format!(
            "run `svcctl status {}` to see that machine; once the cause is fixed, try again",
            self.machine.machine_id
        )
    }
}

/// Reports an operation's progress, printing each change once.
struct ProgressReporter {
    progress: Progress,
    state: String,
    /// Highest log sequence number seen so far.
    last_seq: u64,
    /// Number of boot stages seen so far.
    seen_stages: usize,
    /// Last reported boot progress, in tens of percent.
    last_tens: u64,
    has_reported_error: bool,
}

impl ProgressReporter {
    fn new() -> Self {
        Self {
            progress: Progress::start(),
            state: String::new(),
            last_seq: 0,
            seen_stages: 0,
            last_tens: 0,
            has_reported_error: false,
        }
    }

    fn report(&mut self, machine: &MachineDetail, operation: Option<&Operation>) {
        self.has_reported_error = false;
        let mut lines: Vec<(&str, String)> = Vec::new();
        if let Some(operation) = operation {
            let (log_lines, last) = operation::lines_after(operation, self.last_seq);
            let log_lines = log_lines.into_iter().filter(|line| operation::should_show(line));
            lines.extend(log_lines.map(|line| {
                (line.at.as_str(), operation::format_log_line(self.progress.view(), operation, line))
            }));
            self.last_seq = last;
        }
        let stages = machine.boot.as_ref().map_or(&[][..], |boot| &boot.stages);
        // Skip boot stages from before the operation: a machine being resized has already booted.
        let is_earlier = |at: &str| operation.is_some_and(|operation| at < operation.created_at.as_str());
        for stage in stages.iter().skip(self.seen_stages).filter(|stage| !is_earlier(&stage.at)) {
            let at = operation.map_or_else(
                || stage.at.to_string(),
                |operation| operation::format_offset(operation, &stage.at),
            );
            lines.push((&stage.at, format!("{at}  boot: {}", stage.stage)));
        }
        self.seen_stages = stages.len();
        // All timestamps have the same format, so they sort lexicographically.
        lines.sort_by_key(|(at, _)| *at);
        let is_first = self.state.is_empty();
        let state = format!("machine {} {}", machine.machine_id, describe_activity(machine, operation));
        if is_first {
            self.progress.print_line(&state);
        }
        lines.iter().for_each(|(_, line)| self.progress.print_line(line));
        if !is_first && self.state != state {
            self.progress.print_line(&state);
        }
        self.state = state;
        // Skip the progress of completed stages: it would be printed after the next stage's line.
        let is_current = |progress: &&BootProgress| {
            machine.registered_at.is_none()
                && machine.boot.as_ref().is_none_or(|boot| boot.stage == progress.stage)
        };
        let progress = machine.boot_progress.as_ref().filter(is_current);
        let tens = progress.and_then(boot::percent).unwrap_or_default() / 10;
        if let Some(progress) = progress.filter(|_| tens > self.last_tens) {
            self.progress.print_line(&format!(
                "{:>9}  boot: {} {}",
                "",
                progress.stage,
                boot::progress_line(progress)
            ));
        }
        self.last_tens = tens;
        let step = operation.map_or(machine.display_state(), |operation| &operation.step);
        let boot = machine.boot.as_ref().filter(|_| step == "await_registration");
        let progress =
            progress.map(|progress| format!(" {}", boot::progress_line(progress))).unwrap_or_default();
        let boot = boot.map(|boot| format!(", boot: {}{progress}", boot.stage)).unwrap_or_default();
        self.progress.set_message(format!("{step}{boot}"));
    }

    fn report_error(&mut self, error: &str) {
        if !self.has_reported_error {
            self.progress.print_line(&format!("still waiting: {error}"));
        }
        self.has_reported_error = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn poll_until_cancels_in_flight_poll_at_timeout() {
        let start = Instant::now();
        let polled = poll_until(Duration::from_millis(20), async || {
            sleep(Duration::from_secs(60)).await;
            Ok(Some(()))
        });
        assert!(matches!(polled.await, Ok(None)));
        assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn poll_until_leaves_time_for_last_poll() {
        let start = Instant::now();
        // After the polls at 0, 200 and 500 ms, only the last one can find the value.
        let polled = poll_until(Duration::from_millis(800), async || {
            sleep(Duration::from_millis(1)).await;
            Ok((start.elapsed() >= Duration::from_millis(550)).then_some(()))
        });
        assert!(matches!(polled.await, Ok(Some(()))));
    }
}
