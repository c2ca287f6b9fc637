//! The cost of dispatches. A host reports it to its owner and, through the platform, to operators.

use jiff::civil::Date;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};

use crate::text::WireString;

/// 2^53: a double represents every whole number up to this one exactly.
const MAX_WHOLE_AMOUNT: f64 = 9_007_199_254_740_992.0;

/// The totals for all dispatches and for each group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct UsageReport {
    /// The cost in US dollars.
    #[serde(serialize_with = "serialize_dollars")]
    #[schemars(with = "f64")]
    pub total_cost: f64,
    pub total_tokens_in: u64,
    pub total_tokens_out: u64,
    pub total_dispatches: u64,
    /// Ordered by day or name.
    pub entries: Vec<UsageEntry>,
}

/// A group's totals.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct UsageEntry {
    /// The day, or the first day of the week or month; for a model or user, the day of its first dispatch.
    pub date: WireString<Date>,
    /// Present only in a report by model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub model: Option<String>,
    /// Present only in a report by user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub user_id: Option<String>,
    /// The cost in US dollars.
    #[serde(serialize_with = "serialize_dollars")]
    #[schemars(with = "f64")]
    pub cost: f64,
    pub tokens_in: u64,
    pub tokens_out: u64,
    pub dispatches: u64,
}

/// Writes whole amounts as integers, as dispatch records do.
fn serialize_dollars<S: Serializer>(amount: &f64, out: S) -> Result<S::Ok, S::Error> {
    if amount.fract() == 0.0 && (0.0..MAX_WHOLE_AMOUNT).contains(amount) {
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "whole, and within the range"
        )]
        return out.serialize_u64(*amount as u64);
    }
    out.serialize_f64(*amount)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_amounts_are_integers() {
        let serialize_report = |cost| {
            let report = UsageReport {
                total_cost: cost,
                total_tokens_in: 1,
                total_tokens_out: 2,
                total_dispatches: 3,
                entries: Vec::new(),
            };
            serde_json::to_string(&report).unwrap()
        };
        assert!(serialize_report(2.0).starts_with(r#"{"totalCost":2,"totalTokensIn":1"#));
        assert!(serialize_report(0.25).starts_with(r#"{"totalCost":0.25,"#));
    }
}
