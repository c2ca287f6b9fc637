//! Running dispatches, their processes and hook-reported tool calls. Performs no I/O.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::peer::Peer;
use crate::audit::protocol::{Process, SeenCalls};

/// Maximum number of concurrent dispatches, far above the configurable limit. Beyond it, the oldest is evicted.
const MAX_DISPATCHES: usize = 256;
/// Maximum number of tool call ids stored per dispatch; further calls are only counted.
const MAX_IDS: usize = 1024;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Dispatch {
    pub id: String,
    pub agent_name: String,
    /// The `svc-agent` process, which adopts the agent's orphans.
    runner: Process,
    /// Ids of hook-reported calls, up to [`MAX_IDS`].
    #[serde(rename = "told")]
    reported: BTreeSet<String>,
    /// Number of calls beyond `reported`.
    #[serde(rename = "toldMore")]
    further_reported: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dispatches(Vec<Dispatch>);

impl Dispatches {
    pub fn begin(&mut self, id: String, agent_name: String, runner: Process) {
        self.0.retain(|dispatch| dispatch.id != id);
        if self.0.len() >= MAX_DISPATCHES {
            self.0.remove(0);
        }
        self.0.push(Dispatch { id, agent_name, runner, reported: BTreeSet::new(), further_reported: 0 });
    }

    /// Finds the dispatch the peer's process belongs to.
    pub fn find(&self, peer: &Peer) -> Option<&Dispatch> {
        self.0.iter().find(|dispatch| peer.is_in_tree_of(dispatch.runner))
    }

    /// Records a hook-reported call.
    pub fn add_call(&mut self, id: &str, tool_use: &str) {
        let Some(dispatch) = self.0.iter_mut().find(|dispatch| dispatch.id == id) else { return };
        if dispatch.reported.len() < MAX_IDS {
            dispatch.reported.insert(tool_use.to_owned());
        } else if !dispatch.reported.contains(tool_use) {
            dispatch.further_reported += 1;
        }
    }

    /// Ends a dispatch. Returns the number of calls in the agent's output that weren't reported by a hook.
    pub fn end(&mut self, id: &str, seen: &SeenCalls) -> u64 {
        let position = self.0.iter().position(|dispatch| dispatch.id == id);
        let (reported, further_reported) = position
            .map(|index| self.0.remove(index))
            .map(|dispatch| (dispatch.reported, dispatch.further_reported))
            .unwrap_or_default();
        if seen.has_shared_call_ids && further_reported == 0 && seen.further_calls == 0 {
            return seen.ids.iter().filter(|id| !reported.contains(*id)).count() as u64;
        }
        // Without shared ids, or if some ids weren't stored, only compare the counts.
        let seen_count = seen.ids.len() as u64 + seen.further_calls;
        seen_count.saturating_sub(reported.len() as u64 + further_reported)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(ids: &[&str], has_shared_call_ids: bool) -> SeenCalls {
        SeenCalls {
            ids: ids.iter().map(|&id| id.to_owned()).collect(),
            further_calls: 0,
            has_shared_call_ids,
        }
    }

    fn dispatches_with_calls(reported: &[&str]) -> Dispatches {
        let mut dispatches = Dispatches::default();
        dispatches.begin("d".to_owned(), "coder".to_owned(), Process { pid: 7, started: 1 });
        reported.iter().for_each(|call| dispatches.add_call("d", call));
        dispatches
    }

    #[test]
    fn end_counts_unreported_calls() {
        assert_eq!(dispatches_with_calls(&["a", "b"]).end("d", &seen(&["a", "b"], true)), 0);
        assert_eq!(dispatches_with_calls(&["a"]).end("d", &seen(&["a", "b", "c"], true)), 2);
        // A reported subagent call doesn't offset an unreported call.
        assert_eq!(dispatches_with_calls(&["a", "x"]).end("d", &seen(&["a", "b"], true)), 1);
        // Codex uses different ids in its output and its hooks.
        assert_eq!(dispatches_with_calls(&["a", "b"]).end("d", &seen(&["1", "2"], false)), 0);
        assert_eq!(dispatches_with_calls(&["a"]).end("d", &seen(&["1", "2", "3"], false)), 2);
        assert_eq!(dispatches_with_calls(&[]).end("other", &seen(&["1"], true)), 1, "unknown dispatch");
        assert_eq!(dispatches_with_calls(&[]).end("d", &SeenCalls::default()), 0);
    }

    #[test]
    fn end_counts_each_call_with_a_reused_id() {
        // The program reused an ended call's id, so the watcher rejects the second call's report.
        assert_eq!(dispatches_with_calls(&["a"]).end("d", &seen(&["a", "a"], false)), 1);
        let seen = SeenCalls { further_calls: 1, ..seen(&["a", "a"], true) };
        assert_eq!(dispatches_with_calls(&["a"]).end("d", &seen), 2);
    }

    #[test]
    fn end_counts_calls_beyond_the_id_limit() {
        let ids: Vec<String> = (0..MAX_IDS + 50).map(|n| n.to_string()).collect();
        let mut dispatches = dispatches_with_calls(&ids.iter().map(String::as_str).collect::<Vec<_>>());
        let seen = SeenCalls { ids: ids[..MAX_IDS].to_vec(), further_calls: 60, has_shared_call_ids: true };
        assert_eq!(dispatches.end("d", &seen), 10);
        assert_eq!(dispatches, Dispatches::default());
    }
}
