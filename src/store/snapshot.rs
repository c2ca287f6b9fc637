//! A snapshot's side record, and the check that the snapshot named by the pointer is there whole.

use std::future::ready;
use std::pin::pin;

use futures_util::TryStreamExt;
use jiff::Timestamp;
use object_store::ObjectStore;
use serde::{Deserialize, Serialize};

use super::bucket::{Bucket, Condition, StoreError};
use super::key::{self, SlotPrefix};
use super::pointer::SnapshotRef;
use super::pointer_io;
use super::role_facts::RoleFacts;
use super::{bounded_list, bundle};
use crate::clock;
use crate::machine::epoch::Epoch;
use crate::machine::id::MachineId;
use crate::untrusted_text::bounded;

pub const FORMAT: u32 = 1;
/// More than a server of ours has. A record with more is none: in memory each takes many times its size in the object.
pub const MAX_ROLES: usize = 10_000;
pub const MAX_TABLES: usize = 100_000;

/// `….dump.json`, written beside the dump before the pointer names it (contract, part 4).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SideRecord {
    pub version: u32,
    pub key: String,
    pub size_bytes: u64,
    pub sha256: String,
    pub pg_version: String,
    pub machine_id: MachineId,
    pub epoch: Epoch,
    #[serde(with = "clock::wire")]
    pub taken_at: Timestamp,
    #[serde(with = "clock::wire")]
    pub verified_at: Timestamp,
    /// Roles that own or are granted something in the dump.
    #[serde(deserialize_with = "bounded_list::at_most::<_, _, MAX_ROLES>")]
    pub roles: Vec<String>,
    #[serde(deserialize_with = "bounded_list::at_most::<_, _, MAX_TABLES>")]
    pub tables: Vec<TableCount>,
    /// What a dump of the database's content does not hold. Absent in records written without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub database: Option<DatabaseFacts>,
    /// Which database of that machine it was. Absent in records of hosts before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub database_identity: Option<DatabaseIdentity>,
}

/// One database of one server, as one restore made it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DatabaseIdentity {
    /// `pg_control_system()`: made by initdb.
    pub system_identifier: String,
    pub database_oid: u32,
    /// Made by each restore, and kept in the database, too.
    pub restore_id: uuid::Uuid,
}

/// What belongs to the database itself: a restore into a new database applies it again.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DatabaseFacts {
    pub owner: Option<String>,
    /// On disk, when the snapshot was taken.
    pub size_bytes: u64,
    /// `None`: never granted or revoked, the defaults hold.
    pub grants: Option<Vec<DatabaseGrant>>,
    pub settings: Vec<DatabaseSetting>,
    /// Every role of the server. Absent in records written without it.
    #[serde(
        default,
        deserialize_with = "bounded_list::some_at_most::<_, _, MAX_ROLES>",
        skip_serializing_if = "Option::is_none"
    )]
    pub roles: Option<Vec<RoleFacts>>,
}

impl SideRecord {
    /// The same as the pointer would name it.
    pub fn named(&self) -> SnapshotRef {
        SnapshotRef {
            key: self.key.clone(),
            size_bytes: self.size_bytes,
            sha256: self.sha256.clone(),
            etag: None,
            machine_id: self.machine_id,
            epoch: self.epoch,
            taken_at: self.taken_at,
            verified_at: self.verified_at,
        }
    }

    /// The major version of the PostgreSQL that it is of, where it is said.
    pub fn pg_major(&self) -> Option<u32> {
        self.pg_version.split(['.', ' ', 'b', 'r', 'd']).next()?.parse().ok()
    }
}

/// A right on the database; without `grantee`, everybody's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DatabaseGrant {
    pub grantee: Option<String>,
    pub privilege: String,
    pub grantable: bool,
}

/// `ALTER DATABASE … SET`, or with `role`, `ALTER ROLE … IN DATABASE … SET`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DatabaseSetting {
    pub role: Option<String>,
    pub name: String,
    pub value: String,
}

