//! The tools of a run, from their start to their end.

use serde_json::Value;

use super::{Event, preview, told};
use crate::host::records::entry::{Status, Tool};

/// More tools of one run are counted by the last of these, so that a record's line has its bounds.
const MOST_TOOLS: usize = 2000;

const LONGEST_NAME: usize = 100;

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
        if self.all.len() == MOST_TOOLS || self.running.iter().any(|running| running.id == id) {
            return None;
        }
        let input_preview = preview::of_input(input);
        let event = Event::ToolStarted {
            id: id.to_owned(),
            name: name.to_owned(),
            input_preview: input_preview.clone(),
        };
        self.running.push(Running { id: id.to_owned(), at: self.all.len(), since_ms: at_ms });
        // One that never ends has not succeeded.
        let tool =
            Tool { name: told(name, LONGEST_NAME), duration_ms: 0, input_preview, status: Status::Error };
        self.all.push(tool);
        Some(event)
    }

    pub fn end(&mut self, at_ms: u64, id: &str, status: Status) -> Option<Event> {
        let at = self.running.iter().position(|running| running.id == id)?;
        let running = self.running.swap_remove(at);
        let tool = &mut self.all[running.at];
        tool.duration_ms = at_ms.saturating_sub(running.since_ms);
        tool.status = status;
        Some(Event::ToolEnded { id: id.to_owned(), name: tool.name.clone(), status })
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
