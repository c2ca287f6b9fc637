//! Lists a slot's verified snapshots, by their sidecars, newest first.
//!
//! A dump without a sidecar was never completely verified, and is not listed.

use std::collections::VecDeque;

use futures_util::{StreamExt, TryStreamExt, stream};
use jiff::{SignedDuration, Timestamp};
use object_store::ObjectStore;
use object_store::path::Path;
use serde::Deserialize;

use super::bucket::{Bucket, StoreError};
use super::bundle;
use super::key::{self, SlotPrefix};
use svc_base::clock;
use svc_base::untrusted_text::truncate_printable;
use svc_machine::epoch::Epoch;
use svc_machine::id::MachineId;

/// Maximum number of concurrent sidecar reads, of at most 1 MiB each.
const MAX_CONCURRENT_READS: usize = 4;
const SIDECAR_SUFFIX: &str = ".json";
/// Initial time range for a page: hours per snapshot, plus additional hours. Backups are hourly.
const HOURS_PER_SNAPSHOT: i64 = 1;
const EXTRA_HOURS: i64 = 2;
/// While a page is not full, its time range grows by this factor.
const RANGE_GROWTH_FACTOR: i32 = 8;
/// Maximum time range; beyond it, all keys are listed.
const MAX_TIME_RANGE: SignedDuration = SignedDuration::from_hours(10 * 366 * 24);

/// The fields of a sidecar that a listing shows. The others are skipped, because a host can make them large.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ListedSnapshot {
    pub key: String,
    pub size_bytes: u64,
    pub sha256: String,
    pub machine_id: MachineId,
    pub epoch: Epoch,
    #[serde(with = "clock::wire")]
    pub taken_at: Timestamp,
    #[serde(with = "clock::wire")]
    pub verified_at: Timestamp,
}

impl ListedSnapshot {
    /// Whether this is the sidecar of the snapshot with this key.
    fn matches_key(&self, key: &str) -> bool {
        let is_digest = bundle::parse_digest(&self.sha256).as_deref() == Some(&*self.sha256);
        self.key == key && is_digest && key::matches_sidecar(key, self.taken_at, self.epoch)
    }
}

/// A page of snapshots in descending order by key, and therefore by time.
pub struct SnapshotPage {
    pub snapshots: Vec<ListedSnapshot>,
    /// The key after which the next page begins; `None` on the last page.
    pub next: Option<String>,
}

/// Selects the snapshots for a page.
#[derive(Debug, Clone, Copy)]
pub struct PageWindow<'a> {
    /// Selects only snapshots with keys below this one.
    pub before: Option<&'a str>,
    /// When the latest snapshot was taken, if known. Reduces the number of listings if that snapshot is old.
    pub latest: Option<Timestamp>,
    pub limit: usize,
}

/// Lists the newest snapshots in a window. Only keys near the page's time range are listed.
///
/// # Errors
/// [`StoreError`] if the store cannot be read. Sidecars that are unreadable or do not match their keys are skipped,
/// with one log line.
pub async fn list_page(
    bucket: &Bucket,
    slot: &SlotPrefix,
    window: PageWindow<'_>,
) -> Result<SnapshotPage, StoreError> {
    let limit = window.limit;
    let mut keys = list_newest_keys(bucket, slot, &window, limit + 1).await?;
    let has_more = keys.len() > limit;
    keys.truncate(limit);
    let next = keys.last().filter(|_| has_more).cloned();
    let mut reads =
        stream::iter(keys).map(|key| read_or_skip(bucket, slot, key)).buffered(MAX_CONCURRENT_READS);
    let (mut snapshots, mut skipped_log) = (Vec::new(), SkippedLog::default());
    while let Some(read) = reads.try_next().await? {
        match read {
            Ok(snapshot) => snapshots.extend(snapshot),
            Err(skipped) => skipped_log.add(skipped),
        }
    }
    skipped_log.write_log();
    Ok(SnapshotPage { snapshots, next })
}

