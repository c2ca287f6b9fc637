//! Finds the newest entry in the pointer's log at a bounded cost.
//!
//! Any holder of the slot's store credentials can add any number of objects to the log, so it is never listed without a
//! limit. If a listing does not end within [`MAX_LISTED_NAMES`] names, single keys are probed: entries are consecutive
//! except for a few gaps, which come from old releases and rebuilt pointers.
//!
//! A result that is too low is safe: a `seq` with an existing entry cannot be claimed.

use std::ops::Range;

use futures_util::TryStreamExt;
use object_store::ObjectMeta;

use super::bucket::{Bucket, StoreError};
use super::key::PointerPaths;
use super::pointer::{MAX_SEQ, MAX_SEQ_AHEAD};

/// Maximum number of names that [`find_highest_listed`] reads. Under the protocol, at most one entry is ahead of
/// `latest`.
const MAX_LISTED_NAMES: usize = 64;
/// Maximum number of names that [`list_entries`] reads. The files pointer's log has a few thousand entries.
const MAX_LISTED_ENTRIES: usize = 20_000;
/// Maximum number of non-entry names to skip before the first entry, if the start of the log is unknown.
const MAX_SKIPPED_NAMES: usize = 10_000;
/// Maximum number of listings that [`find_newest_entry`] starts in a log with gaps.
const MAX_LISTINGS: u32 = 8;
/// Maximum number of names that a rebuild skips above the `seq` that it would claim: a hundred listing pages, or the
/// entries of more than ten years of hourly backups.
const MAX_REBUILD_SKIPPED_NAMES: usize = 100_000;

/// The `seq` of an existing entry, and its object's metadata.
type LogEntry = (u64, ObjectMeta);

/// Finds the highest log entry with a `seq` from `from` to [`MAX_SEQ_AHEAD`] above it; `None` if there is none. In a
/// log with many gaps or many other objects, the result may be too low or `None`.
pub(super) async fn find_newest_entry(
    bucket: &Bucket,
    paths: &PointerPaths,
    from: u64,
) -> Result<Option<LogEntry>, StoreError> {
    let limit = from.saturating_add(MAX_SEQ_AHEAD);
    let mut newest: Option<LogEntry> = None;
    for _ in 0..MAX_LISTINGS {
        let start = newest.as_ref().map_or(from, |(seq, _)| seq.saturating_add(1));
        let (found, is_complete) = find_highest_listed(bucket, paths, start, limit).await?;
        if is_complete {
            return Ok(found.or(newest));
        }
        let first = match found.or_else(|| newest.clone()) {
            Some(first) => Some(first),
            None => match head_entry(bucket, paths, start).await? {
                None if start == 0 => find_first_listed(bucket, paths, limit).await?,
                head => head,
            },
        };
        let Some(first) = first else { return Ok(None) };
        let last = find_last_consecutive(bucket, paths, first, limit).await?;
        if newest.as_ref().is_some_and(|(seq, _)| *seq == last.0) {
            return Ok(Some(last));
        }
        newest = Some(last);
    }
    tracing::warn!(log = %paths.log, "the pointer's log has many gaps; a newer entry may exist");
    Ok(newest)
}

/// Lists the entries with a `seq` in a range, in ascending order; `None` if there are too many.
pub(super) async fn list_entries(
    bucket: &Bucket,
    paths: &PointerPaths,
    range: Range<u64>,
) -> Result<Option<Vec<u64>>, StoreError> {
    let log = &paths.log;
    let mut listing = match range.start.checked_sub(1) {
        Some(previous) => bucket.raw().list_with_offset(Some(log), &paths.entry(previous)),
        None => bucket.raw().list(Some(log)),
    };
    let mut seqs = Vec::new();
    for _ in 0..MAX_LISTED_ENTRIES {
        let next = listing.try_next().await.map_err(|error| StoreError::classify(log, error))?;
        let Some(meta) = next else { return Ok(Some(seqs)) };
        match paths.entry_seq(&meta.location) {
            Some(seq) if seq >= range.end => return Ok(Some(seqs)),
            seq => seqs.extend(seq.filter(|seq| range.contains(seq))),
        }
    }
    Ok(None)
}

