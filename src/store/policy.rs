//! IAM session policies for machines. They allow reading, writing and listing the machine's own slot, but not deleting
//! objects or, if the store can enforce it, overwriting those that hosts write only once.
//!
//! An outage session stays valid after the platform has given the slot to another machine. It can write only snapshots
//! of one epoch whose names begin with the UTC date of a day on which the session is valid (see [`outage_policy`] for
//! an exception), and cannot move the pointer.

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::key::{SlotPrefix, snapshot_name_prefix};
use svc_machine::epoch::Epoch;

/// Maximum difference between a host's clock and the platform's. Stores reject requests with a larger skew.
const MAX_CLOCK_SKEW: SignedDuration = SignedDuration::from_mins(15);
/// Maximum length of an STS session policy.
const MAX_POLICY_CHARS: usize = 2048;
/// Maximum number of days in a policy. The platform limits outage sessions to seven days, which can span nine UTC days
/// with clock skew.
const MAX_DAYS: usize = 9;

/// Whether a session may overwrite objects that hosts write only once: snapshots, pointer-log entries, and the objects
/// of the file backup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overwrites {
    /// The store allows it. Hosts never overwrite these objects, but stolen credentials could be used to do so.
    Allowed,
    /// The store rejects it: these objects can only be created with `If-None-Match`. `s3:if-none-match` and
    /// `s3:ObjectCreationOperation` are AWS condition keys that other stores may not support.
    Denied,
}

/// Returns the policy for a slot. Below the slot's prefix, it allows getting, putting and listing objects, and aborting
/// uploads.
///
/// `partition` is `aws`, except in other AWS partitions, such as `aws-us-gov`.
pub fn slot_policy(partition: &str, bucket: &str, slot: &SlotPrefix, overwrites: Overwrites) -> String {
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
    if overwrites == Overwrites::Denied {
        // Only the `latest` pointers and `system/vps-meta.json` are overwritten.
        let write_once = ["system/db/*/*", "files/*/*", "files/config"];
        let write_once = write_once.map(|objects| format!("{bucket}/{slot}/{objects}"));
        statements.push(deny_overwrites(&write_once));
    }
    render_document(&statements)
}

/// The period in which an outage session may be used, by the platform's clock.
#[derive(Debug, Clone, Copy)]
pub struct SessionWindow {
    pub from: Timestamp,
    pub until: Timestamp,
}

impl SessionWindow {
    /// Returns the name prefixes of all UTC days in the window, extended by the clock skew; at most [`MAX_DAYS`].
    fn day_prefixes(self) -> Vec<String> {
        let from = self.from.saturating_sub(MAX_CLOCK_SKEW).unwrap_or(Timestamp::MIN);
        let until = self.until.saturating_add(MAX_CLOCK_SKEW).unwrap_or(Timestamp::MAX);
        let last = day_prefix(until);
        let mut days = vec![day_prefix(from)];
        let mut time = from;
        while days.last().is_some_and(|day| *day < last) && days.len() < MAX_DAYS {
            time = time.saturating_add(SignedDuration::from_hours(24)).unwrap_or(Timestamp::MAX);
            days.push(day_prefix(time));
        }
        days
    }
}

/// Returns the name prefix of snapshots taken on the day of `time`, such as `2026-11-24T`.
fn day_prefix(time: Timestamp) -> String {
    snapshot_name_prefix(time).split_inclusive('T').next().unwrap_or_default().to_owned()
}

/// Returns the days' longest common prefix. The days are in order, so the first and the last determine it.
fn common_prefix(days: &[String]) -> String {
    let (Some(first), Some(last)) = (days.first(), days.last()) else { return String::new() };
    first.chars().zip(last.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a).collect()
}

