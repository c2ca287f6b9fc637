//! The pointer and the sidecar, as read from the object store: a reader stays within the slot and accepts only
//! consistent objects.

use std::sync::Arc;

use jiff::Timestamp;
use object_store::memory::InMemory;
use object_store::path::Path;
use proptest::prelude::*;
use svc::machine::epoch::Epoch;
use svc::machine::id::MachineId;
use svc::store::Bucket;
use svc::store::key::{SlotPrefix, SnapshotKey, snapshot_key};
use svc::store::pointer::{self, Fence, Pointer, SnapshotRef};
use svc::store::pointer_io;
use svc::store::snapshot::{
    self, DatabaseFacts, DatabaseGrant, DatabaseSetting, Sidecar, SnapshotUnusable, TableCount,
};

use super::Target;

const DUMP: &[u8] = b"PGDMP";
/// The digest of [`DUMP`].
const SHA256: &str = "b5a26a21290c39819235a235b8ed66b3bd98ed90c8316c8949bfbb7419cac878";

fn slot() -> SlotPrefix {
    SlotPrefix::new(&"user_1".parse().expect("the user is valid"), &svc::machine::name::Slot::primary())
}

fn timestamp(millis: i64) -> Timestamp {
    Timestamp::from_millisecond(millis).expect("the time is in range")
}

/// Returns the sidecar of the only complete snapshot in the slot.
fn complete_sidecar() -> Sidecar {
    Sidecar {
        version: 1,
        key: snapshot_key(timestamp(1_767_323_045_678), Epoch(7)),
        size_bytes: DUMP.len() as u64,
        sha256: SHA256.to_owned(),
        pg_version: "16.14".to_owned(),
        machine_id: MachineId(uuid::Uuid::from_u128(7)),
        epoch: Epoch(7),
        taken_at: timestamp(1_767_323_045_678),
        verified_at: timestamp(1_767_323_046_000),
        roles: vec!["app_notes".to_owned()],
        tables: vec![TableCount { name: "public.t".to_owned(), rows: 3 }],
        database: None,
        database_identity: None,
    }
}

/// Returns a bucket with three dumps: the complete snapshot's, with the given sidecar; a valid copy of that
/// snapshot in another slot; and a dump without a sidecar.
async fn bucket_with_sidecar(sidecar: &[u8]) -> Result<Bucket, String> {
    let bucket = Bucket::new(Arc::new(InMemory::new()));
    let key = complete_sidecar().key;
    let valid_sidecar = serde_json::to_vec(&complete_sidecar()).expect("a sidecar serializes to JSON");
    let key_without_sidecar = snapshot_key(timestamp(0), Epoch(7));
    let objects: [(Path, &[u8]); 5] = [
        (slot().snapshot(&key).ok_or("the key is invalid")?, DUMP),
        (slot().sidecar(&key).ok_or("the key is invalid")?, sidecar),
        (Path::from(format!("other/primary/{key}")), DUMP),
        (Path::from(format!("other/primary/{key}.json")), &valid_sidecar),
        (slot().snapshot(&key_without_sidecar).ok_or("the key is invalid")?, DUMP),
    ];
    for (path, content) in objects {
        bucket.put(&path, content.to_vec()).await.map_err(|error| error.to_string())?;
    }
    Ok(bucket)
}

pub fn block_on<T>(work: impl Future<Output = T>) -> T {
    thread_local! {
        static RUNTIME: tokio::runtime::Runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().expect("build a runtime");
    }
    RUNTIME.with(|runtime| runtime.block_on(work))
}

