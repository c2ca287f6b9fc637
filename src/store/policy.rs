//! IAM session policies of machines: read, write and list their own slot. They cannot delete objects, nor, if the store can
//! enforce it, overwrite snapshots.
//!
//! An outage session stays valid after the platform has given the slot to another machine. It can write only snapshots of
//! one epoch with names of its days, and cannot move the pointer.

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::key::{SlotPrefix, snapshot_name_at};
use svc_machine::epoch::Epoch;

/// Maximum difference between a host's clock and the platform's. Stores refuse requests with a larger skew.
const MAX_CLOCK_SKEW: SignedDuration = SignedDuration::from_mins(15);
/// Maximum length of a session policy in STS.
const MAX_POLICY_CHARS: usize = 2048;
/// Maximum days in a policy. STS sessions last at most seven days, which with clock skew touch nine.
const MAX_DAYS: usize = 9;

/// Whether a session may overwrite snapshots and entries of the pointer's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotWrites {
    /// Not enforced by the store. Hosts never overwrite snapshots; stolen credentials could.
    Any,
    /// Refused by the store: objects can only be created with `If-None-Match`. `s3:if-none-match` and
    /// `s3:ObjectCreationOperation` are condition keys of AWS that other stores may not support.
    Once,
}

/// The policy for a slot: get, put, list and abort uploads below the slot's prefix.
///
/// `partition` is `aws`, except in AWS's separate clouds.
pub fn slot_policy(partition: &str, bucket: &str, slot: &SlotPrefix, writes: SnapshotWrites) -> String {
    // Users and slots are validated names, so they contain no wildcards or policy variables.
    let (bucket, slot) = (format!("arn:{partition}:s3:::{bucket}"), slot.root());
    let mut statements = vec![
        json!({
            "Effect": "Allow",
            "Action": [
                "s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"
            ],
            "Resource": format!("{bucket}/{slot}/*"),
        }),
        json!({
            "Effect": "Allow",
            "Action": "s3:ListBucket",
            "Resource": bucket,
            "Condition": {"StringLike": {"s3:prefix": format!("{slot}/*")}},
        }),
    ];
    if writes == SnapshotWrites::Once {
        let once = ["snapshots", "pointer-log"].map(|folder| format!("{bucket}/{slot}/system/db/{folder}/*"));
        statements.push(create_only(&once));
    }
    document(&statements)
}

/// The time in which an outage session may be used, by the platform's clock.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    pub from: Timestamp,
    pub until: Timestamp,
}

impl Window {
    /// The UTC days of all snapshots in the window, in the form of their names.
    fn days(self) -> Vec<String> {
        let from = self.from.saturating_sub(MAX_CLOCK_SKEW).unwrap_or(Timestamp::MIN);
        let until = self.until.saturating_add(MAX_CLOCK_SKEW).unwrap_or(Timestamp::MAX);
        let last = day(until);
        let mut days = vec![day(from)];
        let mut at = from;
        while days.last().is_some_and(|day| *day < last) && days.len() < MAX_DAYS {
            at = at.saturating_add(SignedDuration::from_hours(24)).unwrap_or(Timestamp::MAX);
            days.push(day(at));
        }
        days
    }
}

/// `2026-11-24T`.
fn day(at: Timestamp) -> String {
    snapshot_name_at(at).split_inclusive('T').next().unwrap_or_default().to_owned()
}

/// The common prefix of the days.
fn common_prefix(days: &[String]) -> String {
    let (Some(first), Some(last)) = (days.first(), days.last()) else { return String::new() };
    first.chars().zip(last.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a).collect()
}

/// The policy of an outage session: write snapshots of one epoch with names of the session's days, and read the pointer, its
/// log and side records. It cannot read dumps of other epochs, nor move the pointer.
///
/// If many days or long names would exceed the maximum policy length, it allows the common prefix of the days.
pub fn outage_policy(
    partition: &str,
    bucket: &str,
    (slot, epoch): (&SlotPrefix, Epoch),
    window: Window,
    writes: SnapshotWrites,
) -> String {
    let (bucket, db) = (format!("arn:{partition}:s3:::{bucket}"), format!("{}/system/db", slot.root()));
    let days = window.days();
    let exact = outage(&bucket, &db, epoch, &days, writes);
    if exact.len() <= MAX_POLICY_CHARS {
        return exact;
    }
    outage(&bucket, &db, epoch, &[common_prefix(&days)], writes)
}

