//! Release rollouts.

use std::ops::Deref;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::text::{Time, WireString, default_unknown, string_enum};
use svc_machine::id::{MachineId, RolloutId};
use svc_machine::name::{Handle, ImageVersion, Slot};

string_enum!(
    /// The state of a rollout.
    RolloutState {
        Running = "running",
        Paused = "paused",
        /// The platform stopped it: too many machines failed.
        Stopped = "stopped",
        /// An operator ended it.
        Aborted = "aborted",
        Succeeded = "succeeded",
    }
);
string_enum!(
    /// The state of a machine in a rollout.
    MemberState {
        Waiting = "waiting",
        Requested = "asked",
        Updated = "updated",
        Failed = "failed",
        Skipped = "skipped",
    }
);

impl RolloutState {
    pub fn has_ended(self) -> bool {
        !matches!(self, Self::Running | Self::Paused)
    }
}

/// A rollout without its machines.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RolloutSummary {
    pub rollout_id: WireString<RolloutId>,
    #[serde(default)]
    pub image_version: WireString<ImageVersion>,
    pub state: WireString<RolloutState>,
    /// The reason the platform paused or stopped the rollout.
    pub why: Option<String>,
    /// Number of machines that are updated first.
    #[serde(default)]
    pub canary: u64,
    #[serde(default)]
    pub batch_size: u64,
    #[serde(default)]
    pub max_failures: u64,
    #[serde(default)]
    pub totals: RolloutTotals,
    #[serde(default)]
    pub created_at: Time,
    #[serde(default)]
    pub updated_at: Time,
    pub ended_at: Option<Time>,
    /// Whether the release is verified on the first machines before it is installed on the others.
    #[serde(default)]
    pub verify: bool,
    /// The result of the last verification. Older platforms omit it.
    #[serde(default)]
    pub verification: Option<RolloutVerification>,
    #[serde(default = "default_unknown")]
    pub request_id: String,
}

/// The verification of a release on the first machines in a rollout.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct RolloutVerification {
    #[serde(default)]
    pub at: Time,
    pub passed: bool,
    /// The machines on which the release was verified.
    #[serde(default)]
    pub handles: Vec<WireString<Handle>>,
    /// The problems that were found.
    #[serde(default)]
    pub findings: Vec<RolloutFinding>,
}

/// A problem that the verification found.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct RolloutFinding {
    #[serde(default)]
    pub machine_id: WireString<MachineId>,
    #[serde(default)]
    pub handle: WireString<Handle>,
    /// The name of the check.
    #[serde(default = "default_unknown")]
    pub check: String,
    #[serde(default = "default_unknown")]
    pub what: String,
    pub next: Option<String>,
}

/// A rollout with its machines.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Rollout {
    #[serde(flatten)]
    pub summary: RolloutSummary,
    #[serde(default)]
    pub machines: Vec<RolloutMachine>,
}

impl Deref for Rollout {
    type Target = RolloutSummary;

    fn deref(&self) -> &RolloutSummary {
        &self.summary
    }
}

/// Rollouts, newest first.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct RolloutList {
    pub rollouts: Vec<RolloutSummary>,
}

/// Number of machines by state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct RolloutTotals {
    #[serde(default)]
    pub waiting: u64,
    #[serde(default)]
    pub asked: u64,
    #[serde(default)]
    pub updated: u64,
    #[serde(default)]
    pub failed: u64,
    #[serde(default)]
    pub skipped: u64,
}

/// A machine in a rollout.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct RolloutMachine {
    pub machine_id: WireString<MachineId>,
    #[serde(default)]
    pub handle: WireString<Handle>,
    #[serde(default)]
    pub slot: WireString<Slot>,
    /// The number of its batch; 0 is the canary.
    #[serde(default)]
    pub batch: u64,
    pub state: WireString<MemberState>,
    pub error: Option<String>,
    /// When the update was requested from its host.
    pub asked_at: Option<Time>,
    pub ended_at: Option<Time>,
    /// The release that the machine is running.
    #[serde(default)]
    pub image_version: WireString<ImageVersion>,
}

impl RolloutTotals {
    pub fn add(&mut self, state: MemberState, count: u64) {
        let total = match state {
            MemberState::Waiting => &mut self.waiting,
            MemberState::Requested => &mut self.asked,
            MemberState::Updated => &mut self.updated,
            MemberState::Failed => &mut self.failed,
            MemberState::Skipped => &mut self.skipped,
        };
        *total += count;
    }
}

impl RolloutSummary {
    /// Whether the rollout is waiting for an operator, because the verification found a problem.
    pub fn is_halted(&self) -> bool {
        self.state.is(RolloutState::Paused) && self.verification.as_ref().is_some_and(|last| !last.passed)
    }

    pub fn has_ended(&self) -> bool {
        !(self.state.is(RolloutState::Running) || self.state.is(RolloutState::Paused))
    }
}

impl RolloutMachine {
    pub fn has_ended(&self) -> bool {
        !(self.state.is(MemberState::Waiting) || self.state.is(MemberState::Requested))
    }
}
