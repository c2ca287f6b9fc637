//! Sums usage independently of the product. Costs are parsed exactly, without floating point, as 128-bit integers in
//! billionths of a dollar.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Day, user and model.
pub type UsageKey = (String, String, String);

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UsageSum {
    pub cost_nanos: u128,
    pub tokens_in: u128,
    pub tokens_out: u128,
    pub dispatches: u128,
}

impl UsageSum {
    pub fn add(&mut self, other: &Self) {
        self.cost_nanos += other.cost_nanos;
        self.tokens_in += other.tokens_in;
        self.tokens_out += other.tokens_out;
        self.dispatches += other.dispatches;
    }
}

pub fn total(sums: &BTreeMap<UsageKey, UsageSum>) -> UsageSum {
    let mut total = UsageSum::default();
    sums.values().for_each(|sum| total.add(sum));
    total
}

/// Sums all interaction files by day, user and model. Also returns the id of each stored dispatch.
pub fn sum_interactions(logs: &Path) -> Result<(BTreeMap<UsageKey, UsageSum>, Vec<u64>)> {
    let (mut sums, mut ids) = (BTreeMap::<UsageKey, UsageSum>::new(), Vec::new());
    for entry in fs::read_dir(logs)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some(day) = name.strip_prefix("interactions-").and_then(|name| name.strip_suffix(".jsonl"))
        else {
            continue;
        };
        for line in fs::read_to_string(&path)?.lines() {
            // Skip a line that was truncated when the process was killed.
            let Ok(Value::Object(entry)) = serde_json::from_str::<Value>(line) else { continue };
            let text = |name: &str| entry[name].as_str().unwrap_or_default().to_owned();
            let sum = UsageSum {
                cost_nanos: parse_cost_nanos(cost_text(line)?)?,
                tokens_in: entry["tokensIn"].as_u64().context("tokensIn")?.into(),
                tokens_out: entry["tokensOut"].as_u64().context("tokensOut")?.into(),
                dispatches: 1,
            };
            sums.entry((day.to_owned(), text("senderId"), text("model"))).or_default().add(&sum);
            ids.push(text("id").parse()?);
        }
    }
    Ok((sums, ids))
}

/// Reads the sums in `usage.jsonl`: the last line for each key wins. Sums of zero are omitted.
pub fn read_usage_sums(logs: &Path) -> Result<BTreeMap<UsageKey, UsageSum>> {
    let mut sums = BTreeMap::new();
    for line in fs::read_to_string(logs.join("usage.jsonl"))?.lines() {
        let entry: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
        let text = |name: &str| entry[name].as_str().unwrap_or_default().to_owned();
        let sum = UsageSum {
            cost_nanos: parse_cost_nanos(cost_text(line)?)?,
            tokens_in: entry["tokensIn"].as_u64().context("tokensIn")?.into(),
            tokens_out: entry["tokensOut"].as_u64().context("tokensOut")?.into(),
            dispatches: entry["dispatches"].as_u64().context("dispatches")?.into(),
        };
        sums.insert((text("date"), text("userId"), text("model")), sum);
    }
    sums.retain(|_, sum| *sum != UsageSum::default());
    Ok(sums)
}

/// Returns a line's cost, as written.
fn cost_text(line: &str) -> Result<&str> {
    let (_, rest) = line.split_once("\"cost\":").context("the line has no cost")?;
    Ok(rest.split([',', '}']).next().unwrap_or_default())
}

/// Converts a decimal number of dollars to billionths, without floating point.
pub fn parse_cost_nanos(text: &str) -> Result<u128> {
    let (digits, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let shift = exponent.parse::<i32>()? + 9 - i32::try_from(fraction.len())?;
    let number: u128 = format!("{whole}{fraction}").parse().with_context(|| text.to_owned())?;
    let power = 10_u128.pow(shift.unsigned_abs());
    if shift >= 0 {
        return Ok(number * power);
    }
    ensure!(number.is_multiple_of(power), "{text} has more than nine decimal places");
    Ok(number / power)
}

#[test]
fn parse_cost_nanos_is_exact() {
    for (text, expected) in [
        ("0", 0),
        ("3", 3_000_000_000),
        ("0.0125", 12_500_000),
        ("1e-9", 1),
        ("1.5e-8", 15),
        ("12.000000001", 12_000_000_001),
    ] {
        assert_eq!(parse_cost_nanos(text).unwrap(), expected, "{text}");
    }
    assert!(parse_cost_nanos("1e-10").is_err() && parse_cost_nanos("x").is_err());
}
