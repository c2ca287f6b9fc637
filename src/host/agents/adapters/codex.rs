//! Codex adapter: parses the output of `codex exec --json`. The format is documented in `tests/agents/README.md`, along
//! with the recordings used to test this adapter.
//!
//! The output doesn't include the model or cost, and its usage covers all earlier runs of the thread, but not subagents
//! or interrupted runs. [`super::codex_sessions`] therefore reads model and usage from the session files. A
//! conversation id that matches an existing thread resumes it; otherwise, each run starts a new thread.
//!
//! If the session files can't be read, we fall back to the printed usage, which is too high for a resumed thread.

use serde::Deserialize;
use serde_json::{Value, json};

use super::codex_sessions::SessionUsage;
use super::run::RunState;
use super::{Adapter, Event, Exit, MAX_MESSAGE_CHARS, Outcome, exit_failure, scrub_and_truncate};
use crate::records::entry::{DispatchError, ResultStatus};

#[derive(Deserialize)]
#[serde(tag = "type")]
enum CodexLine {
    #[serde(rename = "thread.started")]
    ThreadStarted { thread_id: String },
    #[serde(rename = "item.started")]
    ItemStarted { item: Item },
    #[serde(rename = "item.completed")]
    ItemCompleted { item: Item },
    #[serde(rename = "turn.completed")]
    TurnCompleted { usage: Usage },
    #[serde(rename = "turn.failed")]
    TurnFailed { error: TurnError },
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct Item {
    id: String,
    #[serde(flatten)]
    kind: ItemKind,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ItemKind {
    AgentMessage {
        text: String,
    },
    CommandExecution {
        command: String,
        #[serde(default)]
        status: String,
        #[serde(default)]
        aggregated_output: String,
        #[serde(default)]
        exit_code: Option<i64>,
    },
    FileChange {
        changes: Value,
        #[serde(default)]
        status: String,
    },
    CollabToolCall {
        tool: String,
        #[serde(default)]
        status: String,
    },
    #[serde(other)]
    Other,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Usage {
    input_tokens: u64,
    /// Included in `input_tokens`.
    cached_input_tokens: u64,
    output_tokens: u64,
}

#[derive(Deserialize)]
struct TurnError {
    message: String,
}

/// A Codex run.
#[derive(Default)]
pub struct Codex {
    run: RunState,
    is_turn_completed: bool,
    has_session_usage: bool,
    failure: Option<DispatchError>,
}

impl Adapter for Codex {
    fn parse_line(&mut self, at_ms: u64, line: &str) -> Vec<Event> {
        let event = match serde_json::from_str(line).unwrap_or(CodexLine::Other) {
            CodexLine::ThreadStarted { thread_id } => {
                self.run.conversation_id = Some(thread_id.clone());
                Some(Event::Started { conversation_id: Some(thread_id), model: None })
            }
            CodexLine::ItemStarted { item } => self.start_item(at_ms, &item),
            CodexLine::ItemCompleted { item } => return self.complete_item(at_ms, item),
            CodexLine::TurnCompleted { usage } => {
                self.run.add_tokens(usage.input_tokens, usage.output_tokens);
                self.run.tokens_cached = usage.cached_input_tokens;
                self.is_turn_completed = true;
                None
            }
            CodexLine::TurnFailed { error } => {
                let message = scrub_and_truncate(&error.message, MAX_MESSAGE_CHARS);
                self.failure = Some(DispatchError {
                    name: "TurnFailed".to_owned(),
                    message,
                    stack: None,
                    tool: None,
                    turn: None,
                });
                None
            }
            CodexLine::Other => None,
        };
        event.into_iter().collect()
    }

    fn set_usage(&mut self, usage: SessionUsage) {
        (self.run.tokens_in, self.run.tokens_out) = (usage.tokens_in, usage.tokens_out);
        self.run.tokens_cached = usage.tokens_cached;
        self.run.model = usage.model;
        self.has_session_usage = true;
    }

    fn finish(&mut self, at_ms: u64, exit: Exit, stderr_tail: &str) -> Outcome {
        let error = match (self.failure.take(), exit) {
            (None, Exit::Code(0)) if self.is_turn_completed => None,
            (Some(failure), _) => Some(failure),
            _ => Some(exit_failure(exit, stderr_tail)),
        };
        let is_started = self.run.conversation_id.is_some();
        self.run.has_unreported_usage = is_started && !self.is_turn_completed && !self.has_session_usage;
        self.run.finish(at_ms, error)
    }
}

/// Returns the thread id if this is a `thread.started` line.
pub fn parse_thread_id(line: &[u8]) -> Option<String> {
    match serde_json::from_slice(line) {
        Ok(CodexLine::ThreadStarted { thread_id }) => Some(thread_id),
        _ => None,
    }
}

impl Codex {
    fn start_item(&mut self, at_ms: u64, item: &Item) -> Option<Event> {
        let (name, input) = match &item.kind {
            ItemKind::CommandExecution { command, .. } => {
                ("Bash", json!({ "command": unwrap_shell(command) }))
            }
            ItemKind::FileChange { changes, .. } => ("apply_patch", json!({ "changes": changes })),
            ItemKind::CollabToolCall { tool, .. } => (&**tool, Value::Null),
            ItemKind::AgentMessage { .. } | ItemKind::Other => return None,
        };
        self.run.tools.start(at_ms, &item.id, name, &input)
    }

    fn complete_item(&mut self, at_ms: u64, item: Item) -> Vec<Event> {
        // Some items are only reported on completion. `start_item` ignores items that have already started.
        let started = self.start_item(at_ms, &item);
        let ended = match item.kind {
            ItemKind::AgentMessage { text } => {
                self.run.set_text(&text);
                Some(Event::Text { text })
            }
            ItemKind::CommandExecution { status, aggregated_output, exit_code, .. } => {
                // Matches Claude Code's output format.
                let code = exit_code.map(|code| format!("Exit code {code}\n")).unwrap_or_default();
                self.end_tool(at_ms, &item.id, &status, Some(&(code + &aggregated_output)))
            }
            ItemKind::FileChange { status, .. } | ItemKind::CollabToolCall { status, .. } => {
                self.end_tool(at_ms, &item.id, &status, None)
            }
            ItemKind::Other => None,
        };
        started.into_iter().chain(ended).collect()
    }

    fn end_tool(&mut self, at_ms: u64, id: &str, status: &str, output: Option<&str>) -> Option<Event> {
        let status = if status == "completed" { ResultStatus::Success } else { ResultStatus::Error };
        self.run.tools.end(at_ms, id, status, output)
    }
}

/// Strips the `bash -lc` wrapper that Codex adds to commands.
fn unwrap_shell(command: &str) -> &str {
    let inner = command.strip_prefix("/bin/bash -lc '").and_then(|rest| rest.strip_suffix('\''));
    inner.unwrap_or(command)
}

#[cfg(test)]
mod tests {
    use super::super::tests::replay;
    use super::*;

    #[test]
    fn run_reports_tools_usage_and_text() {
        let (events, outcome) = replay("codex", "basic", &mut Codex::default());
        let tools: Vec<(&str, ResultStatus)> =
            outcome.tools.iter().map(|tool| (&*tool.name, tool.status)).collect();
        let (patch, good) = ("apply_patch", ResultStatus::Success);
        assert_eq!(
            tools,
            [
                (patch, good),
                (patch, good),
                ("Bash", good),
                ("Bash", ResultStatus::Error),
                (patch, good),
                ("Bash", good),
                (patch, good)
            ]
        );
        assert_eq!(outcome.tools[2].input_preview, "mkdir -p a/b && cp x z && mv x y && rm z");
        assert_eq!((outcome.tokens_in, outcome.tokens_out, outcome.cost), (48_000, 1600, None));
        assert_eq!(outcome.tokens_cached, 40_000);
        assert_eq!((outcome.status, outcome.text.as_deref()), (ResultStatus::Success, Some("All done.")));
        assert!(!format!("{events:?}{outcome:?}").contains("three"), "tool output leaked");
        assert_eq!(outcome.tools[3].error.as_deref(), Some("Exit code 3 out err"));
        assert_eq!(outcome.tools.iter().filter(|tool| tool.error.is_some()).count(), 1);
    }

    #[test]
    fn session_usage_overrides_printed_usage() {
        let mut codex = Codex::default();
        let line = r#"{"type":"thread.started","thread_id":"t-1"}"#;
        codex.parse_line(0, line);
        assert_eq!(
            (parse_thread_id(line.as_bytes()).as_deref(), parse_thread_id(b"{}")),
            (Some("t-1"), None)
        );
        codex.parse_line(
            1,
            r#"{"type":"turn.completed","usage":{"input_tokens":54000,"output_tokens":1800}}"#,
        );
        codex.set_usage(SessionUsage {
            model: Some("gpt-5.5".to_owned()),
            tokens_in: 6000,
            tokens_out: 200,
            tokens_cached: 5000,
        });
        let outcome = codex.finish(2, Exit::Code(0), "");
        assert_eq!(outcome.tokens_cached, 5000);
        assert_eq!(
            (outcome.tokens_in, outcome.tokens_out, outcome.model.as_deref()),
            (6000, 200, Some("gpt-5.5"))
        );
    }

    #[test]
    fn failures_report_their_reason() {
        let (_, outcome) = replay("codex", "err500", &mut Codex::default());
        let failed = outcome.error.unwrap();
        assert!(failed.name == "TurnFailed" && failed.message.contains("high demand"), "{failed:?}");
        let (_, outcome) = replay("codex", "sigterm", &mut Codex::default());
        let failed = outcome.error.unwrap();
        assert_eq!((&*failed.name, failed.tool.as_deref()), ("Signal", Some("Bash")), "{failed:?}");
        assert_eq!(failed.turn, Some(1));
    }
}
