//! Our own protocol, for agents without one: one JSON object per line.
//!
//! The program reads one line from stdin, followed by EOF:
//! `{"type": "prompt", "version": 1, "prompt", "agentName", "model", "conversationId"}`. The last two fields may be
//! `null`. It then writes these lines to stdout:
//!
//! | line | |
//! |---|---|
//! | `{"type": "started", "conversationId"?, "model"?}` | first |
//! | `{"type": "text", "text"}` | text written by the agent |
//! | `{"type": "tool", "id", "name", "input"}` | a tool call started |
//! | `{"type": "toolResult", "id", "status": "success" or "error", "error"?}` | the call finished; `error` is text |
//! | `{"type": "usage", "tokensIn", "tokensOut", "cost"?}` | usage since the previous `usage` line; `cost` in dollars |
//! | `{"type": "result", "status", "text"?, "error"?: {"name"?, "message", "stack"?, "tool"?, "turn"?}}` | last |
//!
//! A run succeeds only if its result has status `success` and the program exits with code 0.

use serde::Deserialize;
use serde_json::Value;

use super::run::RunState;
use super::{
    Adapter, Event, Exit, MAX_MESSAGE_CHARS, MAX_STACK_CHARS, Outcome, exit_failure, scrub_and_truncate,
};
use crate::records::entry::{DispatchError, ResultStatus};
use crate::records::money::Dollars;

/// Maximum number of characters in an error or tool name.
const MAX_NAME_CHARS: usize = 100;
/// Name for errors that the program doesn't name.
const DEFAULT_ERROR_NAME: &str = "Error";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase", tag = "type")]
enum ProtocolLine {
    Started {
        conversation_id: Option<String>,
        model: Option<String>,
    },
    Text {
        text: String,
    },
    Tool {
        id: String,
        name: String,
        #[serde(default)]
        input: Value,
    },
    ToolResult {
        id: String,
        status: ResultStatus,
        error: Option<String>,
    },
    Usage {
        #[serde(default)]
        tokens_in: u64,
        #[serde(default)]
        tokens_out: u64,
        cost: Option<Dollars>,
    },
    Result {
        status: ResultStatus,
        text: Option<String>,
        error: Option<ErrorFields>,
    },
}

#[derive(Deserialize)]
struct ErrorFields {
    name: Option<String>,
    message: String,
    stack: Option<String>,
    tool: Option<String>,
    turn: Option<u64>,
}

impl From<ErrorFields> for DispatchError {
    fn from(error: ErrorFields) -> Self {
        Self {
            name: scrub_and_truncate(error.name.as_deref().unwrap_or(DEFAULT_ERROR_NAME), MAX_NAME_CHARS),
            message: scrub_and_truncate(&error.message, MAX_MESSAGE_CHARS),
            stack: error.stack.map(|stack| scrub_and_truncate(&stack, MAX_STACK_CHARS)),
            tool: error.tool.map(|tool| scrub_and_truncate(&tool, MAX_NAME_CHARS)),
            turn: error.turn,
        }
    }
}

/// A run of an agent that speaks this protocol.
#[derive(Default)]
pub struct JsonLines {
    run: RunState,
    result: Option<(ResultStatus, Option<DispatchError>)>,
}

impl Adapter for JsonLines {
    fn parse_line(&mut self, at_ms: u64, line: &str) -> Vec<Event> {
        let Ok(line) = serde_json::from_str::<ProtocolLine>(line) else { return Vec::new() };
        // Every line except `usage` implies model usage that hasn't been reported yet.
        self.run.has_unreported_usage = !matches!(line, ProtocolLine::Usage { .. });
        let event = match line {
            ProtocolLine::Started { conversation_id, model } => {
                (self.run.conversation_id, self.run.model) = (conversation_id.clone(), model.clone());
                Some(Event::Started { conversation_id, model })
            }
            ProtocolLine::Text { text } => {
                self.run.set_text(&text);
                Some(Event::Text { text })
            }
            ProtocolLine::Tool { id, name, input } => self.run.tools.start(at_ms, &id, &name, &input),
            ProtocolLine::ToolResult { id, status, error } => {
                self.run.tools.end(at_ms, &id, status, error.as_deref())
            }
            ProtocolLine::Usage { tokens_in, tokens_out, cost } => {
                self.run.add_tokens(tokens_in, tokens_out);
                if let Some(cost) = cost {
                    self.run.add_cost(cost);
                }
                None
            }
            ProtocolLine::Result { status, text, error } => {
                self.run.text = text.or(self.run.text.take());
                self.result = Some((status, error.map(DispatchError::from)));
                None
            }
        };
        event.into_iter().collect()
    }

