//! `system/config.json`, which the owner's browser and programs change: limits and agents are within bounds, and an
//! error message quotes no value.

use proptest::prelude::*;
use serde_json::{Value, json};
use svc::host::agents::owner_config::OwnerSettings;
use svc::host::records::money::Dollars;

use super::Target;

pub fn target() -> Target {
    Target { name: "owner-config", valid: configs().boxed(), check_any, check_valid, cases: 1000 }
}

/// Text in values that no message may quote.
const SECRET: &str = "sk-a-key-of-the-owner";

fn configs() -> impl Strategy<Value = Vec<u8>> {
    let zone = prop::sample::select(&["UTC", "Europe/Berlin", "America/New_York"][..]);
    let agents = prop::collection::btree_map("[a-z]{1,8}", (1..=86_400_u64, "[a-z]{1,8}"), 0..3);
    (zone, 0..10_000_u32, 1..=64_usize, agents).prop_map(|(zone, cents, concurrency, agents)| {
        let agents_json: serde_json::Map<String, Value> = agents
            .into_iter()
            .map(|(name, (seconds, program))| {
                let agent = json!({ "adapter": "claude-code", "command": [program, SECRET],
                    "deadlineSeconds": seconds, "environment": { "API_KEY": SECRET }, "apps": ["notes"] });
                (name, agent)
            })
            .collect();
        let config = json!({
            "costLimits": { "daily": f64::from(cents) / 100.0, "monthly": 100, "timeZone": zone },
            "storage": { "appBytes": 1_000_000, "apps": { "notes": 5 } },
            "agents": agents_json, "dispatch": { "concurrency": concurrency },
            "prices": { "m": { "input": 3, "output": 15.5, "cachedInput": 0.3 } },
            "editor": { "theme": SECRET },
        });
        config.to_string().into_bytes()
    })
}

/// Whether the secret is part of a name, such as an agent's, which messages may show.
fn has_secret_in_name(value: &Value) -> bool {
    match value {
        Value::Object(members) => {
            members.iter().any(|(name, value)| name.contains(SECRET) || has_secret_in_name(value))
        }
        Value::Array(items) => items.iter().any(has_secret_in_name),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

fn check_any(bytes: &[u8]) -> Result<(), String> {
    // Ignored members may be JSON that this test's parser rejects.
    let is_secret_only_in_values =
        serde_json::from_slice::<Value>(bytes).is_ok_and(|config| !has_secret_in_name(&config));
    let settings = match OwnerSettings::parse(bytes) {
        Ok(settings) => settings,
        Err(reason) if is_secret_only_in_values && reason.contains(SECRET) => {
            return Err(format!("the message quotes a value: {reason}"));
        }
        Err(reason) if reason.chars().any(char::is_control) || reason.len() > 1024 => {
            return Err(format!("the message is too long or contains control characters: {reason:?}"));
        }
        Err(_) => return Ok(()),
    };
    if is_secret_only_in_values && format!("{:?}", settings.agents.agents).contains(SECRET) {
        return Err("the debug output contains an agent's command or environment".to_owned());
    }
    let limits = settings.limits;
    if [limits.daily, limits.monthly, limits.reservation].iter().any(|amount| *amount < Dollars::ZERO) {
        return Err(format!("{limits:?} has a negative amount"));
    }
    let agents = &settings.agents;
    if !(1..=64).contains(&agents.concurrency) || !agents.agents.contains_key(&agents.default_agent) {
        return Err(format!(
            "invalid concurrency {} or default agent {}",
            agents.concurrency, agents.default_agent
        ));
    }
    for (name, agent) in &agents.agents {
        let has_nul = |text: &String| text.contains('\0');
        let environment = agent.environment.iter();
        let is_valid = agent.command.first().is_some_and(|program| !program.is_empty())
            && !agent.command.iter().any(has_nul)
            && !environment
                .clone()
                .any(|(name, value)| has_nul(name) || has_nul(value) || name.contains('='))
            && (1..=86_400).contains(&agent.deadline_seconds);
        if !is_valid || name.is_empty() {
            return Err(format!("the invalid agent {name:?} was accepted"));
        }
    }
    Ok(())
}

fn check_valid(bytes: &[u8]) -> Result<(), String> {
    let expected: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let settings = OwnerSettings::parse(bytes)?;
    let agent_count = expected["agents"].as_object().map_or(0, serde_json::Map::len).max(1);
    let is_same = settings.time_zone == expected["costLimits"]["timeZone"]
        && expected["costLimits"]["daily"].as_f64() == json!(settings.limits.daily).as_f64()
        && settings.agents.agents.len() == agent_count
        && settings.storage.quota_for("notes") == Some(5)
        && settings.storage.quota_for("other") == Some(1_000_000);
    if is_same { Ok(()) } else { Err(format!("parsed as {settings:?}")) }
}
