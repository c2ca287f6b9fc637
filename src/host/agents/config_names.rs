//! Detects unknown names in `system/config.json`, so a typo can't silently disable a limit.
//!
//! Top-level members may belong to other programs, so an unknown one is an error only if it resembles a setting missing
//! from the file.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::adapters::preview;

/// Longer names are truncated in messages.
const MAX_SHOWN_CHARS: usize = 64;
/// Names at least this long match within two edits, shorter ones within one.
const MIN_LONG_NAME_CHARS: usize = 8;

const TOP_LEVEL_MEMBERS: [&str; 5] = ["costLimits", "storage", "agents", "dispatch", "prices"];
const COST_LIMITS_MEMBERS: [&str; 4] = ["daily", "monthly", "reservation", "timeZone"];
const STORAGE_MEMBERS: [&str; 2] = ["appBytes", "apps"];
const AGENT_MEMBERS: [&str; 6] = ["adapter", "command", "model", "deadlineSeconds", "environment", "apps"];
const DISPATCH_MEMBERS: [&str; 2] = ["defaultAgent", "concurrency"];
const PRICE_MEMBERS: [&str; 3] = ["input", "output", "cachedInput"];

type Members = BTreeMap<String, IgnoredAny>;

/// Member names in the file.
#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Names {
    cost_limits: Members,
    storage: Members,
    agents: BTreeMap<String, Members>,
    dispatch: Members,
    prices: BTreeMap<String, Members>,
}

/// Rejects unknown names.
///
/// # Errors
/// A message about the first unknown name. Values are never quoted, since they can be secrets.
pub fn check_names(text: &[u8]) -> Result<(), String> {
    // The caller has already parsed this text and reports any other errors.
    let Ok(names) = serde_json::from_slice::<Names>(text) else { return Ok(()) };
    check_members("costLimits", &names.cost_limits, &COST_LIMITS_MEMBERS)?;
    check_members("storage", &names.storage, &STORAGE_MEMBERS)?;
    check_members("dispatch", &names.dispatch, &DISPATCH_MEMBERS)?;
    for (name, agent) in &names.agents {
        check_members(&format!("agents.{}", shorten(name)), agent, &AGENT_MEMBERS)?;
    }
    for (name, price) in &names.prices {
        check_members(&format!("prices.{}", shorten(name)), price, &PRICE_MEMBERS)?;
    }
    let Ok(all) = serde_json::from_slice::<Members>(text) else { return Ok(()) };
    let misspelled =
        |name: &String| find_similar(name, &TOP_LEVEL_MEMBERS).filter(|similar| !all.contains_key(*similar));
    match all.keys().find_map(|name| Some((name, misspelled(name)?))) {
        Some((name, similar)) => Err(format!("{} is not a setting; did you mean {similar}?", shorten(name))),
        None => Ok(()),
    }
}

fn check_members(object: &str, members: &Members, known: &[&str]) -> Result<(), String> {
    let Some(unknown) = members.keys().find(|name| !known.contains(&name.as_str())) else { return Ok(()) };
    Err(format!(
        "{object}.{} is not a setting; the settings in {object} are {}",
        shorten(unknown),
        known.join(", ")
    ))
}

fn shorten(name: &str) -> String {
    preview::flatten_and_truncate(name, MAX_SHOWN_CHARS)
}

/// Finds a known name within two edits, or one for short names. Ignores case, dashes and underscores.
fn find_similar<'k>(name: &str, known: &[&'k str]) -> Option<&'k str> {
    let normalize = |name: &str| name.to_lowercase().replace(['-', '_'], "");
    let name = normalize(&preview::flatten_and_truncate(name, MAX_SHOWN_CHARS));
    known.iter().copied().find(|known| {
        let max_distance = if known.len() < MIN_LONG_NAME_CHARS { 1 } else { 2 };
        strsim::levenshtein(&name, &normalize(known)) <= max_distance
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_names_are_rejected() {
        for (text, part) in [
            (
                r#"{"costLimits": {"dailly": 1}}"#,
                "costLimits.dailly is not a setting; the settings in costLimits are daily, monthly",
            ),
            (r#"{"costLimits": {"daily": 1, "weekly": 5}}"#, "costLimits.weekly"),
            (r#"{"storage": {"bytes": 1}}"#, "storage.bytes"),
            (r#"{"dispatch": {"default": "a"}}"#, "dispatch.default"),
            (
                r#"{"agents": {"a": {"adapter": "codex", "command": ["x"], "modell": "m"}}}"#,
                "agents.a.modell",
            ),
            (r#"{"prices": {"m": {"input": 1, "output": 1, "cached": 1}}}"#, "prices.m.cached"),
            (r#"{"costLimit": {"daily": 1}}"#, "costLimit is not a setting; did you mean costLimits?"),
            (r#"{"cost_limits": {"daily": 1}}"#, "did you mean costLimits?"),
            (r#"{"costLimtis": {"daily": 1}}"#, "did you mean costLimits?"),
            (r#"{"Agents": {}}"#, "did you mean agents?"),
            (r#"{"price": {}}"#, "did you mean prices?"),
        ] {
            let error = check_names(text.as_bytes()).expect_err(text);
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn unrelated_names_are_allowed() {
        for text in [
            r#"{"theme": "dark", "editor": {"costLimit": 1}, "limits": {}, "version": 1}"#,
            r#"{"agents": {}, "agent": "of another program"}"#,
            r#"{"agents": {"dailly": {"adapter": "codex", "command": ["x"], "environment": {"ANY": "1"}}}}"#,
            r#"{"storage": {"appBytes": 5, "apps": {"notes": 5}}, "prices": {"any-model": {"input": 1, "output": 1}}}"#,
            r#"{"dispatch": {"defaultAgent": "a", "concurrency": 1}}"#,
        ] {
            assert_eq!(check_names(text.as_bytes()), Ok(()), "{text}");
        }
    }

    #[test]
    fn messages_are_short_and_printable() {
        let text = format!(r#"{{"costLimits": {{"a\n{}": 1}}}}"#, "x".repeat(5000));
        let error = check_names(text.as_bytes()).unwrap_err();
        assert!(error.len() < 500 && !error.contains('\n'), "{error}");
    }
}