/// Reads the sidecar of one snapshot; `None` if it is missing, unreadable, or does not match its key.
pub async fn read_listed_snapshot(
    bucket: &Bucket,
    slot: &SlotPrefix,
    key: &str,
) -> Result<Option<ListedSnapshot>, StoreError> {
    let mut skipped_log = SkippedLog::default();
    let snapshot = read_or_skip(bucket, slot, key.to_owned()).await?.unwrap_or_else(|skipped| {
        skipped_log.add(skipped);
        None
    });
    skipped_log.write_log();
    Ok(snapshot)
}

/// A skipped sidecar, with the reason.
struct SkippedSidecar {
    key: String,
    reason: String,
}

/// Logs one line for all skipped sidecars on a page, because a host can write any number of them.
#[derive(Default)]
struct SkippedLog {
    first: Option<SkippedSidecar>,
    count: usize,
}

impl SkippedLog {
    fn add(&mut self, skipped: SkippedSidecar) {
        self.first.get_or_insert(skipped);
        self.count += 1;
    }

    fn write_log(self) {
        if let Some(SkippedSidecar { key, reason }) = self.first {
            tracing::warn!(
                key = truncate_printable(&key),
                reason,
                count = self.count,
                "unusable sidecars were skipped; this is the first"
            );
        }
    }
}

/// Lists the newest keys in a window in descending order. A store lists keys only in ascending order, so the listing
/// starts earlier each time until enough keys are found.
async fn list_newest_keys(
    bucket: &Bucket,
    slot: &SlotPrefix,
    window: &PageWindow<'_>,
    count: usize,
) -> Result<Vec<String>, StoreError> {
    let hours = HOURS_PER_SNAPSHOT * i64::try_from(count).unwrap_or(i64::MAX / 2) + EXTRA_HOURS;
    let initial_range = SignedDuration::from_hours(hours);
    let mut range = initial_range;
    let before = window.before.map(|key| (key, key::time_in(key)));
    let mut from = before.and_then(|(_, time)| time).unwrap_or_else(Timestamp::now);
    // If the cursor contains no time, all keys are listed.
    let has_no_time = before.is_some_and(|(_, time)| time.is_none());
    let mut latest = window.latest.filter(|_| window.before.is_none());
    let mut end = window.before.and_then(|key| key.rsplit('/').next()).map(str::to_owned);
    let mut keys = Vec::new();
    loop {
        let start = Some(range).filter(|range| *range < MAX_TIME_RANGE && !has_no_time);
        let start = start.and_then(|range| from.checked_sub(range).ok()).map(key::snapshot_name_prefix);
        let remaining = count - keys.len();
        keys.extend(list_last_keys(bucket, slot, start.as_deref(), end.as_deref(), remaining).await?);
        if keys.len() >= count || start.is_none() {
            return Ok(keys);
        }
        end = end.into_iter().chain(start).min();
        let older = latest.take().filter(|_| keys.is_empty());
        match older.filter(|latest| Some(key::snapshot_name_prefix(*latest)) < end) {
            Some(latest) => (from, range) = (latest, initial_range),
            None => range *= RANGE_GROWTH_FACTOR,
        }
    }
}

/// Lists the last `count` keys with names above `start` and below `end`, in descending order.
async fn list_last_keys(
    bucket: &Bucket,
    slot: &SlotPrefix,
    start: Option<&str>,
    end: Option<&str>,
    count: usize,
) -> Result<Vec<String>, StoreError> {
    let prefix = slot.snapshots();
    let mut listing = match start {
        Some(start) => bucket.raw().list_with_offset(Some(&prefix), &prefix.clone().join(start)),
        None => bucket.raw().list(Some(&prefix)),
    };
    let mut keys = VecDeque::with_capacity(count + 1);
    while let Some(object) = listing.next().await {
        let location = object.map_err(|error| StoreError::classify(&prefix, error))?.location;
        if end.is_some_and(|end| name_in(&prefix, &location).is_some_and(|name| name >= end)) {
            break;
        }
        if let Some(key) = snapshot_key_of(slot, &prefix, &location) {
            keys.push_back(key);
            if keys.len() > count {
                keys.pop_front();
            }
        }
    }
    Ok(keys.into_iter().rev().collect())
}

