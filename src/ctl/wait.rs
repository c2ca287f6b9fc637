//! Waiting until an operation has ended and its machine stands still; what happens meanwhile goes to stderr.

use std::time::Duration;

use anyhow::anyhow;
use tokio::time::{Instant, sleep};

use super::api::{Answer, Api, CallError};
use super::show::{self, Machine, Operation};
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
    let deadline = Instant::now() + within;
    let mut seen = Seen::default();
    let mut pause = FIRST_PAUSE;
    loop {
        match api.get(&["vps", machine_id], &[]).await {
            Ok(answer) => {
                let machine: Machine = answer.read()?;
                let operation = operation_id
                    .and_then(|id| machine.operations.iter().find(|operation| operation.operation_id == id));
                seen.tell(&machine, operation);
                if is_settled(&machine, operation) {
                    verdict(&machine, operation)?;
                    return Ok((answer, machine));
                }
            }
            // The platform may restart meanwhile: what was accepted goes on.
            Err(error @ CallError::Unreachable { .. }) => seen.tell_trouble(&error.to_string()),
            Err(CallError::Refused(refusal)) if refusal.is_transient() => {
                seen.tell_trouble(&refusal.to_string());
            }
            Err(error) => return Err(error.into()),
        }
        if Instant::now() >= deadline {
            return Err(Failure::new(Exit::TryAgain, not_in_time(machine_id, operation_id, within)));
        }
        sleep(pause.min(deadline.duration_since(Instant::now()))).await;
        pause = (pause * 3 / 2).min(LONGEST_PAUSE);
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
    let why = show::compact(machine.failure.as_ref());
    let why = if why.is_empty() { why } else { format!("; {why}") };
    let id = &machine.machine_id;
    let error = anyhow!("machine {id} {ended}{why}\n  next: `svcctl status {id}` shows its operations");
    Err(Failure::new(Exit::Unavailable, error))
}

/// What has been told already.
#[derive(Default)]
struct Seen {
    state: String,
    entries: usize,
    trouble: bool,
}

impl Seen {
    fn tell(&mut self, machine: &Machine, operation: Option<&Operation>) {
        self.trouble = false;
        for entry in operation.iter().flat_map(|operation| operation.log.iter().skip(self.entries)) {
            eprintln!("{}", entry.line());
        }
        self.entries = operation.map_or(self.entries, |operation| operation.log.len());
        let now = machine.state_word();
        if self.state != now {
            eprintln!("machine {} is {now}", machine.machine_id);
            now.clone_into(&mut self.state);
        }
    }

    fn tell_trouble(&mut self, what: &str) {
        if !self.trouble {
            eprintln!("still waiting: {what}");
        }
        self.trouble = true;
    }
}
