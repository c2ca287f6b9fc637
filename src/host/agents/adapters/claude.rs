//! Claude Code, as `claude -p --output-format stream-json --verbose` tells of its run. What it tells, and when, is in
//! `tests/agents/README.md`, with the recordings that this is tested by.
//!
//! Its `total_cost_usd` goes on over resumed conversations: what this run cost is the sum of `model_usage_since_last_result`
//! over its results, of which there are several where something ran in the background.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::run::Run;
use super::{Adapter, Event, Exit, LONGEST_MESSAGE, Outcome, silent, told};
use crate::host::records::entry::{Failed, Status};
use crate::host::records::money::Dollars;

#[derive(Deserialize)]
struct Line {
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
    // Of a result.
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

/// A count that some gateways leave out, or write as null.
type Count = Option<u64>;

fn sum(counts: [Count; 3]) -> u64 {
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
        sum([self.input_tokens, self.cache_creation_input_tokens, self.cache_read_input_tokens])
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
    },
    #[serde(other)]
    Other,
}

/// A run of Claude Code.
#[derive(Default)]
pub struct Claude {
    /// With tokens and cost of its results.
    run: Run,
    result: Option<Ended>,
    /// Of messages of the model since the last result: all that is known of a run that is cut off. An answer's own tokens are
    /// not told before its end.
    asked: BTreeMap<String, u64>,
}

struct Ended {
    error: Option<Failed>,
}

