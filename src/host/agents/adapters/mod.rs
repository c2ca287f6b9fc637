//! Adapters that parse the output of coding agents. Only [`codex_sessions`] performs I/O: it reads files.
//!
//! An [`Adapter`] is fed each line of a run's output, followed by the exit status. It returns events during the run and
//! the outcome at the end: tools, tokens, cost and error. Unknown lines are ignored, since new agent releases add more.

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
/// Maximum number of characters in a model name or conversation id.
const MAX_ID_CHARS: usize = 200;

/// An event reported to a run's listeners.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", tag = "type")]
pub enum Event {
    /// The agent has started. If it reported a conversation id, the conversation can be resumed.
    #[serde(rename_all = "camelCase")]
    Started {
        conversation_id: Option<String>,
        model: Option<String>,
    },
    /// Text written by the agent.
    Text {
        text: String,
    },
    #[serde(rename_all = "camelCase")]
    ToolStarted {
        id: String,
        name: String,
        input_preview: String,
        /// Whether the call is recorded in [`Outcome::tools`], whose length is limited. Only recorded calls may be
        /// logged to `activity.log`. Not sent to listeners.
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
    /// Whether a signal terminated the process. By convention, programs that handle a signal exit with 128 plus the
    /// signal number, which is at most 64. Higher codes are errors: `exit(-1)`, for example, yields 255.
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
    /// Input tokens served from the model provider's cache. Included in `tokens_in`.
    pub tokens_cached: u64,
    /// `None` if the program doesn't report a cost.
    pub cost: Option<Dollars>,
    /// Whether the model may have used tokens since the program last reported usage or cost.
    pub has_unreported_usage: bool,
    pub tools: Vec<ToolCall>,
    pub status: ResultStatus,
    pub error: Option<DispatchError>,
    /// The agent's final text.
    pub text: Option<String>,
}

/// Parses the output of one run.
pub trait Adapter: Send {
    /// Parses a line of stdout, read `at_ms` milliseconds into the run.
    fn parse_line(&mut self, at_ms: u64, line: &str) -> Vec<Event>;

    /// Overrides the printed usage with that from the program's session files. Call before [`Adapter::finish`].
    fn set_usage(&mut self, _usage: SessionUsage) {}

    /// Records that the program resumed an earlier conversation, whose usage some releases print again. Call before
    /// [`Adapter::finish`].
    fn set_resumed(&mut self) {}

    /// Finishes the run after the process has exited.
    fn finish(&mut self, at_ms: u64, exit: Exit, stderr_tail: &str) -> Outcome;
}

/// Adapters by configuration name.
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
    /// Whether tool calls have the same ids in the program's output and hooks.
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

/// Redacts secrets, then flattens the text to one line of at most `max_chars` characters.
fn scrub_and_truncate(text: &str, max_chars: usize) -> String {
    preview::flatten_and_truncate(&preview::scrub(text), max_chars)
}

/// Error for a run that didn't report one itself. [`run::RunState::finish`] adds the tool and turn.
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
