//! Text view of the operator audit log.

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;

use super::{Color, View, compact};

/// Maximum number of changes shown per entry. `--json` shows them all.
const MAX_CHANGES: usize = 4;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AuditEntryPage {
    pub entries: Vec<AuditEntry>,
    pub next_cursor: Option<String>,
}

/// An audit entry along with its complete JSON.
#[derive(Debug, Deserialize)]
#[serde(try_from = "Value")]
pub struct AuditEntry {
    pub audit_id: String,
    pub at: Timestamp,
    pub json: Value,
}

impl TryFrom<Value> for AuditEntry {
    type Error = String;

    fn try_from(json: Value) -> Result<Self, String> {
        let id = json["auditId"].as_str().ok_or("entry without auditId")?;
        let at = json["at"].as_str().and_then(|at| at.parse().ok()).ok_or("entry without a valid time")?;
        Ok(Self { audit_id: id.to_owned(), at, json })
    }
}

/// Lists entries newest last, like a log file.
pub fn list(view: &View, page: &AuditEntryPage) -> String {
    if page.entries.is_empty() {
        return "no entries\n".to_owned();
    }
    let mut text: String = page.entries.iter().rev().map(|entry| line(view, entry)).collect();
    if let Some(cursor) = &page.next_cursor {
        text.push_str(&format!("older entries: repeat the command with `--cursor {cursor}`\n"));
    }
    text
}

/// Formats an entry as `2026-01-02 03:04:05 UTC  ada  recover  <target>  status=running→recovering`.
pub fn line(view: &View, entry: &AuditEntry) -> String {
    let member = |name: &str| compact(entry.json.get(name));
    let at = entry.at.strftime("%Y-%m-%d %H:%M:%S UTC").to_string();
    let actor = view.paint(Some(Color::Strong), &member("actor"));
    let mut parts = vec![view.paint(Some(Color::Faint), &at), actor, member("action"), member("target")];
    let changes = format_changes(&entry.json["before"], &entry.json["after"]);
    if !changes.is_empty() {
        parts.push(changes);
    }
    parts.join("  ") + "\n"
}

/// Formats the changed, added and removed scalar members.
fn format_changes(before: &Value, after: &Value) -> String {
    let (Some(old), Some(new)) = (before.as_object(), after.as_object()) else { return String::new() };
    let is_scalar = |value: &Value| !value.is_object() && !value.is_array();
    let is_changed = |name: &&String| {
        let (was, now) = (&before[name.as_str()], &after[name.as_str()]);
        *name != "updatedAt" && is_scalar(was) && is_scalar(now) && was != now
    };
    let format_value = |value: &Value| match value {
        Value::Null => "none".to_owned(),
        value => compact(Some(value)),
    };
    let removed = old.keys().filter(|name| !new.contains_key(name.as_str()));
    let changed: Vec<&String> = new.keys().chain(removed).filter(is_changed).collect();
    let mut shown_changes: Vec<String> = changed
        .iter()
        .take(MAX_CHANGES)
        .map(|name| {
            let (was, now) = (&before[name.as_str()], &after[name.as_str()]);
            format!("{name}={}→{}", format_value(was), format_value(now))
        })
        .collect();
    if changed.len() > MAX_CHANGES {
        shown_changes.push(format!("and {} more", changed.len() - MAX_CHANGES));
    }
    shown_changes.join(" ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const VIEW: View = View { now: Timestamp::UNIX_EPOCH, has_colors: false, width: None };

    fn entry(before: &Value, after: &Value) -> Value {
        json!({"auditId": "019a0000-0000-7000-8000-000000000001", "at": "2026-01-02T03:04:05.000Z", "actor": "ada",
            "action": "fail", "target": "m-1", "before": before, "after": after, "requestId": "r-1"})
    }

    #[test]
    fn line_names_actor_action_target_and_changes() {
        let (before, after) = (
            json!({"status": "running", "updatedAt": "a", "epoch": 1}),
            json!({"status": "failed", "updatedAt": "b", "epoch": 1}),
        );
        let entry: AuditEntry = serde_json::from_value(entry(&before, &after)).unwrap();
        assert_eq!(line(&VIEW, &entry), "2026-01-02 03:04:05 UTC  ada  fail  m-1  status=running→failed\n");
    }

    #[test]
    fn line_shows_added_and_removed_members() {
        let entry: AuditEntry =
            serde_json::from_value(entry(&json!({"why": "disk"}), &json!({"until": "t", "list": []})))
                .unwrap();
        assert!(line(&VIEW, &entry).ends_with("  until=none→t why=disk→none\n"), "{}", line(&VIEW, &entry));
    }

    #[test]
    fn list_shows_newest_last_and_the_next_cursor() {
        let mut older = entry(&Value::Null, &Value::Null);
        older["at"] = json!("2026-01-01T00:00:00.000Z");
        let page = json!({"entries": [entry(&Value::Null, &Value::Null), older], "nextCursor": "c-1"});
        let text = list(&VIEW, &serde_json::from_value(page).unwrap());
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("2026-01-01") && lines[1].starts_with("2026-01-02"), "{text}");
        assert!(lines[2].ends_with("`--cursor c-1`"), "{text}");
        let none: AuditEntryPage =
            serde_json::from_value(json!({"entries": [], "nextCursor": null})).unwrap();
        assert_eq!(list(&VIEW, &none), "no entries\n");
    }
}
