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

/// Lines that had no room: a line of any JSON record. Whoever reads a record looks for `gap` first.
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
    }
}
