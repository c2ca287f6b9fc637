//! Builds an agent program's launch parameters: arguments, stdin and environment. Doesn't perform I/O.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::json;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::AdapterKind;

/// Parameters of a run.
#[derive(Debug, Clone, Copy)]
pub struct LaunchRequest<'a> {
    pub agent_name: &'a str,
    pub prompt: &'a str,
    pub model: Option<&'a str>,
    pub conversation_id: Option<&'a str>,
}

/// Additions to the configured command.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Launch {
    pub arguments: Vec<String>,
    pub stdin: Vec<u8>,
    pub environment: Vec<(&'static str, &'static str)>,
}

impl AdapterKind {
    /// Builds the additions to the command. With `has_conversation`, the program has stored the conversation and
    /// resumes it.
    pub fn build_launch(self, request: &LaunchRequest<'_>, has_conversation: bool) -> Launch {
        match self {
            Self::ClaudeCode => build_claude_launch(request, has_conversation),
            Self::Codex => build_codex_launch(request, has_conversation),
            Self::JsonLines => Launch { stdin: format_prompt_line(request), ..Launch::default() },
        }
    }

    /// Returns the location of a conversation's Claude Code transcript: a directory, and the file name within one of
    /// its subdirectories. `None` for other programs; for Codex, see [`Self::sessions_dir`].
    pub fn transcript_location(
        self,
        location: &StateLocation<'_>,
        conversation_id: &str,
    ) -> Option<(PathBuf, String)> {
        match self {
            Self::ClaudeCode => {
                let state_dir = location.resolve("CLAUDE_CONFIG_DIR", ".claude");
                Some((state_dir.join("projects"), format!("{}.jsonl", to_session_id(conversation_id))))
            }
            Self::Codex | Self::JsonLines => None,
        }
    }

    /// Returns the directory of Codex session files (see [`super::codex_sessions`]).
    pub fn sessions_dir(self, location: &StateLocation<'_>) -> Option<PathBuf> {
        (self == Self::Codex).then(|| location.resolve("CODEX_HOME", ".codex").join("sessions"))
    }
}

/// Settings that determine where a program stores its state.
#[derive(Debug, Clone, Copy)]
pub struct StateLocation<'a> {
    /// The home directory, unless the agent's environment sets `HOME`.
    pub home: &'a Path,
    pub working_dir: &'a Path,
    /// The agent's configured environment.
    pub environment: &'a BTreeMap<String, String>,
}

impl StateLocation<'_> {
    /// Returns the directory named by a variable, defaulting to `below_home` in the home directory.
    fn resolve(&self, variable: &str, below_home: &str) -> PathBuf {
        let directory = |name: &str| {
            let value = self.environment.get(name).filter(|value| !value.is_empty())?;
            // Relative paths are relative to the program's working directory.
            Some(self.working_dir.join(value))
        };
        directory(variable)
            .unwrap_or_else(|| directory("HOME").unwrap_or_else(|| self.home.to_owned()).join(below_home))
    }
}

fn build_claude_launch(request: &LaunchRequest<'_>, has_conversation: bool) -> Launch {
    let mut arguments: Vec<String> =
        ["-p", "--output-format", "stream-json", "--verbose"].map(str::to_owned).into();
    if let Some(model) = request.model {
        arguments.extend(["--model".to_owned(), model.to_owned()]);
    }
    if let Some(conversation) = request.conversation_id {
        let flag = if has_conversation { "--resume" } else { "--session-id" };
        arguments.extend([flag.to_owned(), to_session_id(conversation)]);
    }
    Launch {
        arguments,
        stdin: request.prompt.as_bytes().to_vec(),
        // The program is updated with host releases.
        environment: vec![("DISABLE_AUTOUPDATER", "1")],
    }
}

fn build_codex_launch(request: &LaunchRequest<'_>, has_conversation: bool) -> Launch {
    // The hooks are trusted: they were installed by this machine or by the owner.
    let mut arguments: Vec<String> =
        ["--json", "--skip-git-repo-check", "--dangerously-bypass-hook-trust"].map(str::to_owned).into();
    if let Some(model) = request.model {
        arguments.extend(["-m".to_owned(), model.to_owned()]);
    }
    if let Some(thread) = request.conversation_id.filter(|_| has_conversation) {
        arguments.extend(["resume".to_owned(), thread.to_owned()]);
    }
    arguments.push("-".to_owned());
    Launch { arguments, stdin: request.prompt.as_bytes().to_vec(), ..Launch::default() }
}

