//! Whose a change is: which tool calls were running when it happened.
//!
//! Pure. A command may change anything, so what happens between its beginning and its end is its. A tool that writes one
//! file claims that file: what it says of it is believed at its end, and nobody else is held to have done it.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::diff::Change;
use crate::host::audit::protocol::Process;
use crate::host::records::entry::{AuditEntry, Op};

/// So many tool calls are kept at once.
pub const MOST: usize = 256;

/// Who did something.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Agent {
    pub actor: String,
    pub name: String,
    pub dispatch: Option<String>,
}

/// A tool call that has begun.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Window {
    pub session: String,
    pub tool_use: String,
    pub tool: String,
    pub agent: Agent,
    pub subagent: Option<String>,
    pub process: Option<Process>,
    pub opened: Timestamp,
    /// Paths that the one file it writes may have; none of a command, which may write any.
    pub claim: Option<Vec<String>>,
    pub is_background: bool,
}

impl Window {
    fn claims(&self, change: &Change) -> bool {
        let Some(paths) = &self.claim else { return false };
        paths.iter().any(|path| match change.op {
            Op::Write => change.path == path.as_bytes(),
            Op::Mkdir => is_above(&change.path, path.as_bytes()),
            Op::Delete => false,
        })
    }
}

fn is_above(folder: &[u8], path: &[u8]) -> bool {
    path.strip_prefix(folder).is_some_and(|rest| rest.starts_with(b"/"))
}

/// Whose it is, by the commands that were running.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Owners {
    agents: Vec<Agent>,
    tool: Option<String>,
}

impl Owners {
    fn entry(&self, change: &Change, timestamp: Timestamp) -> Option<AuditEntry> {
        let first = self.agents.first()?;
        let all = |of: fn(&Agent) -> &str| {
            let mut names: Vec<&str> = Vec::new();
            for agent in &self.agents {
                if !names.contains(&of(agent)) {
                    names.push(of(agent));
                }
            }
            names.join(", ")
        };
        let is_one = self.agents.len() == 1;
        let (path, escaped) = AuditEntry::path(&change.path);
        Some(AuditEntry {
            version: AuditEntry::VERSION,
            timestamp,
            op: change.op,
            path,
            escaped,
            size_bytes: change.size,
            actor: all(|agent| &agent.actor),
            agent_name: Some(all(|agent| &agent.name)),
            dispatch_id: if is_one { first.dispatch.clone() } else { None },
            tool: self.tool.clone(),
            ambiguous: !is_one,
        })
    }
}

/// A change that a tool call claims and has not ended yet.
#[derive(Debug)]
struct Held {
    change: Change,
    owners: Owners,
    at: Timestamp,
}

#[derive(Debug, Default)]
pub struct Windows {
    open: Vec<Window>,
    held: Vec<Held>,
}

impl Windows {
    /// Those that were open in another life of this process.
    pub fn restored(open: Vec<Window>) -> Self {
        Self { open, held: Vec::new() }
    }

    pub fn all(&self) -> &[Window] {
        &self.open
    }

    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Whether some run, and all of them in the background.
    pub fn is_background(&self) -> bool {
        !self.open.is_empty() && self.open.iter().all(|window| window.is_background)
    }

    pub fn has(&self, session: &str, tool_use: &str) -> bool {
        self.get(session, tool_use).is_some()
    }

    pub fn get(&self, session: &str, tool_use: &str) -> Option<&Window> {
        self.open.iter().find(|window| window.session == session && window.tool_use == tool_use)
    }

    /// A tool call begins. Where there are too many, the oldest is given up.
    pub fn begin(&mut self, window: Window) -> Option<Window> {
        self.open.retain(|open| !(open.session == window.session && open.tool_use == window.tool_use));
        let given_up = (self.open.len() >= MOST).then(|| self.open.remove(0));
        self.open.push(window);
        given_up
    }

    /// What happened since the last look, as far as it is known whose it is.
    pub fn attribute(&mut self, changes: Vec<Change>, at: Timestamp) -> Vec<AuditEntry> {
        if self.open.is_empty() {
            return Vec::new();
        }
        let owners = self.owners();
        let mut entries = Vec::new();
        for change in changes {
            if self.open.iter().any(|window| window.claims(&change)) {
                self.held.push(Held { change, owners: owners.clone(), at });
            } else {
                entries.extend(owners.entry(&change, at));
            }
        }
        entries
    }

    fn owners(&self) -> Owners {
        let commands = || self.open.iter().filter(|window| window.claim.is_none());
        let mut agents: Vec<Agent> = Vec::new();
        for window in commands() {
            if !agents.contains(&window.agent) {
                agents.push(window.agent.clone());
            }
        }
        let tool = commands().next().map(|window| window.tool.clone());
        Owners { agents, tool: tool.filter(|tool| commands().all(|window| window.tool == *tool)) }
    }

    /// A tool call has succeeded. Of one that wrote a file: what it did, with the path of `paths`, as the tree shows it,
    /// and where it shows nothing, `otherwise`.
    pub fn succeed(
        &mut self,
        session: &str,
        tool_use: &str,
        otherwise: Option<Change>,
        at: Timestamp,
    ) -> Vec<AuditEntry> {
        let Some(place) =
            self.open.iter().position(|open| open.session == session && open.tool_use == tool_use)
        else {
            return Vec::new();
        };
        let window = self.open.remove(place);
        if window.claim.is_none() {
            return Vec::new();
        }
        let (mut mine, others) = std::mem::take(&mut self.held)
            .into_iter()
            .partition::<Vec<_>, _>(|held| window.claims(&held.change));
        self.held = others;
        if !mine.iter().any(|held| held.change.op == Op::Write) {
            let owners = Owners { agents: Vec::new(), tool: None };
            mine.extend(otherwise.map(|change| Held { change, owners, at }));
        }
        let owner = Owners { agents: vec![window.agent], tool: Some(window.tool) };
        let is_last =
            |at: usize| !mine[at + 1..].iter().any(|later| later.change.path == mine[at].change.path);
        let last = mine.iter().enumerate().filter(|(at, _)| is_last(*at));
        last.filter_map(|(_, held)| owner.entry(&held.change, held.at)).collect()
    }

    /// A tool call has failed, or is given up with others. What it claimed and has not done was somebody else's.
    pub fn end(&mut self, ends: impl Fn(&Window) -> bool) -> Vec<AuditEntry> {
        self.open.retain(|window| !ends(window));
        let open = &self.open;
        let (kept, free) = std::mem::take(&mut self.held)
            .into_iter()
            .partition::<Vec<_>, _>(|held| open.iter().any(|window| window.claims(&held.change)));
        self.held = kept;
        free.into_iter().filter_map(|held| held.owners.entry(&held.change, held.at)).collect()
    }

    /// What a tool began goes on after its end.
    pub fn put_into_background(&mut self, session: &str, tool_use: &str) {
        let of = |window: &&mut Window| window.session == session && window.tool_use == tool_use;
        if let Some(window) = self.open.iter_mut().find(of) {
            window.is_background = true;
        }
    }
}

#[cfg(test)]
mod tests;
