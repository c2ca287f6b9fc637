//! What a machine may do in the bucket, as an IAM session policy: read, write and list its own slot. Nothing is deleted,
//! and where the store can enforce it, no snapshot is written twice.

use serde_json::json;

use super::key::SlotPrefix;

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
        // Parts of an upload take no condition, and make no object.
        statements.push(json!({
            "Effect": "Deny",
            "Action": "s3:PutObject",
            "Resource": [
                format!("{bucket}/{slot}/system/db/snapshots/*"),
                format!("{bucket}/{slot}/system/db/pointer-log/*"),
            ],
            "Condition": {
                "Null": {"s3:if-none-match": "true"},
                "Bool": {"s3:ObjectCreationOperation": "true"},
            },
        }));
    }
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
    fn no_name_that_is_taken_has_a_wildcard() {
        for special in ["a*", "a?", "${aws:userid}"] {
            assert!(special.parse::<crate::machine::name::IdpUserId>().is_err(), "{special}");
        }
    }
}
