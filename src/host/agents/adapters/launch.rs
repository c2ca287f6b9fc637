//! How an agent's program is started: its arguments, what it reads, and its environment. Pure.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::json;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::Kind;

/// What a run is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    pub agent_name: &'a str,
    pub prompt: &'a str,
    pub model: Option<&'a str>,
    pub conversation_id: Option<&'a str>,
}

/// What a program gets beside its command.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Launch {
    pub arguments: Vec<String>,
    pub stdin: Vec<u8>,
    pub environment: Vec<(&'static str, &'static str)>,
}

impl Kind {
    /// `is_known`: the program has this conversation already, and goes on with it.
    pub fn launch(self, asked: &Asked<'_>, is_known: bool) -> Launch {
        match self {
            Self::ClaudeCode => claude(asked, is_known),
            Self::Codex => codex(asked, is_known),
            Self::JsonLines => Launch { stdin: plain(asked), ..Launch::default() },
        }
    }

    /// Where the program keeps a conversation, as the end of a path below a directory of it; `None` where it is the
    /// program's own business.
    pub fn transcripts(self, home: &Path, conversation_id: &str) -> Option<(PathBuf, String)> {
        match self {
            Self::ClaudeCode => {
                Some((home.join(".claude/projects"), format!("{}.jsonl", session(conversation_id))))
            }
            Self::Codex | Self::JsonLines => None,
        }
    }

    /// Where Codex keeps its threads (see [`super::codex_sessions`]).
    pub fn sessions(self, home: &Path, environment: &BTreeMap<String, String>) -> Option<PathBuf> {
        let own = || environment.get("CODEX_HOME").map_or_else(|| home.join(".codex"), PathBuf::from);
        (self == Self::Codex).then(|| own().join("sessions"))
    }
}

fn claude(asked: &Asked<'_>, is_known: bool) -> Launch {
    let mut arguments: Vec<String> =
        ["-p", "--output-format", "stream-json", "--verbose"].map(str::to_owned).into();
    if let Some(model) = asked.model {
        arguments.extend(["--model".to_owned(), model.to_owned()]);
    }
    if let Some(conversation) = asked.conversation_id {
        let flag = if is_known { "--resume" } else { "--session-id" };
        arguments.extend([flag.to_owned(), session(conversation)]);
    }
    Launch {
        arguments,
        stdin: asked.prompt.as_bytes().to_vec(),
        // It is the release that brings another.
        environment: vec![("DISABLE_AUTOUPDATER", "1")],
    }
}

fn codex(asked: &Asked<'_>, is_known: bool) -> Launch {
    // The hooks are ours, or the owner's own.
    let mut arguments: Vec<String> =
        ["--json", "--skip-git-repo-check", "--dangerously-bypass-hook-trust"].map(str::to_owned).into();
    if let Some(model) = asked.model {
        arguments.extend(["-m".to_owned(), model.to_owned()]);
    }
    if let Some(thread) = asked.conversation_id.filter(|_| is_known) {
        arguments.extend(["resume".to_owned(), thread.to_owned()]);
    }
    arguments.push("-".to_owned());
    Launch { arguments, stdin: asked.prompt.as_bytes().to_vec(), ..Launch::default() }
}

/// Sessions of Claude Code are UUIDs; a conversation of another name has the same one each time.
fn session(conversation_id: &str) -> String {
    if let Ok(id) = Uuid::try_parse(conversation_id) {
        return id.to_string();
    }
    let digest = Sha256::digest(format!("svc conversation {conversation_id}"));
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    uuid::Builder::from_random_bytes(bytes).into_uuid().to_string()
}

fn plain(asked: &Asked<'_>) -> Vec<u8> {
    let mut line = json!({
        "type": "prompt",
        "version": 1,
        "prompt": asked.prompt,
        "agentName": asked.agent_name,
        "model": asked.model,
        "conversationId": asked.conversation_id,
    })
    .to_string()
    .into_bytes();
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKED: Asked<'_> = Asked {
        agent_name: "coder",
        prompt: "/no command\n--flag",
        model: Some("m"),
        conversation_id: Some("telegram:7"),
    };

    #[test]
    fn a_conversation_is_begun_once_and_gone_on_with() {
        let (first, again) = (Kind::ClaudeCode.launch(&ASKED, false), Kind::ClaudeCode.launch(&ASKED, true));
        assert_eq!(first.stdin, ASKED.prompt.as_bytes());
        assert_eq!(
            first.arguments[..7],
            ["-p", "--output-format", "stream-json", "--verbose", "--model", "m", "--session-id"]
        );
        assert_eq!((&*again.arguments[6], &again.arguments[7]), ("--resume", &first.arguments[7]));
        assert!(Uuid::try_parse(&first.arguments[7]).is_ok());
        let named = "6ba7b810-9dad-41d1-80b4-00c04fd430c8";
        let given = Kind::ClaudeCode.launch(&Asked { conversation_id: Some(named), ..ASKED }, false);
        assert_eq!(given.arguments[7], named);
    }

    #[test]
    fn a_thread_of_codex_is_gone_on_with() {
        let (first, again) = (Kind::Codex.launch(&ASKED, false), Kind::Codex.launch(&ASKED, true));
        assert_eq!(first.arguments[3..], ["-m", "m", "-"]);
        assert_eq!(again.arguments[3..], ["-m", "m", "resume", "telegram:7", "-"]);
        let environment = BTreeMap::from([("CODEX_HOME".to_owned(), "/x".to_owned())]);
        let home = Path::new("/home/svc");
        assert_eq!(Kind::Codex.sessions(home, &environment), Some("/x/sessions".into()));
        assert_eq!(Kind::Codex.sessions(home, &BTreeMap::new()), Some("/home/svc/.codex/sessions".into()));
        assert_eq!(Kind::ClaudeCode.sessions(home, &environment), None);
    }

    #[test]
    fn our_own_protocol_reads_its_prompt_as_a_line() {
        let launch = Kind::JsonLines.launch(&ASKED, false);
        let line: serde_json::Value = serde_json::from_slice(&launch.stdin).unwrap();
        assert_eq!((line["prompt"].as_str(), line["model"].as_str()), (Some(ASKED.prompt), Some("m")));
        assert!(launch.arguments.is_empty() && launch.stdin.ends_with(b"\n"));
    }
}
