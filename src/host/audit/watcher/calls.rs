//! Identifies tool calls, authorizes peers to report on them, and sanitizes names in messages. Performs no I/O.

use std::collections::VecDeque;

use super::call_windows::CallWindow;
use super::peer::Peer;
use crate::audit::protocol::{Message, Process};

/// Maximum length of names and ids; longer ones are truncated.
const MAX_NAME_BYTES: usize = 200;
/// Maximum number of remembered calls, both for those with a gap and for ended ones.
const MAX_REMEMBERED_CALLS: usize = 512;

/// A tool call. The process is part of its identity, since any program can send any id.
#[derive(Debug, PartialEq, Eq)]
pub struct Call {
    pub session: String,
    pub tool_use: String,
    pub process: Option<Process>,
}

/// An ended call.
pub struct EndedCall {
    pub call: Call,
    /// Whether the end was reported by a live process, not by a saved message.
    pub is_live: bool,
}

/// A peer's authority to report on a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Authority {
    Proven,
    /// The peer exited before it could be identified. Its report is accepted, but a reported end is recorded as a gap.
    Unproven,
    /// The call belongs to a different process.
    None,
}

pub fn determine_authority(window: &CallWindow, peer: &Peer) -> Authority {
    match (window.process, peer.caller()) {
        (None, _) => Authority::Proven,
        (Some(_), None) if !peer.is_identified() => Authority::Unproven,
        (process, caller) if process == caller => Authority::Proven,
        _ => Authority::None,
    }
}

/// Drops the oldest calls beyond `MAX_REMEMBERED_CALLS`.
pub fn trim_remembered<T>(calls: &mut VecDeque<T>) {
    let excess = calls.len().saturating_sub(MAX_REMEMBERED_CALLS);
    calls.drain(..excess);
}

/// Truncates names and ids and strips their control characters, since any program can choose them.
pub fn sanitize_names(mut message: Message) -> Message {
    let sanitize = |text: &mut String| {
        if text.len() > MAX_NAME_BYTES || text.chars().any(char::is_control) {
            // A character is at most four bytes.
            *text = text.chars().filter(|c| !c.is_control()).take(MAX_NAME_BYTES / 4).collect();
        }
    };
    [&mut message.session_id, &mut message.actor, &mut message.agent_name].into_iter().for_each(sanitize);
    let optional =
        [&mut message.tool_use_id, &mut message.tool, &mut message.subagent, &mut message.dispatch_id];
    optional.into_iter().flatten().for_each(sanitize);
    message
}
