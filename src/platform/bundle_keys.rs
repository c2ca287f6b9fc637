//! Reports which hosts trust which release keys. An operator needs this report before removing a key.
//!
//! This module performs no I/O: its input is the fleet's rows and the platform's configured keys.

use std::collections::{BTreeMap, BTreeSet};

use super::db::fleet::FleetRow;
use svc_machine::name::Handle;
use svc_store::bundle::{MAX_KEYS, TrustedKeys};
use svc_wire::fleet::{BundleKey, BundleKeys};
use svc_wire::text::WireString;

/// Maximum number of handles in each list; the counts include all machines.
const MAX_HANDLES: usize = 20;
/// Maximum number of keys listed: the platform's keys, then the most widely trusted other keys.
const MAX_LISTED_KEYS: usize = 2 * MAX_KEYS;

/// Builds `bundleKeys` for `GET /vps/fleet`: the hosts that trust each key, those that do not, and those that have not
/// reported.
///
/// `sequence` is `BUNDLE_KEYS_SEQUENCE`. If a host has a newer key set, the variable was not raised when a release was
/// published, and new hosts start with an outdated set.
pub fn summarize(rows: &[FleetRow], configured: &TrustedKeys, sequence: u32) -> BundleKeys {
    // A booting machine has the keys from its user-data and reports them only once it is running.
    let booted: Vec<&FleetRow> =
        rows.iter().filter(|row| !matches!(row.status.as_str(), "provisioning" | "recovering")).collect();
    let reporting: Vec<(&str, BTreeSet<&str>)> = booted
        .iter()
        .filter_map(|row| {
            let (_, ids) = row.bundle_keys.as_ref()?;
            Some((row.handle.as_str(), ids.iter().map(String::as_str).collect()))
        })
        .collect();
    let not_reporting: Vec<&str> =
        booted.iter().filter(|row| row.bundle_keys.is_none()).map(|row| row.handle.as_str()).collect();
    let ahead: Vec<(&str, i64)> = booted
        .iter()
        .filter_map(|row| Some((row.handle.as_str(), row.bundle_keys.as_ref()?.0)))
        .filter(|(_, reported)| *reported > i64::from(sequence))
        .collect();
    let configured = configured.ids();
    let keys = listed_keys(&configured, &reporting)
        .iter()
        .map(|id| key_entry(id, &configured, &reporting))
        .collect();
    BundleKeys {
        keys,
        not_reporting: not_reporting.len() as u64,
        not_reporting_handles: listed_handles(not_reporting.iter()),
        sequence: sequence.into(),
        highest_sequence: ahead.iter().map(|(_, reported)| reported.unsigned_abs()).max(),
        ahead: ahead.len() as u64,
        ahead_handles: listed_handles(ahead.iter().map(|(handle, _)| handle)),
    }
}

fn listed_handles<'a>(handles: impl Iterator<Item = &'a &'a str>) -> Vec<WireString<Handle>> {
    handles.take(MAX_HANDLES).map(|handle| WireString::from_stored(*handle)).collect()
}

/// Returns the keys that get an entry. They are limited to [`MAX_LISTED_KEYS`] because each entry scans every row.
fn listed_keys<'a>(configured: &'a [String], reporting: &[(&str, BTreeSet<&'a str>)]) -> Vec<&'a str> {
    configured
        .iter()
        .map(String::as_str)
        .chain(other_keys(configured, reporting))
        .take(MAX_LISTED_KEYS)
        .collect()
}

/// Returns the keys that hosts trust but the platform does not, most widely trusted first.
fn other_keys<'a>(configured: &[String], reporting: &[(&str, BTreeSet<&'a str>)]) -> Vec<&'a str> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for id in reporting.iter().flat_map(|(_, ids)| ids).filter(|id| !configured.iter().any(|key| key == *id))
    {
        *counts.entry(id).or_default() += 1;
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    counts.into_iter().map(|(id, _)| id).collect()
}