/// Finds the lowest free number, at or above `seq`, such that a reader of a pointer with that number as its `seq` finds
/// no higher entry. Also returns the `seq` of the last entry that was skipped, if any. Any holder of the slot's store
/// credentials can add unreadable entries at any distance, and a pointer below one of them would be unreadable as well.
///
/// # Errors
/// [`StoreError`]; `Corrupt` if there are too many entries to skip, or no `seq` remains.
pub(super) async fn find_free_seq(
    bucket: &Bucket,
    paths: &PointerPaths,
    seq: u64,
) -> Result<(u64, Option<u64>), StoreError> {
    let (log, mut seq, mut skipped) = (&paths.log, seq, None);
    let corrupt =
        |reason: &str| StoreError::Corrupt { key: paths.log.to_string(), reason: reason.to_owned() };
    let offset = paths.entry(seq.saturating_sub(1));
    let mut listing = bucket.raw().list_with_offset(Some(log), &offset);
    let mut names = 0;
    while let Some(meta) = listing.try_next().await.map_err(|error| StoreError::classify(log, error))? {
        names += 1;
        if names > MAX_REBUILD_SKIPPED_NAMES {
            return Err(corrupt("it has too many entries above the pointer for a rebuild"));
        }
        let Some(entry_seq) = paths.entry_seq(&meta.location).filter(|entry| *entry >= seq) else { continue };
        if entry_seq > seq.saturating_add(MAX_SEQ_AHEAD) {
            break;
        }
        (seq, skipped) = (entry_seq + 1, Some(entry_seq));
    }
    if seq >= MAX_SEQ { Err(corrupt("no seq remains above its entries")) } else { Ok((seq, skipped)) }
}

/// Finds the highest entry among the first [`MAX_LISTED_NAMES`] names from `start`. Also returns whether the listing is
/// complete.
async fn find_highest_listed(
    bucket: &Bucket,
    paths: &PointerPaths,
    start: u64,
    limit: u64,
) -> Result<(Option<LogEntry>, bool), StoreError> {
    let log = &paths.log;
    let mut listing = match start.checked_sub(1) {
        Some(previous) => bucket.raw().list_with_offset(Some(log), &paths.entry(previous)),
        None => bucket.raw().list(Some(log)),
    };
    let mut newest: Option<LogEntry> = None;
    for _ in 0..MAX_LISTED_NAMES {
        let Some(meta) = listing.try_next().await.map_err(|error| StoreError::classify(log, error))? else {
            return Ok((newest, true));
        };
        let seq = paths.entry_seq(&meta.location).filter(|seq| (start..=limit).contains(seq));
        if let Some(seq) = seq.filter(|seq| newest.as_ref().is_none_or(|(newest, _)| newest < seq)) {
            newest = Some((seq, meta));
        }
    }
    Ok((newest, false))
}

/// Finds the first `seq` above 0 in a log whose old entries are deleted; 0 if there is none.
pub(super) async fn find_first_seq(bucket: &Bucket, paths: &PointerPaths) -> Result<u64, StoreError> {
    Ok(find_first_listed(bucket, paths, MAX_SEQ - 1).await?.map_or(0, |(seq, _)| seq))
}

/// Finds the first entry with a `seq` from 1 to `limit`. Skips at most [`MAX_SKIPPED_NAMES`] other names.
async fn find_first_listed(
    bucket: &Bucket,
    paths: &PointerPaths,
    limit: u64,
) -> Result<Option<LogEntry>, StoreError> {
    let log = &paths.log;
    let mut listing = bucket.raw().list_with_offset(Some(log), &paths.entry(0));
    for _ in 0..=MAX_SKIPPED_NAMES {
        let Some(meta) = listing.try_next().await.map_err(|error| StoreError::classify(log, error))? else {
            return Ok(None);
        };
        if let Some(seq) = paths.entry_seq(&meta.location).filter(|seq| *seq <= limit) {
            return Ok(Some((seq, meta)));
        }
    }
    tracing::warn!(%log, "the pointer's log begins with too many names that are not entries");
    Ok(None)
}

/// Finds the last of the consecutive entries that begin at `first`, by exponential and binary search. If there is a
/// gap, the result is an entry before or beyond it.
async fn find_last_consecutive(
    bucket: &Bucket,
    paths: &PointerPaths,
    first: LogEntry,
    limit: u64,
) -> Result<LogEntry, StoreError> {
    let (mut newest, mut step) = (first, 1);
    let mut missing = loop {
        let candidate = newest.0.saturating_add(step);
        if candidate > limit {
            break limit.saturating_add(1);
        }
        let Some(found) = head_entry(bucket, paths, candidate).await? else { break candidate };
        (newest, step) = (found, step * 2);
    };
    while missing - newest.0 > 1 {
        let middle = newest.0 + (missing - newest.0) / 2;
        match head_entry(bucket, paths, middle).await? {
            Some(found) => newest = found,
            None => missing = middle,
        }
    }
    Ok(newest)
}

