//! Operations on machines, with their step logs.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::text::{Time, WireString, default_unknown, string_enum};
use svc_machine::id::{MachineId, OperationId};

string_enum!(
    /// The state of an operation.
    OperationState {
        Running = "running",
        /// The operation is waiting for an operator's answer to its question.
        Waiting = "waiting",
        Succeeded = "succeeded",
        Failed = "failed",
        Cancelled = "cancelled",
    }
);

/// An operation with its step log.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Operation {
    pub operation_id: WireString<OperationId>,
    pub machine_id: WireString<MachineId>,
    #[serde(default = "default_unknown")]
    pub kind: String,
    pub state: WireString<OperationState>,
    /// The question that an operator must answer, while the operation is waiting.
    pub question: Option<Question>,
    #[serde(default = "default_unknown")]
    pub step: String,
    /// Failed attempts at the current step.
    #[serde(default)]
    pub attempts: u64,
    pub error_code: Option<String>,
    #[serde(default)]
    pub created_at: Time,
    #[serde(default)]
    pub updated_at: Time,
    pub ended_at: Option<Time>,
    /// The id of the request that created the operation.
    pub request_id: Option<String>,
    /// The newest lines, oldest first.
    #[serde(default)]
    pub log: Vec<LogLine>,
    /// Number of older lines that are omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u64")]
    pub log_omitted: Option<u64>,
}

/// A question that an operator must answer.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct Question {
    pub code: String,
    #[serde(default = "default_unknown")]
    pub detail: String,
    /// The key of the snapshot that the answer may select.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub snapshot_key: Option<String>,
}

/// A line of an operation's log.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct LogLine {
    /// Increases from line to line, but not necessarily by one. Older platforms omit it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u64")]
    pub seq: Option<u64>,
    #[serde(default)]
    pub at: Time,
    #[serde(default = "default_unknown")]
    pub step: String,
    #[serde(default = "default_unknown")]
    pub outcome: String,
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// Number of times this line was logged again after `at`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u64")]
    pub repeats: Option<u64>,
    /// The time of the last repetition.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Time")]
    pub repeated_at: Option<Time>,
}

impl Operation {
    /// Returns the question, if the operation is waiting for an answer.
    pub fn question(&self) -> Option<&Question> {
        self.question.as_ref().filter(|_| self.state.is(OperationState::Waiting))
    }

    pub fn is_in_progress(&self) -> bool {
        self.state.is(OperationState::Running) || self.state.is(OperationState::Waiting)
    }
}
