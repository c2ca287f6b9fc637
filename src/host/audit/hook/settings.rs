//! The `hooks` of an agent's settings, with ours among the owner's: pure.
//!
//! Whatever is not ours stays as it is and where it is. Ours are known by the program that they run.

use serde_json::{Map, Value, json};

/// The name of our program, wherever it lies.
const PROGRAM: &str = "svc-hook";

/// Where a hook is to be: at an event, and for which tools of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    pub event: &'static str,
    pub matcher: Option<&'static str>,
}

/// Settings that no hook can be put into.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not what it should be: {1} is expected")]
pub struct Unusable(pub String, pub &'static str);

/// Puts our hook where it is wanted, once, and nowhere else; `true` where that changed something.
///
/// # Errors
/// When hooks cannot be told from what is there. Then nothing is changed.
pub fn install(settings: &mut Value, wanted: &[Wanted], command: &str) -> Result<bool, Unusable> {
    check(settings)?;
    let before = settings.clone();
    let all = hooks(settings);
    for (event, groups) in all.iter_mut() {
        if !wanted.iter().any(|wanted| wanted.event == event) {
            without_ours(groups);
        }
    }
    for wanted in wanted {
        let groups = all.entry(wanted.event).or_insert_with(|| json!([]));
        place(groups, group(wanted, command));
    }
    all.retain(|event, groups| !is_empty(groups) || was_there(&before, event));
    Ok(*settings != before)
}

/// Takes our hook out; `true` where there was one.
///
/// # Errors
/// As above.
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
        without_ours(groups);
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

/// The settings' hooks, which were checked to be an object, or are made.
fn hooks(settings: &mut Value) -> &mut Map<String, Value> {
    if settings.get("hooks").is_none() {
        settings["hooks"] = json!({});
    }
    settings["hooks"].as_object_mut().expect("was checked")
}

fn was_there(before: &Value, event: &str) -> bool {
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

/// A group that has our hook and nothing else.
fn is_only_ours(group: &Value) -> bool {
    group["hooks"].as_array().is_some_and(|hooks| !hooks.is_empty() && hooks.iter().all(is_ours))
}

/// Where ours is already, it becomes this one; else it comes last.
fn place(groups: &mut Value, wanted: Value) {
    let first = groups.as_array().and_then(|groups| groups.iter().position(is_only_ours));
    let mut wanted = Some(wanted);
    if let (Some(at), Some(groups)) = (first, groups.as_array_mut())
        && let Some(wanted) = wanted.take()
    {
        groups[at] = json!({ "kept": wanted });
    }
    without_ours(groups);
    let Some(groups) = groups.as_array_mut() else { return };
    match wanted {
        Some(wanted) => groups.push(wanted),
        None => {
            if let Some(kept) = groups.iter_mut().find(|group| group.get("kept").is_some()) {
                *kept = kept["kept"].take();
            }
        }
    }
}

fn without_ours(groups: &mut Value) {
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