/// Returns an outage session's policy. It allows writing snapshots of one epoch whose names begin with the UTC
/// date of a day on which the session is valid, and reading the pointer, its log and sidecars. It does not allow
/// reading any other dump, or moving the pointer.
///
/// If many days or long names would exceed the maximum policy length, it instead allows all names that begin with the
/// common prefix of the days' dates.
pub fn outage_policy(
    partition: &str,
    bucket: &str,
    (slot, epoch): (&SlotPrefix, Epoch),
    window: SessionWindow,
    overwrites: Overwrites,
) -> String {
    let (bucket, db) = (format!("arn:{partition}:s3:::{bucket}"), format!("{}/system/db", slot.root()));
    let prefixes = window.day_prefixes();
    let exact = render_outage_policy(&bucket, &db, epoch, &prefixes, overwrites);
    if exact.len() <= MAX_POLICY_CHARS {
        return exact;
    }
    render_outage_policy(&bucket, &db, epoch, &[common_prefix(&prefixes)], overwrites)
}

fn render_outage_policy(
    bucket: &str,
    db: &str,
    epoch: Epoch,
    prefixes: &[String],
    overwrites: Overwrites,
) -> String {
    // A sidecar's name ends in `.dump.json`.
    let writable: Vec<String> =
        prefixes.iter().map(|prefix| format!("{bucket}/{db}/snapshots/{prefix}*-{epoch}.dump*")).collect();
    let mut statements = vec![
        json!({
            "Effect": "Allow",
            "Action": ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"],
            "Resource": writable,
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
    if overwrites == Overwrites::Denied {
        statements.push(deny_overwrites(&[format!("{bucket}/{db}/snapshots/*")]));
    }
    render_document(&statements)
}

/// Returns the statement that denies writes without `If-None-Match`. Uploads of parts are exempt, because they have no
/// condition and create no object.
fn deny_overwrites(resources: &[String]) -> Value {
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

fn render_document(statements: &[Value]) -> String {
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
        let policy = slot_policy("aws", &"b".repeat(63), &slot, Overwrites::Denied);
        assert!(policy.len() <= 2048, "too long for STS: {}", policy.len());
        assert!(!policy.contains("Delete") && !policy.contains("s3:*"), "{policy}");
        assert!(policy.contains(&format!("{}/*", slot.root())), "{policy}");
    }

    fn window(from: &str, hours: i64) -> SessionWindow {
        let from: Timestamp = from.parse().unwrap();
        SessionWindow { from, until: from.checked_add(SignedDuration::from_hours(hours)).unwrap() }
    }

    fn longest_slot() -> SlotPrefix {
        let user = format!("auth0|{}", "x".repeat(122)).parse().unwrap();
        SlotPrefix::new(&user, &"a".repeat(32).parse::<Slot>().unwrap())
    }

    #[test]
    fn outage_policy_allows_one_epoch_and_fits_sts() {
        let slot = longest_slot();
        for (from, hours) in
            [("2026-11-24T10:20:00Z", 12), ("2026-11-30T23:00:00Z", 12), ("2026-11-24T10:20:00Z", 168)]
        {
            let slot_and_epoch = (&slot, Epoch(u32::MAX));
            let policy = outage_policy(
                "aws",
                &"b".repeat(63),
                slot_and_epoch,
                window(from, hours),
                Overwrites::Denied,
            );
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
                outage_policy("aws", "fleet", (&slot, Epoch(7)), window(from, hours), Overwrites::Allowed);
            let policy: Value = serde_json::from_str(&policy).unwrap();
            let writable = policy["Statement"][0]["Resource"].as_array().unwrap().clone();
            let name = |resource: &Value| resource.as_str().unwrap().rsplit('/').next().unwrap().to_owned();
            writable.iter().map(name).collect::<Vec<_>>()
        };
        assert_eq!(days("2026-11-24T10:20:00Z", 12), ["2026-11-24T*-7.dump*"]);
        assert_eq!(days("2026-09-30T23:00:00Z", 12), ["2026-09-30T*-7.dump*", "2026-10-01T*-7.dump*"]);
        // The host's clock may be behind or ahead.
        assert_eq!(days("2027-01-01T00:10:00Z", 1), ["2026-12-31T*-7.dump*", "2027-01-01T*-7.dump*"]);
        assert_eq!(days("2026-11-24T10:20:00Z", 168).len(), 8);
    }

    #[test]
    fn user_ids_with_wildcards_are_refused() {
        for special in ["a*", "a?", "${aws:userid}"] {
            assert!(special.parse::<svc_machine::name::IdpUserId>().is_err(), "{special}");
        }
    }
}
