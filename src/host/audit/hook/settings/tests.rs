//! Tests for installing and uninstalling the hook alongside other hooks.

use proptest::prelude::*;

use super::*;

const SPECS: [HookSpec; 2] =
    [HookSpec { event: "PreToolUse", matcher: Some("Bash") }, HookSpec { event: "Stop", matcher: None }];
const COMMAND: &str = "exec /opt/svc/bin/svc-hook claude-code";

fn foreign_group(command: &str) -> Value {
    json!({ "matcher": "*", "hooks": [{ "type": "command", "command": command }] })
}

#[test]
fn repeated_install_keeps_foreign_groups_with_any_members() {
    let foreign = json!({ "kept": true, "hooks": [{ "type": "command", "command": "x" }] });
    let mut settings = json!({ "hooks": { "Stop": [foreign] } });
    assert!(install(&mut settings, &SPECS, COMMAND).unwrap());
    assert!(!install(&mut settings, &SPECS, COMMAND).unwrap());
    assert_eq!(settings["hooks"]["Stop"], json!([foreign, build_group(&SPECS[1], COMMAND)]));
}

#[test]
fn foreign_hooks_keep_their_positions() {
    let mixed = json!({ "matcher": "Bash", "hooks": [
        { "type": "command", "command": "mine" }, { "type": "command", "command": "/old/bin/svc-hook", "timeout": 9 } ] });
    let before = json!({ "a": 1, "hooks": {
        "PreToolUse": [foreign_group("one"), { "hooks": [{ "command": "/old/svc-hook x" }] }, foreign_group("two"), mixed],
        "Notification": [{ "hooks": [{ "command": "svc-hook" }] }],
        "PostCompact": [],
        "Stop": [foreign_group("say svc-hook")],
    }, "z": { "b": 2, "a": 1 } });
    let mut after = before.clone();
    assert!(install(&mut after, &SPECS, COMMAND).unwrap());
    let hooks = &after["hooks"];
    let pre = hooks["PreToolUse"].as_array().unwrap();
    assert_eq!((pre.len(), &pre[0], &pre[2]), (4, &foreign_group("one"), &foreign_group("two")));
    assert_eq!(pre[1], build_group(&SPECS[0], COMMAND));
    assert_eq!(pre[3]["hooks"], json!([{ "type": "command", "command": "mine" }]));
    assert_eq!(hooks["Stop"][0], foreign_group("say svc-hook"));
    assert_eq!((hooks["Stop"].as_array().unwrap().len(), &hooks["PostCompact"]), (2, &json!([])));
    assert!(hooks.get("Notification").is_none());
    assert!(!install(&mut after, &SPECS, COMMAND).unwrap());
    assert!(uninstall(&mut after).unwrap() && !uninstall(&mut after).unwrap());
    assert_eq!(after["hooks"]["Stop"], json!([foreign_group("say svc-hook")]));
}

#[test]
fn invalid_settings_are_left_unchanged() {
    for invalid in [
        json!([]),
        json!(null),
        json!({"hooks": 1}),
        json!({"hooks": {"Stop": {}}}),
        json!({"hooks": {"X": [1]}}),
    ] {
        let mut settings = invalid.clone();
        assert!(install(&mut settings, &SPECS, COMMAND).is_err() && uninstall(&mut settings).is_err());
        assert_eq!(settings, invalid);
    }
}

fn any_groups() -> impl Strategy<Value = Value> {
    let command =
        prop_oneof!["[a-z]{1,4}", Just("/x/svc-hook".to_owned()), Just("exec /y/svc-hook codex".to_owned())];
    let hook = command.prop_map(|command| json!({ "type": "command", "command": command }));
    let group = (proptest::option::of("[a-z]{1,3}"), prop::collection::vec(hook, 0..3)).prop_map(
        |(matcher, hooks)| {
            matcher.map_or_else(
                || json!({ "hooks": hooks }),
                |matcher| json!({ "matcher": matcher, "hooks": hooks }),
            )
        },
    );
    prop::collection::vec(group, 0..4).prop_map(Value::from)
}

/// Lists the foreign hooks by event and matcher, and otherwise in their original order.
fn list_foreign_hooks(settings: &Value) -> Vec<(String, Value)> {
    let mut found = Vec::new();
    for (event, groups) in settings["hooks"].as_object().into_iter().flatten() {
        for group in groups.as_array().unwrap() {
            let hooks = group["hooks"].as_array().unwrap().iter().filter(|hook| !is_ours(hook));
            found.extend(hooks.map(|hook| (format!("{event} {}", group["matcher"]), hook.clone())));
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

proptest! {
    #[test]
    fn install_adds_ours_once_and_keeps_foreign_hooks(
        all in prop::collection::btree_map("PreToolUse|PostToolUse|Stop|Other", any_groups(), 0..4)
    ) {
        let before = json!({ "first": true, "hooks": all, "last": 0 });
        let mut settings = before.clone();
        install(&mut settings, &SPECS, COMMAND).unwrap();
        let text = settings.to_string();
        prop_assert_eq!(text.matches("svc-hook").count(), SPECS.len(), "{}", text);
        prop_assert_eq!(list_foreign_hooks(&settings), list_foreign_hooks(&before));
        prop_assert!(!install(&mut settings, &SPECS, COMMAND).unwrap());
        uninstall(&mut settings).unwrap();
        prop_assert!(!settings.to_string().contains("svc-hook"));
        prop_assert_eq!(list_foreign_hooks(&settings), list_foreign_hooks(&before));
        prop_assert_eq!(&settings["last"], &before["last"]);
    }
}
