//! All verified snapshots of a slot, by their side records: a page of them, the newest first.
//!
//! A dump without a side record was never verified to its end, and is not listed.

use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::ObjectStore;

use super::bucket::{Bucket, StoreError};
use super::key::SlotPrefix;
use super::snapshot::SideRecord;

const READ_AT_ONCE: usize = 8;
const SUFFIX: &str = ".json";

/// Side records in descending order of their keys, which is that of the times when they were taken.
pub struct Page {
    pub records: Vec<SideRecord>,
    /// The key after which the next page begins; `None` after the last.
    pub next: Option<String>,
}

/// At most `limit` snapshots older than the key `before`.
///
/// # Errors
/// [`StoreError`]; a side record that cannot be read as one is left out, and said in the log.
pub async fn page(
    bucket: &Bucket,
    slot: &SlotPrefix,
    before: Option<&str>,
    limit: usize,
) -> Result<Page, StoreError> {
    let mut keys = keys(bucket, slot).await?;
    keys.sort_unstable_by(|a, b| b.cmp(a));
    let mut keys: Vec<String> =
        keys.into_iter().filter(|key| before.is_none_or(|before| &**key < before)).collect();
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
        let name = object.location.filename().and_then(|name| name.strip_suffix(SUFFIX));
        let key = name.map(|name| format!("system/db/snapshots/{name}"));
        keys.extend(key.filter(|key| slot.snapshot(key).is_some()));
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
