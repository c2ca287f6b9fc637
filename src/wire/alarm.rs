//! Alarms about the whole fleet or the provider.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::text::{Time, default_unknown};

/// An active alarm.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Alarm {
    pub alarm: String,
    #[serde(default)]
    pub since: Time,
    #[serde(default)]
    pub seen_at: Time,
    /// Details of the condition that raised the alarm.
    #[schemars(schema_with = "any_object")]
    #[serde(default)]
    pub detail: BTreeMap<String, Value>,
    /// The end of the period for which an operator released the alarm; `null` if it is not released.
    pub released_until: Option<Time>,
    /// What an operator should do.
    #[serde(default = "default_unknown")]
    pub next: String,
}

fn any_object(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({ "type": "object" })
}
