//! What a machine may do in the bucket, as an IAM session policy: read, write and list its own slot. Nothing is deleted,
//! and where the store can enforce it, no snapshot is written twice.
//!
//! An outage session outlives the platform's word on who holds the slot. It adds snapshots of one epoch and never moves
//! the pointer, so it changes nothing that a machine is restored from.

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::key::{SlotPrefix, snapshot_name_at};
use crate::machine::epoch::Epoch;

/// How far a host's clock may be from the platform's: stores refuse requests of clocks that differ by more.
const MAX_CLOCK_SKEW: SignedDuration = SignedDuration::from_mins(15);

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
    /// What the names of all snapshots that are taken in it begin with.
    fn name_prefix(self) -> String {
        let from = self.from.saturating_sub(MAX_CLOCK_SKEW).unwrap_or(Timestamp::MIN);
        let until = self.until.saturating_add(MAX_CLOCK_SKEW).unwrap_or(Timestamp::MAX);
        let (from, until) = (snapshot_name_at(from), snapshot_name_at(until));
        from.chars().zip(until.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a).collect()
    }
}

/// Snapshots of one epoch, by names of the time of the session, and what a backup reads before it: pointer, pointer log and
/// side records. No other snapshot can be read, and the pointer cannot be moved.
pub fn of_outage(
    partition: &str,
    bucket: &str,
    (slot, epoch): (&SlotPrefix, Epoch),
    window: Window,
    writes: SnapshotWrites,
) -> String {
    let (bucket, db) = (format!("arn:{partition}:s3:::{bucket}"), format!("{}/system/db", slot.root()));
    // The record of a snapshot ends in `.dump.json`.
    let own = format!("{bucket}/{db}/snapshots/{}*-{epoch}.dump*", window.name_prefix());
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
        statements.push(create_only(&[own]));
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

    #[test]
    fn outage_policy_names_one_epoch_and_fits_sts() {
        let user = format!("auth0|{}", "x".repeat(122)).parse().unwrap();
        let slot = SlotPrefix::new(&user, &"a".repeat(32).parse::<Slot>().unwrap());
        let from: Timestamp = "2026-11-24T10:20:00Z".parse().unwrap();
        let window =
            |hours| Window { from, until: from.checked_add(SignedDuration::from_hours(hours)).unwrap() };
        let policy =
            of_outage("aws", &"b".repeat(63), (&slot, Epoch(u32::MAX)), window(12), SnapshotWrites::Once);
        assert!(policy.len() <= 2048, "STS takes no longer one: {}", policy.len());
        assert!(!policy.contains("Delete") && !policy.contains("s3:*"), "{policy}");
        assert!(policy.contains("/snapshots/2026-11-24T*-4294967295.dump*"), "{policy}");
        assert_eq!(window(24 * 7).name_prefix(), "2026-1", "from November into December");
        assert_eq!(Window { from, until: from }.name_prefix(), "2026-11-24T10-");
    }

    #[test]
    fn no_name_that_is_taken_has_a_wildcard() {
        for special in ["a*", "a?", "${aws:userid}"] {
            assert!(special.parse::<crate::machine::name::IdpUserId>().is_err(), "{special}");
        }
    }
}
