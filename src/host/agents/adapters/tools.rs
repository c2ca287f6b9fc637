//! Tool-call tracking for a run.

use serde_json::Value;

use super::{Event, preview, scrub_and_truncate};
use crate::records::entry::{ResultStatus, ToolCall};

/// Maximum number of tool calls recorded per run, to bound the record size. Calls over the limit are only reported as
/// events.
const MAX_TOOL_CALLS: usize = 2000;

const MAX_NAME_CHARS: usize = 100;
/// Maximum call id length; longer ids are truncated before comparison. Claude Code and Codex ids have about 30
/// characters.
const MAX_ID_CHARS: usize = 200;

/// Maximum error size in bytes, per call and per run.
const MAX_ERROR_BYTES: usize = 1024;
const MAX_TOTAL_ERROR_BYTES: usize = 256 << 10;

/// Tool calls, in start order.
#[derive(Debug, Default)]
pub struct ToolCalls {
    /// The first [`MAX_TOOL_CALLS`] calls.
    recorded: Vec<ToolCall>,
    /// Number of calls started so far, including those not in `recorded`.
    started_count: usize,
    running: Vec<RunningCall>,
    error_bytes: usize,
    turns: u64,
    /// Whether a call has ended since the model's last output, so its next output starts a new turn.
    has_results: bool,
}

#[derive(Debug)]
struct RunningCall {
    id: String,
    name: String,
    /// Index among all started calls. For a recorded call, also its index in `recorded`.
    index: usize,
    started_ms: u64,
}

impl ToolCalls {
    /// Starts a call, or returns `None` if one with this id is already running. Calls over the limit get an event too:
    /// the file audit compares the calls in the output with those reported by hooks.
    pub fn start(&mut self, at_ms: u64, id: &str, name: &str, input: &Value) -> Option<Event> {
        let (id, name) =
            (preview::flatten_and_truncate(id, MAX_ID_CHARS), scrub_and_truncate(name, MAX_NAME_CHARS));
        if self.running.iter().any(|running| running.id == id) {
            return None;
        }
        self.record_model_output();
        let input_preview = preview::preview_input(input);
        let is_recorded = self.started_count < MAX_TOOL_CALLS;
        let event = Event::ToolStarted {
            id: id.clone(),
            name: name.clone(),
            input_preview: input_preview.clone(),
            is_recorded,
        };
        // With more than `MAX_TOOL_CALLS` calls running at once, we don't report when the excess ones end.
        if self.running.len() < MAX_TOOL_CALLS {
            let running =
                RunningCall { id, name: name.clone(), index: self.started_count, started_ms: at_ms };
            self.running.push(running);
        }
        self.started_count += 1;
        if is_recorded {
            // Calls that never end keep this status.
            let status = ResultStatus::Error;
            self.recorded.push(ToolCall { name, duration_ms: 0, input_preview, status, error: None });
        }
        Some(event)
    }

    /// Ends a call, or returns `None` if no call with this id is running. `error` is the call's output, recorded only
    /// if `status` is `Error`.
    pub fn end(&mut self, at_ms: u64, id: &str, status: ResultStatus, error: Option<&str>) -> Option<Event> {
        self.has_results = true;
        let id = preview::flatten_and_truncate(id, MAX_ID_CHARS);
        let position = self.running.iter().position(|running| running.id == id)?;
        let running = self.running.swap_remove(position);
        if let Some(tool) = self.recorded.get_mut(running.index) {
            tool.duration_ms = at_ms.saturating_sub(running.started_ms);
            tool.status = status;
            let has_room = self.error_bytes + MAX_ERROR_BYTES <= MAX_TOTAL_ERROR_BYTES;
            if let Some(error) = error.filter(|_| status == ResultStatus::Error && has_room) {
                let error = preview::preview_error(error, MAX_ERROR_BYTES);
                self.error_bytes += error.len();
                tool.error = Some(error).filter(|error| !error.is_empty());
            }
        }
        Some(Event::ToolEnded { id, name: running.name, status })
    }

    /// Ends all calls still running at the end of the run. Returns the tool to blame for a run error: the most recently
    /// started call that is still running or, if there is none, the last call, provided it failed and was recorded.
    pub fn close(&mut self, at_ms: u64) -> Option<String> {
        let last = self.started_count.checked_sub(1).and_then(|last| self.recorded.get(last));
        let last_failed =
            last.filter(|last| last.status == ResultStatus::Error).map(|last| last.name.clone());
        let last_running = self.running.iter().max_by_key(|running| running.index);
        let failed = last_running.map(|running| running.name.clone()).or(last_failed);
        for running in self.running.drain(..) {
            if let Some(tool) = self.recorded.get_mut(running.index) {
                tool.duration_ms = at_ms.saturating_sub(running.started_ms);
            }
        }
        failed
    }

