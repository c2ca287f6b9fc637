//! A host's report of its dispatch costs, which an operator reads: bounded, safe to print, and without unknown fields.

use proptest::prelude::*;
use serde_json::{Value, json};
use svc::platform::api::usage::read_report;

use super::Target;

/// Maximum length of a reported string.
const MAX_CHARS: usize = 2000;

pub fn target() -> Target {
    Target { name: "usage-report", valid: reports().boxed(), check_any, check_valid, cases: 1000 }
}

fn reports() -> impl Strategy<Value = Vec<u8>> {
    let entry = (0..10_000_u32, any::<u32>(), prop::option::of("[a-z0-9.-]{1,20}"));
    prop::collection::vec(entry, 0..4).prop_map(|entries| {
        let total: u32 = entries.iter().map(|(cents, ..)| cents).sum();
        let entries_json: Vec<Value> = entries
            .into_iter()
            .map(|(cents, tokens, model)| {
                let mut entry = json!({ "date": "2026-11-23", "userId": "user_1", "cost": f64::from(cents) / 100.0,
                    "tokensIn": tokens, "tokensOut": 1, "dispatches": 1 });
                if let Some(model) = model {
                    entry["model"] = model.into();
                }
                entry
            })
            .collect();
        let report = json!({ "totalCost": f64::from(total) / 100.0, "totalTokensIn": 5, "totalTokensOut": 6,
            "totalDispatches": 7, "entries": entries_json, "later": "a field from a newer host" });
        report.to_string().into_bytes()
    })
}

fn check_any(bytes: &[u8]) -> Result<(), String> {
    let Ok(report) = read_report(bytes) else { return Ok(()) };
    let is_cost = |value: &Value| value.as_f64().is_some_and(|cost| cost.is_finite() && cost >= 0.0);
    if !is_cost(&report["totalCost"]) {
        return Err(format!("the total is {}", report["totalCost"]));
    }
    let has_only = |value: &Value, names: &[&str]| {
        value.as_object().is_some_and(|members| members.keys().all(|name| names.contains(&name.as_str())))
    };
    let totals = ["totalCost", "totalTokensIn", "totalTokensOut", "totalDispatches", "entries"];
    let fields = ["date", "model", "userId", "cost", "tokensIn", "tokensOut", "dispatches"];
    if !has_only(&report, &totals) {
        return Err(format!("{report} has unknown fields"));
    }
    for entry in report["entries"].as_array().into_iter().flatten() {
        if !has_only(entry, &fields) || !is_cost(&entry["cost"]) {
            return Err(format!("{entry} is passed on"));
        }
        for text in ["model", "userId"].iter().filter_map(|name| entry[name].as_str()) {
            let is_unsafe = |c: char| {
                (c.is_control() && c != '\n')
                    || matches!(c, '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}')
            };
            if text.chars().count() > MAX_CHARS || text.contains(is_unsafe) {
                return Err(format!("{text:?} is passed on"));
            }
        }
    }
    Ok(())
}

/// Converts all numbers to floats, so that 1 equals 1.0.
fn convert_numbers_to_floats(value: &mut Value) {
    match value {
        Value::Number(number) => *value = number.as_f64().into(),
        Value::Array(items) => items.iter_mut().for_each(convert_numbers_to_floats),
        Value::Object(members) => members.values_mut().for_each(convert_numbers_to_floats),
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

fn check_valid(bytes: &[u8]) -> Result<(), String> {
    let mut expected: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if let Some(members) = expected.as_object_mut() {
        members.remove("later");
    }
    convert_numbers_to_floats(&mut expected);
    let mut read = read_report(bytes)?;
    convert_numbers_to_floats(&mut read);
    if read == expected { Ok(()) } else { Err(format!("parsed as {read}")) }
}
