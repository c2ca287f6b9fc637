//! Edits the `hooks` of an agent's settings: pure.
//!
//! Foreign hooks keep their content and order. Our hook is recognised by its program.

use serde_json::{Map, Value, json};

/// Name of the hook's program, in any directory.
const PROGRAM: &str = "svc-hook";

/// An event that a hook is wanted for, and the tools that it applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    pub event: &'static str,
    pub matcher: Option<&'static str>,
}

/// Settings whose structure does not allow hooks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not what it should be: {1} is expected")]
pub struct Unusable(pub String, pub &'static str);

/// Adds our hook for the wanted events, once each, and removes it from all others; `true` if anything changed.
///
/// # Errors
/// The structure of the hooks is invalid. Then nothing is changed.
pub fn install(settings: &mut Value, wanted: &[Wanted], command: &str) -> Result<bool, Unusable> {
    check(settings)?;
    let before = settings.clone();
    let all = hooks(settings);
    for (event, groups) in all.iter_mut() {
        if !wanted.iter().any(|wanted| wanted.event == event) {
            remove_ours(groups);
        }
    }
    for wanted in wanted {
        let groups = all.entry(wanted.event).or_insert_with(|| json!([]));
        replace_or_append(groups, group(wanted, command));
    }
    all.retain(|event, groups| !is_empty(groups) || was_empty(&before, event));
    Ok(*settings != before)
}

/// Removes our hook; `true` if there was one.
///
/// # Errors
/// As [`install`].
pub fn uninstall(settings: &mut Value) -> Result<bool, Unusable> {
    check(settings)?;
    if settings.get("hooks").is_none() {
        return Ok(false);
    }
    let before = settings.clone();
    let all = hooks(settings);
    let mut emptied = Vec::new();
    for (event, groups) in all.iter_mut() {
        let had = !is_empty(groups);
        remove_ours(groups);
        if had && is_empty(groups) {
            emptied.push(event.clone());
        }
    }
    all.retain(|event, _| !emptied.contains(event));
    if !emptied.is_empty() && all.is_empty() {
        settings.as_object_mut().map(|settings| settings.shift_remove("hooks"));
    }
    Ok(*settings != before)
}

fn check(settings: &Value) -> Result<(), Unusable> {
    let settings = settings.as_object().ok_or_else(|| Unusable("the file".to_owned(), "an object"))?;
    let Some(hooks) = settings.get("hooks") else { return Ok(()) };
    let hooks = hooks.as_object().ok_or_else(|| Unusable("`hooks`".to_owned(), "an object"))?;
    for (event, groups) in hooks {
        let groups = groups.as_array().ok_or_else(|| Unusable(format!("`hooks.{event}`"), "an array"))?;
        if groups.iter().any(|group| !group.is_object()) {
            return Err(Unusable(format!("`hooks.{event}`"), "an array of objects"));
        }
    }
    Ok(())
}

/// The settings' hooks, created if absent; [`check`] has validated them.
fn hooks(settings: &mut Value) -> &mut Map<String, Value> {
    if settings.get("hooks").is_none() {
        settings["hooks"] = json!({});
    }
    settings["hooks"].as_object_mut().expect("check validated the hooks")
}

fn was_empty(before: &Value, event: &str) -> bool {
    before["hooks"].get(event).is_some_and(is_empty)
}

fn is_empty(groups: &Value) -> bool {
    groups.as_array().is_some_and(Vec::is_empty)
}

fn group(wanted: &Wanted, command: &str) -> Value {
    let hooks = json!([{ "type": "command", "command": command, "timeout": 5 }]);
    match wanted.matcher {
        Some(matcher) => json!({ "matcher": matcher, "hooks": hooks }),
        None => json!({ "hooks": hooks }),
    }
}

fn is_ours(hook: &Value) -> bool {
    let command = hook["command"].as_str().unwrap_or_default();
    let mut words = command.split_whitespace().filter(|word| *word != "exec");
    words.next().is_some_and(|program| program.rsplit('/').next() == Some(PROGRAM))
}

/// Whether the group has our hook and no other.
fn is_only_ours(group: &Value) -> bool {
    group["hooks"].as_array().is_some_and(|hooks| !hooks.is_empty() && hooks.iter().all(is_ours))
}

/// Replaces our existing group in place, or else appends a new one.
fn replace_or_append(groups: &mut Value, wanted: Value) {
    // All groups before it stay, so that its index does.
    let first = groups.as_array().and_then(|groups| groups.iter().position(is_only_ours));
    remove_ours(groups);
    let Some(groups) = groups.as_array_mut() else { return };
    groups.insert(first.unwrap_or(groups.len()).min(groups.len()), wanted);
}

fn remove_ours(groups: &mut Value) {
    let Some(groups) = groups.as_array_mut() else { return };
    groups.retain_mut(|group| {
        let Some(hooks) = group.get_mut("hooks").and_then(Value::as_array_mut) else { return true };
        let had = hooks.len();
        hooks.retain(|hook| !is_ours(hook));
        hooks.len() == had || !hooks.is_empty()
    });
}

#[cfg(test)]
mod tests;
