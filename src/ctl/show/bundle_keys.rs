//! Release keys trusted by hosts: the text view for `svcctl bundle keys`, and doctor findings.

use super::table::{self, Cell};
use super::{Color, View};
use svc_base::diagnosis::Findings;
use svc_base::quantity::pluralize;
use svc_machine::name::Handle;
use svc_wire::fleet::{BundleKey, BundleKeys};
use svc_wire::text::WireString;

const ROTATION_ADVICE: &str =
    "follow the steps of a rotation in `svcctl bundle --help`; run `svcctl bundle keys` to see its progress";

/// Formats a machine count and handles as `3 machines (ada, bob, cy)`.
fn format_machines(count: u64, handles: &[WireString<Handle>]) -> String {
    let ellipsis = if count > handles.len() as u64 { ", …" } else { "" };
    format!("{} ({}{ellipsis})", pluralize(count, "machine"), join_handles(handles))
}

fn join_handles(handles: &[WireString<Handle>]) -> String {
    handles.iter().map(WireString::as_str).collect::<Vec<_>>().join(", ")
}

fn choose_form(count: u64, one: &'static str, many: &'static str) -> &'static str {
    if count == 1 { one } else { many }
}

/// Adds findings for configured keys that some hosts don't trust, trusted keys that aren't configured, and an outdated
/// `BUNDLE_KEYS_SEQUENCE`.
pub fn findings(keys: &BundleKeys, findings: Findings) -> Findings {
    let findings = keys.keys.iter().fold(findings, |findings, key| key_findings(key, findings));
    match outdated_sequence(keys) {
        Some((what, next)) => findings.warning(what, next),
        None => findings,
    }
}

/// Returns a finding and advice if hosts trust a key set newer than `BUNDLE_KEYS_SEQUENCE`.
fn outdated_sequence(keys: &BundleKeys) -> Option<(String, String)> {
    let highest = keys.highest_sequence?;
    let who = format_machines(keys.ahead, &keys.ahead_handles);
    let what = format!(
        "BUNDLE_KEYS_SEQUENCE is {}, but {who} {} a newer key set (highest sequence: {highest}): an older release \
         could give new hosts a key that was dropped",
        keys.sequence,
        choose_form(keys.ahead, "trusts", "trust"),
    );
    let next = format!(
        "set BUNDLE_KEYS_SEQUENCE to {highest} and BUNDLE_PUBLIC_KEYS to that key set, and restart \
         svc-platform, unless the report from {} is false",
        choose_form(keys.ahead, "this host", "these hosts")
    );
    Some((what, next))
}

fn key_findings(key: &BundleKey, findings: Findings) -> Findings {
    let BundleKey { key_id, trusting, not_trusting, .. } = key;
    if key.is_configured && *not_trusting > 0 {
        let who = format_machines(*not_trusting, &key.not_trusting_handles);
        let verb = choose_form(*not_trusting, "does", "do");
        let what = format!("{who} {verb} not trust the key {key_id} in BUNDLE_PUBLIC_KEYS");
        return findings.warning(what, ROTATION_ADVICE);
    }
    if !key.is_configured && *trusting > 0 {
        let who = format_machines(*trusting, &key.trusting_handles);
        let verb = choose_form(*trusting, "trusts", "trust");
        let what = format!("{who} still {verb} the key {key_id}, which BUNDLE_PUBLIC_KEYS does not contain");
        return findings.warning(what, ROTATION_ADVICE);
    }
    findings
}

fn row(key: &BundleKey) -> Vec<Cell> {
    let BundleKey { key_id, is_configured, trusting, not_trusting, .. } = key;
    let color = (*is_configured && *not_trusting > 0).then_some(Color::Bad);
    let not_trusted_by = if *not_trusting == 0 {
        "0".to_owned()
    } else {
        format_machines(*not_trusting, &key.not_trusting_handles)
    };
    vec![
        key_id.clone().into(),
        if *is_configured { "yes" } else { "no" }.into(),
        trusting.to_string().into(),
        Cell::colored(color, not_trusted_by),
    ]
}

pub fn show(view: &View, keys: &BundleKeys) -> String {
    if keys.keys.is_empty() && keys.not_reporting == 0 {
        return "no key is configured (BUNDLE_PUBLIC_KEYS), and no machine trusts one\n".to_owned();
    }
    let rows: Vec<_> = keys.keys.iter().map(row).collect();
    let mut text = table::render(view, &["KEY", "PLATFORM", "TRUSTED BY", "NOT TRUSTED BY"], &rows);
    if keys.not_reporting > 0 {
        let who = format_machines(keys.not_reporting, &keys.not_reporting_handles);
        let verb = choose_form(keys.not_reporting, "has", "have");
        text.push_str(&format!(
            "\n{who} {verb} not reported any key\n  next: update to a release that reports keys; a machine that sends no \
             heartbeats cannot be updated\n"
        ));
    }
    if let Some((what, next)) = outdated_sequence(keys) {
        text.push_str(&format!("\n{what}\n  next: {next}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn keys() -> BundleKeys {
        let key = |id: &str, is_configured: bool, with: &[&str], without: &[&str], not_trusting: u64| {
            json!({
                "keyId": id, "isConfigured": is_configured, "trusting": with.len(), "trustingHandles": with,
                "notTrusting": not_trusting, "notTrustingHandles": without,
            })
        };
        let keys = json!({
            "keys": [
                key("aaaaaaaaaaaaaaaa", true, &["ada", "bob"], &[], 0),
                key("bbbbbbbbbbbbbbbb", true, &["ada"], &["bob"], 7),
                key("cccccccccccccccc", false, &["bob"], &["ada"], 1),
            ],
            "notReporting": 1, "notReportingHandles": ["cy"],
            "sequence": 0, "highestSequence": 2, "ahead": 1, "aheadHandles": ["ada"],
        });
        serde_json::from_value(keys).unwrap()
    }

    #[test]
    fn findings_name_missing_and_obsolete_keys() {
        let found = findings(&keys(), Findings::new("fleet")).into_list();
        let texts: Vec<String> = found.iter().map(|finding| finding.what.clone()).collect();
        assert_eq!(
            texts,
            [
                "7 machines (bob, …) do not trust the key bbbbbbbbbbbbbbbb in BUNDLE_PUBLIC_KEYS",
                "1 machine (bob) still trusts the key cccccccccccccccc, which BUNDLE_PUBLIC_KEYS does not contain",
                "BUNDLE_KEYS_SEQUENCE is 0, but 1 machine (ada) trusts a newer key set (highest sequence: 2): an older \
                 release could give new hosts a key that was dropped",
            ]
        );
        assert!(found[2].next.as_ref().unwrap().contains("BUNDLE_KEYS_SEQUENCE to 2"), "{found:?}");
    }

    #[test]
    fn findings_are_empty_for_an_older_platform() {
        let older: BundleKeys =
            serde_json::from_value(json!({"keys": [], "notReporting": 0, "notReportingHandles": []}))
                .unwrap();
        assert!(findings(&older, Findings::new("fleet")).is_empty());
    }

    #[test]
    fn show_lists_keys_and_nonreporting_machines() {
        let view = View { now: jiff::Timestamp::UNIX_EPOCH, has_colors: false, width: None };
        let text = show(&view, &keys());
        for part in
            ["aaaaaaaaaaaaaaaa  yes", "7 machines (bob, …)", "1 machine (cy) has not reported any key"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