    fn finish(&mut self, at_ms: u64, exit: Exit, stderr_tail: &str) -> Outcome {
        // By the time a program prints its result, it has reported all of its usage.
        self.run.has_unreported_usage &= self.result.is_none();
        let error = match (self.result.take(), exit) {
            (Some((ResultStatus::Success, _)), Exit::Code(0)) => None,
            (Some((ResultStatus::Error, Some(error))), _) => Some(error),
            (Some((ResultStatus::Error, None)), Exit::Code(0)) => Some(DispatchError {
                name: DEFAULT_ERROR_NAME.to_owned(),
                message: "the agent reported an error without a message".to_owned(),
                ..exit_failure(exit, stderr_tail)
            }),
            _ => Some(exit_failure(exit, stderr_tail)),
        };
        self.run.finish(at_ms, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(lines: &[&str], exit: Exit) -> (Vec<Event>, Outcome) {
        let mut adapter = JsonLines::default();
        let events = lines.iter().zip(0..).flat_map(|(line, n)| adapter.parse_line(n * 10, line)).collect();
        let outcome = adapter.finish(lines.len() as u64 * 10, exit, "hunter2: password=hunter2hunter2");
        (events, outcome)
    }

    #[test]
    fn run_reports_events_and_totals() {
        let (events, outcome) = run(
            &[
                r#"{"type":"started","conversationId":"c1","model":"m1"}"#,
                r#"{"type":"tool","id":"1","name":"Bash","input":{"command":"ls"}}"#,
                r#"{"type":"usage","tokensIn":10,"tokensOut":2,"cost":0.25}"#,
                r#"{"type":"toolResult","id":"1","status":"success"}"#,
                "noise",
                r#"{"type":"later","x":1}"#,
                r#"{"type":"usage","tokensIn":1,"tokensOut":1,"cost":0.5}"#,
                r#"{"type":"text","text":"done"}"#,
                r#"{"type":"result","status":"success"}"#,
            ],
            Exit::Code(0),
        );
        assert_eq!(events.len(), 4);
        assert_eq!(
            (outcome.tokens_in, outcome.tokens_out, outcome.cost),
            (11, 3, Some(Dollars::from_nanos(750_000_000)))
        );
        assert_eq!(
            (outcome.status, outcome.text.as_deref(), outcome.model.as_deref()),
            (ResultStatus::Success, Some("done"), Some("m1"))
        );
        assert_eq!((outcome.tools[0].duration_ms, &*outcome.tools[0].input_preview), (20, "ls"));
    }

    #[test]
    fn run_fails_unless_result_and_exit_code_report_success() {
        let tool = r#"{"type":"tool","id":"1","name":"Bash","input":{"command":"sleep 9"}}"#;
        for (lines, exit, name) in [
            (vec![], Exit::Code(0), "NoResult"),
            (vec![tool], Exit::Signal(15), "Signal"),
            (vec![r#"{"type":"result","status":"success"}"#], Exit::Code(3), "ExitCode"),
            (
                vec![r#"{"type":"result","status":"error","error":{"name":"Quota","message":"none left"}}"#],
                Exit::Code(1),
                "Quota",
            ),
        ] {
            let (_, outcome) = run(&lines, exit);
            let error = outcome.error.unwrap();
            assert_eq!((&*error.name, outcome.status), (name, ResultStatus::Error));
            assert!(!format!("{error:?}").contains("hunter2hunter2"), "{error:?}");
            assert_eq!(error.tool.is_some(), lines.first() == Some(&tool));
            assert_eq!(error.turn, error.tool.is_some().then_some(1));
        }
    }

    #[test]
    fn error_result_without_error_field_is_reported() {
        let result = r#"{"type":"result","status":"error","text":"I cannot"}"#;
        let (_, outcome) = run(&[result], Exit::Code(0));
        let error = outcome.error.unwrap();
        assert_eq!(
            (&*error.name, &*error.message),
            ("Error", "the agent reported an error without a message")
        );
        assert!(error.stack.is_some_and(|stack| stack.contains("password=***")), "standard error is missing");
        assert_eq!(outcome.text.as_deref(), Some("I cannot"));
        assert_eq!(run(&[result], Exit::Code(3)).1.error.unwrap().name, "ExitCode");
    }

    #[test]
    fn usage_after_the_last_usage_line_is_unreported() {
        let started = r#"{"type":"started"}"#;
        let usage = r#"{"type":"usage","tokensIn":5,"tokensOut":1,"cost":0.01}"#;
        let text = r#"{"type":"text","text":"next"}"#;
        let tool = r#"{"type":"tool","id":"1","name":"Bash","input":{"command":"ls"}}"#;
        let tool_result = r#"{"type":"toolResult","id":"1","status":"success"}"#;
        let result = r#"{"type":"result","status":"success"}"#;
        let has_unreported_usage = |lines: &[&str]| run(lines, Exit::Code(1)).1.has_unreported_usage;
        assert!(has_unreported_usage(&[started]));
        for line in [text, tool, tool_result] {
            assert!(has_unreported_usage(&[started, usage, line]), "{line}");
        }
        assert!(!has_unreported_usage(&[started, text, usage]));
        assert!(!has_unreported_usage(&[started, text, usage, "noise"]), "an unknown line was not ignored");
        assert!(!has_unreported_usage(&[started, text, result]));
        assert!(!has_unreported_usage(&[]), "the run did not start");
    }

    #[test]
    fn failed_tool_is_recorded_with_its_error() {
        let (_, outcome) = run(
            &[
                r#"{"type":"tool","id":"1","name":"Bash","input":{"command":"make"}}"#,
                r#"{"type":"toolResult","id":"1","status":"error","error":"no rule, API_KEY=sk-0123456789"}"#,
                r#"{"type":"text","text":"I give up."}"#,
                r#"{"type":"result","status":"error","error":{"message":"no way"}}"#,
            ],
            Exit::Code(0),
        );
        assert_eq!(outcome.tools[0].error.as_deref(), Some("no rule, API_KEY=***"));
        let error = outcome.error.unwrap();
        assert_eq!((error.tool.as_deref(), error.turn), (Some("Bash"), Some(2)));
    }
}
