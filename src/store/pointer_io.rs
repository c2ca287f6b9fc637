//! Reads and writes a pointer. A write claims the next `seq` in the log, then updates `latest`.
//!
//! Each `seq` is claimed by creating the object `pointer-log/<seq>.json`, which contains the whole pointer and must not
//! already exist. `latest` is written after it. Two writers therefore never both succeed, even on a store whose
//! `If-Match` is not atomic; the store needs to guarantee only that an object is created at most once. The highest
//! entry is authoritative (for the files pointer, the highest valid one); the next writer repairs a stale `latest`
//! and, for the files pointer, a corrupt or implausible one. A corrupt `latest` of the database's pointer must be
//! repaired by an operator (`pointer_repair`), because it may be wrong to restore from the log.
//!
//! Invariant: a `seq` is claimed only if `latest` has the previous one, so that a crash leaves at most one entry
//! ahead of `latest`. Entries are never deleted, except old ones of the files pointer (`files_pointer::trim_log`).

use std::time::Duration;

use futures_util::{StreamExt, stream};

use super::bucket::{Bucket, Condition, StoreError, Version, VersionedValue};
use super::key::{PointerPaths, SlotPrefix};
use super::pointer::{self, Fence, FencedError, PointedSnapshot, Pointer, SnapshotRef};
use super::pointer_log::{find_first_seq, find_newest_entry, list_entries};
use super::snapshot_with_sidecar::SnapshotWithSidecar;
use svc_machine::epoch::MAX_EPOCH;

/// Maximum number of corrupt log entries that are skipped.
const MAX_SKIPPED_ENTRIES: usize = 1000;
/// Maximum number of log entries that are read concurrently.
const MAX_CONCURRENT_READS: usize = 16;
/// Maximum number of attempts to write if other writers interfere.
const MAX_ATTEMPTS: u32 = 16;

/// The reason the pointer was not written.
#[derive(Debug, thiserror::Error)]
pub enum PointerError {
    #[error(transparent)]
    Fenced(#[from] FencedError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the pointer was changed by other writers {MAX_ATTEMPTS} times in a row")]
    TooManyConflicts,
}

/// The current pointer, and the state of the object `latest` when it was read.
#[derive(Debug, Clone)]
pub struct PointerRead<S = SnapshotRef> {
    pub value: Pointer<S>,
    latest: Option<LatestObject>,
}

#[derive(Debug, Clone)]
struct LatestObject {
    /// `None` if the object is corrupt or implausible.
    seq: Option<u64>,
    /// Whether `latest` equals the log entry with the same `seq`; also true if that entry is absent or corrupt, or was
    /// not read.
    matches_log: bool,
    version: Version,
}

impl<S> PointerRead<S> {
    /// Whether `latest` exists. If it was deleted, no snapshot is restored from the log.
    pub fn has_latest(&self) -> bool {
        self.latest.is_some()
    }

    /// Whether `latest` already contains the current pointer.
    pub(super) fn is_published(&self) -> bool {
        self.latest.as_ref().is_some_and(|latest| latest.matches_log && latest.seq == Some(self.value.seq))
    }

    /// Whether the log has an entry that is not in `latest` yet.
    fn is_ahead_of_latest(&self) -> bool {
        self.latest.as_ref().is_none_or(|latest| latest.seq < Some(self.value.seq))
    }

