//! Attributes changes to the tool calls that were running when they happened.
//!
//! Pure. A command may change anything, so changes between its start and its end are its own. A tool that writes one
//! file claims that file: its report is believed at its end, and no other call is held responsible.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::diff::Change;
use crate::audit::protocol::Process;
use crate::records::entry::{AuditEntry, Op};

/// Maximum open tool calls.
pub const MAX_WINDOWS: usize = 256;

/// The agent that made a change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Agent {
    pub actor: String,
    pub name: String,
    pub dispatch: Option<String>,
}

/// A running tool call.
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
    /// Possible paths of the one file that it writes; `None` for a command, which may write any.
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

/// The agents whose commands were running.
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
        let (path, escaped) = AuditEntry::encode_path(&change.path);
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

/// A claimed change, pending until its call ends.
#[derive(Debug)]
struct PendingChange {
    change: Change,
    owners: Owners,
    at: Timestamp,
}

#[derive(Debug, Default)]
pub struct Windows {
    open: Vec<Window>,
    pending: Vec<PendingChange>,
}

impl Windows {
    /// Restores the calls that were open before a restart.
    pub fn restored(open: Vec<Window>) -> Self {
        Self { open, pending: Vec::new() }
    }

    pub fn all(&self) -> &[Window] {
        &self.open
    }

    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Whether there are open calls and all of them run in the background.
    pub fn is_background(&self) -> bool {
        !self.open.is_empty() && self.open.iter().all(|window| window.is_background)
    }

    pub fn has(&self, session: &str, tool_use: &str) -> bool {
        self.get(session, tool_use).is_some()
    }

    pub fn get(&self, session: &str, tool_use: &str) -> Option<&Window> {
        self.open.iter().find(|window| window.session == session && window.tool_use == tool_use)
    }

    /// Opens a call. Returns the oldest one if it had to be evicted.
    pub fn begin(&mut self, window: Window) -> Option<Window> {
        self.open.retain(|open| !(open.session == window.session && open.tool_use == window.tool_use));
        let evicted = (self.open.len() >= MAX_WINDOWS).then(|| self.open.remove(0));
        self.open.push(window);
        evicted
    }

    /// Attributes the changes since the last check; claimed ones stay pending.
    pub fn attribute(&mut self, changes: Vec<Change>, at: Timestamp) -> Vec<AuditEntry> {
        if self.open.is_empty() {
            return Vec::new();
        }
        let owners = self.owners();
        let mut entries = Vec::new();
        for change in changes {
            if self.open.iter().any(|window| window.claims(&change)) {
                self.pending.push(PendingChange { change, owners: owners.clone(), at });
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

    /// Ends a successful call. For a tool that wrote a file, returns its changes as the tree shows them, or else
    /// `fallback`.
    pub fn succeed(
        &mut self,
        session: &str,
        tool_use: &str,
        fallback: Option<Change>,
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
        let (mut mine, others) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition::<Vec<_>, _>(|pending| window.claims(&pending.change));
        self.pending = others;
        if !mine.iter().any(|pending| pending.change.op == Op::Write) {
            let owners = Owners { agents: Vec::new(), tool: None };
            mine.extend(fallback.map(|change| PendingChange { change, owners, at }));
        }
        let owner = Owners { agents: vec![window.agent], tool: Some(window.tool) };
        let is_last =
            |at: usize| !mine[at + 1..].iter().any(|later| later.change.path == mine[at].change.path);
        let last = mine.iter().enumerate().filter(|(at, _)| is_last(*at));
        last.filter_map(|(_, pending)| owner.entry(&pending.change, pending.at)).collect()
    }

    /// Ends failed or abandoned calls. Changes that they claimed but did not make belong to the running commands.
    pub fn end(&mut self, ends: impl Fn(&Window) -> bool) -> Vec<AuditEntry> {
        self.open.retain(|window| !ends(window));
        let open = &self.open;
        let (pending, released) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition::<Vec<_>, _>(|pending| open.iter().any(|window| window.claims(&pending.change)));
        self.pending = pending;
        released.into_iter().filter_map(|one| one.owners.entry(&one.change, one.at)).collect()
    }

    /// Marks a call that continues in the background after its end.
    pub fn put_into_background(&mut self, session: &str, tool_use: &str) {
        let is_call = |window: &&mut Window| window.session == session && window.tool_use == tool_use;
        if let Some(window) = self.open.iter_mut().find(is_call) {
            window.is_background = true;
        }
    }
}

#[cfg(test)]
mod tests;