fn key_entry(id: &str, configured: &[String], reporting: &[(&str, BTreeSet<&str>)]) -> BundleKey {
    let (trusting, not_trusting): (Vec<_>, Vec<_>) = reporting.iter().partition(|(_, ids)| ids.contains(id));
    let handles =
        |machines: &[&(&str, BTreeSet<&str>)]| listed_handles(machines.iter().map(|(handle, _)| handle));
    BundleKey {
        key_id: id.to_owned(),
        is_configured: configured.iter().any(|key| key == id),
        trusting: trusting.len() as u64,
        trusting_handles: handles(&trusting),
        not_trusting: not_trusting.len() as u64,
        not_trusting_handles: handles(&not_trusting),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fleet::tests::healthy_row;

    const OLD: &str = "SYI72Ti3RJxzEy9+gM7OSAARF8/NglUPYX3o0A/AaLQ=";
    const NEW: &str = "eORXKO6/E/hnhpWscq+rlYmslv94xGDwuVdmREQ7pMk=";

    fn row(handle: &str, keys: Option<&[&str]>) -> FleetRow {
        let bundle_keys = keys.map(|ids| (1, ids.iter().map(|id| (*id).to_owned()).collect()));
        FleetRow { handle: handle.to_owned(), bundle_keys, ..healthy_row() }
    }

    #[test]
    fn summary_lists_trusting_and_other_hosts_per_key() {
        let configured: TrustedKeys = format!("{OLD},{NEW}").parse().unwrap();
        let ids = configured.ids();
        let (old, new) = (ids[0].as_str(), ids[1].as_str());
        let unconfigured = "0123456789abcdef";
        let booting = FleetRow { status: "provisioning".to_owned(), ..row("eve", None) };
        let rows = [
            row("ada", Some(&[old, new])),
            row("bob", Some(&[old])),
            row("cy", Some(&[old, unconfigured])),
            row("dan", None),
            booting,
        ];
        let report = summarize(&rows, &configured, 1);
        let expected = json!({
            "keys": [
                {"keyId": old, "isConfigured": true, "trusting": 3, "trustingHandles": ["ada", "bob", "cy"],
                 "notTrusting": 0, "notTrustingHandles": []},
                {"keyId": new, "isConfigured": true, "trusting": 1, "trustingHandles": ["ada"],
                 "notTrusting": 2, "notTrustingHandles": ["bob", "cy"]},
                {"keyId": unconfigured, "isConfigured": false, "trusting": 1, "trustingHandles": ["cy"],
                 "notTrusting": 2, "notTrustingHandles": ["ada", "bob"]},
            ],
            "notReporting": 1,
            "notReportingHandles": ["dan"],
            "sequence": 1, "highestSequence": null, "ahead": 0, "aheadHandles": [],
        });
        assert_eq!(json!(report), expected);
    }

    #[test]
    fn summary_names_hosts_ahead_of_configured_sequence() {
        let report = summarize(&[row("ada", Some(&[OLD])), row("bob", None)], &TrustedKeys::default(), 0);
        assert_eq!((report.sequence, report.highest_sequence, report.ahead), (0, Some(1), 1));
        assert_eq!(json!(report.ahead_handles), json!(["ada"]));
    }

    #[test]
    fn summary_limits_keys_and_handles() {
        let rows: Vec<FleetRow> = (0..200).map(|n| row("ada", Some(&[&format!("{n:016x}")]))).collect();
        let report = summarize(&rows, &TrustedKeys::default(), 0);
        assert_eq!(report.keys.len(), MAX_LISTED_KEYS);
        assert_eq!(report.keys[0].not_trusting, 199);
        assert_eq!(report.keys[0].not_trusting_handles.len(), MAX_HANDLES);
        let reporting: Vec<_> = rows
            .iter()
            .filter_map(|row| row.bundle_keys.as_ref())
            .map(|(_, ids)| ("ada", ids.iter().map(String::as_str).collect()))
            .collect();
        assert_eq!(listed_keys(&[], &reporting).len(), MAX_LISTED_KEYS, "number of keys with an entry");
    }
}
