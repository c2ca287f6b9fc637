//! Slots and their subscriptions.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::text::{Text, Time, words};
use svc_machine::name::{IdpUserId, Slot};
use svc_machine::plan::Plan;

words!(
    /// Whether a subscription is paid for.
    SubscriptionStatus { Active = "active", Inactive = "inactive" }
);

/// A slot's subscription.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Subscription {
    pub idp_user_id: Text<IdpUserId>,
    pub slot: Text<Slot>,
    #[serde(default)]
    pub plan: Text<Plan>,
    pub status: Text<SubscriptionStatus>,
    pub current_period_end: Option<Time>,
    /// Whether the slot is not a customer's: its recoveries and rollbacks count as exercises. Older platforms omit it.
    #[serde(default)]
    pub test: bool,
}

/// A page of slot subscriptions, by user and slot.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct SubscriptionList {
    pub slots: Vec<Subscription>,
    pub next_cursor: Option<String>,
}
