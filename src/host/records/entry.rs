//! Log entries as defined in part 2 of the specification, plus additional fields such as `id` and `version`.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::money::Dollars;
use svc_base::clock;

/// A finished dispatch: a line in `interactions-{date}.jsonl`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Interaction {
    pub version: u32,
    /// Dispatch id, generated or chosen by the caller.
    pub id: String,
    /// When the dispatch finished, which determines the day it counts toward.
    #[serde(with = "clock::wire")]
    pub timestamp: Timestamp,
    /// When the dispatch was accepted; absent from older records.
    #[serde(default, with = "clock::wire_option", skip_serializing_if = "Option::is_none")]
    pub accepted_at: Option<Timestamp>,
    /// When its run began, even if the agent couldn't be started; absent from older records, or if it ended while
    /// queued.
    #[serde(default, with = "clock::wire_option", skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Timestamp>,
    /// The user or channel that sent the dispatch.
    pub sender_id: String,
    pub conversation_id: String,
    pub model: String,
    pub agent_name: String,
    pub tokens_in: u64,
    pub tokens_out: u64,
    pub cost: Dollars,
    /// The run ended before reporting its full cost, so `cost` is an estimate of at least the reserved amount.
    #[serde(default, skip_serializing_if = "is_false")]
    pub cost_estimated: bool,
    pub duration_ms: u64,
    pub tools: Vec<ToolCall>,
    pub status: ResultStatus,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<DispatchError>,
    pub batch: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_id: Option<String>,
    /// Number of entries in the batch, including refused ones, which aren't recorded; absent from older records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<usize>,
    /// Request digest, to detect an id reused for a different request; absent from older records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
}

impl Interaction {
    pub const FORMAT_VERSION: u32 = 1;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ResultStatus {
    Success,
    Error,
}

/// An agent's tool call, excluding its output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ToolCall {
    pub name: String,
    pub duration_ms: u64,
    /// Start of the call's input, with secrets removed.
    pub input_preview: String,
    pub status: ResultStatus,
    /// Start of the returned error, with secrets removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Error from a failed dispatch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DispatchError {
    pub name: String,
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stack: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<u64>,
}

/// A file change in the home directory: a line in `audit.jsonl`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AuditEntry {
    pub version: u32,
    /// When the change was detected: for a command, when it finished.
    #[serde(with = "clock::wire")]
    pub timestamp: Timestamp,
    pub op: FileOperation,
    /// Relative to the home directory.
    pub path: String,
    /// The path isn't valid UTF-8: in `path`, `\xNN` encodes an invalid byte, and `\\` a backslash.
    #[serde(default, skip_serializing_if = "is_false")]
    pub escaped: bool,
    /// Current size of the file; 0 for directories and deleted files.
    pub size_bytes: u64,
    /// Agent program or system component.
    pub actor: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dispatch_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool: Option<String>,
    /// The actor is uncertain: several agents or dispatches were running commands, or an agent was killed during a call
    /// that writes this file. `agent_name` lists the agents.
    #[serde(default, skip_serializing_if = "is_false")]
    pub ambiguous: bool,
}

impl AuditEntry {
    pub const FORMAT_VERSION: u32 = 1;

    /// Encodes a path, and returns whether it was escaped.
    pub fn encode_path(bytes: &[u8]) -> (String, bool) {
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
pub enum FileOperation {
    Write,
    Delete,
    Mkdir,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde requires this signature")]
fn is_false(flag: &bool) -> bool {
    !flag
}

/// Reports dropped lines or unseen tool calls. May occur in any JSON log file, so readers check for `gap` first.
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
    /// Number of missing lines or calls.
    pub lost: u64,
    /// Time of the first missing line or call.
    #[serde(with = "clock::wire")]
    pub since: Timestamp,
    /// Cause of unseen tool calls, in `audit.jsonl` only. Absent for dropped lines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<GapReason>,
}

/// Cause of a gap in the changes made by tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, strum::Display)]
#[cfg_attr(test, derive(strum::VariantArray))]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum GapReason {
    /// The hook couldn't reach the watcher.
    #[serde(rename = "unheard")]
    #[strum(serialize = "unheard")]
    Undelivered,
    /// The watcher didn't reply before the hook's deadline.
    Late,
    /// The hook's input was invalid or too large.
    Unreadable,
    /// The watcher restarted while tools were running.
    Restarted,
    /// End of a tool call without a matching start.
    Unpaired,
    /// Too many concurrent tool calls.
    #[serde(rename = "crowded")]
    #[strum(serialize = "crowded")]
    TooManyCalls,
    /// Calls in the agent's output that weren't reported by a hook.
    Unseen,
    /// An unauthorized process reported a dispatch or another process's call. The report was rejected, unless the
    /// forgery was only detected later.
    Forged,
    /// End of a tool call whose reporting process had already exited.
    Unproven,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lines_use_the_specifications_names() {
        let line = json!({
            "version": 1, "id": "01", "timestamp": "2026-11-22T01:02:03.456Z", "acceptedAt": "2026-11-22T01:02:01.000Z",
            "startedAt": "2026-11-22T01:02:03.449Z", "senderId": "user_1", "conversationId": "c",
            "model": "m", "agentName": "coder", "tokensIn": 10, "tokensOut": 20, "cost": 0.0125, "durationMs": 7,
            "tools": [{"name": "Bash", "durationMs": 3, "inputPreview": "ls", "status": "error",
                "error": "Exit code 3"}], "status": "error",
            "error": {"name": "ToolError", "message": "no", "stack": "at x", "tool": "Bash", "turn": 2},
            "batch": true, "batchId": "b", "batchSize": 3, "fingerprint": "0f",
        });
        let entry: Interaction = serde_json::from_value(line.clone()).unwrap();
        assert_eq!((entry.cost, entry.cost_estimated), (Dollars::from_nanos(12_500_000), false));
        assert_eq!(serde_json::to_value(&entry).unwrap(), line);
        let line = json!({
            "version": 1, "timestamp": "2026-11-22T01:02:03.456Z", "op": "mkdir", "path": "apps/notes", "sizeBytes": 0,
            "actor": "claude-code", "agentName": "coder",
        });
        let entry: AuditEntry = serde_json::from_value(line.clone()).unwrap();
        assert_eq!(serde_json::to_value(&entry).unwrap(), line);
    }

    #[test]
    fn gap_reasons_are_displayed_as_serialized() {
        for reason in <GapReason as strum::VariantArray>::VARIANTS {
            assert_eq!(serde_json::to_value(reason).unwrap(), reason.to_string());
        }
    }

    #[test]
    fn non_utf8_path_is_escaped() {
        assert_eq!(AuditEntry::encode_path("ä\\n\n".as_bytes()), ("ä\\n\n".to_owned(), false));
        assert_eq!(AuditEntry::encode_path(b"a\\b/\xff\xc3c"), ("a\\\\b/\\xff\\xc3c".to_owned(), true));
    }
}
