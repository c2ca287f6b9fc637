//! What a machine may do in the bucket, as an IAM session policy: read, write and list its own slot. Nothing is deleted,
//! and where the store can enforce it, no snapshot is written twice.
//!
//! An outage session stays valid after the platform has given the slot to another machine. It writes snapshots of one epoch
//! with names of its own days, and never moves the pointer.

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::key::{SlotPrefix, snapshot_name_at};
use crate::machine::epoch::Epoch;

/// How far a host's clock may be from the platform's: stores refuse requests of clocks that differ by more.
const MAX_CLOCK_SKEW: SignedDuration = SignedDuration::from_mins(15);
/// Of a session policy: STS takes no longer one.
const MAX_POLICY_CHARS: usize = 2048;
/// STS grants sessions of at most seven days, which touch nine.
const MAX_DAYS: usize = 9;

/// Whether a session may write over a snapshot, or over an entry of the pointer's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotWrites {
    /// Not enforced by the store. Hosts never overwrite snapshots; stolen credentials could.
    Any,
    /// Refused by the store: an object there is created with `If-None-Match`, or not at all. `s3:if-none-match` and
    /// `s3:ObjectCreationOperation` are condition keys of AWS, which other stores may not know.
    Once,
}

/// Get, put, list, and the end of an upload that failed, below the slot's prefix alone.
///
/// `partition` is `aws` but for AWS's separate clouds.
pub fn of_slot(partition: &str, bucket: &str, slot: &SlotPrefix, writes: SnapshotWrites) -> String {
    // Users and slots are checked names, so that nothing of them is a wildcard or a variable of the policy's language.
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
    /// The UTC days of all snapshots that are taken in it, as their names begin.
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

/// What all of them begin with.
fn common_prefix(days: &[String]) -> String {
    let (Some(first), Some(last)) = (days.first(), days.last()) else { return String::new() };
    first.chars().zip(last.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a).collect()
}

/// Snapshots of one epoch, by names of the session's days, and what a backup reads before it: pointer, pointer log and side
/// records. No dump of another epoch can be read, and the pointer cannot be moved.
///
/// A session of many days, or with long names, would need a longer policy than STS takes: it gets the days' common beginning.
pub fn of_outage(
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
    // The record of a snapshot ends in `.dump.json`.
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

/// Refuses a write without `If-None-Match`. Parts of an upload take no condition, and make no object.
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
    use crate::machine::name::Slot;

    #[test]
    fn a_policy_names_one_slot_and_no_delete() {
        let user = format!("auth0|{}", "x".repeat(122)).parse().unwrap();
        let slot = SlotPrefix::new(&user, &"a".repeat(32).parse::<Slot>().unwrap());
        let policy = of_slot("aws", &"b".repeat(63), &slot, SnapshotWrites::Once);
        assert!(policy.len() <= 2048, "STS takes no longer one: {}", policy.len());
        assert!(!policy.contains("Delete") && !policy.contains("s3:*"), "{policy}");
        assert!(
            policy.contains(&format!("{}/*", slot.root())),
            "the key's own form, as the store sees it: {policy}"
        );
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
    fn outage_policy_names_one_epoch_and_fits_sts() {
        let slot = longest();
        for (from, hours) in
            [("2026-11-24T10:20:00Z", 12), ("2026-11-30T23:00:00Z", 12), ("2026-11-24T10:20:00Z", 168)]
        {
            let whose = (&slot, Epoch(u32::MAX));
            let policy = of_outage("aws", &"b".repeat(63), whose, window(from, hours), SnapshotWrites::Once);
            assert!(policy.len() <= 2048, "STS takes no longer one: {}", policy.len());
            assert!(!policy.contains("Delete") && !policy.contains("s3:*"), "{policy}");
            assert!(policy.contains("*-4294967295.dump*"), "{policy}");
        }
    }

    #[test]
    fn outage_policy_names_each_day_of_the_session() {
        let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
        let days = |from, hours| {
            let policy =
                of_outage("aws", "fleet", (&slot, Epoch(7)), window(from, hours), SnapshotWrites::Any);
            let policy: Value = serde_json::from_str(&policy).unwrap();
            let own = policy["Statement"][0]["Resource"].as_array().unwrap().clone();
            let name = |it: &Value| it.as_str().unwrap().rsplit('/').next().unwrap().to_owned();
            own.iter().map(name).collect::<Vec<_>>()
        };
        assert_eq!(days("2026-11-24T10:20:00Z", 12), ["2026-11-24T*-7.dump*"]);
        assert_eq!(days("2026-09-30T23:00:00Z", 12), ["2026-09-30T*-7.dump*", "2026-10-01T*-7.dump*"]);
        // A clock that is behind or ahead.
        assert_eq!(days("2027-01-01T00:10:00Z", 1), ["2026-12-31T*-7.dump*", "2027-01-01T*-7.dump*"]);
        assert_eq!(days("2026-11-24T10:20:00Z", 168).len(), 8);
    }

    #[test]
    fn no_name_that_is_taken_has_a_wildcard() {
        for special in ["a*", "a?", "${aws:userid}"] {
            assert!(special.parse::<crate::machine::name::IdpUserId>().is_err(), "{special}");
        }
    }
}
