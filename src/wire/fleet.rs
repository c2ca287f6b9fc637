//! The summary of the fleet: machines, backups, operations, alarms, certificates and release keys.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::alarm::Alarm;
use crate::rollout::RolloutSummary;
use crate::text::{Time, WireString, default_unknown, string_enum};
use svc_machine::id::{MachineId, OperationId};
use svc_machine::name::{Handle, IdpUserId, Slot};
use svc_machine::state::Status;

string_enum!(
    /// How a machine left its slot.
    EndReason { Deleted = "deleted", Replaced = "replaced" }
);

/// The fleet: totals, the machines that need attention, overdue operations, alarms, and the open rollout.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct Fleet {
    pub totals: Totals,
    pub backups: BackupAges,
    /// The first machines that need attention; `attentionTotal` counts all.
    #[serde(default)]
    pub attention: Vec<MachineNeedingAttention>,
    /// Number of all machines that need attention.
    #[serde(default)]
    pub attention_total: u64,
    /// Older platforms omit it.
    #[serde(default)]
    #[schemars(with = "BundleKeys")]
    pub bundle_keys: Option<BundleKeys>,
    /// Present while the platform has a domain for host names. Older platforms omit it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Certificates")]
    pub certificates: Option<Certificates>,
    /// The open rollout.
    pub rollout: Option<RolloutSummary>,
    /// The first overdue operations; `overdueOperationsTotal` counts all.
    #[serde(default)]
    pub overdue_operations: Vec<OverdueOperation>,
    /// Number of all overdue operations.
    #[serde(default)]
    pub overdue_operations_total: u64,
    #[serde(default)]
    pub alarms: Vec<Alarm>,
    /// Older platforms omit it.
    #[serde(default)]
    #[schemars(with = "Exercises")]
    pub exercises: Option<Exercises>,
    #[serde(default)]
    pub as_of: Time,
}

/// When recovery and rollback were last exercised on a test slot.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct Exercises {
    #[serde(default)]
    pub recovery: Exercise,
    #[serde(default)]
    pub rollback: Exercise,
}

/// The last success of an exercise.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct Exercise {
    /// `null` if it never succeeded.
    pub last_at: Option<Time>,
    pub machine_id: Option<WireString<MachineId>>,
    /// Whether the last success is recent enough.
    #[serde(default)]
    pub is_current: bool,
}

/// Machine counts.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct Totals {
    pub machines: u64,
    pub by_status: BTreeMap<String, u64>,
    #[serde(default)]
    pub by_image_version: BTreeMap<String, u64>,
    #[serde(default)]
    pub by_health: BTreeMap<String, u64>,
}

/// Ages of the newest backups of the machines that hold data, each capped at the time since the machine's registration.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct BackupAges {
    pub max_age_seconds: Option<u64>,
    pub p50_age_seconds: Option<u64>,
    /// Number of machines without a backup.
    pub never: u64,
}

/// A machine that needs attention.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct MachineNeedingAttention {
    pub machine_id: WireString<MachineId>,
    #[serde(default)]
    pub idp_user_id: WireString<IdpUserId>,
    #[serde(default)]
    pub slot: WireString<Slot>,
    #[serde(default)]
    pub handle: WireString<Handle>,
    pub status: WireString<Status>,
    /// The platform's reasons, roughly in order of severity, then the host's.
    #[serde(default)]
    pub reasons: Vec<String>,
    /// How the machine left its slot; absent while it holds the slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "WireString<EndReason>")]
    pub ended: Option<WireString<EndReason>>,
    /// The operation that is waiting for an operator's decision.
    #[schemars(skip_serializing_if = "Option::is_none")]
    pub operation_id: Option<WireString<OperationId>>,
}

/// An operation that has been in progress for too long.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct OverdueOperation {
    pub operation_id: WireString<OperationId>,
    pub machine_id: WireString<MachineId>,
    #[serde(default)]
    pub handle: WireString<Handle>,
    #[serde(default = "default_unknown")]
    pub kind: String,
    #[serde(default = "default_unknown")]
    pub step: String,
    #[serde(default)]
    pub attempts: u64,
    pub error_code: Option<String>,
    #[serde(default)]
    pub age_seconds: u64,
}

/// The certificates of machines in service: booting, failed and powered-off machines are not counted. Lists of handles
/// are bounded; the counts are not.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct Certificates {
    /// `CUSTOMER_VPS_TLS_VERIFY`.
    #[serde(default)]
    pub is_required: bool,
    /// Number of machines with a trusted certificate that is not about to expire.
    #[serde(default)]
    pub trusted: u64,
    #[serde(default)]
    pub expiring: u64,
    #[serde(default)]
    pub expiring_handles: Vec<WireString<Handle>>,
    /// Number of machines without a trusted certificate.
    #[serde(default)]
    pub missing: u64,
    #[serde(default)]
    pub missing_handles: Vec<WireString<Handle>>,
    /// Number of `missing` machines that `CUSTOMER_VPS_TLS_VERIFY_EXCEPT` exempts.
    #[serde(default)]
    pub exempt: u64,
}

/// The release keys that hosts trust. Lists of handles are bounded; the counts are not.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct BundleKeys {
    pub keys: Vec<BundleKey>,
    /// Number of hosts that have not reported which keys they trust.
    pub not_reporting: u64,
    #[serde(default)]
    pub not_reporting_handles: Vec<WireString<Handle>>,
    /// `BUNDLE_KEYS_SEQUENCE`. Older platforms omit this field and the following ones.
    #[serde(default)]
    pub sequence: u64,
    /// The highest sequence that a host reports, if it is higher than `sequence`.
    pub highest_sequence: Option<u64>,
    /// Number of hosts whose key set has a sequence higher than `sequence`.
    #[serde(default)]
    pub ahead: u64,
    #[serde(default)]
    pub ahead_handles: Vec<WireString<Handle>>,
}

/// A release key, and the hosts that trust it.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct BundleKey {
    pub key_id: String,
    pub is_configured: bool,
    pub trusting: u64,
    #[serde(default)]
    pub trusting_handles: Vec<WireString<Handle>>,
    pub not_trusting: u64,
    #[serde(default)]
    pub not_trusting_handles: Vec<WireString<Handle>>,
}
