//! The tool calls of a run.

use serde_json::Value;

use super::{Event, preview, scrub_and_truncate};
use crate::records::entry::{Status, Tool};

/// Maximum tool calls recorded per run, which bounds the line of its record; more are ignored.
const MAX_TOOLS: usize = 2000;

const MAX_NAME_CHARS: usize = 100;
/// IDs of Claude Code and Codex have about 30 characters. Longer IDs are compared by their start.
const MAX_ID_CHARS: usize = 200;

/// In the order in which they started.
#[derive(Debug, Default)]
pub struct Tools {
    all: Vec<Tool>,
    running: Vec<Running>,
}

#[derive(Debug)]
struct Running {
    id: String,
    at: usize,
    since_ms: u64,
}

impl Tools {
    pub fn start(&mut self, at_ms: u64, id: &str, name: &str, input: &Value) -> Option<Event> {
        let (id, name) = (preview::truncate(id, MAX_ID_CHARS), scrub_and_truncate(name, MAX_NAME_CHARS));
        if self.all.len() == MAX_TOOLS || self.running.iter().any(|running| running.id == id) {
            return None;
        }
        let input_preview = preview::preview_input(input);
        let event =
            Event::ToolStarted { id: id.clone(), name: name.clone(), input_preview: input_preview.clone() };
        self.running.push(Running { id, at: self.all.len(), since_ms: at_ms });
        // A tool that never ends has not succeeded.
        let tool = Tool { name, duration_ms: 0, input_preview, status: Status::Error };
        self.all.push(tool);
        Some(event)
    }

    pub fn end(&mut self, at_ms: u64, id: &str, status: Status) -> Option<Event> {
        let id = preview::truncate(id, MAX_ID_CHARS);
        let at = self.running.iter().position(|running| running.id == id)?;
        let running = self.running.swap_remove(at);
        let tool = &mut self.all[running.at];
        tool.duration_ms = at_ms.saturating_sub(running.since_ms);
        tool.status = status;
        Some(Event::ToolEnded { id, name: tool.name.clone(), status })
    }

    /// Ends all running tools at the end of the run. Returns the tool during which the run was interrupted: one that
    /// was running, or else the last one if it failed.
    pub fn close(&mut self, at_ms: u64) -> Option<String> {
        let running = self.running.iter().map(|running| running.at).max();
        let last = self.all.len().checked_sub(1).filter(|at| self.all[*at].status == Status::Error);
        let interrupted = running.or(last);
        for running in self.running.drain(..) {
            self.all[running.at].duration_ms = at_ms.saturating_sub(running.since_ms);
        }
        interrupted.map(|at| self.all[at].name.clone())
    }

    pub fn into_all(self) -> Vec<Tool> {
        self.all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_bound_ids_and_names_of_tools() {
        let (id, name) = ("i".repeat(1 << 20), "n".repeat(1 << 20));
        let mut tools = Tools::default();
        let Some(Event::ToolStarted { id: shown, name: named, .. }) =
            tools.start(0, &id, &name, &Value::Null)
        else {
            panic!("a tool starts");
        };
        assert!(shown.len() <= MAX_ID_CHARS + 3 && named.len() <= MAX_NAME_CHARS + 3, "{}", shown.len());
        let Some(Event::ToolEnded { id: ended, .. }) = tools.end(5, &id, Status::Success) else {
            panic!("the same tool ends");
        };
        assert_eq!(ended, shown);
        assert_eq!(tools.into_all()[0].duration_ms, 5);
    }
}
