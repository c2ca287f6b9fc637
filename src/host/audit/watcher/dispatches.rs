//! Dispatches that run, by the process below which all of theirs run, and which of their tool calls hooks told of. Pure.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::peer::Speaker;
use crate::host::audit::protocol::{Process, SeenCalls};

/// Dispatches at once: far more than are ever run.
const MAX_RUNNING: usize = 256;
/// Tool calls of one dispatch that are remembered by their ids; more are counted.
const MAX_IDS: usize = 1024;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Dispatch {
    pub id: String,
    pub agent_name: String,
    /// `svc-agent`'s: what an agent leaves behind becomes its child.
    runner: Process,
    told: BTreeSet<String>,
    /// Beside `told`.
    told_more: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dispatches(Vec<Dispatch>);

impl Dispatches {
    pub fn begin(&mut self, id: String, agent_name: String, runner: Process) {
        self.0.retain(|one| one.id != id);
        if self.0.len() >= MAX_RUNNING {
            self.0.remove(0);
        }
        self.0.push(Dispatch { id, agent_name, runner, told: BTreeSet::new(), told_more: 0 });
    }

    /// The dispatch that this is a process of.
    pub fn of(&self, speaker: &Speaker) -> Option<&Dispatch> {
        self.0.iter().find(|one| speaker.is_below(one.runner))
    }

    /// A hook told of this call.
    pub fn note(&mut self, id: &str, tool_use: &str) {
        let Some(one) = self.0.iter_mut().find(|one| one.id == id) else { return };
        if one.told.len() < MAX_IDS {
            one.told.insert(tool_use.to_owned());
        } else if !one.told.contains(tool_use) {
            one.told_more += 1;
        }
    }

    /// It is over: how many of the calls that its agent's own output had no hook told of.
    pub fn end(&mut self, id: &str, seen: &SeenCalls) -> u64 {
        let place = self.0.iter().position(|one| one.id == id);
        let (told, told_more) =
            place.map(|at| self.0.remove(at)).map(|one| (one.told, one.told_more)).unwrap_or_default();
        let unmatched = seen.ids.iter().filter(|id| !told.contains(*id)).count();
        let matched = seen.ids.len() - unmatched;
        let unmatched = unmatched as u64 + seen.more;
        if seen.is_by_id && told_more == 0 && seen.more == 0 {
            return unmatched;
        }
        // Where ids say nothing, as many calls must have been told.
        unmatched.saturating_sub((told.len() - matched) as u64 + told_more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(ids: &[&str], is_by_id: bool) -> SeenCalls {
        SeenCalls { ids: ids.iter().map(|&id| id.to_owned()).collect(), more: 0, is_by_id }
    }

    fn begun(told: &[&str]) -> Dispatches {
        let mut all = Dispatches::default();
        all.begin("d".to_owned(), "coder".to_owned(), Process { pid: 7, started: 1 });
        told.iter().for_each(|call| all.note("d", call));
        all
    }

    #[test]
    fn calls_that_no_hook_told_of_are_counted() {
        assert_eq!(begun(&["a", "b"]).end("d", &seen(&["a", "b"], true)), 0);
        assert_eq!(begun(&["a"]).end("d", &seen(&["a", "b", "c"], true)), 2);
        // One of a subagent stands in for nothing.
        assert_eq!(begun(&["a", "x"]).end("d", &seen(&["a", "b"], true)), 1);
        // Codex has other ids in its output than in its hooks.
        assert_eq!(begun(&["a", "b"]).end("d", &seen(&["1", "2"], false)), 0);
        assert_eq!(begun(&["a"]).end("d", &seen(&["1", "2", "3"], false)), 2);
        assert_eq!(begun(&[]).end("other", &seen(&["1"], true)), 1, "nobody said that it had begun");
        assert_eq!(begun(&[]).end("d", &SeenCalls::default()), 0);
    }

    #[test]
    fn calls_beyond_the_bound_are_counted() {
        let ids: Vec<String> = (0..MAX_IDS + 50).map(|n| n.to_string()).collect();
        let mut all = begun(&ids.iter().map(String::as_str).collect::<Vec<_>>());
        let seen = SeenCalls { ids: ids[..MAX_IDS].to_vec(), more: 60, is_by_id: true };
        assert_eq!(all.end("d", &seen), 10);
        assert_eq!(all, Dispatches::default());
    }
}
