//! The audit log: changes by operators, hosts and the platform, and operators' reads of owners' data.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::text::{Time, WireString, default_unknown};
use svc_machine::id::AuditId;

/// A change, or a read of an owner's data.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct AuditEntry {
    pub audit_id: WireString<AuditId>,
    pub at: Time,
    #[serde(default = "default_unknown")]
    pub actor: String,
    #[serde(default = "default_unknown")]
    pub action: String,
    #[serde(default = "default_unknown")]
    pub target: String,
    /// The resource before the change.
    pub before: Option<Value>,
    /// The resource after the change.
    pub after: Option<Value>,
    #[serde(default = "default_unknown")]
    pub request_id: String,
}

/// A page of the audit log, newest first.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct AuditPage {
    pub entries: Vec<AuditEntry>,
    pub next_cursor: Option<String>,
}
