//! Slots and their subscriptions.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::text::{Time, WireString, string_enum};
use svc_machine::name::{IdpUserId, Slot};
use svc_machine::plan::Plan;

string_enum!(
    /// Whether a subscription is paid for.
    SubscriptionStatus { Active = "active", Inactive = "inactive" }
);

/// A slot's subscription.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Subscription {
    pub idp_user_id: WireString<IdpUserId>,
    pub slot: WireString<Slot>,
    #[serde(default)]
    pub plan: WireString<Plan>,
    pub status: WireString<SubscriptionStatus>,
    pub current_period_end: Option<Time>,
    /// Whether this is a test slot, whose recoveries and rollbacks count as exercises. Older platforms omit it.
    #[serde(default)]
    pub test: bool,
}

/// A page of slot subscriptions, by user and slot.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct SubscriptionPage {
    pub slots: Vec<Subscription>,
    pub next_cursor: Option<String>,
}
