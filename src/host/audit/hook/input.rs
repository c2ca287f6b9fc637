//! What an agent's program gives its hook on stdin, as far as it is used: `tests/agents/README.md` has the facts.
//!
//! What a tool was to write and what it answered is passed over where it stands, and goes nowhere.

use std::io::{self, Read};

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::host::audit::protocol::{COMMANDS, Message, Phase, WRITERS};

/// More is not read.
const LARGEST: u64 = 4 << 20;

#[derive(Debug, Deserialize)]
pub struct Input {
    hook_event_name: String,
    #[serde(default)]
    session_id: String,
    #[serde(default)]
    transcript_path: Option<String>,
    #[serde(default)]
    cwd: Option<String>,
    #[serde(default)]
    tool_name: Option<String>,
    #[serde(default)]
    tool_use_id: Option<String>,
    #[serde(default)]
    tool_input: Option<Either<ToolInput>>,
    #[serde(default)]
    tool_response: Option<Either<ToolResponse>>,
    /// Only Codex says it.
    #[serde(default)]
    turn_id: Option<IgnoredAny>,
    #[serde(default)]
    agent_id: Option<String>,
    #[serde(default)]
    agent_type: Option<String>,
}

/// An object of ours, or whatever else a program gives in its place.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Either<T> {
    Known(T),
    Other(IgnoredAny),
}

impl<T> Either<T> {
    fn known(&self) -> Option<&T> {
        match self {
            Self::Known(known) => Some(known),
            Self::Other(_) => None,
        }
    }
}

#[derive(Debug, Deserialize)]
struct ToolInput {
    #[serde(default)]
    file_path: Option<String>,
    #[serde(default)]
    notebook_path: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ToolResponse {
    #[serde(default)]
    background_task_id: Option<IgnoredAny>,
    /// A command that took too long goes on in the background.
    #[serde(default)]
    timed_out_after_ms: Option<IgnoredAny>,
}

impl Input {
    /// `None` for what changes no file.
    ///
    /// # Errors
    /// When it is no hook's input, or too large.
    pub fn read(from: impl Read) -> io::Result<Option<Self>> {
        let mut text = Vec::new();
        from.take(LARGEST + 1).read_to_end(&mut text)?;
        if text.len() as u64 > LARGEST {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let input: Self = serde_json::from_slice(&text)?;
        Ok(input.phase().is_some().then_some(input))
    }

    fn phase(&self) -> Option<Phase> {
        let tool = self.tool_name.as_deref().unwrap_or_default();
        let is_meant = COMMANDS.contains(&tool) || WRITERS.contains(&tool);
        match self.hook_event_name.as_str() {
            "PreToolUse" if is_meant => Some(Phase::Pre),
            "PostToolUse" if is_meant => Some(Phase::Post),
            "PostToolUseFailure" if is_meant => Some(Phase::Failed),
            "Stop" | "StopFailure" | "SubagentStop" | "Interrupt" => Some(Phase::TurnEnd),
            "SessionEnd" => Some(Phase::SessionEnd),
            _ => None,
        }
    }

    /// What is told of it. `actor` is the program that the hook was installed for.
    pub fn message(self, actor: &str) -> Message {
        let mut message = Message::new(self.phase().unwrap_or(Phase::TurnEnd));
        message.actor = self.actor(actor).to_owned();
        let own = if message.actor == "claude-code" { "claude" } else { &message.actor };
        message.agent_name = said("SVC_AGENT_NAME")
            .or(self.agent_type)
            .filter(|name| !name.is_empty())
            .unwrap_or_else(|| own.to_owned());
        message.session_id = self.session_id;
        message.subagent = self.agent_id;
        message.tool_use_id = self.tool_use_id;
        message.cwd = self.cwd;
        let input = self.tool_input.as_ref().and_then(Either::known);
        let is_writer = self.tool_name.as_deref().is_some_and(|tool| WRITERS.contains(&tool));
        message.path = input
            .filter(|_| is_writer)
            .and_then(|input| input.file_path.clone().or_else(|| input.notebook_path.clone()));
        message.tool = self.tool_name;
        let response = self.tool_response.as_ref().and_then(Either::known);
        message.is_background = response
            .is_some_and(|told| told.background_task_id.is_some() || told.timed_out_after_ms.is_some());
        message
    }

    fn actor<'a>(&self, named: &'a str) -> &'a str {
        let by_path = |part: &str| self.transcript_path.as_deref().is_some_and(|path| path.contains(part));
        if !named.is_empty() {
            named
        } else if self.turn_id.is_some() || by_path("/.codex/") {
            "codex"
        } else if by_path("/.claude/") || said("CLAUDECODE").is_some() {
            "claude-code"
        } else {
            "agent"
        }
    }
}

fn said(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(text: &str) -> Option<Message> {
        Input::read(text.as_bytes()).unwrap().map(|input| input.message(""))
    }

    #[test]
    fn a_hooks_input_is_what_was_recorded_and_no_content_is_told() {
        let recorded = include_str!("../../../../tests/agents/recordings/claude/basic.hooks.jsonl");
        let messages: Vec<Message> = recorded.lines().filter_map(told).collect();
        let phases: Vec<Phase> = messages.iter().map(|message| message.phase).collect();
        assert!(
            [Phase::Pre, Phase::Post, Phase::Failed].iter().all(|phase| phases.contains(phase)),
            "{phases:?}"
        );
        assert_eq!(messages[0].path.as_deref(), Some("/PROJ/x"));
        assert!(
            messages
                .iter()
                .all(|message| (message.tool.as_deref() == Some("Bash")) == message.path.is_none()
                    || message.tool.is_none())
        );
        assert_eq!(messages[0].actor, "claude-code");
        let text = serde_json::to_string(&messages).unwrap();
        assert!(!text.contains("three") && !text.contains("mkdir"), "{text}");
    }

    #[test]
    fn what_goes_on_in_the_background_is_known() {
        let recorded = include_str!("../../../../tests/agents/recordings/claude/bash_bg.hooks.jsonl");
        let messages: Vec<Message> = recorded.lines().filter_map(told).collect();
        let background = messages.iter().filter(|message| message.is_background);
        assert_eq!(background.map(|message| message.phase).collect::<Vec<_>>(), [Phase::Post]);
    }

    #[test]
    fn codex_is_told_apart() {
        let recorded = include_str!("../../../../tests/agents/recordings/codex/basic.hooks.jsonl");
        let messages: Vec<Message> = recorded.lines().filter_map(told).collect();
        assert!(messages.iter().any(|message| message.tool.as_deref() == Some("apply_patch")));
        assert!(messages.iter().all(|message| message.actor == "codex" && message.path.is_none()));
    }

    #[test]
    fn what_changes_nothing_is_not_told_and_what_is_too_much_or_nothing_is_refused() {
        assert!(told(r#"{"hook_event_name":"PreToolUse","tool_name":"Read","tool_input":{}}"#).is_none());
        assert!(told(r#"{"hook_event_name":"SessionStart"}"#).is_none());
        let odd = told(
            r#"{"hook_event_name":"PostToolUse","tool_name":"Bash","tool_input":7,"tool_response":[1]}"#,
        );
        assert_eq!(odd.unwrap().phase, Phase::Post);
        for wrong in ["", "{", "[]", "{}"] {
            assert!(Input::read(wrong.as_bytes()).is_err(), "{wrong}");
        }
        assert!(Input::read(io::repeat(b' ')).is_err());
    }
}
