//! Claude Code adapter: parses the output of `claude -p --output-format stream-json --verbose`. The format is
//! documented in `tests/agents/README.md`, along with the recordings used to test this adapter.
//!
//! `total_cost_usd` and `modelUsage` accumulate across the results of a run and the runs of a conversation. A run's
//! usage is therefore the sum of `model_usage_since_last_result` over its results. Runs with background work have
//! several results.
//!
//! Earlier releases, such as 2.1.197, don't print `model_usage_since_last_result`. For those, we use the last
//! `modelUsage`, which includes subagents. In a resumed conversation, `modelUsage` also includes an unknown amount from
//! earlier runs, so we fall back to the tokens in `usage`, which exclude subagents; the cost then includes that of the
//! earlier runs.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::run::RunState;
use super::{Adapter, Event, Exit, MAX_MESSAGE_CHARS, Outcome, exit_failure, scrub_and_truncate};
use crate::records::entry::{DispatchError, ResultStatus};
use crate::records::money::Dollars;

#[derive(Deserialize)]
struct ClaudeLine {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    subtype: Option<String>,
    #[serde(default)]
    session_id: Option<String>,
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    message: Option<Message>,
    #[serde(default)]
    parent_tool_use_id: Option<String>,
    // Result fields.
    #[serde(default)]
    is_error: bool,
    #[serde(default)]
    result: Option<String>,
    #[serde(default)]
    errors: Vec<Value>,
    #[serde(default)]
    num_turns: Option<u64>,
    #[serde(default)]
    total_cost_usd: Option<f64>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(default)]
    model_usage_since_last_result: Option<BTreeMap<String, ModelUsage>>,
    #[serde(default, rename = "modelUsage")]
    model_usage: Option<BTreeMap<String, ModelUsage>>,
}

#[derive(Deserialize)]
struct Message {
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    content: Value,
    #[serde(default)]
    usage: Option<Usage>,
}

/// A token count, which some model APIs omit or set to null.
type Count = Option<u64>;

fn sum_counts(counts: [Count; 3]) -> u64 {
    counts.into_iter().flatten().fold(0, u64::saturating_add)
}

#[derive(Deserialize, Clone, Copy, Default)]
#[serde(default)]
struct Usage {
    input_tokens: Count,
    output_tokens: Count,
    cache_creation_input_tokens: Count,
    cache_read_input_tokens: Count,
}