fn is_digest(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

async fn bucket_with_pointer(bytes: &[u8]) -> Result<Bucket, String> {
    let bucket =
        bucket_with_sidecar(&serde_json::to_vec(&complete_sidecar()).expect("a sidecar serializes to JSON"))
            .await?;
    bucket.put(&slot().pointer(), bytes.to_vec()).await.map_err(|error| error.to_string())?;
    Ok(bucket)
}

pub fn pointer() -> Target {
    Target {
        name: "pointer",
        valid: pointers().boxed(),
        check_any: check_any_pointer,
        check_valid: check_valid_pointer,
        cases: 1500,
    }
}

fn pointers() -> impl Strategy<Value = Vec<u8>> {
    let snapshot = prop_oneof![
        2 => Just(Some(SnapshotRef { etag: Some("\"abc\"".to_owned()), ..complete_sidecar().snapshot_ref() })),
        1 => Just(None),
    ];
    (0..60u32, 0..1u64 << 40, snapshot).prop_map(|(fence, seq, snapshot)| {
        let pointer = Pointer {
            version: 1,
            fence_epoch: Epoch(fence),
            fence_machine_id: None,
            fence_proof: None,
            seq,
            snapshot,
            emptied_at: None,
        };
        serde_json::to_vec(&pointer).expect("a pointer serializes to JSON")
    })
}

fn check_any_pointer(bytes: &[u8]) -> Result<(), String> {
    block_on(async {
        let bucket = bucket_with_pointer(bytes).await?;
        if let Ok(Some(read)) = pointer_io::read(&bucket, &slot()).await {
            check_accepted_pointer(&read.value)?;
        }
        match snapshot::find_latest(&bucket, &slot()).await {
            Ok(found)
                if (&found.key, found.size_bytes, &*found.sha256) == (&complete_sidecar().key, 5, SHA256) =>
            {
                Ok(())
            }
            Ok(found) => {
                Err(format!("the pointer resolves to {found:?}, which is not the complete snapshot"))
            }
            Err(SnapshotUnusable::Absent | SnapshotUnusable::Damaged { .. }) => Ok(()),
            Err(SnapshotUnusable::Store(error)) => {
                Err(format!("a malformed pointer is reported as a store failure: {error}"))
            }
        }
    })
}

/// Checks that the pointer parses back to the same value, and that the next writer increases `seq` and does not
/// decrease `fence_epoch`.
fn check_accepted_pointer(read: &Pointer) -> Result<(), String> {
    if read.version != 1 {
        return Err(format!("the version {} was accepted", read.version));
    }
    let text = serde_json::to_vec(read).expect("a pointer serializes to JSON");
    let reparsed: Pointer =
        serde_json::from_slice(&text).map_err(|error| format!("cannot be reparsed: {error}"))?;
    if !is_same_on_wire(&reparsed, read) {
        return Err(format!("{read:?} was reparsed as {reparsed:?}"));
    }
    let next = [
        pointer::fence(Some(read), &Fence::unsigned(Epoch(u32::MAX), complete_sidecar().machine_id)),
        pointer::advance(
            Some(read),
            &SnapshotRef {
                key: "another".to_owned(),
                epoch: Epoch(u32::MAX),
                ..complete_sidecar().snapshot_ref()
            },
        ),
    ];
    for next in next.into_iter().flatten().flatten() {
        if next.seq <= read.seq || next.fence_epoch < read.fence_epoch {
            return Err(format!("the pointer was moved back from {read:?} to {next:?}"));
        }
    }
    Ok(())
}

/// Compares pointers without fractions of a millisecond, which the wire format does not carry.
fn is_same_on_wire(left: &Pointer, right: &Pointer) -> bool {
    let truncate = |pointer: &Pointer| {
        let mut pointer = pointer.clone();
        if let Some(snapshot) = &mut pointer.snapshot {
            snapshot.taken_at = timestamp(snapshot.taken_at.as_millisecond());
            snapshot.verified_at = timestamp(snapshot.verified_at.as_millisecond());
        }
        pointer
    };
    truncate(left) == truncate(right)
}

fn check_valid_pointer(bytes: &[u8]) -> Result<(), String> {
    let expected: Pointer = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    block_on(async {
        let bucket = bucket_with_pointer(bytes).await?;
        let read = pointer_io::read(&bucket, &slot()).await.map_err(|error| error.to_string())?;
        let read = read.ok_or("there is no pointer")?;
        if read.value != expected {
            return Err(format!("parsed as {:?}", read.value));
        }
        match (snapshot::find_latest(&bucket, &slot()).await, expected.snapshot) {
            (Ok(found), Some(expected)) if found == expected => Ok(()),
            // The bucket contains a snapshot, but the pointer names none.
            (Err(SnapshotUnusable::Damaged { .. }), None) => Ok(()),
            (found, expected) => Err(format!("{expected:?} resolved to {found:?}")),
        }
    })
}

pub fn sidecar() -> Target {
    Target {
        name: "sidecar",
        valid: sidecars().boxed(),
        check_any: check_any_sidecar,
        check_valid: check_valid_sidecar,
        cases: 1500,
    }
}

fn database_facts() -> impl Strategy<Value = DatabaseFacts> {
    let grant = (prop::option::of("[a-z\"' ]{1,12}"), "[A-Z]{1,10}", any::<bool>());
    let grant =
        grant.prop_map(|(grantee, privilege, grantable)| DatabaseGrant { grantee, privilege, grantable });
    let setting = (prop::option::of("[a-z]{1,8}"), "[a-z._]{1,12}", "\\PC{0,12}");
    let setting = setting.prop_map(|(role, name, value)| DatabaseSetting { role, name, value });
    let owner = prop::option::of("[a-z_]{1,12}");
    let grants = prop::option::of(prop::collection::vec(grant, 0..4));
    (owner, any::<u64>(), grants, prop::collection::vec(setting, 0..4)).prop_map(
        |(owner, size_bytes, grants, settings)| DatabaseFacts {
            owner,
            size_bytes,
            grants,
            settings,
            roles: None,
        },
    )
}

fn sidecars() -> impl Strategy<Value = Vec<u8>> {
    let table = ("\\PC{1,20}", any::<u64>()).prop_map(|(name, rows)| TableCount { name, rows });
    let version = prop_oneof!["16\\.[0-9]{1,2}", Just("17beta1".to_owned()), "\\PC{0,9}"];
    (
        prop::collection::vec(table, 0..6),
        prop::collection::vec("\\PC{0,12}", 0..4),
        prop::option::of(database_facts()),
        version,
    )
        .prop_map(|(tables, roles, database, pg_version)| {
            let sidecar = Sidecar { tables, roles, database, pg_version, ..complete_sidecar() };
            serde_json::to_vec(&sidecar).expect("a sidecar serializes to JSON")
        })
}

fn check_any_sidecar(bytes: &[u8]) -> Result<(), String> {
    block_on(async {
        let bucket = bucket_with_sidecar(bytes).await?;
        let sidecar = match snapshot::load(&bucket, &slot(), &complete_sidecar().key).await {
            Ok(sidecar) => sidecar,
            Err(SnapshotUnusable::Damaged { .. }) => return Ok(()),
            Err(error) => return Err(format!("a malformed sidecar is reported as {error:?}")),
        };
        if sidecar.version != 1
            || sidecar.key != complete_sidecar().key
            || sidecar.size_bytes != DUMP.len() as u64
        {
            return Err(format!("{sidecar:?} was accepted"));
        }
        // The restore uses the digest in a file name.
        if !is_digest(&sidecar.sha256) {
            return Err(format!("{:?} is not a SHA-256", sidecar.sha256));
        }
        if sidecar.key.parse::<SnapshotKey>().is_err() || sidecar.snapshot_ref().key != sidecar.key {
            return Err(format!("{} is not a key", sidecar.key));
        }
        if snapshot_key(sidecar.taken_at, sidecar.epoch) != sidecar.key {
            return Err(format!(
                "{} of epoch {} does not match {}",
                sidecar.taken_at, sidecar.epoch, sidecar.key
            ));
        }
        // Must not panic for any version.
        let _ = sidecar.pg_major();
        Ok(())
    })
}

fn check_valid_sidecar(bytes: &[u8]) -> Result<(), String> {
    let expected: Sidecar = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if serde_json::to_vec(&expected).expect("a sidecar serializes to JSON") != bytes {
        return Err("the sidecar is not serialized to the same bytes".to_owned());
    }
    block_on(async {
        let bucket = bucket_with_sidecar(bytes).await?;
        match snapshot::load(&bucket, &slot(), &complete_sidecar().key).await {
            Ok(sidecar) if sidecar == expected => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
}