/// Rows of one table at the snapshot's instant; `name` is `schema.table`, quoted where needed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TableCount {
    pub name: String,
    pub rows: u64,
}

/// A snapshot whose object is complete and whose side record is written: the only kind that the pointer may name.
#[derive(Debug, Clone)]
pub struct Recorded(SnapshotRef);

impl Recorded {
    pub fn named(&self) -> &SnapshotRef {
        &self.0
    }
}

/// Writes the side record of a complete, verified object; `etag` is the object's. A side record is written once.
///
/// # Errors
/// [`StoreError`]; a key that is not one of a snapshot is `Corrupt`, and another record under that key `Precondition`.
pub async fn record(
    bucket: &Bucket,
    slot: &SlotPrefix,
    side: &SideRecord,
    etag: Option<String>,
) -> Result<Recorded, StoreError> {
    let no_snapshot =
        || StoreError::Corrupt { key: side.key.clone(), why: "the key is not one of a snapshot".to_owned() };
    let object = slot.side_record(&side.key).ok_or_else(no_snapshot)?;
    match bucket.put_json_if(&object, side, Condition::Absent).await {
        Ok(()) => {}
        Err(refused @ StoreError::Precondition { .. }) => {
            // It may be our own write whose answer was lost. Another record is never replaced.
            let found = bucket.get_json::<SideRecord>(&object).await?;
            let text = |record: &SideRecord| serde_json::to_string(record).ok();
            if found.is_none_or(|found| text(&found.value) != text(side)) {
                return Err(refused);
            }
        }
        Err(error) => return Err(error),
    }
    Ok(Recorded(SnapshotRef { etag, ..side.named() }))
}

/// A snapshot that was recorded before, after a look that object and side record are there and agree in size.
///
/// # Errors
/// [`Unusable`]; never `Absent`.
pub async fn recorded(
    bucket: &Bucket,
    slot: &SlotPrefix,
    key: &str,
) -> Result<(SideRecord, Recorded), Unusable> {
    let side = by_key(bucket, slot, key).await?;
    let named = side.named();
    Ok((side, Recorded(named)))
}

/// Why there is no snapshot to restore.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// Confirmed: no pointer or a tombstone, and no snapshot; or an operator's decision to start empty.
    #[error("there is no snapshot")]
    Absent,
    #[error("{key} is not usable: {why}")]
    Damaged { key: String, why: String },
    #[error(transparent)]
    Store(StoreError),
}

/// The snapshot that the pointer names, after a check that object and side record are there and agree in size.
///
/// Its bytes are checked where they are read: by the restore.
///
/// # Errors
/// [`Unusable`]; only `Absent` means that there is none. Snapshots that no pointer names are `Damaged`: the pointer was
/// lost, and starting empty would forget them.
pub async fn latest(bucket: &Bucket, slot: &SlotPrefix) -> Result<SnapshotRef, Unusable> {
    match named(bucket, slot).await? {
        Ok(named) => check(bucket, slot, named).await,
        Err(Nameless::Emptied) => Err(Unusable::Absent),
        Err(_) if !holds_any(bucket, slot).await.map_err(Unusable::Store)? => Err(Unusable::Absent),
        // The first backup may have moved the pointer since it was read.
        Err(_) => match named(bucket, slot).await? {
            Ok(named) => check(bucket, slot, named).await,
            Err(nameless) => Err(Unusable::Damaged {
                key: slot.pointer().to_string(),
                why: format!(
                    "{nameless} although snapshots exist; see `svcctl pointer show`, then `svcctl pointer rebuild`"
                ),
            }),
        },
    }
}

/// Why no snapshot is named.
#[derive(Debug, Clone, Copy)]
enum Nameless {
    Missing,
    Tombstone,
    /// An operator decided so.
    Emptied,
}

impl std::fmt::Display for Nameless {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Missing => "the pointer is missing",
            Self::Tombstone | Self::Emptied => "the pointer names no snapshot",
        })
    }
}

