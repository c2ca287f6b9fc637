//! What a line of a record says: the specification's part 2, and an `id` and a `version` beside it.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::money::Dollars;
use crate::clock;

/// A dispatch that has ended: a line of `interactions-{date}.jsonl`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Interaction {
    pub version: u32,
    /// The dispatch's own, or the one that its caller gave.
    pub id: String,
    /// When it ended: the day that it counts for is this one's.
    #[serde(with = "clock::wire")]
    pub timestamp: Timestamp,
    /// The user or channel that it was for.
    pub sender_id: String,
    pub conversation_id: String,
    pub model: String,
    pub agent_name: String,
    pub tokens_in: u64,
    pub tokens_out: u64,
    pub cost: Dollars,
    pub duration_ms: u64,
    pub tools: Vec<Tool>,
    pub status: Status,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Failed>,
    pub batch: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_id: Option<String>,
}

impl Interaction {
    pub const VERSION: u32 = 1;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Success,
    Error,
}

/// A tool that an agent used. What the tool answered is nowhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Tool {
    pub name: String,
    pub duration_ms: u64,
    /// The beginning of its input, without secrets.
    pub input_preview: String,
    pub status: Status,
}

/// Why a dispatch failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Failed {
    pub name: String,
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stack: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<u64>,
}

/// A change of a file in the home: a line of `audit.jsonl`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AuditEntry {
    pub version: u32,
    /// When it was noticed: for a command, its end.
    #[serde(with = "clock::wire")]
    pub timestamp: Timestamp,
    pub op: Op,
    /// From the home's root.
    pub path: String,
    /// The name is no text: in `path`, `\\xNN` is a byte, and `\\\\` a backslash.
    #[serde(default, skip_serializing_if = "is_false")]
    pub escaped: bool,
    /// Of the file as it is now; 0 for a folder, and for what is gone.
    pub size_bytes: u64,
    /// The agents' program, or the part of the system.
    pub actor: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dispatch_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool: Option<String>,
    /// Several agents were at work, and it was one of them: `actor` and `agent_name` have all of their names.
    #[serde(default, skip_serializing_if = "is_false")]
    pub ambiguous: bool,
}

impl AuditEntry {
    pub const VERSION: u32 = 1;

    /// A path, which is bytes, as it is written, and whether it had to be escaped for that.
    pub fn path(bytes: &[u8]) -> (String, bool) {
        if let Ok(path) = std::str::from_utf8(bytes) {
            return (path.to_owned(), false);
        }
        let mut path = String::with_capacity(bytes.len() + 16);
        for chunk in bytes.utf8_chunks() {
            path.push_str(&chunk.valid().replace('\\', "\\\\"));
            for byte in chunk.invalid() {
                path.push_str(&format!("\\x{byte:02x}"));
            }
        }
        (path, true)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    Write,
    Delete,
    Mkdir,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde wants it")]
fn is_false(flag: &bool) -> bool {
    !flag
}

/// Lines that had no room, or tool calls that nobody saw: a line of any JSON record. Whoever reads a record looks for
/// `gap` first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GapLine {
    pub version: u32,
    #[serde(with = "clock::wire")]
    pub timestamp: Timestamp,
    pub gap: Gap,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Gap {
    /// How many lines.
    pub lost: u64,
    /// When the first of them had no room.
    #[serde(with = "clock::wire")]
    pub since: Timestamp,
    /// Of the audit: why tool calls were not seen. Lines that had no room say nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<Why>,
}

/// Why changes of tool calls may be missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Why {
    /// The hook found nobody to tell.
    Unheard,
    /// The answer did not come in time, and the hook let go.
    Late,
    /// What the hook was given could not be read, or was too large.
    Unreadable,
    /// The watcher began anew while tools were running.
    Restarted,
    /// The end of a tool call whose beginning was not seen.
    Unpaired,
    /// More tool calls at once than are kept.
    Crowded,
    /// The agent's own output had them, and no hook told of them.
    Unseen,
    /// A hook spoke for another process's call, or for a dispatch, and was not believed.
    Forged,
    /// The end of a tool call whose teller was gone before it could be looked at.
    Unproven,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_line_has_the_specifications_names() {
        let line = json!({
            "version": 1, "id": "01", "timestamp": "2026-11-22T01:02:03.456Z", "senderId": "user_1", "conversationId": "c",
            "model": "m", "agentName": "coder", "tokensIn": 10, "tokensOut": 20, "cost": 0.0125, "durationMs": 7,
            "tools": [{"name": "Bash", "durationMs": 3, "inputPreview": "ls", "status": "error"}], "status": "error",
            "error": {"name": "ToolError", "message": "no", "stack": "at x", "tool": "Bash", "turn": 2},
            "batch": true, "batchId": "b",
        });
        let entry: Interaction = serde_json::from_value(line.clone()).unwrap();
        assert_eq!(entry.cost, Dollars::from_nanos(12_500_000));
        assert_eq!(serde_json::to_value(&entry).unwrap(), line);
        let line = json!({
            "version": 1, "timestamp": "2026-11-22T01:02:03.456Z", "op": "mkdir", "path": "apps/notes", "sizeBytes": 0,
            "actor": "claude-code", "agentName": "coder",
        });
        let entry: AuditEntry = serde_json::from_value(line.clone()).unwrap();
        assert_eq!(serde_json::to_value(&entry).unwrap(), line);
    }

    #[test]
    fn a_path_that_is_no_text_is_written_so_that_it_can_be_read_back() {
        assert_eq!(AuditEntry::path("ä\\n\n".as_bytes()), ("ä\\n\n".to_owned(), false));
        assert_eq!(AuditEntry::path(b"a\\b/\xff\xc3c"), ("a\\\\b/\\xff\\xc3c".to_owned(), true));
    }
}
