//! Adapters that parse the output of coding agents' programs. Only [`codex_sessions`] performs I/O: it reads files.
//!
//! An [`Adapter`] receives each line of a run's output and finally its exit status. It returns events during the run,
//! and the outcome at the end: tools, tokens, cost and error. Unknown lines are ignored, because new program releases
//! add more.

mod claude;
pub mod codex;
pub mod codex_sessions;
mod json_lines;
pub mod launch;
pub mod preview;
mod run;
pub mod settings;
mod tools;

use serde::{Deserialize, Serialize};

pub use claude::Claude;
pub use codex::Codex;
pub use json_lines::JsonLines;

use self::codex_sessions::SessionUsage;
use crate::records::entry::{DispatchError, ResultStatus, ToolCall};
use crate::records::money::Dollars;

/// Longer messages and stacks are truncated.
const MAX_MESSAGE_CHARS: usize = 2000;
const MAX_STACK_CHARS: usize = 4000;
/// Maximum number of characters in a model name or a conversation id.
const MAX_ID_CHARS: usize = 200;

/// An event that a run reports to its listeners.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", tag = "type")]
pub enum Event {
    /// The agent has started. If it reported a conversation id, the conversation can be resumed.
    #[serde(rename_all = "camelCase")]
    Started {
        conversation_id: Option<String>,
        model: Option<String>,
    },
    /// Text that the agent wrote.
    Text {
        text: String,
    },
    #[serde(rename_all = "camelCase")]
    ToolStarted {
        id: String,
        name: String,
        input_preview: String,
        /// Whether the call is recorded in [`Outcome::tools`], whose length is limited. Only recorded calls may be
        /// noted in `activity.log`. Listeners do not receive this field.
        #[serde(skip)]
        is_recorded: bool,
    },
    ToolEnded {
        id: String,
        name: String,
        status: ResultStatus,
    },
}

/// The exit status of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Exit {
    Code(i32),
    Signal(i32),
}

impl Exit {
    /// Whether a signal ended the process. By convention, a program that handles a signal exits with 128 plus the
    /// signal's number, which is at most 64. Higher codes are errors: 255, for example, is the code of `exit(-1)`.
    pub fn is_caused_by_signal(self) -> bool {
        match self {
            Self::Code(code) => (129..=192).contains(&code),
            Self::Signal(_) => true,
        }
    }
}

/// The outcome of a run, as reported by the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub conversation_id: Option<String>,
    pub model: Option<String>,
    pub tokens_in: u64,
    pub tokens_out: u64,
    /// Input tokens that the model's service had cached; part of `tokens_in`.
    pub tokens_cached: u64,
    /// `None` if the program reports no cost.
    pub cost: Option<Dollars>,
    /// Whether the model may have used tokens after the program last reported its usage or cost.
    pub has_unreported_usage: bool,
    pub tools: Vec<ToolCall>,
    pub status: ResultStatus,
    pub error: Option<DispatchError>,
    /// The agent's final text.
    pub text: Option<String>,
}

/// Parses the output of one run.
pub trait Adapter: Send {
    /// Parses a line of standard output, which was read `at_ms` milliseconds after the start.
    fn parse_line(&mut self, at_ms: u64, line: &str) -> Vec<Event>;

    /// Sets the usage from the program's session files, which overrides the printed usage. Call before
    /// [`Adapter::finish`].
    fn set_usage(&mut self, _usage: SessionUsage) {}

    /// Records that the program resumed an earlier conversation, whose usage some releases print again. Call before
    /// [`Adapter::finish`].
    fn set_resumed(&mut self) {}

    /// Ends the run after the process has exited.
    fn finish(&mut self, at_ms: u64, exit: Exit, stderr_tail: &str) -> Outcome;
}

/// The adapters, by their names in the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AdapterKind {
    /// Claude Code: `claude -p --output-format stream-json --verbose`.
    ClaudeCode,
    /// Codex: `codex exec --json`.
    Codex,
    /// The project's own JSON Lines protocol: see [`JsonLines`].
    JsonLines,
}

impl AdapterKind {
    /// Whether tool calls have the same ids in the program's output and in its hooks.
    pub fn has_shared_call_ids(self) -> bool {
        self == Self::ClaudeCode
    }

    pub fn create_adapter(self) -> Box<dyn Adapter> {
        match self {
            Self::ClaudeCode => Box::new(Claude::default()),
            Self::Codex => Box::new(Codex::default()),
            Self::JsonLines => Box::new(JsonLines::default()),
        }
    }
}

/// Removes secrets, then puts the text on one line and truncates it to at most `max_chars` characters.
fn scrub_and_truncate(text: &str, max_chars: usize) -> String {
    preview::flatten_and_truncate(&preview::scrub(text), max_chars)
}

/// The error for a run that reported none itself. [`run::RunState::finish`] adds the tool and the turn.
fn exit_failure(exit: Exit, stderr_tail: &str) -> DispatchError {
    let (name, message) = match exit {
        Exit::Code(0) => ("NoResult", "the agent exited without a result".to_owned()),
        Exit::Code(code) => ("ExitCode", format!("the agent exited with code {code}")),
        Exit::Signal(signal) => ("Signal", format!("the agent was terminated by signal {signal}")),
    };
    let stack = Some(stderr_tail.trim())
        .filter(|text| !text.is_empty())
        .map(|text| scrub_and_truncate(text, MAX_STACK_CHARS));
    DispatchError { name: name.to_owned(), message, stack, tool: None, turn: None }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// Feeds a recording to an adapter.
    pub fn replay(program: &str, name: &str, adapter: &mut dyn Adapter) -> (Vec<Event>, Outcome) {
        let dir = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
            .join("tests/agents/recordings")
            .join(program);
        let stdout = std::fs::read_to_string(dir.join(format!("{name}.stdout.jsonl"))).unwrap();
        let exit_text = std::fs::read_to_string(dir.join(format!("{name}.exit"))).unwrap();
        let exit_code: i32 = exit_text.lines().next().unwrap().trim().parse().unwrap();
        let exit = if exit_code < 0 { Exit::Signal(-exit_code) } else { Exit::Code(exit_code) };
        let events = stdout.lines().zip(0..).flat_map(|(line, n)| adapter.parse_line(n, line)).collect();
        let lines = stdout.lines().count() as u64;
        (events, adapter.finish(lines, exit, "text on standard error"))
    }

    #[test]
    fn signals_are_recognized_by_exit_code() {
        for code in [129, 143, 192] {
            assert!(Exit::Code(code).is_caused_by_signal(), "{code}");
        }
        for code in [0, 1, 128, 193, 255] {
            assert!(!Exit::Code(code).is_caused_by_signal(), "{code}");
        }
    }
}
