//! Waiting until an operation has ended and its machine stands still; what happens meanwhile is told on the way.

use std::time::Duration;

use anyhow::anyhow;
use tokio::time::{Instant, sleep};

use super::api::{Answer, Api, CallError};
use super::progress::Progress;
use super::show::machine::Machine;
use super::show::operation::Operation;
use crate::applet::{Exit, Failure};

const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Follows a machine, by one operation of it or by its status alone, and gives its last record.
///
/// # Errors
/// [`Exit::Unavailable`] when it ended badly, [`Exit::TryAgain`] when it had not ended in time.
pub async fn until_settled(
    api: &Api,
    machine_id: &str,
    operation_id: Option<&str>,
    within: Duration,
) -> Result<(Answer, Machine), Failure> {
    let mut clock = Clock::start(within);
    let mut seen = Seen::new();
    loop {
        match look(api, machine_id).await? {
            Ok((answer, machine)) => {
                let operation = operation_id
                    .and_then(|id| machine.operations.iter().find(|operation| operation.operation_id == id));
                seen.tell(&machine, operation);
                if is_settled(&machine, operation) {
                    drop(seen);
                    verdict(&machine, operation)?;
                    return Ok((answer, machine));
                }
            }
            Err(trouble) => seen.tell_trouble(&trouble),
        }
        if clock.is_over() {
            return Err(Failure::new(Exit::TryAgain, not_in_time(machine_id, operation_id, within)));
        }
        clock.pause().await;
    }
}

/// A machine's record; or the words of a trouble that may pass, because what was accepted goes on meanwhile.
pub async fn look(api: &Api, machine_id: &str) -> Result<Result<(Answer, Machine), String>, Failure> {
    match api.get(&["vps", machine_id], &[]).await {
        Ok(answer) => {
            let machine = answer.read()?;
            Ok(Ok((answer, machine)))
        }
        Err(error @ CallError::Unreachable { .. }) => Ok(Err(error.to_string())),
        Err(CallError::Refused(refusal)) if refusal.is_transient() => Ok(Err(refusal.to_string())),
        Err(error) => Err(error.into()),
    }
}

/// Growing pauses up to a deadline.
pub struct Clock {
    deadline: Instant,
    pause: Duration,
}

impl Clock {
    pub fn start(within: Duration) -> Self {
        Self { deadline: Instant::now() + within, pause: FIRST_PAUSE }
    }

    pub fn is_over(&self) -> bool {
        Instant::now() >= self.deadline
    }

    pub async fn pause(&mut self) {
        sleep(self.pause.min(self.deadline.duration_since(Instant::now()))).await;
        self.pause = (self.pause * 3 / 2).min(LONGEST_PAUSE);
    }
}

fn not_in_time(machine_id: &str, operation_id: Option<&str>, within: Duration) -> anyhow::Error {
    let look = operation_id
        .map_or_else(|| format!("svcctl status {machine_id}"), |id| format!("svcctl operation {id} --wait"));
    anyhow!("not ended after {} s; it goes on\n  next: `{look}`", within.as_secs())
}

fn is_settled(machine: &Machine, operation: Option<&Operation>) -> bool {
    let ended = operation.is_none_or(|operation| operation.state != "running");
    let moving = matches!(machine.state_word(), "provisioning" | "recovering" | "resizing");
    // A failed operation may leave a status that nothing will change any more.
    ended && (!moving || operation.is_some_and(|operation| operation.state != "succeeded"))
}

fn verdict(machine: &Machine, operation: Option<&Operation>) -> Result<(), Failure> {
    let kind = operation.map_or("", |operation| operation.kind.as_str());
    let failed = operation.filter(|operation| operation.state != "succeeded");
    let ended = match (failed, machine.state_word()) {
        (None, "running") => return Ok(()),
        (None, "deleted") if kind == "delete" => return Ok(()),
        (None, state) => format!("is {state}"),
        (Some(operation), _) => {
            let code = operation.error_code.as_deref().map(|code| format!(" ({code})")).unwrap_or_default();
            format!("has not come about: {} {}{code}", operation.kind, operation.state)
        }
    };
    let id = &machine.machine_id;
    let (why, next) = match &machine.failure {
        Some(failure) => (format!("; {}", failure.line()), failure.advice(machine)),
        None => (String::new(), format!("`svcctl status {id}` shows its operations")),
    };
    let error = anyhow!("machine {id} {ended}{why}\n  next: {next}");
    Err(Failure::new(Exit::Unavailable, error))
}

/// What has been told already.
struct Seen {
    progress: Progress,
    state: String,
    entries: usize,
    stages: usize,
    trouble: bool,
}

impl Seen {
    fn new() -> Self {
        Self { progress: Progress::start(), state: String::new(), entries: 0, stages: 0, trouble: false }
    }

    fn tell(&mut self, machine: &Machine, operation: Option<&Operation>) {
        self.trouble = false;
        let mut news: Vec<(&str, String)> = Vec::new();
        if let Some(operation) = operation {
            let entries = operation.log.iter().skip(self.entries).filter(|entry| entry.is_news());
            news.extend(
                entries.map(|entry| (entry.at.as_str(), operation.line(self.progress.view(), entry))),
            );
            self.entries = operation.log.len();
        }
        let stages = machine.boot.as_ref().map_or(&[][..], |boot| &boot.stages);
        // A resize boots a machine that had its first boot long before.
        let earlier =
            |at: &str| operation.and_then(|o| o.created_at.as_deref()).is_some_and(|from| at < from);
        for stage in stages.iter().skip(self.stages).filter(|stage| !earlier(&stage.at)) {
            let at = operation.map_or_else(|| stage.at.clone(), |operation| operation.offset(&stage.at));
            news.push((&stage.at, format!("{at}  boot: {}", stage.stage)));
        }
        self.stages = stages.len();
        // Times of one clock, in one form: their texts are in order, too.
        news.sort_by_key(|(at, _)| *at);
        news.iter().for_each(|(_, line)| self.progress.line(line));
        let now = machine.state_word();
        if self.state != now {
            self.progress.line(&format!("machine {} is {now}", machine.machine_id));
            now.clone_into(&mut self.state);
        }
        let step = operation.and_then(|operation| operation.step.as_deref()).unwrap_or(now);
        let boot = machine.boot.as_ref().filter(|_| step == "await_registration");
        let boot = boot.map(|boot| format!(", boot: {}", boot.stage)).unwrap_or_default();
        self.progress.at(format!("{step}{boot}"));
    }

    fn tell_trouble(&mut self, what: &str) {
        if !self.trouble {
            self.progress.line(&format!("still waiting: {what}"));
        }
        self.trouble = true;
    }
}