/// Claude Code requires UUIDs, so other conversation ids are mapped to stable UUIDs.
pub fn to_session_id(conversation_id: &str) -> String {
    if let Ok(id) = Uuid::try_parse(conversation_id) {
        return id.to_string();
    }
    let digest = Sha256::digest(format!("svc conversation {conversation_id}"));
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    uuid::Builder::from_random_bytes(bytes).into_uuid().to_string()
}

fn format_prompt_line(request: &LaunchRequest<'_>) -> Vec<u8> {
    let mut line = json!({
        "type": "prompt",
        "version": 1,
        "prompt": request.prompt,
        "agentName": request.agent_name,
        "model": request.model,
        "conversationId": request.conversation_id,
    })
    .to_string()
    .into_bytes();
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: LaunchRequest<'_> = LaunchRequest {
        agent_name: "coder",
        prompt: "/no command\n--flag",
        model: Some("m"),
        conversation_id: Some("telegram:7"),
    };

    #[test]
    fn claude_starts_a_conversation_once_then_resumes_it() {
        let (first, resumed) = (
            AdapterKind::ClaudeCode.build_launch(&REQUEST, false),
            AdapterKind::ClaudeCode.build_launch(&REQUEST, true),
        );
        assert_eq!(first.stdin, REQUEST.prompt.as_bytes());
        assert_eq!(
            first.arguments[..7],
            ["-p", "--output-format", "stream-json", "--verbose", "--model", "m", "--session-id"]
        );
        assert_eq!((&*resumed.arguments[6], &resumed.arguments[7]), ("--resume", &first.arguments[7]));
        assert!(Uuid::try_parse(&first.arguments[7]).is_ok());
        let uuid = "6ba7b810-9dad-41d1-80b4-00c04fd430c8";
        let launch = AdapterKind::ClaudeCode
            .build_launch(&LaunchRequest { conversation_id: Some(uuid), ..REQUEST }, false);
        assert_eq!(launch.arguments[7], uuid);
    }

    #[test]
    fn codex_resumes_an_existing_thread() {
        let (first, resumed) = (
            AdapterKind::Codex.build_launch(&REQUEST, false),
            AdapterKind::Codex.build_launch(&REQUEST, true),
        );
        assert_eq!(first.arguments[3..], ["-m", "m", "-"]);
        assert_eq!(resumed.arguments[3..], ["-m", "m", "resume", "telegram:7", "-"]);
    }

    #[test]
    fn environment_determines_state_directories() {
        let resolve_dirs = |variables: &[(&str, &str)]| {
            let environment =
                variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            let (home, working_dir) = (Path::new("/home/svc"), Path::new("/home/svc/home"));
            let location = StateLocation { home, working_dir, environment: &environment };
            assert_eq!(AdapterKind::ClaudeCode.sessions_dir(&location), None);
            let (transcripts, name) = AdapterKind::ClaudeCode.transcript_location(&location, "c").unwrap();
            assert_eq!(name, format!("{}.jsonl", to_session_id("c")));
            (transcripts, AdapterKind::Codex.sessions_dir(&location).unwrap())
        };
        for (variables, claude, codex) in [
            (&[][..], "/home/svc/.claude/projects", "/home/svc/.codex/sessions"),
            (&[("CODEX_HOME", "/x")], "/home/svc/.claude/projects", "/x/sessions"),
            (&[("CLAUDE_CONFIG_DIR", "/y")], "/y/projects", "/home/svc/.codex/sessions"),
            (&[("CLAUDE_CONFIG_DIR", "in")], "/home/svc/home/in/projects", "/home/svc/.codex/sessions"),
            (&[("HOME", "/h"), ("CODEX_HOME", "")], "/h/.claude/projects", "/h/.codex/sessions"),
            (&[("HOME", "/h"), ("CLAUDE_CONFIG_DIR", "/y")], "/y/projects", "/h/.codex/sessions"),
        ] {
            assert_eq!(resolve_dirs(variables), (claude.into(), codex.into()), "{variables:?}");
        }
    }

    #[test]
    fn json_lines_prompt_is_a_single_line() {
        let launch = AdapterKind::JsonLines.build_launch(&REQUEST, false);
        let line: serde_json::Value = serde_json::from_slice(&launch.stdin).unwrap();
        assert_eq!((line["prompt"].as_str(), line["model"].as_str()), (Some(REQUEST.prompt), Some("m")));
        assert!(launch.arguments.is_empty() && launch.stdin.ends_with(b"\n"));
    }
}