async fn head_entry(bucket: &Bucket, paths: &PointerPaths, seq: u64) -> Result<Option<LogEntry>, StoreError> {
    Ok(bucket.head(&paths.entry(seq)).await?.map(|meta| (seq, meta)))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::path::Path;

    use super::*;
    use crate::key::SlotPrefix;
    use crate::lenient::{IgnoredCondition, LenientStore};
    use svc_machine::name::Slot;

    struct Log {
        store: Arc<LenientStore>,
        bucket: Bucket,
        slot: SlotPrefix,
    }

    impl Log {
        async fn with_entries(entries: impl IntoIterator<Item = u64>) -> Self {
            let store = Arc::new(LenientStore::new(IgnoredCondition::Replace));
            let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
            let log = Self { bucket: Bucket::new(store.clone()), store, slot };
            for seq in entries {
                log.put(&log.slot.pointer_entry(seq)).await;
            }
            log
        }

        async fn put(&self, key: &Path) {
            self.bucket.put(key, "{}").await.unwrap();
        }

        async fn find_newest(&self, from: u64) -> Option<u64> {
            find_newest_entry(&self.bucket, &self.slot.pointer_paths(), from)
                .await
                .unwrap()
                .map(|(seq, _)| seq)
        }
    }

    #[tokio::test]
    async fn find_newest_entry_returns_last_from_any_start() {
        let log = Log::with_entries(7..=3000).await;
        for from in [0, 1, 7, 8, 2000, 2937, 2999, 3000] {
            assert_eq!(log.find_newest(from).await, Some(3000), "{from}");
        }
        assert_eq!(log.find_newest(3001).await, None);
        assert_eq!(Log::with_entries([]).await.find_newest(0).await, None);
    }

    #[tokio::test]
    async fn find_newest_entry_returns_last_beyond_gaps() {
        let log = Log::with_entries((1..=500).chain(900..=1200).chain([1202, 1300])).await;
        for from in [0, 1, 400, 500, 501, 1200, 1300] {
            assert_eq!(log.find_newest(from).await, Some(1300), "{from}");
        }
    }

    #[tokio::test]
    async fn find_newest_entry_ignores_implausible_entries() {
        let log = Log::with_entries([5, 6, 7 + MAX_SEQ_AHEAD]).await;
        assert_eq!(log.find_newest(6).await, Some(6));
        assert_eq!(log.find_newest(7).await, Some(7 + MAX_SEQ_AHEAD));
    }

    #[tokio::test]
    async fn find_free_seq_skips_every_entry_that_a_reader_finds() {
        let far = 3 * MAX_SEQ_AHEAD;
        let log = Log::with_entries([1, 2, 3, 600_000, 1_500_000, far]).await;
        for (seq, expected) in [(1, 1_500_001), (4, 1_500_001), (600_000, 1_500_001), (1_500_001, 1_500_001)]
        {
            let (free, skipped) = find_free_seq(&log.bucket, &log.slot.pointer_paths(), seq).await.unwrap();
            assert_eq!((free, skipped), (expected, Some(1_500_000).filter(|_| seq != expected)), "{seq}");
            assert_eq!(log.find_newest(free).await, None, "{seq}");
        }
        // `far` was out of the reader's range above, and is now within it.
        let (free, _) =
            find_free_seq(&log.bucket, &log.slot.pointer_paths(), far - MAX_SEQ_AHEAD).await.unwrap();
        assert_eq!(free, far + 1);
        let last = Log::with_entries([MAX_SEQ - 1]).await;
        let error = find_free_seq(&last.bucket, &last.slot.pointer_paths(), MAX_SEQ - 2).await.unwrap_err();
        assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
    }

    #[tokio::test]
    async fn find_newest_entry_skips_names_before_the_first_entry() {
        let log = Log::with_entries(500..=700).await;
        let dir = log.slot.pointer_log();
        for n in 0..200 {
            log.put(&dir.clone().join(format!("-{n:07}"))).await;
            log.put(&dir.clone().join(format!("0000000000000001.json{n:07}"))).await;
        }
        assert_eq!(log.find_newest(0).await, Some(700));
    }

    #[tokio::test]
    async fn find_newest_entry_skips_other_names_at_low_cost() {
        let log = Log::with_entries(1..=10).await;
        let dir = log.slot.pointer_log();
        for n in 0..2000 {
            // Names that sort after all entries, and between entries 10 and 11.
            log.put(&dir.clone().join(format!("zz{n:07}"))).await;
            log.put(&dir.clone().join(format!("0000000000000010.json{n:07}"))).await;
        }
        for from in [0, 1, 9, 10] {
            let before = log.store.listed_count();
            assert_eq!(log.find_newest(from).await, Some(10), "{from}");
            let listed = log.store.listed_count() - before;
            assert!(listed <= 2 * MAX_LISTED_NAMES, "{from}: {listed}");
        }
        assert_eq!(log.find_newest(11).await, None);
        for seq in 11..=200 {
            log.put(&log.slot.pointer_entry(seq)).await;
        }
        for from in [0, 1, 10, 11, 200] {
            assert_eq!(log.find_newest(from).await, Some(200), "{from}");
        }
    }
}