/// Returns the key of the snapshot to which this sidecar belongs; `None` if the object is not a sidecar.
fn snapshot_key_of(slot: &SlotPrefix, prefix: &Path, object: &Path) -> Option<String> {
    let name = name_in(prefix, object)?.strip_suffix(SIDECAR_SUFFIX)?;
    Some(format!("system/db/snapshots/{name}")).filter(|key| slot.snapshot(key).is_some())
}

/// Returns the object's name below the prefix.
fn name_in<'a>(prefix: &Path, object: &'a Path) -> Option<&'a str> {
    object.as_ref().strip_prefix(prefix.as_ref())?.strip_prefix('/')
}

/// Lists the keys, relative to the slot, of all snapshots with a sidecar. Does not check whether their dumps exist.
pub async fn list_keys(bucket: &Bucket, slot: &SlotPrefix) -> Result<Vec<String>, StoreError> {
    let prefix = slot.snapshots();
    let mut listing = bucket.raw().list(Some(&prefix));
    let mut keys = Vec::new();
    while let Some(object) = listing.next().await {
        let object = object.map_err(|error| StoreError::classify(&prefix, error))?;
        keys.extend(snapshot_key_of(slot, &prefix, &object.location));
    }
    Ok(keys)
}

async fn read_or_skip(
    bucket: &Bucket,
    slot: &SlotPrefix,
    key: String,
) -> Result<Result<Option<ListedSnapshot>, SkippedSidecar>, StoreError> {
    let Some(path) = slot.sidecar(&key) else { return Ok(Ok(None)) };
    match bucket.get_json::<ListedSnapshot>(&path).await {
        Ok(None) => Ok(Ok(None)),
        Ok(Some(read)) if read.value.matches_key(&key) => Ok(Ok(Some(read.value))),
        Ok(Some(_)) => {
            Ok(Err(SkippedSidecar { key, reason: "the sidecar does not match its key".to_owned() }))
        }
        Err(StoreError::Corrupt { key, reason }) => Ok(Err(SkippedSidecar { key, reason })),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::lenient::{IgnoredCondition, LenientStore};
    use crate::role_facts::RoleFacts;
    use crate::snapshot::{self, DatabaseFacts, Sidecar, TableCount};
    use svc_machine::name::Slot;

    const TOTAL: i64 = 2000;

    /// Creates a slot with [`TOTAL`] hourly snapshots, the newest of which has the given age, in a store that counts
    /// listed objects.
    async fn hourly_snapshots(
        newest_age: SignedDuration,
    ) -> (Bucket, SlotPrefix, Arc<LenientStore>, Vec<String>) {
        let store = Arc::new(LenientStore::new(IgnoredCondition::Replace));
        let bucket = Bucket::new(store.clone());
        let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
        let newest = Timestamp::now() - newest_age;
        let mut keys = Vec::new();
        for hour in 0..TOTAL {
            let key = key::snapshot_key(newest - SignedDuration::from_hours(hour), Epoch(1));
            bucket.put(&slot.snapshot(&key).unwrap(), "dump").await.unwrap();
            bucket.put(&slot.sidecar(&key).unwrap(), "{}").await.unwrap();
            keys.push(key);
        }
        (bucket, slot, store, keys)
    }

    async fn list_newest(bucket: &Bucket, slot: &SlotPrefix, window: PageWindow<'_>) -> Vec<String> {
        list_newest_keys(bucket, slot, &window, window.limit).await.unwrap()
    }

    #[tokio::test]
    async fn page_lists_only_keys_near_its_range() {
        let (bucket, slot, store, keys) = hourly_snapshots(SignedDuration::from_mins(5)).await;
        let first = PageWindow { before: None, latest: None, limit: 51 };
        assert_eq!(list_newest(&bucket, &slot, first).await, keys[..51]);
        assert!(store.listed_count() < 120, "listed {} objects", store.listed_count());
        // A page that starts below a key in the middle.
        let before = store.listed_count();
        let next = PageWindow { before: Some(&keys[999]), latest: None, limit: 51 };
        assert_eq!(list_newest(&bucket, &slot, next).await, keys[1000..1051]);
        assert!(store.listed_count() - before < 120, "listed {} objects", store.listed_count() - before);
        let last = PageWindow { before: Some(&keys[1979]), latest: None, limit: 51 };
        assert_eq!(list_newest(&bucket, &slot, last).await, keys[1980..]);
    }

    #[tokio::test]
    async fn page_of_an_old_slot_starts_at_its_latest_snapshot() {
        let age = SignedDuration::from_hours(24 * 400);
        let (bucket, slot, store, keys) = hourly_snapshots(age).await;
        let latest = Some(key::taken_at(&keys[0]).unwrap());
        let window = PageWindow { before: None, latest, limit: 51 };
        assert_eq!(list_newest(&bucket, &slot, window).await, keys[..51]);
        assert!(store.listed_count() < 120, "listed {} objects", store.listed_count());
        let unknown = PageWindow { latest: None, ..window };
        assert_eq!(list_newest(&bucket, &slot, unknown).await, keys[..51]);
    }

    #[tokio::test]
    async fn page_sorts_keys_without_a_time() {
        let (bucket, slot, _, _) = hourly_snapshots(SignedDuration::ZERO).await;
        for name in ["zero.dump", "0.dump"] {
            let key = format!("system/db/snapshots/{name}");
            bucket.put(&slot.sidecar(&key).unwrap(), "{}").await.unwrap();
        }
        let all = PageWindow { before: None, latest: None, limit: 3000 };
        let keys = list_newest(&bucket, &slot, all).await;
        assert_eq!(keys.len(), usize::try_from(TOTAL).unwrap() + 2);
        assert_eq!(
            (&*keys[0], &*keys[keys.len() - 1]),
            ("system/db/snapshots/zero.dump", "system/db/snapshots/0.dump")
        );
        // Keys without a time also work as cursors.
        let page_below = async |before: &str| {
            list_newest(&bucket, &slot, PageWindow { before: Some(before), latest: None, limit: 5 }).await
        };
        assert_eq!(page_below("system/db/snapshots/0.dump").await, Vec::<String>::new());
        assert_eq!(page_below("system/db/snapshots/0.dump~").await, ["system/db/snapshots/0.dump"]);
        assert_eq!(page_below("system/db/snapshots/2000-13-01.dump").await, ["system/db/snapshots/0.dump"]);
        assert_eq!(page_below("system/db/snapshots/zero.dump").await, keys[1..6]);
        assert_eq!(page_below("system/db/snapshots/2100-01-01T00-00-00.000Z-1.dump").await, keys[1..6]);
        assert!(keys.is_sorted_by(|a, b| a > b));
    }

    /// Returns a valid sidecar for a key, with some fields replaced.
    fn sidecar_json(key: &str, changes: &serde_json::Value) -> String {
        let mut sidecar = json!({"version": 1, "key": key, "sizeBytes": 4, "sha256": "ab".repeat(32), "pgVersion": "16",
            "machineId": uuid::Uuid::nil(), "epoch": 1, "takenAt": key::time_in(key).map(clock::rfc3339_ms),
            "verifiedAt": "2026-01-02T03:04:05.000Z", "roles": [], "tables": []});
        for (name, value) in changes.as_object().unwrap() {
            sidecar[name] = value.clone();
        }
        sidecar.to_string()
    }

    #[tokio::test]
    async fn page_skips_sidecars_that_do_not_match_their_key() {
        let bucket = Bucket::new(Arc::new(object_store::memory::InMemory::new()));
        let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
        let key_at = |second: u32| format!("system/db/snapshots/2026-11-24T03-04-0{second}.678Z-1.dump");
        for (second, changes) in [
            (0, json!({})),
            (1, json!({"epoch": 900})),
            (2, json!({"takenAt": "2026-11-25T03:04:02.678Z"})),
            (3, json!({"key": key_at(0)})),
            (4, json!({"sha256": "x".repeat(64)})),
            // Fields that a listing does not show are not parsed.
            (5, json!({"roles": "none"})),
        ] {
            let sidecar_path = slot.sidecar(&key_at(second)).unwrap();
            bucket.put(&sidecar_path, sidecar_json(&key_at(second), &changes)).await.unwrap();
        }
        // An outage session's policy for epoch 1 allows this name, which ends in epoch 900.
        let forged = "system/db/snapshots/2026-11-24T03-04-06.678Z-1.dumpZ-900.dump";
        let object = slot.snapshots().join("2026-11-24T03-04-06.678Z-1.dumpZ-900.dump.json");
        bucket.put(&object, sidecar_json(forged, &json!({"epoch": 900}))).await.unwrap();
        let all = PageWindow { before: None, latest: None, limit: 50 };
        let page = list_page(&bucket, &slot, all).await.unwrap();
        let keys: Vec<_> = page.snapshots.iter().map(|snapshot| snapshot.key.clone()).collect();
        assert_eq!(keys, [key_at(5), key_at(0)]);
        assert_eq!(read_listed_snapshot(&bucket, &slot, &key_at(1)).await.unwrap(), None);
        assert!(!list_keys(&bucket, &slot).await.unwrap().contains(&forged.to_owned()));
    }

    #[tokio::test]
    async fn load_refuses_sidecar_with_too_many_roles() {
        let bucket = Bucket::new(Arc::new(object_store::memory::InMemory::new()));
        let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
        let key = "system/db/snapshots/2026-11-24T03-04-05.678Z-1.dump";
        bucket.put(&slot.snapshot(key).unwrap(), "dump").await.unwrap();
        let facts = |count: usize| {
            json!({"database": {"owner": null, "sizeBytes": 1, "grants": null, "settings": [],
                "roles": vec![json!({}); count]}})
        };
        let max = snapshot::MAX_ROLES;
        for (changes, is_usable) in [
            (json!({"roles": vec![""; max]}), true),
            (json!({"roles": vec![""; max + 1]}), false),
            (facts(max), true),
            (facts(max + 1), false),
        ] {
            bucket.put(&slot.sidecar(key).unwrap(), sidecar_json(key, &changes)).await.unwrap();
            let read = snapshot::load(&bucket, &slot, key).await;
            assert_eq!(read.is_ok(), is_usable);
            assert!(
                read_listed_snapshot(&bucket, &slot, key).await.unwrap().is_some(),
                "a listing read the roles"
            );
        }
    }

    #[tokio::test]
    async fn write_sidecar_refuses_what_load_would_refuse() {
        let bucket = Bucket::new(Arc::new(object_store::memory::InMemory::new()));
        let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
        let facts = |roles: usize| {
            let roles = Some(vec![RoleFacts::default(); roles]);
            Some(DatabaseFacts { roles, ..DatabaseFacts::default() })
        };
        let tables = |count: usize| vec![TableCount { name: "public.t".to_owned(), rows: 1 }; count];
        let max = snapshot::MAX_ROLES;
        for (second, (is_accepted, roles, database, tables)) in (0..).zip([
            (true, max, None, Vec::new()),
            (false, max + 1, None, Vec::new()),
            (true, 0, facts(4_000), Vec::new()),
            (false, 0, facts(6_000), Vec::new()),
            (true, 0, None, tables(25_000)),
            (false, 0, None, tables(50_000)),
        ]) {
            let key = format!("system/db/snapshots/2026-11-24T03-04-0{second}.678Z-1.dump");
            let empty: Sidecar = serde_json::from_str(&sidecar_json(&key, &json!({}))).unwrap();
            let sidecar = Sidecar { roles: vec![String::new(); roles], database, tables, ..empty };
            bucket.put(&slot.snapshot(&key).unwrap(), "dump").await.unwrap();
            match snapshot::write_sidecar(&bucket, &slot, &sidecar, None).await {
                Ok(_) => assert_eq!(snapshot::load(&bucket, &slot, &key).await.unwrap(), sidecar),
                Err(error) => {
                    assert!(matches!(&error, StoreError::TooLarge { .. }), "{error}");
                    assert_eq!(read_listed_snapshot(&bucket, &slot, &key).await.unwrap(), None);
                    // The same sidecar, written without the check.
                    bucket.put_json(&slot.sidecar(&key).unwrap(), &sidecar).await.unwrap();
                }
            }
            assert_eq!(snapshot::load(&bucket, &slot, &key).await.is_ok(), is_accepted, "case {second}");
        }
    }
}