    /// Records model output. Output after tool results starts a new turn.
    pub fn record_model_output(&mut self) {
        self.turns += u64::from(self.turns == 0 || self.has_results);
        self.has_results = false;
    }

    /// Current turn, or `None` before the model's first output.
    pub fn turn(&self) -> Option<u64> {
        (self.turns > 0).then_some(self.turns)
    }

    pub fn into_recorded(self) -> Vec<ToolCall> {
        self.recorded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tool_ids_and_names_are_bounded_in_events() {
        let (id, name) = ("i".repeat(1 << 20), "n".repeat(1 << 20));
        let mut tools = ToolCalls::default();
        let Some(Event::ToolStarted { id: event_id, name: event_name, .. }) =
            tools.start(0, &id, &name, &Value::Null)
        else {
            panic!("the tool did not start");
        };
        assert!(event_id.len() <= MAX_ID_CHARS + 3, "{}", event_id.len());
        assert!(event_name.len() <= MAX_NAME_CHARS + 3, "{}", event_name.len());
        let Some(Event::ToolEnded { id: ended_id, .. }) = tools.end(5, &id, ResultStatus::Success, None)
        else {
            panic!("the tool did not end");
        };
        assert_eq!(ended_id, event_id);
        assert_eq!(tools.into_recorded()[0].duration_ms, 5);
    }

    #[test]
    fn errors_are_bounded_and_scrubbed() {
        let mut tools = ToolCalls::default();
        let long = format!("Exit code 1\npassword=hunter2hunter2 {}", "é".repeat(4000));
        for id in ["a", "b", "c"] {
            tools.start(0, id, "Bash", &Value::Null);
        }
        tools.end(1, "a", ResultStatus::Error, Some(&long));
        tools.end(1, "b", ResultStatus::Success, Some("not an error"));
        tools.end(1, "c", ResultStatus::Error, Some(""));
        let recorded = tools.into_recorded();
        let error = recorded[0].error.as_deref().unwrap();
        assert!(error.starts_with("Exit code 1 password=*** é") && error.ends_with('…'), "{error}");
        assert!((1000..=MAX_ERROR_BYTES).contains(&error.len()), "{}", error.len());
        assert_eq!((&recorded[1].error, &recorded[2].error), (&None, &None));
        let mut tools = ToolCalls::default();
        for n in 0..MAX_TOOL_CALLS {
            tools.start(0, &n.to_string(), "Bash", &Value::Null);
            tools.end(1, &n.to_string(), ResultStatus::Error, Some(&"x".repeat(1100)));
        }
        let bytes: usize =
            tools.into_recorded().iter().filter_map(|tool| Some(tool.error.as_ref()?.len())).sum();
        let expected = MAX_TOTAL_ERROR_BYTES - MAX_ERROR_BYTES..=MAX_TOTAL_ERROR_BYTES;
        assert!(expected.contains(&bytes), "{bytes}");
    }

    #[test]
    fn calls_over_the_limit_are_reported_but_not_recorded() {
        let (input, status) = (Value::Null, ResultStatus::Error);
        let mut tools = ToolCalls::default();
        for n in 0..MAX_TOOL_CALLS {
            let event = tools.start(0, &n.to_string(), "Bash", &input);
            assert!(matches!(event, Some(Event::ToolStarted { is_recorded: true, .. })), "{n}: {event:?}");
            tools.end(0, &n.to_string(), status, None);
        }
        let event = tools.start(0, "more", "Write", &input);
        assert!(matches!(event, Some(Event::ToolStarted { is_recorded: false, .. })), "{event:?}");
        assert_eq!(tools.start(0, "more", "Write", &input), None, "a call with this id is running");
        let ended = Event::ToolEnded { id: "more".to_owned(), name: "Write".to_owned(), status };
        assert_eq!(tools.end(1, "more", status, Some("failed")), Some(ended));
        tools.start(1, "last", "Edit", &input);
        assert_eq!(tools.close(2).as_deref(), Some("Edit"));
        assert_eq!(tools.into_recorded().len(), MAX_TOOL_CALLS);
    }

    #[test]
    fn running_calls_are_bounded_but_all_are_reported() {
        let mut tools = ToolCalls::default();
        for n in 0..=MAX_TOOL_CALLS {
            assert!(tools.start(0, &n.to_string(), "Bash", &Value::Null).is_some(), "{n}");
        }
        assert_eq!(tools.running.len(), MAX_TOOL_CALLS);
    }

    #[test]
    fn turn_begins_with_output_after_results() {
        let mut tools = ToolCalls::default();
        assert_eq!(tools.turn(), None);
        for id in ["a", "b"] {
            tools.start(0, id, "Bash", &Value::Null);
        }
        assert_eq!(tools.turn(), Some(1));
        for id in ["a", "b"] {
            tools.end(0, id, ResultStatus::Success, None);
        }
        tools.record_model_output();
        tools.start(0, "c", "Bash", &Value::Null);
        assert_eq!(tools.turn(), Some(2));
    }
}
