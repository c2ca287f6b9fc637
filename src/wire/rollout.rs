//! Rollouts of releases.

use std::ops::Deref;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::text::{Text, Time, unknown, words};
use svc_machine::id::{MachineId, RolloutId};
use svc_machine::name::{Handle, ImageVersion, Slot};

words!(
    /// The state of a rollout.
    RolloutState {
        Running = "running",
        Paused = "paused",
        /// The platform stopped it: too many machines failed.
        Stopped = "stopped",
        /// By an operator.
        Aborted = "aborted",
        Succeeded = "succeeded",
    }
);
words!(
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
    pub rollout_id: Text<RolloutId>,
    #[serde(default)]
    pub image_version: Text<ImageVersion>,
    pub state: Text<RolloutState>,
    /// Why the platform stopped it.
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
    #[serde(default = "unknown")]
    pub request_id: String,
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
    pub machine_id: Text<MachineId>,
    #[serde(default)]
    pub handle: Text<Handle>,
    #[serde(default)]
    pub slot: Text<Slot>,
    /// 0 for the canary.
    #[serde(default)]
    pub batch: u64,
    pub state: Text<MemberState>,
    pub error: Option<String>,
    /// When its host was requested to update.
    pub asked_at: Option<Time>,
    pub ended_at: Option<Time>,
    /// The release that it runs.
    #[serde(default)]
    pub image_version: Text<ImageVersion>,
}

impl RolloutTotals {
    pub fn add(&mut self, state: MemberState, machines: u64) {
        let total = match state {
            MemberState::Waiting => &mut self.waiting,
            MemberState::Requested => &mut self.asked,
            MemberState::Updated => &mut self.updated,
            MemberState::Failed => &mut self.failed,
            MemberState::Skipped => &mut self.skipped,
        };
        *total += machines;
    }
}

impl RolloutSummary {
    pub fn has_ended(&self) -> bool {
        !(self.state.is(RolloutState::Running) || self.state.is(RolloutState::Paused))
    }
}

impl RolloutMachine {
    pub fn has_ended(&self) -> bool {
        !(self.state.is(MemberState::Waiting) || self.state.is(MemberState::Requested))
    }
}
