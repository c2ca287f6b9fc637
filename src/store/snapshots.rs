//! All verified snapshots of a slot, by their side records: a page of them, the newest first.
//!
//! A dump without a side record was never verified to its end, and is not listed.

use std::collections::VecDeque;

use futures_util::{StreamExt, TryStreamExt, stream};
use jiff::{SignedDuration, Timestamp};
use object_store::ObjectStore;
use object_store::path::Path;

use super::bucket::{Bucket, StoreError};
use super::key::{self, SlotPrefix};
use super::snapshot::SideRecord;

const READ_AT_ONCE: usize = 8;
const SUFFIX: &str = ".json";
/// Backups are hourly: how far back a page reaches at first, for each snapshot and beyond them.
const HOURS_EACH: i64 = 1;
const HOURS_BEYOND: i64 = 2;
/// A page that is not full is continued further back, by this factor.
const REACH_FACTOR: i32 = 8;
/// Beyond this, the rest is read from the beginning.
const MAX_REACH: SignedDuration = SignedDuration::from_hours(10 * 366 * 24);

/// Side records in descending order of their keys, which is that of the times when they were taken.
pub struct Page {
    pub records: Vec<SideRecord>,
    /// The key after which the next page begins; `None` after the last.
    pub next: Option<String>,
}

/// Which snapshots a page has.
#[derive(Debug, Clone, Copy)]
pub struct Window<'a> {
    /// Only those older than this key.
    pub before: Option<&'a str>,
    /// When the latest snapshot was taken, where that is known, so that a slot that has stopped taking snapshots needs fewer
    /// listings.
    pub latest: Option<Timestamp>,
    pub limit: usize,
}

/// The newest snapshots of a window. Only the keys of about the time of the page are listed.
///
/// # Errors
/// [`StoreError`]; a side record that cannot be read as one is left out, and said in the log.
pub async fn page(bucket: &Bucket, slot: &SlotPrefix, window: Window<'_>) -> Result<Page, StoreError> {
    let limit = window.limit;
    let mut keys = newest_keys(bucket, slot, &window, limit + 1).await?;
    let more = keys.len() > limit;
    keys.truncate(limit);
    let next = keys.last().filter(|_| more).cloned();
    let records = stream::iter(keys)
        .map(|key| read(bucket, slot, key))
        .buffered(READ_AT_ONCE)
        .try_filter_map(async |record| Ok(record))
        .try_collect()
        .await?;
    Ok(Page { records, next })
}

/// The record of one snapshot, where it has one that can be read.
///
/// # Errors
/// [`StoreError`].
pub async fn one(bucket: &Bucket, slot: &SlotPrefix, key: &str) -> Result<Option<SideRecord>, StoreError> {
    read(bucket, slot, key.to_owned()).await
}

/// The newest keys of a window in descending order. A store lists keys in ascending order alone, so they are listed from a
/// time on, which lies further back until enough were found.
async fn newest_keys(
    bucket: &Bucket,
    slot: &SlotPrefix,
    window: &Window<'_>,
    count: usize,
) -> Result<Vec<String>, StoreError> {
    let hours = HOURS_EACH * i64::try_from(count).unwrap_or(i64::MAX / 2) + HOURS_BEYOND;
    let first_reach = SignedDuration::from_hours(hours);
    let mut reach = first_reach;
    let before = window.before.map(|key| (key, key::taken_at(key)));
    let mut from = before.and_then(|(_, at)| at).unwrap_or_else(Timestamp::now);
    // A key without a time says nothing of where to begin.
    let has_no_time = before.is_some_and(|(_, at)| at.is_none());
    let mut latest = window.latest.filter(|_| window.before.is_none());
    let mut end = window.before.and_then(|key| key.rsplit('/').next()).map(str::to_owned);
    let mut found = Vec::new();
    loop {
        let start = Some(reach).filter(|reach| *reach < MAX_REACH && !has_no_time);
        let start = start.and_then(|reach| from.checked_sub(reach).ok()).map(key::snapshot_name_at);
        let missing = count - found.len();
        found.extend(listed(bucket, slot, start.as_deref(), end.as_deref(), missing).await?);
        if found.len() >= count || start.is_none() {
            return Ok(found);
        }
        end = end.into_iter().chain(start).min();
        let older = latest.take().filter(|_| found.is_empty());
        match older.filter(|latest| Some(key::snapshot_name_at(*latest)) < end) {
            Some(latest) => (from, reach) = (latest, first_reach),
            None => reach *= REACH_FACTOR,
        }
    }
}

/// The last `count` keys whose names are above `start` and below `end`, in descending order.
async fn listed(
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
        let location = object.map_err(|error| StoreError::of(&prefix, error))?.location;
        if end.is_some_and(|end| name_in(&prefix, &location).is_some_and(|name| name >= end)) {
            break;
        }
        if let Some(key) = key_of(slot, &prefix, &location) {
            keys.push_back(key);
            if keys.len() > count {
                keys.pop_front();
            }
        }
    }
    Ok(keys.into_iter().rev().collect())
}

/// The key of the snapshot that a side record is of.
fn key_of(slot: &SlotPrefix, prefix: &Path, object: &Path) -> Option<String> {
    let name = name_in(prefix, object)?.strip_suffix(SUFFIX)?;
    Some(format!("system/db/snapshots/{name}")).filter(|key| slot.snapshot(key).is_some())
}

