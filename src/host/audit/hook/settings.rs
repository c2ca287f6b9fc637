//! Edits the `hooks` section of agent settings. Performs no I/O.
//!
//! Foreign hooks keep their content and order. Ours is recognized by its program name.

use serde_json::{Map, Value, json};

/// Program name of our hook, which may be in any directory.
const HOOK_PROGRAM: &str = "svc-hook";

/// A hook to install: an event, and the tools it applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HookSpec {
    pub event: &'static str,
    pub matcher: Option<&'static str>,
}

/// A structural error in the settings.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0} must be {1}")]
pub struct SettingsError(pub String, pub &'static str);

/// Adds our hook exactly once for each of these events, and removes it from all others. Returns whether anything
/// changed.
///
/// # Errors
/// Fails without changing anything if the hooks are malformed.
pub fn install(settings: &mut Value, specs: &[HookSpec], command: &str) -> Result<bool, SettingsError> {
    check_structure(settings)?;
    let before = settings.clone();
    let hooks = hooks_mut(settings);
    for (event, groups) in hooks.iter_mut() {
        if !specs.iter().any(|spec| spec.event == event) {
            remove_ours(groups);
        }
    }
    for spec in specs {
        let groups = hooks.entry(spec.event).or_insert_with(|| json!([]));
        replace_or_append(groups, build_group(spec, command));
    }
    hooks.retain(|event, groups| !is_empty(groups) || was_empty(&before, event));
    Ok(*settings != before)
}

/// Removes our hook. Returns whether there was one.
///
/// # Errors
/// See [`install`].
pub fn uninstall(settings: &mut Value) -> Result<bool, SettingsError> {
    check_structure(settings)?;
    if settings.get("hooks").is_none() {
        return Ok(false);
    }
    let before = settings.clone();
    let hooks = hooks_mut(settings);
    let mut emptied = Vec::new();
    for (event, groups) in hooks.iter_mut() {
        let had_groups = !is_empty(groups);
        remove_ours(groups);
        if had_groups && is_empty(groups) {
            emptied.push(event.clone());
        }
    }
    hooks.retain(|event, _| !emptied.contains(event));
    if !emptied.is_empty() && hooks.is_empty() {
        settings.as_object_mut().map(|settings| settings.shift_remove("hooks"));
    }
    Ok(*settings != before)
}

fn check_structure(settings: &Value) -> Result<(), SettingsError> {
    let settings = settings.as_object().ok_or_else(|| SettingsError("the file".to_owned(), "an object"))?;
    let Some(hooks) = settings.get("hooks") else { return Ok(()) };
    let hooks = hooks.as_object().ok_or_else(|| SettingsError("`hooks`".to_owned(), "an object"))?;
    for (event, groups) in hooks {
        let groups =
            groups.as_array().ok_or_else(|| SettingsError(format!("`hooks.{event}`"), "an array"))?;
        if groups.iter().any(|group| !group.is_object()) {
            return Err(SettingsError(format!("`hooks.{event}`"), "an array of objects"));
        }
    }
    Ok(())
}

/// Returns the `hooks` object, creating it if absent. Call [`check_structure`] first.
fn hooks_mut(settings: &mut Value) -> &mut Map<String, Value> {
    if settings.get("hooks").is_none() {
        settings["hooks"] = json!({});
    }
    settings["hooks"].as_object_mut().expect("validated by check_structure")
}

fn was_empty(before: &Value, event: &str) -> bool {
    before["hooks"].get(event).is_some_and(is_empty)
}

fn is_empty(groups: &Value) -> bool {
    groups.as_array().is_some_and(Vec::is_empty)
}

fn build_group(spec: &HookSpec, command: &str) -> Value {
    let hooks = json!([{ "type": "command", "command": command, "timeout": 5 }]);
    match spec.matcher {
        Some(matcher) => json!({ "matcher": matcher, "hooks": hooks }),
        None => json!({ "hooks": hooks }),
    }
}

fn is_ours(hook: &Value) -> bool {
    let command = hook["command"].as_str().unwrap_or_default();
    let mut words = command.split_whitespace().filter(|word| *word != "exec");
    words.next().is_some_and(|program| program.rsplit('/').next() == Some(HOOK_PROGRAM))
}

/// Whether the group contains only our hook.
fn is_only_ours(group: &Value) -> bool {
    group["hooks"].as_array().is_some_and(|hooks| !hooks.is_empty() && hooks.iter().all(is_ours))
}

/// Replaces our existing group in place, or appends a new one.
fn replace_or_append(groups: &mut Value, group: Value) {
    // Groups before our first one are retained, so its index stays valid.
    let first = groups.as_array().and_then(|groups| groups.iter().position(is_only_ours));
    remove_ours(groups);
    let Some(groups) = groups.as_array_mut() else { return };
    groups.insert(first.unwrap_or(groups.len()).min(groups.len()), group);
}

fn remove_ours(groups: &mut Value) {
    let Some(groups) = groups.as_array_mut() else { return };
    groups.retain_mut(|group| {
        let Some(hooks) = group.get_mut("hooks").and_then(Value::as_array_mut) else { return true };
        let count = hooks.len();
        hooks.retain(|hook| !is_ours(hook));
        hooks.len() == count || !hooks.is_empty()
    });
}

#[cfg(test)]
mod tests;