fn outage(bucket: &str, db: &str, epoch: Epoch, names: &[String], writes: SnapshotWrites) -> String {
    // A snapshot's record ends in `.dump.json`.
    let own: Vec<String> =
        names.iter().map(|name| format!("{bucket}/{db}/snapshots/{name}*-{epoch}.dump*")).collect();
    let mut statements = vec![
        json!({
            "Effect": "Allow",
            "Action": ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"],
            "Resource": own,
        }),
        json!({
            "Effect": "Allow",
            "Action": "s3:GetObject",
            "Resource": [format!("{bucket}/{db}/latest"), format!("{bucket}/{db}/*.json")],
        }),
        json!({
            "Effect": "Allow",
            "Action": "s3:ListBucket",
            "Resource": bucket,
            "Condition": {"StringLike": {"s3:prefix": format!("{db}/*")}},
        }),
    ];
    if writes == SnapshotWrites::Once {
        statements.push(create_only(&[format!("{bucket}/{db}/snapshots/*")]));
    }
    document(&statements)
}

/// Denies writes without `If-None-Match`. Parts of an upload have no condition, and create no object.
fn create_only(resources: &[String]) -> Value {
    json!({
        "Effect": "Deny",
        "Action": "s3:PutObject",
        "Resource": resources,
        "Condition": {
            "Null": {"s3:if-none-match": "true"},
            "Bool": {"s3:ObjectCreationOperation": "true"},
        },
    })
}

fn document(statements: &[Value]) -> String {
    json!({"Version": "2012-10-17", "Statement": statements}).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use svc_machine::name::Slot;

    #[test]
    fn slot_policy_allows_one_slot_and_no_delete() {
        let user = format!("auth0|{}", "x".repeat(122)).parse().unwrap();
        let slot = SlotPrefix::new(&user, &"a".repeat(32).parse::<Slot>().unwrap());
        let policy = slot_policy("aws", &"b".repeat(63), &slot, SnapshotWrites::Once);
        assert!(policy.len() <= 2048, "STS takes no longer one: {}", policy.len());
        assert!(!policy.contains("Delete") && !policy.contains("s3:*"), "{policy}");
        assert!(policy.contains(&format!("{}/*", slot.root())), "the key in the store's form: {policy}");
    }

    fn window(from: &str, hours: i64) -> Window {
        let from: Timestamp = from.parse().unwrap();
        Window { from, until: from.checked_add(SignedDuration::from_hours(hours)).unwrap() }
    }

    fn longest() -> SlotPrefix {
        let user = format!("auth0|{}", "x".repeat(122)).parse().unwrap();
        SlotPrefix::new(&user, &"a".repeat(32).parse::<Slot>().unwrap())
    }

    #[test]
    fn outage_policy_allows_one_epoch_and_fits_sts() {
        let slot = longest();
        for (from, hours) in
            [("2026-11-24T10:20:00Z", 12), ("2026-11-30T23:00:00Z", 12), ("2026-11-24T10:20:00Z", 168)]
        {
            let whose = (&slot, Epoch(u32::MAX));
            let policy =
                outage_policy("aws", &"b".repeat(63), whose, window(from, hours), SnapshotWrites::Once);
            assert!(policy.len() <= 2048, "too long for STS: {}", policy.len());
            assert!(!policy.contains("Delete") && !policy.contains("s3:*"), "{policy}");
            assert!(policy.contains("*-4294967295.dump*"), "{policy}");
        }
    }

    #[test]
    fn outage_policy_allows_each_day_of_the_session() {
        let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
        let days = |from, hours| {
            let policy =
                outage_policy("aws", "fleet", (&slot, Epoch(7)), window(from, hours), SnapshotWrites::Any);
            let policy: Value = serde_json::from_str(&policy).unwrap();
            let own = policy["Statement"][0]["Resource"].as_array().unwrap().clone();
            let name = |it: &Value| it.as_str().unwrap().rsplit('/').next().unwrap().to_owned();
            own.iter().map(name).collect::<Vec<_>>()
        };
        assert_eq!(days("2026-11-24T10:20:00Z", 12), ["2026-11-24T*-7.dump*"]);
        assert_eq!(days("2026-09-30T23:00:00Z", 12), ["2026-09-30T*-7.dump*", "2026-10-01T*-7.dump*"]);
        // The clock may be behind or ahead.
        assert_eq!(days("2027-01-01T00:10:00Z", 1), ["2026-12-31T*-7.dump*", "2027-01-01T*-7.dump*"]);
        assert_eq!(days("2026-11-24T10:20:00Z", 168).len(), 8);
    }

    #[test]
    fn names_with_wildcards_are_refused() {
        for special in ["a*", "a?", "${aws:userid}"] {
            assert!(special.parse::<svc_machine::name::IdpUserId>().is_err(), "{special}");
        }
    }
}
