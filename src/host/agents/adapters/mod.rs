//! Coding agents' programs, by what they print: pure.
//!
//! An [`Adapter`] is told each line of a run's output and how the run ended. It says what is worth telling while the run
//! goes on, and at the end what the record has: tools, tokens, cost, and why it failed. A line that it does not know is
//! left out: programs say more with each release.

mod claude;
pub mod codex;
pub mod codex_sessions;
pub mod launch;
mod plain;
pub mod preview;
mod run;
pub mod settings;
mod tools;

use serde::{Deserialize, Serialize};

pub use claude::Claude;
pub use codex::Codex;
pub use plain::Plain;

use self::codex_sessions::Used;
use crate::host::records::entry::{Failed, Status, Tool};
use crate::host::records::money::Dollars;

/// Longer messages and stacks are cut off.
const LONGEST_MESSAGE: usize = 2000;
const LONGEST_STACK: usize = 4000;
/// Of a model's name, or a conversation's.
const LONGEST_WORD: usize = 200;

/// What happens in a run, for whoever looks on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", tag = "type")]
pub enum Event {
    /// The agent is there, and has a conversation that can be gone on with.
    #[serde(rename_all = "camelCase")]
    Started {
        conversation_id: Option<String>,
        model: Option<String>,
    },
    /// Something that the agent says.
    Text {
        text: String,
    },
    #[serde(rename_all = "camelCase")]
    ToolStarted {
        id: String,
        name: String,
        input_preview: String,
    },
    ToolEnded {
        id: String,
        name: String,
        status: Status,
    },
}

/// How the process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Exit {
    Code(i32),
    Signal(i32),
}

/// What was done, and what it cost, as far as the program said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub conversation_id: Option<String>,
    pub model: Option<String>,
    pub tokens_in: u64,
    pub tokens_out: u64,
    /// Of the input: what the model's service had already.
    pub tokens_cached: u64,
    /// `None` where the program names no price.
    pub cost: Option<Dollars>,
    pub tools: Vec<Tool>,
    pub status: Status,
    pub error: Option<Failed>,
    /// What the agent said last.
    pub text: Option<String>,
}

/// One run.
pub trait Adapter: Send {
    /// A line of standard output, `at_ms` after the start.
    fn line(&mut self, at_ms: u64, line: &str) -> Vec<Event>;

    /// What its own record says that it has used, which counts more than what it printed. Before [`Adapter::ended`].
    fn used(&mut self, _used: Used) {}

    /// The process has ended; `said` is the end of what it wrote to standard error.
    fn ended(&mut self, at_ms: u64, exit: Exit, said: &str) -> Outcome;
}

/// The adapters by the names that a configuration gives them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Claude Code: `claude -p --output-format stream-json --verbose`.
    ClaudeCode,
    /// Codex: `codex exec --json`.
    Codex,
    /// Our own protocol of JSON lines: see [`Plain`].
    JsonLines,
}

impl Kind {
    /// Whether tool calls have the same ids in the program's output as in its hooks.
    pub fn has_ids_of_hooks(self) -> bool {
        self == Self::ClaudeCode
    }

    pub fn adapter(self) -> Box<dyn Adapter> {
        match self {
            Self::ClaudeCode => Box::new(Claude::default()),
            Self::Codex => Box::new(Codex::default()),
            Self::JsonLines => Box::new(Plain::default()),
        }
    }
}

/// At most `longest` characters of it, without secrets.
fn told(text: &str, longest: usize) -> String {
    preview::cut(&preview::scrubbed(text), longest)
}

/// Why a run failed that said nothing of it by itself.
fn silent(exit: Exit, said: &str) -> Failed {
    let (name, message) = match exit {
        Exit::Code(0) => ("NoResult", "the agent ended without a result".to_owned()),
        Exit::Code(code) => ("ExitCode", format!("the agent ended with exit code {code}")),
        Exit::Signal(signal) => ("Signal", format!("the agent was ended by signal {signal}")),
    };
    let stack = Some(said.trim()).filter(|said| !said.is_empty()).map(|said| told(said, LONGEST_STACK));
    Failed { name: name.to_owned(), message, stack, tool: None, turn: None }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// A recording, told to an adapter.
    pub fn played(program: &str, name: &str, adapter: &mut dyn Adapter) -> (Vec<Event>, Outcome) {
        let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/agents/recordings").join(program);
        let stdout = std::fs::read_to_string(dir.join(format!("{name}.stdout.jsonl"))).unwrap();
        let exit = std::fs::read_to_string(dir.join(format!("{name}.exit"))).unwrap();
        let code: i32 = exit.lines().next().unwrap().trim().parse().unwrap();
        let exit = if code < 0 { Exit::Signal(-code) } else { Exit::Code(code) };
        let events = stdout.lines().zip(0..).flat_map(|(line, n)| adapter.line(n, line)).collect();
        let lines = stdout.lines().count() as u64;
        (events, adapter.ended(lines, exit, "words on standard error"))
    }
}