async fn named(bucket: &Bucket, slot: &SlotPrefix) -> Result<Result<SnapshotRef, Nameless>, Unusable> {
    match pointer_io::read(bucket, slot).await {
        Ok(Some(read)) if read.has_latest() => {
            let nameless = read.value.emptied_at.map_or(Nameless::Tombstone, |_| Nameless::Emptied);
            Ok(read.value.snapshot.ok_or(nameless))
        }
        Ok(_) => Ok(Err(Nameless::Missing)),
        Err(StoreError::Corrupt { key, why }) => Err(Unusable::Damaged { key, why }),
        Err(error) => Err(Unusable::Store(error)),
    }
}

/// Whether the slot has any snapshot: one listing request. An object without a side record is none; the backup that made
/// it did not end.
async fn holds_any(bucket: &Bucket, slot: &SlotPrefix) -> Result<bool, StoreError> {
    let prefix = slot.snapshots();
    let records =
        bucket.raw().list(Some(&prefix)).try_filter(|meta| ready(key::is_side_record(&meta.location)));
    let first = async { pin!(records).try_next().await.map_err(|error| StoreError::of(&prefix, error)) };
    Ok(bucket.bounded(&prefix, first).await?.is_some())
}

async fn check(bucket: &Bucket, slot: &SlotPrefix, named: SnapshotRef) -> Result<SnapshotRef, Unusable> {
    let record = by_key(bucket, slot, &named.key).await?;
    if record.sha256 != named.sha256 || record.size_bytes != named.size_bytes {
        return Err(Unusable::Damaged { key: named.key, why: "its side record does not fit".to_owned() });
    }
    Ok(named)
}

/// The record of the snapshot with this key, whether or not the pointer names it, after a look that its object is there
/// with that size.
///
/// # Errors
/// [`Unusable`]; never `Absent`.
pub async fn by_key(bucket: &Bucket, slot: &SlotPrefix, key: &str) -> Result<SideRecord, Unusable> {
    // The pointer may name anything.
    let damaged = |why: String| Unusable::Damaged { key: bounded(key), why };
    let (Some(object), Some(side)) = (slot.snapshot(key), slot.side_record(key)) else {
        return Err(damaged("the key is not one of a snapshot".to_owned()));
    };
    let meta = bucket.head(&object).await.map_err(Unusable::Store)?;
    let Some(meta) = meta else {
        return Err(damaged("the object is missing".to_owned()));
    };
    let record = match bucket.get_json::<SideRecord>(&side).await {
        Ok(Some(record)) => record.value,
        Ok(None) => return Err(damaged("its side record is missing".to_owned())),
        Err(StoreError::Corrupt { why, .. }) => return Err(damaged(format!("its side record: {why}"))),
        Err(error) => return Err(Unusable::Store(error)),
    };
    if record.version != FORMAT || record.key != key {
        return Err(damaged("its side record does not fit".to_owned()));
    }
    if !key::agrees(key, record.taken_at, record.epoch) {
        return Err(damaged("its side record says another time or epoch than its key".to_owned()));
    }
    // Whoever fetches the dump names a file by it.
    if bundle::parse_digest(&record.sha256).as_deref() != Some(&*record.sha256) {
        return Err(damaged("its side record has no SHA-256".to_owned()));
    }
    if meta.size != record.size_bytes {
        return Err(damaged(format!("it has {} bytes instead of {}", meta.size, record.size_bytes)));
    }
    Ok(record)
}

/// The side record of a snapshot that was checked by [`latest`].
///
/// # Errors
/// [`StoreError`].
pub async fn side_record(
    bucket: &Bucket,
    slot: &SlotPrefix,
    snapshot: &SnapshotRef,
) -> Result<SideRecord, StoreError> {
    let missing = || StoreError::NotFound { key: format!("{}.json", snapshot.key) };
    let key = slot.side_record(&snapshot.key).ok_or_else(missing)?;
    bucket.get_json(&key).await?.map(|read| read.value).ok_or_else(missing)
}
