//! Attributes changes to the tool calls running at the time.
//!
//! Performs no I/O. A command may change anything, so all changes between its start and end are attributed to it. A
//! single-file tool claims its file: if the call succeeds, the change is attributed only to that call.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::diff::Change;
use crate::audit::protocol::{Message, Process};
use crate::records::entry::{AuditEntry, FileOperation};

/// Maximum number of open tool calls.
pub const MAX_WINDOWS: usize = 256;

/// The agent that made a tool call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Agent {
    pub actor: String,
    pub name: String,
    pub dispatch: Option<String>,
}

/// A path below the home directory that a call may write to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "SavedPath", into = "SavedPath")]
pub struct ClaimedPath(pub Vec<u8>);

/// State-file form of a [`ClaimedPath`]: text if the path is valid UTF-8. Earlier releases only support text.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum SavedPath {
    Text(String),
    Bytes(Vec<u8>),
}

impl From<SavedPath> for ClaimedPath {
    fn from(saved: SavedPath) -> Self {
        match saved {
            SavedPath::Text(path) => Self(path.into_bytes()),
            SavedPath::Bytes(path) => Self(path),
        }
    }
}

impl From<ClaimedPath> for SavedPath {
    fn from(ClaimedPath(path): ClaimedPath) -> Self {
        String::from_utf8(path).map_or_else(|error| Self::Bytes(error.into_bytes()), Self::Text)
    }
}

/// Time window of a running tool call. Any change within it may have been made by the call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CallWindow {
    pub session: String,
    pub tool_use: String,
    pub tool: String,
    pub agent: Agent,
    pub subagent: Option<String>,
    pub process: Option<Process>,
    pub opened: Timestamp,
    /// Possible paths of the file being written, or `None` for a command, which may write any file.
    pub claim: Option<Vec<ClaimedPath>>,
    pub is_background: bool,
}

impl CallWindow {
    /// Builds the window for the call reported in the message.
    pub fn new(message: &Message, claim: Option<Vec<ClaimedPath>>, opened: Timestamp) -> Self {
        Self {
            session: message.session_id.clone(),
            tool_use: message.tool_use_id.clone().unwrap_or_default(),
            tool: message.tool.clone().unwrap_or_default(),
            agent: Agent {
                actor: message.actor.clone(),
                name: message.agent_name.clone(),
                dispatch: message.dispatch_id.clone(),
            },
            subagent: message.subagent.clone(),
            process: message.process,
            opened,
            claim,
            is_background: false,
        }
    }

    fn claims(&self, change: &Change) -> bool {
        let Some(paths) = &self.claim else { return false };
        paths.iter().any(|ClaimedPath(path)| match change.op {
            FileOperation::Write => change.path == *path,
            FileOperation::Mkdir => is_ancestor(&change.path, path),
            FileOperation::Delete => false,
        })
    }
}

fn is_ancestor(dir: &[u8], path: &[u8]) -> bool {
    path.strip_prefix(dir).is_some_and(|rest| rest.starts_with(b"/"))
}

/// The agents a change is attributed to, and their tool if they all used the same one.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Attribution {
    agents: Vec<Agent>,
    tool: Option<String>,
    /// Whether it is uncertain that any of these agents made the change.
    is_uncertain: bool,
}

impl Attribution {
    /// Adds a killed call that claimed the change, and may or may not have made it.
    fn add_killed_call(&mut self, window: &CallWindow) {
        if self.agents.is_empty() {
            self.is_uncertain = true;
            self.tool = Some(window.tool.clone());
        } else if self.tool.as_ref() != Some(&window.tool) {
            self.tool = None;
        }
        if !self.agents.contains(&window.agent) {
            self.agents.push(window.agent.clone());
        }
    }

    fn build_entry(&self, change: &Change, timestamp: Timestamp) -> Option<AuditEntry> {
        let first = self.agents.first()?;
        let join_names = |name_of: fn(&Agent) -> &str| {
            let mut names: Vec<&str> = Vec::new();
            for agent in &self.agents {
                if !names.contains(&name_of(agent)) {
                    names.push(name_of(agent));
                }
            }
            names.join(", ")
        };
        let is_unambiguous = self.agents.len() == 1 && !self.is_uncertain;
        let (path, escaped) = AuditEntry::encode_path(&change.path);
        Some(AuditEntry {
            version: AuditEntry::FORMAT_VERSION,
            timestamp,
            op: change.op,
            path,
            escaped,
            size_bytes: change.size,
            actor: join_names(|agent| &agent.actor),
            agent_name: Some(join_names(|agent| &agent.name)),
            dispatch_id: if is_unambiguous { first.dispatch.clone() } else { None },
            tool: self.tool.clone(),
            ambiguous: !is_unambiguous,
        })
    }
}

/// A claimed change, pending until the claiming call ends.
#[derive(Debug)]
struct PendingChange {
    change: Change,
    /// Fallback attribution if no claiming call succeeds.
    attribution: Attribution,
    at: Timestamp,
}

#[derive(Debug, Default)]
pub struct CallWindows {
    open: Vec<CallWindow>,
    pending: Vec<PendingChange>,
}

impl CallWindows {
    /// Restores calls that were open before a restart.
    pub fn restore(open: Vec<CallWindow>) -> Self {
        Self { open, pending: Vec::new() }
    }