fn name_in<'a>(prefix: &Path, object: &'a Path) -> Option<&'a str> {
    object.as_ref().strip_prefix(prefix.as_ref())?.strip_prefix('/')
}

/// Keys as the pointer names them, of every dump that has a side record.
///
/// # Errors
/// [`StoreError`].
pub async fn keys(bucket: &Bucket, slot: &SlotPrefix) -> Result<Vec<String>, StoreError> {
    let prefix = slot.snapshots();
    let mut listing = bucket.raw().list(Some(&prefix));
    let mut keys = Vec::new();
    while let Some(object) = listing.next().await {
        let object = object.map_err(|error| StoreError::of(&prefix, error))?;
        keys.extend(key_of(slot, &prefix, &object.location));
    }
    Ok(keys)
}

async fn read(bucket: &Bucket, slot: &SlotPrefix, key: String) -> Result<Option<SideRecord>, StoreError> {
    let Some(path) = slot.side_record(&key) else { return Ok(None) };
    match bucket.get_json::<SideRecord>(&path).await {
        Ok(found) => Ok(found.map(|found| found.value).filter(|record| record.key == key)),
        Err(StoreError::Corrupt { key, why }) => {
            tracing::warn!(key, why, "a side record cannot be read");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::machine::epoch::Epoch;
    use crate::machine::name::Slot;
    use crate::store::lenient::{Ignored, Lenient};

    const TOTAL: i64 = 2000;

    /// A slot with a snapshot for each of [`TOTAL`] hours, the newest so long ago; with what counts the listed names.
    async fn hourly(newest_ago: SignedDuration) -> (Bucket, SlotPrefix, Arc<Lenient>, Vec<String>) {
        let store = Arc::new(Lenient::new(Ignored::Replace));
        let bucket = Bucket::new(store.clone());
        let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
        let newest = Timestamp::now() - newest_ago;
        let mut keys = Vec::new();
        for hour in 0..TOTAL {
            let key = key::snapshot_key(newest - SignedDuration::from_hours(hour), Epoch(1));
            bucket.put(&slot.snapshot(&key).unwrap(), "dump").await.unwrap();
            bucket.put(&slot.side_record(&key).unwrap(), "{}").await.unwrap();
            keys.push(key);
        }
        (bucket, slot, store, keys)
    }

    async fn newest(bucket: &Bucket, slot: &SlotPrefix, window: Window<'_>) -> Vec<String> {
        newest_keys(bucket, slot, &window, window.limit).await.unwrap()
    }

    #[tokio::test]
    async fn newest_keys_are_found_without_listing_the_others() {
        let (bucket, slot, store, keys) = hourly(SignedDuration::from_mins(5)).await;
        let first = Window { before: None, latest: None, limit: 51 };
        assert_eq!(newest(&bucket, &slot, first).await, keys[..51]);
        assert!(store.listed() < 120, "{} names", store.listed());
        // The page after a key in the middle, up to that key.
        let before = store.listed();
        let next = Window { before: Some(&keys[999]), latest: None, limit: 51 };
        assert_eq!(newest(&bucket, &slot, next).await, keys[1000..1051]);
        assert!(store.listed() - before < 120, "{} names", store.listed() - before);
        let last = Window { before: Some(&keys[1979]), latest: None, limit: 51 };
        assert_eq!(newest(&bucket, &slot, last).await, keys[1980..]);
    }

    #[tokio::test]
    async fn slot_that_takes_no_more_is_found_from_its_latest() {
        let ago = SignedDuration::from_hours(24 * 400);
        let (bucket, slot, store, keys) = hourly(ago).await;
        let latest = Some(key::taken_at(&keys[0]).unwrap());
        let window = Window { before: None, latest, limit: 51 };
        assert_eq!(newest(&bucket, &slot, window).await, keys[..51]);
        assert!(store.listed() < 120, "{} names", store.listed());
        let unknown = Window { latest: None, ..window };
        assert_eq!(newest(&bucket, &slot, unknown).await, keys[..51]);
    }

    #[tokio::test]
    async fn keys_without_a_time_are_listed_in_their_place() {
        let (bucket, slot, _, _) = hourly(SignedDuration::ZERO).await;
        for name in ["zero.dump", "0.dump"] {
            let key = format!("system/db/snapshots/{name}");
            bucket.put(&slot.side_record(&key).unwrap(), "{}").await.unwrap();
        }
        let all = Window { before: None, latest: None, limit: 3000 };
        let found = newest(&bucket, &slot, all).await;
        assert_eq!(found.len(), usize::try_from(TOTAL).unwrap() + 2);
        assert_eq!(
            (&*found[0], &*found[found.len() - 1]),
            ("system/db/snapshots/zero.dump", "system/db/snapshots/0.dump")
        );
        // As cursors, they bound the page as well.
        let below = async |before: &str| {
            newest(&bucket, &slot, Window { before: Some(before), latest: None, limit: 5 }).await
        };
        assert_eq!(below("system/db/snapshots/0.dump").await, Vec::<String>::new());
        assert_eq!(below("system/db/snapshots/0.dump~").await, ["system/db/snapshots/0.dump"]);
        assert_eq!(below("system/db/snapshots/2000-13-01.dump").await, ["system/db/snapshots/0.dump"]);
        assert_eq!(below("system/db/snapshots/zero.dump").await, found[1..6]);
        assert_eq!(below("system/db/snapshots/2100-01-01T00-00-00.000Z-1.dump").await, found[1..6]);
        assert!(found.is_sorted_by(|a, b| a > b));
    }
}
