//! A heartbeat, which anyone with access to the host can forge: stored values are bounded and safe to print.

use proptest::prelude::*;
use serde_json::{Value, json};
use svc::machine::epoch::MAX_EPOCH;
use svc::platform::api::heartbeat::read_body;

use super::Target;
use super::objects::block_on;

/// Maximum length of a reported string.
const MAX_CHARS: usize = 2000;

pub fn target() -> Target {
    Target { name: "heartbeat", valid: heartbeats().boxed(), check_any, check_valid, cases: 1000 }
}

fn heartbeats() -> impl Strategy<Value = Vec<u8>> {
    let status = || prop_oneof![Just("ok"), Just("failing")];
    let backup = prop::option::of((any::<bool>(), "\\PC{0,20}")).prop_map(|backup| {
        backup.map(|(is_good, error)| {
            json!({ "status": if is_good { "success" } else { "error" }, "key": "system/db/snapshots/x.dump",
                "beganAt": "2026-01-02T03:04:05.678Z", "takenAt": "2026-01-02T03:04:06.000Z", "sizeBytes": 5,
                "error": error })
        })
    });
    let attention = prop::collection::vec(("[a-z_]{1,20}", "[a-z ]{1,20}"), 0..3).prop_map(|items| {
        items.into_iter().map(|(code, detail)| json!({ "code": code, "detail": detail })).collect::<Value>()
    });
    (status(), status(), 0..=MAX_EPOCH.0, 0..1u64 << 50, backup, attention, any::<bool>()).prop_map(
        |(gateway, database, epoch, bytes, backup, attention, is_registering)| {
            let mut heartbeat = json!({
                "imageVersion": "2026.11.21-1", "epoch": epoch,
                "health": { "gateway": gateway, "database": database },
                "disk": (bytes % 4 > 0).then(|| json!({ "totalBytes": bytes, "freeBytes": bytes / 2 })),
                "updating": false, "attention": attention, "proofKids": ["k1", "k2"],
                "lastUpdate": { "version": "2026.11.21-1", "outcome": "updated", "stage": "done",
                    "at": "2026-01-02T03:04:05.678Z" },
                "checks": { "verify": { "status": "success", "at": "2026-01-02T03:04:05.678Z" } },
            });
            if let Some(backup) = backup {
                heartbeat["lastBackup"] = backup;
            }
            if is_registering {
                heartbeat["registration"] = json!({ "machineId": uuid::Uuid::from_u128(7),
                    "imageVersion": "2026.11.21-1", "bundleSha256": "ab".repeat(32),
                    "tlsSpkiSha256": "cd".repeat(32), "bootMs": 5 });
            }
            heartbeat.to_string().into_bytes()
        },
    )
}

fn check_any(bytes: &[u8]) -> Result<(), String> {
    match block_on(read_body(bytes.to_vec())) {
        Ok(stored) => check_stored(&stored),
        Err(problem) => {
            let response = problem.body().to_string();
            let status = problem.code.status().as_u16();
            if !(400..500).contains(&status) {
                return Err(format!("response status {status}"));
            }
            // An error response quotes only field names, which JSON may escape.
            if response.len() > 8192 + 16 * bytes.len() {
                Err(format!("the error response is {} bytes long", response.len()))
            } else {
                Ok(())
            }
        }
    }
}

fn check_stored(stored: &Value) -> Result<(), String> {
    for part in ["imageVersion", "health", "lastBackup", "lastUpdate", "checks", "attention"] {
        check_strings(&stored[part], &mut |text| {
            let is_unsafe = |c: char| {
                (c.is_control() && c != '\n')
                    || matches!(c, '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}')
            };
            if text.chars().count() > MAX_CHARS {
                return Err(format!("{part} has a string of {} characters", text.chars().count()));
            }
            if text.contains(is_unsafe) { Err(format!("{part} has the string {text:?}")) } else { Ok(()) }
        })?;
    }
    let count = |list: &Value| list.as_array().map_or(0, Vec::len);
    if count(&stored["attention"]) > 16 || count(&stored["proofKids"]) > 16 {
        return Err(format!("{stored} has a list of more than 16 items"));
    }
    // PostgreSQL text cannot contain NUL.
    check_strings(&stored["proofKids"], &mut |text| {
        if text.contains('\0') { Err("a key id contains NUL".to_owned()) } else { Ok(()) }
    })?;
    let health = &stored["health"];
    let is_status = |value: &Value| value == "ok" || value == "failing";
    if !is_status(&health["gateway"]) || !is_status(&health["database"]) {
        return Err(format!("the health is {health}"));
    }
    // Only a successful backup sets this time.
    if !stored["backupTakenAt"].is_null() && stored["lastBackup"]["status"] != "success" {
        return Err(format!("{stored} has the time of a backup that did not succeed"));
    }
    Ok(())
}

/// Calls `check` with every string in a value.
fn check_strings(value: &Value, check: &mut impl FnMut(&str) -> Result<(), String>) -> Result<(), String> {
    match value {
        Value::String(text) => check(text),
        Value::Array(items) => items.iter().try_for_each(|item| check_strings(item, check)),
        Value::Object(members) => members.values().try_for_each(|item| check_strings(item, check)),
        Value::Null | Value::Bool(_) | Value::Number(_) => Ok(()),
    }
}

fn check_valid(bytes: &[u8]) -> Result<(), String> {
    let sent: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let stored = block_on(read_body(bytes.to_vec())).map_err(|problem| problem.detail)?;
    let unchanged_fields = ["imageVersion", "epoch", "attention", "proofKids", "updating"].iter();
    let is_unchanged = unchanged_fields.clone().all(|field| stored[field] == sent[field])
        && stored["health"]["disk"] == sent["disk"]
        && stored["lastBackup"]["status"] == sent["lastBackup"]["status"];
    if is_unchanged { Ok(()) } else { Err(format!("stored as {stored}")) }
}
