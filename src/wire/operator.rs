//! Named operators and their tokens.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::text::{Time, WireString, default_unknown, string_enum};
use svc_machine::id::OperatorTokenId;

string_enum!(
    /// The permission that a route requires.
    Scope {
        /// Machines, operations, rollouts, bundles, slots, pointers and the audit log, without the owners' data.
        Read = "read",
        /// Changes to machines, rollouts and pointers; reading snapshots.
        Operate = "operate",
        /// Slots, their subscriptions, and the cost of the owners' dispatches.
        Billing = "billing",
        /// The platform's metrics.
        Metrics = "metrics",
        /// Operators, the audit log, and the keys of file backups.
        Admin = "admin",
    }
);
string_enum!(
    /// Whether an operator's token is accepted.
    OperatorState { Active = "active", Expired = "expired", Revoked = "revoked" }
);

/// An operator, with token expiry and usage times.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Operator {
    pub name: String,
    #[serde(default)]
    pub scopes: Vec<WireString<Scope>>,
    pub state: WireString<OperatorState>,
    #[serde(default)]
    pub expires_at: Time,
    pub last_used_at: Option<Time>,
    /// When the previous token, which the last rotation replaced, expires.
    pub previous_token_expires_at: Option<Time>,
    pub previous_token_last_used_at: Option<Time>,
    #[serde(default)]
    pub created_at: Time,
    /// The operator who added this one.
    #[serde(default = "default_unknown")]
    pub created_by: String,
    pub rotated_at: Option<Time>,
    pub revoked_at: Option<Time>,
}

/// Operators, by name.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct OperatorList {
    pub operators: Vec<Operator>,
}

/// An operator and the id of a newly issued token. This part of the response is stored for replays; the token is not.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct TokenIssue {
    pub operator: Operator,
    #[schemars(with = "String")]
    #[serde(default)]
    pub token_id: WireString<OperatorTokenId>,
}

/// The operator and the new token. Does not implement `Debug`, which would print the token.
#[derive(Clone, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct IssuedToken {
    #[serde(flatten)]
    pub issue: TokenIssue,
    pub token: String,
}

/// The caller's identity and scopes.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct WhoAmI {
    pub name: String,
    #[serde(default)]
    pub scopes: Vec<WireString<Scope>>,
    /// Expiry of the newest token; `null` for `PLATFORM_SECRET`.
    pub expires_at: Option<Time>,
}