impl Adapter for Claude {
    fn line(&mut self, at_ms: u64, line: &str) -> Vec<Event> {
        let Ok(line) = serde_json::from_str::<Line>(line) else { return Vec::new() };
        match (&*line.kind, line.subtype.as_deref()) {
            ("system", Some("init")) => self.init(line),
            ("assistant" | "user", _) => self.message(at_ms, line),
            ("result", _) => {
                self.end_of_turns(line);
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    fn ended(&mut self, at_ms: u64, exit: Exit, said: &str) -> Outcome {
        let cut_off = self.run.tools.close(at_ms);
        let error = match (self.result.take(), exit) {
            (Some(Ended { error: None }), Exit::Code(0)) => None,
            (Some(Ended { error: Some(error) }), _) => Some(error),
            _ => Some(Failed { tool: cut_off, ..silent(exit, said) }),
        };
        self.run.count(self.asked.values().fold(0, |all, one| all.saturating_add(*one)), 0);
        self.run.outcome(error)
    }
}

impl Claude {
    /// It comes again where the model is woken by something that ran in the background.
    fn init(&mut self, line: Line) -> Vec<Event> {
        let is_first = self.run.conversation_id.is_none();
        self.run.conversation_id = line.session_id.or(self.run.conversation_id.take());
        self.run.model = line.model.or(self.run.model.take());
        let (conversation_id, model) = (self.run.conversation_id.clone(), self.run.model.clone());
        is_first.then_some(Event::Started { conversation_id, model }).into_iter().collect()
    }

    fn message(&mut self, at_ms: u64, line: Line) -> Vec<Event> {
        let (Some(message), is_agents) = (line.message, line.kind == "assistant") else { return Vec::new() };
        // Each block has a line of its own; those of one message have its id.
        if let (true, Some(id), Some(usage)) = (is_agents, message.id, message.usage) {
            self.asked.insert(id, usage.tokens_in());
        }
        let Value::Array(blocks) = message.content else { return Vec::new() };
        let mut events = Vec::new();
        for block in blocks {
            events.extend(match serde_json::from_value(block).unwrap_or(Block::Other) {
                Block::Text { text } if is_agents && line.parent_tool_use_id.is_none() => {
                    self.run.text = Some(text.clone());
                    Some(Event::Text { text })
                }
                Block::ToolUse { id, name, input } if is_agents => {
                    self.run.tools.start(at_ms, &id, &name, &input)
                }
                Block::ToolResult { tool_use_id, is_error } => {
                    let status = if is_error { Status::Error } else { Status::Success };
                    self.run.tools.end(at_ms, &tool_use_id, status)
                }
                _ => None,
            });
        }
        events
    }

    fn end_of_turns(&mut self, line: Line) {
        self.asked.clear();
        // A run that came to nothing says so without an init.
        self.run.conversation_id = self.run.conversation_id.take().or(line.session_id);
        let cost = match line.model_usage_since_last_result {
            Some(models) => {
                for usage in models.values() {
                    let tokens_in = sum([
                        usage.input_tokens,
                        usage.cache_read_input_tokens,
                        usage.cache_creation_input_tokens,
                    ]);
                    self.run.count(tokens_in, usage.output_tokens.unwrap_or_default());
                }
                models.values().map(|usage| dollars(usage.cost_usd.unwrap_or_default())).sum()
            }
            // Earlier releases tell the whole conversation's, again with each result.
            None => {
                let usage = line.usage.unwrap_or_default();
                self.run.count(usage.tokens_in(), usage.output_tokens.unwrap_or_default());
                let whole = dollars(line.total_cost_usd.unwrap_or_default());
                whole.saturating_sub(self.run.cost.unwrap_or_default())
            }
        };
        self.run.pay(cost);
        let subtype = line.subtype.unwrap_or_default();
        let text = line.result.filter(|text| !text.is_empty());
        let error = (line.is_error || subtype != "success").then(|| {
            let said =
                line.errors.iter().map(|error| error.as_str().map_or(error.to_string(), str::to_owned));
            let message =
                text.clone().or_else(|| said.reduce(|all, one| all + "; " + &one)).unwrap_or_default();
            // The subtype of a failed call of the model is a success.
            let name = if subtype == "success" { "ApiError".to_owned() } else { subtype };
            Failed {
                name,
                message: told(&message, LONGEST_MESSAGE),
                stack: None,
                tool: None,
                turn: line.num_turns,
            }
        });
        if error.is_none() {
            self.run.text = text.or(self.run.text.take());
        }
        // Of several results, one that failed stays failed.
        let earlier = self.result.take().and_then(|ended| ended.error);
        self.result = Some(Ended { error: error.or(earlier) });
    }
}

/// A number that is no amount is none.
fn dollars(number: f64) -> Dollars {
    Dollars::from_f64(number).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn played(name: &str) -> (Vec<Event>, Outcome) {
        super::super::tests::played("claude", name, &mut Claude::default())
    }

    fn names(outcome: &Outcome) -> Vec<(&str, Status)> {
        outcome.tools.iter().map(|tool| (&*tool.name, tool.status)).collect()
    }

    #[test]
    fn a_run_with_good_and_bad_tools_is_told_whole() {
        let (events, outcome) = played("basic");
        let (good, bad) = (Status::Success, Status::Error);
        assert_eq!(
            names(&outcome),
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
        assert_eq!((outcome.status, outcome.text.as_deref()), (Status::Success, Some("All done.")));
        assert_eq!(outcome.model.as_deref(), Some("claude-opus-5-5"));
        assert!(matches!(&events[0], Event::Started { conversation_id: Some(_), .. }), "{:?}", events[0]);
        let ends = events.iter().filter(|event| matches!(event, Event::ToolEnded { .. })).count();
        assert_eq!(ends, 7);
        assert!(
            !format!("{events:?}{outcome:?}").contains("File created successfully"),
            "no answer of a tool is told"
        );
    }

    #[test]
    fn what_failed_says_why_whatever_its_exit_code() {
        for (name, error, message) in [
            ("err500", "ApiError", "500"),
            ("refusal_stop", "ApiError", ""),
            ("max_turns", "error_max_turns", "Reached maximum number of turns"),
            ("max_budget", "error_max_budget_usd", ""),
            ("sigint", "error_during_execution", ""),
            ("sigterm", "ExitCode", "143"),
            ("resume_missing", "error_during_execution", ""),
        ] {
            let (_, outcome) = played(name);
            let failed = outcome.error.unwrap_or_else(|| panic!("{name} did not fail"));
            assert_eq!((&*failed.name, outcome.status), (error, Status::Error), "{name}: {failed:?}");
            assert!(failed.message.contains(message), "{name}: {failed:?}");
        }
    }

    #[test]
    fn a_run_that_is_cut_off_names_its_tool_and_counts_what_it_asked() {
        let (_, outcome) = played("sigterm");
        assert_eq!(outcome.error.unwrap().tool.as_deref(), Some("Bash"));
        assert!(outcome.tokens_in > 0 && outcome.cost.is_none(), "{} {:?}", outcome.tokens_in, outcome.cost);
    }

    /// The second run's own cost, and not the first's as well.
    #[test]
    fn a_resumed_conversation_costs_what_the_run_did() {
        let (first, resumed) = (played("session_id").1, played("resume").1);
        assert_eq!(first.conversation_id, resumed.conversation_id);
        assert_eq!((first.cost, first.tokens_in), (resumed.cost, resumed.tokens_in));
    }

    #[test]
    fn subagents_and_what_runs_in_the_background_count() {
        let (_, outcome) = played("agent_fg");
        assert!(
            names(&outcome).iter().any(|(name, _)| ["Agent", "Task"].contains(name)),
            "{:?}",
            names(&outcome)
        );
        assert!(
            names(&outcome).iter().any(|(name, _)| *name == "Write"),
            "the subagent's: {:?}",
            names(&outcome)
        );
        for name in ["bash_bg", "agent", "parallel", "no_allow", "model_unknown", "bash_cd"] {
            let (_, outcome) = played(name);
            assert_eq!(outcome.status, Status::Success, "{name}: {:?}", outcome.error);
            assert!(outcome.cost > Some(Dollars::ZERO), "{name}");
        }
    }
}
