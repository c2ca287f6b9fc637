//! Whose word counts for a tool call. Pure.

use super::peer::Speaker;
use super::windows::Window;
use crate::host::audit::protocol::{Message, Process};

/// Names of agents and ids are cut here.
const LONGEST_NAME: usize = 200;

/// A tool call, and the process that makes it: ids are what anybody may say.
#[derive(Debug, PartialEq, Eq)]
pub struct Call {
    pub session: String,
    pub tool_use: String,
    pub process: Option<Process>,
}

/// A call that has ended.
pub struct Done {
    pub call: Call,
    /// It was told by a process that could be asked, and not by what one had left.
    pub is_live: bool,
}

/// Whether who tells of a call's end is the process whose call it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Right {
    Proven,
    /// It has ended since. It is believed, and a gap says so.
    Unproven,
    /// It is another process's.
    None,
}

/// Whether this teller is heard on this call.
pub fn right(window: &Window, speaker: &Speaker) -> Right {
    match (window.process, speaker.caller()) {
        (None, _) => Right::Proven,
        (Some(_), None) if !speaker.is_known() => Right::Unproven,
        (process, caller) if process == caller => Right::Proven,
        _ => Right::None,
    }
}

/// Names that anybody may give are of a bounded length.
pub fn bounded(mut message: Message) -> Message {
    let cut = |text: &mut String| {
        if text.len() > LONGEST_NAME || text.chars().any(char::is_control) {
            *text = text.chars().filter(|c| !c.is_control()).take(LONGEST_NAME / 4).collect();
        }
    };
    [&mut message.session_id, &mut message.actor, &mut message.agent_name].into_iter().for_each(cut);
    let optional =
        [&mut message.tool_use_id, &mut message.tool, &mut message.subagent, &mut message.dispatch_id];
    optional.into_iter().flatten().for_each(cut);
    message
}