    /// Returns the condition that `latest` is unchanged.
    pub fn condition(&self) -> Condition {
        let version = self.latest.as_ref().map(|latest| latest.version.clone());
        version.map_or(Condition::Absent, Condition::Unchanged)
    }
}

/// Reads the database's current pointer; `None` if there is neither `latest` nor a log entry.
///
/// # Errors
/// [`StoreError`]; `Corrupt` if `latest` or the newest log entry is not valid JSON, has an unknown format, or has a
/// `seq` or fence above the maximum, or if the entry's `seq` is not the one in its name.
pub async fn read(bucket: &Bucket, slot: &SlotPrefix) -> Result<Option<PointerRead>, StoreError> {
    read_at(bucket, &slot.pointer_paths()).await
}

/// Like [`read`], for any pointer. With [`PointedSnapshot::REPAIRS_CORRUPT_LATEST`], returns the newest valid log entry
/// if `latest` is corrupt; if there is no entry, the fence is unknown, so the result is still `Corrupt`.
pub(super) async fn read_at<S: PointedSnapshot>(
    bucket: &Bucket,
    paths: &PointerPaths,
) -> Result<Option<PointerRead<S>>, StoreError> {
    let latest = match read_latest::<S>(bucket, paths).await {
        Ok(Some(latest)) => latest,
        Ok(None) => return read_log(bucket, paths, None).await,
        Err(error @ StoreError::Corrupt { .. }) if S::REPAIRS_CORRUPT_LATEST => {
            // The version is read before the log: if another writer has replaced the object since, its entry is found.
            let meta = bucket.head(&paths.latest).await?;
            let corrupt = meta.map(|meta| LatestObject {
                seq: None,
                matches_log: false,
                version: Version::from_meta(&meta),
            });
            let Some(read) = read_log::<S>(bucket, paths, corrupt).await? else { return Err(error) };
            tracing::warn!(%error, "a pointer is damaged; using the newest entry of its log");
            return Ok(Some(read));
        }
        Err(error) => return Err(error),
    };
    let seq = latest.value.seq;
    let newest = find_newest_entry(bucket, paths, seq).await?;
    if S::REPAIRS_CORRUPT_LATEST
        && newest.is_none()
        && let Some(read) = read_log_far_below(bucket, paths, &latest).await?
    {
        return Ok(Some(read));
    }
    let (value, matches_log) = match newest {
        None => (latest.value, true),
        // The log entry has the same ETag as `latest`, so the values are equal.
        Some((entry_seq, meta))
            if entry_seq == seq && meta.e_tag.is_some() && meta.e_tag.as_deref() == latest.version.etag() =>
        {
            (latest.value, true)
        }
        Some((entry_seq, _)) if entry_seq == seq => {
            match read_entry::<S>(bucket, paths, entry_seq).await {
                // An earlier write has skipped this entry.
                Err(StoreError::Corrupt { .. }) if S::REPAIRS_CORRUPT_LATEST => (latest.value, true),
                claimed => {
                    let claimed = claimed?;
                    let matches_log = claimed == latest.value;
                    (if matches_log { claimed } else { pointer::merge(&claimed, &latest.value) }, matches_log)
                }
            }
        }
        Some((entry_seq, _)) => {
            (read_entry_or_skip(bucket, paths, entry_seq, Some(&latest.value)).await?, true)
        }
    };
    let latest = LatestObject { seq: Some(seq), matches_log, version: latest.version };
    Ok(Some(PointerRead { value, latest: Some(latest) }))
}

async fn read_latest<S: PointedSnapshot>(
    bucket: &Bucket,
    paths: &PointerPaths,
) -> Result<Option<VersionedValue<Pointer<S>>>, StoreError> {
    let latest = bucket.get_json::<Pointer<S>>(&paths.latest).await?;
    if let Some(latest) = &latest {
        check_format(&paths.latest, &latest.value)?;
    }
    Ok(latest)
}

/// Reads the newest log entry if it is so far below `latest` that no writer can have claimed the `seq` of `latest`. Any
/// holder of the slot's store credentials can write such a `latest`.
async fn read_log_far_below<S: PointedSnapshot>(
    bucket: &Bucket,
    paths: &PointerPaths,
    latest: &VersionedValue<Pointer<S>>,
) -> Result<Option<PointerRead<S>>, StoreError> {
    let object = LatestObject { seq: None, matches_log: false, version: latest.version.clone() };
    let read = none_if_corrupt(read_log::<S>(bucket, paths, Some(object)).await)?.flatten();
    let is_far = |read: &PointerRead<S>| latest.value.seq - read.value.seq > pointer::MAX_SEQ_AHEAD;
    Ok(read.filter(|read| read.value.seq < latest.value.seq && is_far(read)))
}

/// Reads the newest log entry. Used if `latest` is absent, corrupt or implausible.
async fn read_log<S: PointedSnapshot>(
    bucket: &Bucket,
    paths: &PointerPaths,
    latest: Option<LatestObject>,
) -> Result<Option<PointerRead<S>>, StoreError> {
    let from = if S::HAS_TRIMMED_LOG { find_first_seq(bucket, paths).await? } else { 0 };
    let Some((seq, _)) = find_newest_entry(bucket, paths, from).await? else { return Ok(None) };
    Ok(Some(PointerRead { value: read_entry_or_skip(bucket, paths, seq, None).await?, latest }))
}

/// Reads a log entry. With [`PointedSnapshot::REPAIRS_CORRUPT_LATEST`], a corrupt one is skipped: the result is the
/// newest valid entry between `latest` and the skipped one, or else `latest`, with the skipped entry's `seq`, so that
/// the next write claims the `seq` after it. Any holder of the slot's store credentials can add corrupt entries.
async fn read_entry_or_skip<S: PointedSnapshot>(
    bucket: &Bucket,
    paths: &PointerPaths,
    seq: u64,
    latest: Option<&Pointer<S>>,
) -> Result<Pointer<S>, StoreError> {
    let error = match read_entry(bucket, paths, seq).await {
        Err(error @ StoreError::Corrupt { .. }) if S::REPAIRS_CORRUPT_LATEST => error,
        result => return result,
    };
    // More than one valid entry may be ahead of `latest`, for example if `latest` was restored from an old version.
    let first = latest.map_or(0, |latest| latest.seq.saturating_add(1));
    let seqs = list_entries(bucket, paths, first..seq).await?;
    // In a log that is too long to list, only the entries just below `seq` are tried.
    let seqs =
        seqs.unwrap_or_else(|| (seq.saturating_sub(MAX_SKIPPED_ENTRIES as u64).max(first)..seq).collect());
    let is_truncated = seqs.len() > MAX_SKIPPED_ENTRIES;
    let candidates = seqs.into_iter().rev().take(MAX_SKIPPED_ENTRIES);
    let reads = candidates.map(|candidate| read_entry(bucket, paths, candidate));
    let mut reads = stream::iter(reads).buffered(MAX_CONCURRENT_READS);
    while let Some(read) = reads.next().await {
        match read {
            Ok(entry) => return Ok(Pointer { seq, ..entry }),
            Err(StoreError::Corrupt { .. } | StoreError::NotFound { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    if is_truncated {
        return Err(error);
    }
    latest.map(|latest| Pointer { seq, ..latest.clone() }).ok_or(error)
}

pub(super) async fn read_entry<S: PointedSnapshot>(
    bucket: &Bucket,
    paths: &PointerPaths,
    seq: u64,
) -> Result<Pointer<S>, StoreError> {
    let key = paths.entry(seq);
    let read = bucket.get_json::<Pointer<S>>(&key).await?;
    let value = read.ok_or_else(|| StoreError::NotFound { key: key.to_string() })?.value;
    check_format(&key, &value)?;
    if value.seq != seq {
        let reason = format!("it contains seq {}", value.seq);
        return Err(StoreError::Corrupt { key: key.to_string(), reason });
    }
    Ok(value)
}

/// Reads only `latest`; `None` if it is absent, unreadable or has an unknown format.
pub(super) async fn try_read_latest(
    bucket: &Bucket,
    slot: &SlotPrefix,
) -> Result<Option<Pointer>, StoreError> {
    let latest = none_if_corrupt(bucket.get_json::<Pointer>(&slot.pointer()).await)?.flatten();
    Ok(latest.map(|read| read.value).filter(|pointer| pointer.version == pointer::FORMAT_VERSION))
}

/// Reads a log entry; `None` if it is unreadable.
pub(super) async fn try_read_entry(
    bucket: &Bucket,
    slot: &SlotPrefix,
    seq: u64,
) -> Result<Option<Pointer>, StoreError> {
    none_if_corrupt(read_entry(bucket, &slot.pointer_paths(), seq).await)
}

/// Converts `Corrupt` to `None`.
fn none_if_corrupt<T>(read: Result<T, StoreError>) -> Result<Option<T>, StoreError> {
    match read {
        Ok(value) => Ok(Some(value)),
        Err(StoreError::Corrupt { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

fn check_format<S>(key: &object_store::path::Path, pointer: &Pointer<S>) -> Result<(), StoreError> {
    let reason = if pointer.version != pointer::FORMAT_VERSION {
        format!(
            "it has format version {}; only version {} is supported",
            pointer.version,
            pointer::FORMAT_VERSION
        )
    } else if pointer.seq >= pointer::MAX_SEQ {
        format!("its seq {} is above the maximum", pointer.seq)
    } else if pointer.fence_epoch > MAX_EPOCH {
        format!("its fence {} is above the maximum epoch", pointer.fence_epoch)
    } else {
        return Ok(());
    };
    Err(StoreError::Corrupt { key: key.to_string(), reason })
}

/// Writes the fence. Succeeds if it has already been written.
///
/// # Errors
/// [`PointerError`]; `Fenced` if there is a fence for a higher epoch, or for another machine with the same epoch.
pub async fn fence(bucket: &Bucket, slot: &SlotPrefix, fence: &Fence) -> Result<(), PointerError> {
    write(bucket, &slot.pointer_paths(), |current| pointer::fence::<SnapshotRef>(current, fence)).await
}

/// Moves the pointer to a snapshot, on behalf of the machine that took it.
///
/// # Errors
/// [`PointerError`]; `Fenced` if that machine has been replaced, `TooManyConflicts` if other writers interfered in
/// every attempt.
pub async fn advance(
    bucket: &Bucket,
    slot: &SlotPrefix,
    snapshot: &SnapshotWithSidecar,
) -> Result<(), PointerError> {
    write(bucket, &slot.pointer_paths(), |current| pointer::advance(current, snapshot.snapshot_ref())).await
}

/// A write's retry state. One transient failure is tolerated, because the write may have succeeded: the next attempt
/// reads the current pointer. After a second failure, the first one is reported.
#[derive(Default)]
struct RetryState {
    retries: u32,
    failure: Option<StoreError>,
}

impl RetryState {
    /// Waits before the next attempt after a write that was rejected or failed: linear backoff with jitter.
    ///
    /// # Errors
    /// The error to report, if the failure is permanent or the second transient one.
    async fn back_off(&mut self, error: StoreError) -> Result<(), StoreError> {
        if !matches!(error, StoreError::Precondition { .. }) {
            if self.failure.is_some() || !error.is_transient() {
                return Err(self.first_failure_or(error));
            }
            self.failure = Some(error);
        }
        self.retries += 1;
        let jitter = u32::from(uuid::Uuid::new_v4().as_bytes()[0]) % 20;
        tokio::time::sleep(Duration::from_millis(u64::from(10 * self.retries + jitter))).await;
        Ok(())
    }

    fn first_failure_or(&mut self, last: StoreError) -> StoreError {
        self.failure.take().unwrap_or(last)
    }
}

/// Writes the pointer that `plan` derives from the current one. If `plan` returns `None`, only repairs `latest` and the
/// log, if necessary.
///
/// Each attempt reads the pointer and takes one step: it updates `latest` from the log, or claims the next `seq` and
/// then updates `latest`. If the response to our own claim was lost, `plan` finds nothing to do in a later attempt.
///
/// # Errors
/// [`PointerError`]; `Fenced` from `plan`, `TooManyConflicts` if other writers interfered in every attempt.
pub(super) async fn write<S: PointedSnapshot>(
    bucket: &Bucket,
    paths: &PointerPaths,
    plan: impl Fn(Option<&Pointer<S>>) -> Result<Option<Pointer<S>>, FencedError>,
) -> Result<(), PointerError> {
    let (mut retry_state, mut is_claimed) = (RetryState::default(), false);
    for _ in 0..MAX_ATTEMPTS {
        let current = read_at(bucket, paths).await.map_err(|error| retry_state.first_failure_or(error))?;
        let result = match current.as_ref().filter(|current| current.is_ahead_of_latest()) {
            Some(ahead) => publish(bucket, paths, &ahead.value, ahead.condition()).await,
            None if is_claimed => return Ok(()),
            None => {
                let Some(next) = plan_next(current.as_ref(), &plan)? else { return Ok(()) };
                if next.seq >= pointer::MAX_SEQ {
                    let reason =
                        "no seq remains; delete the objects of the pointer that have a very high seq"
                            .to_owned();
                    return Err(StoreError::Corrupt { key: paths.latest.to_string(), reason }.into());
                }
                let claimed = claim(bucket, paths, &next).await;
                is_claimed = claimed.is_ok();
                let condition = current.as_ref().map_or(Condition::Absent, PointerRead::condition);
                match claimed {
                    Ok(()) => publish(bucket, paths, &next, condition).await,
                    failed => failed,
                }
            }
        };
        if let Err(error) = result {
            retry_state.back_off(error).await?;
        }
    }
    Err(PointerError::TooManyConflicts)
}

/// Plans the pointer to write. A merged value is in no log entry yet, so it is written even if `plan` changes nothing.
fn plan_next<S: PointedSnapshot>(
    current: Option<&PointerRead<S>>,
    plan: impl Fn(Option<&Pointer<S>>) -> Result<Option<Pointer<S>>, FencedError>,
) -> Result<Option<Pointer<S>>, FencedError> {
    let planned = plan(current.map(|current| &current.value))?;
    let merged = current.filter(|current| !current.is_published());
    Ok(planned.or_else(|| merged.map(|read| Pointer { seq: read.value.seq + 1, ..read.value.clone() })))
}

async fn claim<S: PointedSnapshot>(
    bucket: &Bucket,
    paths: &PointerPaths,
    next: &Pointer<S>,
) -> Result<(), StoreError> {
    bucket.put_json_if(&paths.entry(next.seq), next, Condition::Absent).await
}

/// Writes the newest log entry to `latest`. The condition only keeps a later writer's value from being overwritten; if
/// the store does not honor it, the next attempt finds a stale `latest` and writes it again.
async fn publish<S: PointedSnapshot>(
    bucket: &Bucket,
    paths: &PointerPaths,
    value: &Pointer<S>,
    condition: Condition,
) -> Result<(), StoreError> {
    bucket.put_json_if(&paths.latest, value, condition).await
}