    pub fn all(&self) -> &[CallWindow] {
        &self.open
    }

    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Whether there are open calls and all of them run in the background.
    pub fn has_only_background_calls(&self) -> bool {
        !self.open.is_empty() && self.open.iter().all(|window| window.is_background)
    }

    pub fn contains(&self, session: &str, tool_use: &str) -> bool {
        self.get(session, tool_use).is_some()
    }

    pub fn get(&self, session: &str, tool_use: &str) -> Option<&CallWindow> {
        self.open.iter().find(|window| window.session == session && window.tool_use == tool_use)
    }

    /// Opens a window, replacing any open window of the same call. Returns the oldest window if it had to be evicted.
    pub fn begin(&mut self, window: CallWindow) -> Option<CallWindow> {
        self.open.retain(|open| !(open.session == window.session && open.tool_use == window.tool_use));
        let evicted = (self.open.len() >= MAX_WINDOWS).then(|| self.open.remove(0));
        self.open.push(window);
        evicted
    }

    /// Attributes new changes to the running commands. Claimed changes stay pending.
    pub fn attribute(&mut self, changes: Vec<Change>, at: Timestamp) -> Vec<AuditEntry> {
        if self.open.is_empty() {
            return Vec::new();
        }
        let attribution = self.build_command_attribution();
        let mut entries = Vec::new();
        for change in changes {
            if self.open.iter().any(|window| window.claims(&change)) {
                self.pending.push(PendingChange { change, attribution: attribution.clone(), at });
            } else {
                entries.extend(attribution.build_entry(&change, at));
            }
        }
        entries
    }

    /// Builds the attribution to all running commands.
    fn build_command_attribution(&self) -> Attribution {
        let commands = || self.open.iter().filter(|window| window.claim.is_none());
        let mut agents: Vec<Agent> = Vec::new();
        for window in commands() {
            if !agents.contains(&window.agent) {
                agents.push(window.agent.clone());
            }
        }
        let tool = commands().next().map(|window| window.tool.clone());
        let tool = tool.filter(|tool| commands().all(|window| window.tool == *tool));
        Attribution { agents, tool, is_uncertain: false }
    }

    /// Ends a successful call. If it claimed a file, returns its claimed changes, attributed to it: the latest for each
    /// path, plus `fallback` if none of them is a write.
    pub fn end_successful(
        &mut self,
        session: &str,
        tool_use: &str,
        fallback: Option<Change>,
        at: Timestamp,
    ) -> Vec<AuditEntry> {
        let Some(index) =
            self.open.iter().position(|open| open.session == session && open.tool_use == tool_use)
        else {
            return Vec::new();
        };
        let window = self.open.remove(index);
        if window.claim.is_none() {
            return Vec::new();
        }
        let (mut claimed, others) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition::<Vec<_>, _>(|pending| window.claims(&pending.change));
        self.pending = others;
        let attribution =
            Attribution { agents: vec![window.agent], tool: Some(window.tool), is_uncertain: false };
        if !claimed.iter().any(|pending| pending.change.op == FileOperation::Write) {
            let fallback =
                fallback.map(|change| PendingChange { change, attribution: attribution.clone(), at });
            claimed.extend(fallback);
        }
        let is_last = |index: usize| {
            !claimed[index + 1..].iter().any(|later| later.change.path == claimed[index].change.path)
        };
        let last = claimed.iter().enumerate().filter(|(index, _)| is_last(*index));
        last.filter_map(|(_, pending)| attribution.build_entry(&pending.change, pending.at)).collect()
    }

    /// Ends matching calls that failed or were abandoned. The changes they claimed are attributed to the commands
    /// running at the time.
    pub fn end(&mut self, should_end: impl Fn(&CallWindow) -> bool) -> Vec<AuditEntry> {
        self.open.retain(|window| !should_end(window));
        self.release_unclaimed()
    }

    /// Ends matching calls whose process exited before reporting a result. The changes they claimed are attributed to
    /// them and to the commands running at the time.
    pub fn end_killed(&mut self, was_killed: impl Fn(&CallWindow) -> bool) -> Vec<AuditEntry> {
        let (killed, open) = std::mem::take(&mut self.open).into_iter().partition::<Vec<_>, _>(was_killed);
        self.open = open;
        for pending in &mut self.pending {
            for window in killed.iter().filter(|window| window.claims(&pending.change)) {
                pending.attribution.add_killed_call(window);
            }
        }
        self.release_unclaimed()
    }

    /// Removes pending changes no longer claimed by an open call, and builds their entries.
    fn release_unclaimed(&mut self) -> Vec<AuditEntry> {
        let open = &self.open;
        let (pending, released) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition::<Vec<_>, _>(|pending| open.iter().any(|window| window.claims(&pending.change)));
        self.pending = pending;
        released
            .into_iter()
            .filter_map(|pending| pending.attribution.build_entry(&pending.change, pending.at))
            .collect()
    }

    /// Marks a call whose command keeps running after the tool returns.
    pub fn mark_as_background(&mut self, session: &str, tool_use: &str) {
        let is_call = |window: &&mut CallWindow| window.session == session && window.tool_use == tool_use;
        if let Some(window) = self.open.iter_mut().find(is_call) {
            window.is_background = true;
        }
    }
}

#[cfg(test)]
mod tests;
