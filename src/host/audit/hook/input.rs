//! The subset of the hook input that we use; see `tests/agents/README.md` for the format.
//!
//! File contents and tool results are discarded after parsing, and never leave the process.

use std::io::{self, Read};

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::audit::protocol::{COMMAND_TOOLS, Message, Phase, WRITER_TOOLS};

/// Maximum hook input size.
const MAX_INPUT_BYTES: u64 = 4 << 20;

#[derive(Debug, Deserialize)]
pub struct HookInput {
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
    tool_input: Option<LenientValue<ToolInput>>,
    #[serde(default)]
    tool_response: Option<LenientValue<ToolResponse>>,
    /// Only sent by Codex.
    #[serde(default)]
    turn_id: Option<IgnoredAny>,
    #[serde(default)]
    agent_id: Option<String>,
    #[serde(default)]
    agent_type: Option<String>,
}

/// Tolerates any other value in place of the expected object.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum LenientValue<T> {
    Expected(T),
    Other(IgnoredAny),
}

impl<T> LenientValue<T> {
    fn expected(&self) -> Option<&T> {
        match self {
            Self::Expected(value) => Some(value),
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
    /// Commands that time out keep running in the background.
    #[serde(default)]
    timed_out_after_ms: Option<IgnoredAny>,
}

impl HookInput {
    /// Parses the input. Returns `None` for events that aren't reported.
    ///
    /// # Errors
    /// The input cannot be read, is invalid, or is too large.
    pub fn read(from: impl Read) -> io::Result<Option<Self>> {
        let mut text = Vec::new();
        from.take(MAX_INPUT_BYTES + 1).read_to_end(&mut text)?;
        if text.len() as u64 > MAX_INPUT_BYTES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let input: Self = serde_json::from_slice(&text)?;
        Ok(input.phase().is_some().then_some(input))
    }

    fn phase(&self) -> Option<Phase> {
        let tool = self.tool_name.as_deref().unwrap_or_default();
        let is_audited = COMMAND_TOOLS.contains(&tool) || WRITER_TOOLS.contains(&tool);
        match self.hook_event_name.as_str() {
            "PreToolUse" if is_audited => Some(Phase::Pre),
            "PostToolUse" if is_audited => Some(Phase::Post),
            "PostToolUseFailure" if is_audited => Some(Phase::Failed),
            "Stop" | "StopFailure" | "SubagentStop" | "Interrupt" => Some(Phase::TurnEnd),
            "SessionEnd" => Some(Phase::SessionEnd),
            _ => None,
        }
    }

    /// Builds the message for the watcher. `actor` is the program the hook was installed for; empty if unknown.
    pub fn into_message(self, actor: &str) -> Message {
        let mut message = Message::new(self.phase().unwrap_or(Phase::TurnEnd));
        message.actor = self.detect_actor(actor).to_owned();
        let default_name = if message.actor == "claude-code" { "claude" } else { &message.actor };
        message.agent_name = env_var("SVC_AGENT_NAME")
            .or(self.agent_type)
            .filter(|name| !name.is_empty())
            .unwrap_or_else(|| default_name.to_owned());
        message.session_id = self.session_id;
        message.subagent = self.agent_id;
        message.tool_use_id = self.tool_use_id;
        message.cwd = self.cwd;
        let input = self.tool_input.as_ref().and_then(LenientValue::expected);
        let is_writer = self.tool_name.as_deref().is_some_and(|tool| WRITER_TOOLS.contains(&tool));
        message.path = input
            .filter(|_| is_writer)
            .and_then(|input| input.file_path.clone().or_else(|| input.notebook_path.clone()));
        message.tool = self.tool_name;
        let response = self.tool_response.as_ref().and_then(LenientValue::expected);
        message.is_background = response
            .is_some_and(|value| value.background_task_id.is_some() || value.timed_out_after_ms.is_some());
        message
    }

    fn detect_actor<'a>(&self, installed_for: &'a str) -> &'a str {
        let is_transcript_in =
            |dir: &str| self.transcript_path.as_deref().is_some_and(|path| path.contains(dir));
        if !installed_for.is_empty() {
            installed_for
        } else if self.turn_id.is_some() || is_transcript_in("/.codex/") {
            "codex"
        } else if is_transcript_in("/.claude/") || env_var("CLAUDECODE").is_some() {
            "claude-code"
        } else {
            "agent"
        }
    }
}

fn env_var(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Option<Message> {
        HookInput::read(text.as_bytes()).unwrap().map(|input| input.into_message(""))
    }

    #[test]
    fn recorded_input_becomes_messages_without_content() {
        let recorded = include_str!("../../../../tests/agents/recordings/claude/basic.hooks.jsonl");
        let messages: Vec<Message> = recorded.lines().filter_map(parse).collect();
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
    fn detects_background_commands() {
        let recorded = include_str!("../../../../tests/agents/recordings/claude/bash_bg.hooks.jsonl");
        let messages: Vec<Message> = recorded.lines().filter_map(parse).collect();
        let background = messages.iter().filter(|message| message.is_background);
        assert_eq!(background.map(|message| message.phase).collect::<Vec<_>>(), [Phase::Post]);
    }

    #[test]
    fn detects_codex() {
        let recorded = include_str!("../../../../tests/agents/recordings/codex/basic.hooks.jsonl");
        let messages: Vec<Message> = recorded.lines().filter_map(parse).collect();
        assert!(messages.iter().any(|message| message.tool.as_deref() == Some("apply_patch")));
        assert!(messages.iter().all(|message| message.actor == "codex" && message.path.is_none()));
    }

    #[test]
    fn read_ignores_irrelevant_and_rejects_invalid_input() {
        assert!(parse(r#"{"hook_event_name":"PreToolUse","tool_name":"Read","tool_input":{}}"#).is_none());
        assert!(parse(r#"{"hook_event_name":"SessionStart"}"#).is_none());
        let unexpected = parse(
            r#"{"hook_event_name":"PostToolUse","tool_name":"Bash","tool_input":7,"tool_response":[1]}"#,
        );
        assert_eq!(unexpected.unwrap().phase, Phase::Post);
        for invalid in ["", "{", "[]", "{}"] {
            assert!(HookInput::read(invalid.as_bytes()).is_err(), "{invalid}");
        }
        assert!(HookInput::read(io::repeat(b' ')).is_err());
    }
}
