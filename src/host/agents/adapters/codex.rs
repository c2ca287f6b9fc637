//! Codex, as `codex exec --json` tells of its run. What it tells, and when, is in `tests/agents/README.md`, with the
//! recordings that this is tested by.
//!
//! It names no model and no price, its usage is that of the whole thread with all runs before, and what its subagents use,
//! or a run that is cut off, it does not tell: [`super::codex_sessions`] has all that. A conversation that is a thread of its is
//! gone on with; by any other name each run is a thread of its own.
//!
//! Where that cannot be read, what was printed counts: of a thread that is gone on with rather too much than nothing.

use serde::Deserialize;
use serde_json::{Value, json};

use super::codex_sessions::Used;
use super::run::Run;
use super::{Adapter, Event, Exit, LONGEST_MESSAGE, Outcome, silent, told};
use crate::host::records::entry::{Failed, Status};

#[derive(Deserialize)]
#[serde(tag = "type")]
enum Line {
    #[serde(rename = "thread.started")]
    Thread { thread_id: String },
    #[serde(rename = "item.started")]
    ItemStarted { item: Item },
    #[serde(rename = "item.completed")]
    ItemCompleted { item: Item },
    #[serde(rename = "turn.completed")]
    TurnCompleted { usage: Usage },
    #[serde(rename = "turn.failed")]
    TurnFailed { error: Message },
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct Item {
    id: String,
    #[serde(flatten)]
    kind: Kind,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Kind {
    AgentMessage {
        text: String,
    },
    CommandExecution {
        command: String,
        #[serde(default)]
        status: String,
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
    /// Of the input.
    cached_input_tokens: u64,
    output_tokens: u64,
}

#[derive(Deserialize)]
struct Message {
    message: String,
}

/// A run of Codex.
#[derive(Default)]
pub struct Codex {
    run: Run,
    is_done: bool,
    failed: Option<Failed>,
}

impl Adapter for Codex {
    fn line(&mut self, at_ms: u64, line: &str) -> Vec<Event> {
        let event = match serde_json::from_str(line).unwrap_or(Line::Other) {
            Line::Thread { thread_id } => {
                self.run.conversation_id = Some(thread_id.clone());
                Some(Event::Started { conversation_id: Some(thread_id), model: None })
            }
            Line::ItemStarted { item } => self.started(at_ms, &item),
            Line::ItemCompleted { item } => return self.completed(at_ms, item),
            Line::TurnCompleted { usage } => {
                self.run.count(usage.input_tokens, usage.output_tokens);
                self.run.tokens_cached = usage.cached_input_tokens;
                self.is_done = true;
                None
            }
            Line::TurnFailed { error } => {
                let message = told(&error.message, LONGEST_MESSAGE);
                self.failed = Some(Failed {
                    name: "TurnFailed".to_owned(),
                    message,
                    stack: None,
                    tool: None,
                    turn: None,
                });
                None
            }
            Line::Other => None,
        };
        event.into_iter().collect()
    }

    fn used(&mut self, used: Used) {
        (self.run.tokens_in, self.run.tokens_out) = (used.tokens_in, used.tokens_out);
        self.run.tokens_cached = used.tokens_cached;
        self.run.model = used.model;
    }

    fn ended(&mut self, at_ms: u64, exit: Exit, said: &str) -> Outcome {
        let cut_off = self.run.tools.close(at_ms);
        let error = match (self.failed.take(), exit) {
            (None, Exit::Code(0)) if self.is_done => None,
            (Some(failed), _) => Some(failed),
            _ => Some(Failed { tool: cut_off, ..silent(exit, said) }),
        };
        self.run.outcome(error)
    }
}

/// The thread, where a line says that one has begun.
pub fn thread(line: &[u8]) -> Option<String> {
    match serde_json::from_slice(line) {
        Ok(Line::Thread { thread_id }) => Some(thread_id),
        _ => None,
    }
}

impl Codex {
    fn started(&mut self, at_ms: u64, item: &Item) -> Option<Event> {
        let (name, input) = match &item.kind {
            Kind::CommandExecution { command, .. } => ("Bash", json!({ "command": unwrapped(command) })),
            Kind::FileChange { changes, .. } => ("apply_patch", json!({ "changes": changes })),
            Kind::CollabToolCall { tool, .. } => (&**tool, Value::Null),
            Kind::AgentMessage { .. } | Kind::Other => return None,
        };
        self.run.tools.start(at_ms, &item.id, name, &input)
    }

    fn completed(&mut self, at_ms: u64, item: Item) -> Vec<Event> {
        // One that is told of when it is over alone has begun then.
        let begun = self.started(at_ms, &item);
        let ended = match item.kind {
            Kind::AgentMessage { text } => {
                self.run.text = Some(text.clone());
                Some(Event::Text { text })
            }
            Kind::CommandExecution { status, .. }
            | Kind::FileChange { status, .. }
            | Kind::CollabToolCall { status, .. } => {
                let status = if status == "completed" { Status::Success } else { Status::Error };
                self.run.tools.end(at_ms, &item.id, status)
            }
            Kind::Other => None,
        };
        begun.into_iter().chain(ended).collect()
    }
}

/// The command, without the shell that Codex runs it by.
fn unwrapped(command: &str) -> &str {
    let inner = command.strip_prefix("/bin/bash -lc '").and_then(|rest| rest.strip_suffix('\''));
    inner.unwrap_or(command)
}

#[cfg(test)]
mod tests {
    use super::super::tests::played;
    use super::*;

    #[test]
    fn a_run_is_told_whole() {
        let (events, outcome) = played("codex", "basic", &mut Codex::default());
        let tools: Vec<(&str, Status)> =
            outcome.tools.iter().map(|tool| (&*tool.name, tool.status)).collect();
        let (patch, good) = ("apply_patch", Status::Success);
        assert_eq!(
            tools,
            [
                (patch, good),
                (patch, good),
                ("Bash", good),
                ("Bash", Status::Error),
                (patch, good),
                ("Bash", good),
                (patch, good)
            ]
        );
        assert_eq!(outcome.tools[2].input_preview, "mkdir -p a/b && cp x z && mv x y && rm z");
        assert_eq!((outcome.tokens_in, outcome.tokens_out, outcome.cost), (48_000, 1600, None));
        assert_eq!(outcome.tokens_cached, 40_000);
        assert_eq!((outcome.status, outcome.text.as_deref()), (Status::Success, Some("All done.")));
        assert!(!format!("{events:?}{outcome:?}").contains("three"), "no answer of a tool is told");
    }

    #[test]
    fn its_own_record_counts_more_than_its_output() {
        let mut codex = Codex::default();
        let line = r#"{"type":"thread.started","thread_id":"t-1"}"#;
        codex.line(0, line);
        assert_eq!((thread(line.as_bytes()).as_deref(), thread(b"{}")), (Some("t-1"), None));
        codex.line(1, r#"{"type":"turn.completed","usage":{"input_tokens":54000,"output_tokens":1800}}"#);
        codex.used(Used {
            model: Some("gpt-5.5".to_owned()),
            tokens_in: 6000,
            tokens_out: 200,
            tokens_cached: 5000,
        });
        let outcome = codex.ended(2, Exit::Code(0), "");
        assert_eq!(outcome.tokens_cached, 5000);
        assert_eq!(
            (outcome.tokens_in, outcome.tokens_out, outcome.model.as_deref()),
            (6000, 200, Some("gpt-5.5"))
        );
    }

    #[test]
    fn what_failed_says_why() {
        let (_, outcome) = played("codex", "err500", &mut Codex::default());
        let failed = outcome.error.unwrap();
        assert!(failed.name == "TurnFailed" && failed.message.contains("high demand"), "{failed:?}");
        let (_, outcome) = played("codex", "sigterm", &mut Codex::default());
        let failed = outcome.error.unwrap();
        assert_eq!((&*failed.name, failed.tool.as_deref()), ("Signal", Some("Bash")), "{failed:?}");
    }
}