impl Usage {
    fn tokens_in(self) -> u64 {
        sum_counts([self.input_tokens, self.cache_creation_input_tokens, self.cache_read_input_tokens])
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[derive(Default)]
struct ModelUsage {
    input_tokens: Count,
    output_tokens: Count,
    cache_read_input_tokens: Count,
    cache_creation_input_tokens: Count,
    #[serde(rename = "costUSD")]
    cost_usd: Option<f64>,
}

/// Usage summed over all models.
#[derive(Clone, Copy)]
struct Totals {
    tokens_in: u64,
    tokens_out: u64,
    cost: Dollars,
}

impl Totals {
    fn sum(models: &BTreeMap<String, ModelUsage>) -> Self {
        let zero = Self { tokens_in: 0, tokens_out: 0, cost: Dollars::ZERO };
        models.values().fold(zero, |total, usage| {
            let tokens_in =
                [usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens];
            Self {
                tokens_in: total.tokens_in.saturating_add(sum_counts(tokens_in)),
                tokens_out: total.tokens_out.saturating_add(usage.output_tokens.unwrap_or_default()),
                cost: total.cost + to_dollars(usage.cost_usd.unwrap_or_default()),
            }
        })
    }
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Block {
    Text {
        text: String,
    },
    ToolUse {
        id: String,
        name: String,
        #[serde(default)]
        input: Value,
    },
    ToolResult {
        tool_use_id: String,
        #[serde(default)]
        is_error: bool,
        #[serde(default)]
        content: Value,
    },
    #[serde(other)]
    Other,
}

/// A Claude Code run.
#[derive(Default)]
pub struct Claude {
    /// Includes the cost of all results so far, and their tokens if the release prints usage since the last result.
    run: RunState,
    /// Usage of the whole conversation, for releases that don't print usage since the last result.
    conversation_totals: Option<Totals>,
    /// Main loop input and output tokens for the same releases, summed over the results so far.
    main_loop_tokens: (u64, u64),
    is_resumed: bool,
    combined_result: Option<CombinedResult>,
    /// Whether a result was printed. Stays true after `finish` takes `combined_result`.
    has_result: bool,
    /// Input tokens per model message since the last result. Interrupted runs report nothing else: output tokens are
    /// only printed at the end.
    input_tokens: BTreeMap<String, u64>,
}

/// All results so far. The run fails if any of them failed.
struct CombinedResult {
    error: Option<DispatchError>,
}

impl Adapter for Claude {
    fn parse_line(&mut self, at_ms: u64, line: &str) -> Vec<Event> {
        let Ok(line) = serde_json::from_str::<ClaudeLine>(line) else { return Vec::new() };
        match (&*line.kind, line.subtype.as_deref()) {
            ("system", Some("init")) => self.handle_init(line),
            ("assistant" | "user", _) => self.handle_message(at_ms, line),
            ("result", _) => {
                self.handle_result(line);
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    fn set_resumed(&mut self) {
        self.is_resumed = true;
    }

    fn finish(&mut self, at_ms: u64, exit: Exit, stderr_tail: &str) -> Outcome {
        let error = match (self.combined_result.take(), exit) {
            (Some(CombinedResult { error: None }), Exit::Code(0)) => None,
            (Some(CombinedResult { error: Some(error) }), _) => Some(error),
            _ => Some(exit_failure(exit, stderr_tail)),
        };
        let is_started = self.run.conversation_id.is_some();
        self.run.has_unreported_usage = !self.input_tokens.is_empty() || (is_started && !self.has_result);
        let unreported =
            self.input_tokens.values().fold(0, |total: u64, tokens| total.saturating_add(*tokens));
        self.run.add_tokens(unreported, 0);
        let (tokens_in, tokens_out) = match self.conversation_totals.take() {
            Some(totals) if !self.is_resumed => (totals.tokens_in, totals.tokens_out),
            _ => self.main_loop_tokens,
        };
        self.run.add_tokens(tokens_in, tokens_out);
        self.run.finish(at_ms, error)
    }
}

impl Claude {
    /// Handles an init line, which is printed again when background work wakes the model.
    fn handle_init(&mut self, line: ClaudeLine) -> Vec<Event> {
        let is_first = self.run.conversation_id.is_none();
        self.run.conversation_id = line.session_id.or(self.run.conversation_id.take());
        self.run.model = line.model.or(self.run.model.take());
        let (conversation_id, model) = (self.run.conversation_id.clone(), self.run.model.clone());
        is_first.then_some(Event::Started { conversation_id, model }).into_iter().collect()
    }

    fn handle_message(&mut self, at_ms: u64, line: ClaudeLine) -> Vec<Event> {
        let (Some(message), is_assistant) = (line.message, line.kind == "assistant") else {
            return Vec::new();
        };
        // Each block has its own line. Lines of one message share its id, so usage is counted once per message.
        if let (true, Some(id), Some(usage)) = (is_assistant, message.id, message.usage) {
            self.input_tokens.insert(id, usage.tokens_in());
        }
        let Value::Array(blocks) = message.content else { return Vec::new() };
        let mut events = Vec::new();
        for block in blocks {
            events.extend(match serde_json::from_value(block).unwrap_or(Block::Other) {
                Block::Text { text } if is_assistant && line.parent_tool_use_id.is_none() => {
                    self.run.set_text(&text);
                    Some(Event::Text { text })
                }
                Block::ToolUse { id, name, input } if is_assistant => {
                    self.run.tools.start(at_ms, &id, &name, &input)
                }
                Block::ToolResult { tool_use_id, is_error: false, .. } => {
                    self.run.tools.end(at_ms, &tool_use_id, ResultStatus::Success, None)
                }
                Block::ToolResult { tool_use_id, content, .. } => {
                    self.run.tools.end(at_ms, &tool_use_id, ResultStatus::Error, Some(&result_text(&content)))
                }
                _ => None,
            });
        }
        events
    }

    fn handle_result(&mut self, line: ClaudeLine) {
        self.has_result = true;
        self.input_tokens.clear();
        // Runs that fail at startup don't print an init line.
        self.run.conversation_id = self.run.conversation_id.take().or(line.session_id);
        let cost = match line.model_usage_since_last_result {
            Some(models) => {
                let totals = Totals::sum(&models);
                self.run.add_tokens(totals.tokens_in, totals.tokens_out);
                totals.cost
            }
            // Earlier releases report the whole conversation's usage with each result.
            None => {
                let (usage, (tokens_in, tokens_out)) =
                    (line.usage.unwrap_or_default(), self.main_loop_tokens);
                self.main_loop_tokens = (
                    tokens_in.saturating_add(usage.tokens_in()),
                    tokens_out.saturating_add(usage.output_tokens.unwrap_or_default()),
                );
                let models = line.model_usage.filter(|models| !models.is_empty());
                self.conversation_totals = models.as_ref().map(Totals::sum).or(self.conversation_totals);
                let models_cost =
                    models.is_some().then_some(self.conversation_totals).flatten().map(|totals| totals.cost);
                let conversation_cost =
                    models_cost.unwrap_or_else(|| to_dollars(line.total_cost_usd.unwrap_or_default()));
                conversation_cost.saturating_sub(self.run.cost.unwrap_or_default())
            }
        };
        self.run.add_cost(cost);
        let subtype = line.subtype.unwrap_or_default();
        let text = line.result.filter(|text| !text.is_empty());
        let error = (line.is_error || subtype != "success").then(|| {
            let errors =
                line.errors.iter().map(|error| error.as_str().map_or(error.to_string(), str::to_owned));
            let message =
                text.clone().or_else(|| errors.reduce(|all, next| all + "; " + &next)).unwrap_or_default();
            // Failed model calls have subtype "success".
            let name = if subtype == "success" { "ApiError".to_owned() } else { subtype };
            DispatchError {
                name,
                message: scrub_and_truncate(&message, MAX_MESSAGE_CHARS),
                stack: None,
                tool: None,
                turn: line.num_turns,
            }
        });
        if error.is_none() {
            self.run.text = text.or(self.run.text.take());
        }
        let earlier_error = self.combined_result.take().and_then(|result| result.error);
        self.combined_result = Some(CombinedResult { error: error.or(earlier_error) });
    }
}

/// Returns the text of a tool result, which is either a string or an array of blocks.
fn result_text(content: &Value) -> String {
    let text = |block: &Value| block.get("text")?.as_str().map(str::to_owned);
    match content {
        Value::String(text) => text.clone(),
        Value::Array(blocks) => blocks.iter().filter_map(text).collect::<Vec<_>>().join("\n"),
        _ => String::new(),
    }
}

/// Converts an amount. Invalid amounts become zero.
fn to_dollars(number: f64) -> Dollars {
    Dollars::from_f64(number).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replay(name: &str) -> (Vec<Event>, Outcome) {
        super::super::tests::replay("claude", name, &mut Claude::default())
    }

    fn tool_statuses(outcome: &Outcome) -> Vec<(&str, ResultStatus)> {
        outcome.tools.iter().map(|tool| (&*tool.name, tool.status)).collect()
    }

    #[test]
    fn usage_after_the_last_result_is_unreported() {
        let init = r#"{"type":"system","subtype":"init","session_id":"c","model":"m"}"#;
        let message =
            r#"{"type":"assistant","message":{"id":"1","content":[],"usage":{"input_tokens":900000}}}"#;
        let result = r#"{"type":"result","subtype":"success","result":"done","total_cost_usd":0.01}"#;
        let has_unreported_usage = |lines: &[&str], exit| {
            let mut claude = Claude::default();
            lines.iter().for_each(|line| drop(claude.parse_line(0, line)));
            claude.finish(1, exit, "").has_unreported_usage
        };
        assert!(has_unreported_usage(&[init], Exit::Code(1)));
        assert!(has_unreported_usage(&[init, message], Exit::Code(1)));
        assert!(has_unreported_usage(&[init, message, result, init, message], Exit::Code(0)));
        assert!(!has_unreported_usage(&[init, message, result], Exit::Code(0)));
        assert!(!has_unreported_usage(&[], Exit::Code(1)), "the run did not start");
    }

    #[test]
    fn run_reports_succeeded_and_failed_tools() {
        let (events, outcome) = replay("basic");
        let (good, bad) = (ResultStatus::Success, ResultStatus::Error);
        assert_eq!(
            tool_statuses(&outcome),
            [
                ("Write", good),
                ("Edit", good),
                ("Bash", good),
                ("Bash", bad),
                ("Read", good),
                ("Edit", bad),
                ("Write", good)
            ]
        );
        assert_eq!(outcome.tools[2].input_preview, "mkdir -p a/b && cp x z && mv x y && rm z");
        assert_eq!((outcome.tokens_in, outcome.tokens_out), (72_000, 1477));
        assert_eq!(outcome.cost, Some(Dollars::from_nanos(189_540_000)));
        assert_eq!((outcome.status, outcome.text.as_deref()), (ResultStatus::Success, Some("All done.")));
        assert_eq!(outcome.model.as_deref(), Some("claude-opus-5-5"));
        assert!(matches!(&events[0], Event::Started { conversation_id: Some(_), .. }), "{:?}", events[0]);
        let ends = events.iter().filter(|event| matches!(event, Event::ToolEnded { .. })).count();
        assert_eq!(ends, 7);
        assert!(
            !format!("{events:?}{outcome:?}").contains("File created successfully"),
            "tool output leaked"
        );
        assert_eq!(outcome.tools[3].error.as_deref(), Some("Exit code 3 out err"));
        assert!(outcome.tools[5].error.as_deref().is_some_and(|error| error.contains("not found in file")));
        assert_eq!(outcome.tools.iter().filter(|tool| tool.error.is_some()).count(), 2);
        let blocks = serde_json::json!([{"type": "text", "text": "no"}, {"type": "image"}, {"type": "text", "text": "way"}]);
        assert_eq!((result_text(&blocks), result_text(&Value::Null)), ("no\nway".to_owned(), String::new()));
    }

    #[test]
    fn failures_report_their_reason_for_any_exit_code() {
        for (name, error, message) in [
            ("err500", "ApiError", "500"),
            ("refusal_stop", "ApiError", ""),
            ("max_turns", "error_max_turns", "Reached maximum number of turns"),
            ("max_budget", "error_max_budget_usd", ""),
            ("sigint", "error_during_execution", ""),
            ("sigterm", "ExitCode", "143"),
            ("resume_missing", "error_during_execution", ""),
        ] {
            let (_, outcome) = replay(name);
            let failed = outcome.error.unwrap_or_else(|| panic!("{name} did not fail"));
            assert_eq!((&*failed.name, outcome.status), (error, ResultStatus::Error), "{name}: {failed:?}");
            assert!(failed.message.contains(message), "{name}: {failed:?}");
        }
    }

    #[test]
    fn interrupted_run_names_its_tool_and_counts_input() {
        let (_, outcome) = replay("sigterm");
        let error = outcome.error.unwrap();
        assert_eq!((error.tool.as_deref(), error.turn), (Some("Bash"), Some(1)));
        // An interrupted run's result doesn't name a tool, so the adapter adds the running one.
        let error = replay("sigint").1.error.unwrap();
        assert_eq!((error.tool.as_deref(), error.turn), (Some("Bash"), Some(3)));
        assert!(outcome.tokens_in > 0 && outcome.cost.is_none(), "{} {:?}", outcome.tokens_in, outcome.cost);
    }

    #[test]
    fn resumed_run_excludes_the_cost_of_earlier_runs() {
        let (first, resumed) = (replay("session_id").1, replay("resume").1);
        assert_eq!(first.conversation_id, resumed.conversation_id);
        assert_eq!((first.cost, first.tokens_in), (resumed.cost, resumed.tokens_in));
    }

    /// Releases such as 2.1.197 print only `modelUsage`, which covers the whole conversation.
    #[test]
    fn subagent_usage_of_earlier_release_is_in_model_usage() {
        let result = |models: &str| {
            r#"{"type":"result","subtype":"success","is_error":false,"total_cost_usd":0.12,
                "usage":{"input_tokens":2000,"cache_read_input_tokens":10000,"output_tokens":400},
                "modelUsage":MODELS}"#
                .replace("MODELS", models)
        };
        let opus = r#""opus":{"inputTokens":5000,"outputTokens":1000,"cacheReadInputTokens":25000,
            "cacheCreationInputTokens":15000,"costUSD":0.12}"#;
        let haiku = r#""haiku":{"inputTokens":10,"outputTokens":2,"costUSD":0.01}"#;
        let run = |lines: &[String], is_resumed: bool| {
            let mut claude = Claude::default();
            for line in lines {
                claude.parse_line(0, line);
            }
            if is_resumed {
                claude.set_resumed();
            }
            let outcome = claude.finish(0, Exit::Code(0), "");
            (outcome.tokens_in, outcome.tokens_out, outcome.cost.unwrap_or_default().nanos())
        };
        let (first, both) = (result(&format!("{{{opus}}}")), result(&format!("{{{opus},{haiku}}}")));
        assert_eq!(run(std::slice::from_ref(&first), false), (45_000, 1000, 120_000_000));
        let all = [first, both];
        assert_eq!(run(&all, false), (45_010, 1002, 130_000_000), "the second result includes the first");
        assert_eq!(run(&all, true), (24_000, 800, 130_000_000), "the tokens exclude the earlier runs");
        assert_eq!(run(&[result("{}")], false), (12_000, 400, 120_000_000));
        // A recording stripped of usage since the last result yields the same totals.
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/agents/recordings/claude/agent_fg.stdout.jsonl"
        );
        let text = std::fs::read_to_string(path).unwrap().replace("model_usage_since_last_result", "other");
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        let expected = replay("agent_fg").1;
        let cost = expected.cost.unwrap_or_default().nanos();
        assert_eq!(run(&lines, false), (expected.tokens_in, expected.tokens_out, cost));
    }

    #[test]
    fn usage_from_2_1_197_includes_subagents_and_interruptions() {
        let usage = |name: &str| {
            let outcome = replay(name).1;
            let cost = outcome.cost.unwrap_or_default().nanos();
            (outcome.tokens_in, outcome.tokens_out, cost, outcome.has_unreported_usage)
        };
        // Five model calls, three of them by a subagent.
        assert_eq!(usage("agent_fg_2_1_197"), (45_000, 1000, 156_250_000, false));
        assert_eq!(usage("sigint_2_1_197"), (9000, 200, 31_250_000, false));
    }

    #[test]
    fn outcome_includes_subagents_and_background_work() {
        let (_, outcome) = replay("agent_fg");
        let tools = tool_statuses(&outcome);
        assert!(tools.iter().any(|(name, _)| ["Agent", "Task"].contains(name)), "{tools:?}");
        assert!(tools.iter().any(|(name, _)| *name == "Write"), "the subagent's call: {tools:?}");
        for name in ["bash_bg", "agent", "parallel", "no_allow", "model_unknown", "bash_cd"] {
            let (_, outcome) = replay(name);
            assert_eq!(outcome.status, ResultStatus::Success, "{name}: {:?}", outcome.error);
            assert!(outcome.cost > Some(Dollars::ZERO), "{name}");
        }
    }
}
