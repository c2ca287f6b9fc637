//! The tools of a run, from their start to their end.

use serde_json::Value;

use super::{Event, preview, told};
use crate::host::records::entry::{Status, Tool};

/// More tools of one run are counted by the last of these, so that a record's line has its bounds.
const MOST_TOOLS: usize = 2000;

const LONGEST_NAME: usize = 100;
/// Ids of Claude Code and Codex have some 30 characters. What is longer is compared by its beginning.
const MAX_ID_CHARS: usize = 200;

/// In the order of their starts.
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
        let (id, name) = (preview::cut(id, MAX_ID_CHARS), told(name, LONGEST_NAME));
        if self.all.len() == MOST_TOOLS || self.running.iter().any(|running| running.id == id) {
            return None;
        }
        let input_preview = preview::of_input(input);
        let event =
            Event::ToolStarted { id: id.clone(), name: name.clone(), input_preview: input_preview.clone() };
        self.running.push(Running { id, at: self.all.len(), since_ms: at_ms });
        // One that never ends has not succeeded.
        let tool = Tool { name, duration_ms: 0, input_preview, status: Status::Error };
        self.all.push(tool);
        Some(event)
    }

    pub fn end(&mut self, at_ms: u64, id: &str, status: Status) -> Option<Event> {
        let id = preview::cut(id, MAX_ID_CHARS);
        let at = self.running.iter().position(|running| running.id == id)?;
        let running = self.running.swap_remove(at);
        let tool = &mut self.all[running.at];
        tool.duration_ms = at_ms.saturating_sub(running.since_ms);
        tool.status = status;
        Some(Event::ToolEnded { id, name: tool.name.clone(), status })
    }

    /// The run is over; whatever still ran was cut off then. The name of the tool that it was cut off in: one that still ran,
    /// or the last, where that one failed.
    pub fn close(&mut self, at_ms: u64) -> Option<String> {
        let running = self.running.iter().map(|running| running.at).max();
        let last = self.all.len().checked_sub(1).filter(|at| self.all[*at].status == Status::Error);
        let cut_off = running.or(last);
        for running in self.running.drain(..) {
            self.all[running.at].duration_ms = at_ms.saturating_sub(running.since_ms);
        }
        cut_off.map(|at| self.all[at].name.clone())
    }

    pub fn into_all(self) -> Vec<Tool> {
        self.all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_bound_what_an_agent_calls_its_tools() {
        let (id, name) = ("i".repeat(1 << 20), "n".repeat(1 << 20));
        let mut tools = Tools::default();
        let Some(Event::ToolStarted { id: shown, name: named, .. }) =
            tools.start(0, &id, &name, &Value::Null)
        else {
            panic!("a tool starts");
        };
        assert!(shown.len() <= MAX_ID_CHARS + 3 && named.len() <= LONGEST_NAME + 3, "{}", shown.len());
        let Some(Event::ToolEnded { id: ended, .. }) = tools.end(5, &id, Status::Success) else {
            panic!("the same tool ends");
        };
        assert_eq!(ended, shown);
        assert_eq!(tools.into_all()[0].duration_ms, 5);
    }
}
