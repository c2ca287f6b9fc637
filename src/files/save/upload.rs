//! Uploads packs and writes their index files.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc;

use svc_base::failpoint;

use crate::error::FilesError;
use crate::id::Id;
use crate::index::{IndexFile, IndexedPack};
use crate::pack::FinishedPack;
use crate::repository::{ObjectKind, Repository};

/// Maximum number of in-flight packs, which are held in memory.
const MAX_CONCURRENT_UPLOADS: usize = 2;
/// Write an index file once its packs hold this many blobs or bytes, so that a failed save leaves reusable packs
/// behind.
const TARGET_INDEX_BLOBS: usize = 20_000;
const TARGET_INDEX_BYTES: u64 = 512 << 20;

/// Result of [`upload`].
#[derive(Default)]
pub(super) struct UploadResult {
    pub(super) bytes: u64,
    /// How long the packs take at the maximum rate: an upper bound on rate-limit waits.
    pub(super) throttled: Duration,
    pub(super) index_files: Vec<Id>,
}

/// Uploads packs until all senders are dropped.
///
/// # Errors
/// If the store fails. Packs that failed to upload aren't indexed.
pub(super) async fn upload(
    repository: &Repository,
    mut packs: mpsc::Receiver<FinishedPack>,
    limiter: &mut RateLimiter,
    max_bytes_per_second: Option<NonZeroU64>,
) -> Result<UploadResult, FilesError> {
    let mut uploads = FuturesUnordered::new();
    let mut index = PendingIndex::default();
    let mut uploaded = UploadResult::default();
    let mut is_open = true;
    while is_open || !uploads.is_empty() {
        tokio::select! {
            pack = packs.recv(), if is_open && uploads.len() < MAX_CONCURRENT_UPLOADS => match pack {
                Some(pack) => {
                    let duration = duration_at_rate(pack.bytes.len(), max_bytes_per_second);
                    let pause = limiter.admit(duration, Instant::now());
                    uploaded.throttled += duration;
                    uploads.push(upload_pack(repository, pack, pause));
                }
                None => is_open = false,
            },
            Some(pack) = uploads.next() => {
                let pack: FinishedPack = pack?;
                uploaded.bytes += pack.bytes.len() as u64;
                if index.add(pack) {
                    uploaded.index_files.extend(index.write(repository).await?);
                }
            }
        }
    }
    uploaded.index_files.extend(index.write(repository).await?);
    Ok(uploaded)
}

/// Limits the average upload rate across saves. The caller passes in the current time.
#[derive(Default)]
pub(super) struct RateLimiter {
    /// When all admitted bytes will have been uploaded at the maximum rate. `None` before the first pack.
    free_at: Option<Instant>,
}

impl RateLimiter {
    /// Returns how long to wait before uploading a pack that takes `duration` at the maximum rate: until all admitted
    /// packs, including this one, could have been uploaded at that rate. Without including this one, every small save
    /// would exceed the limit.
    fn admit(&mut self, duration: Duration, now: Instant) -> Duration {
        if duration.is_zero() {
            return Duration::ZERO;
        }
        let free_at = self.free_at.map_or(now, |free_at| free_at.max(now)) + duration;
        self.free_at = Some(free_at);
        free_at.duration_since(now)
    }
}

/// Returns how long an upload takes at this rate, or zero without a limit.
fn duration_at_rate(bytes: usize, max_bytes_per_second: Option<NonZeroU64>) -> Duration {
    max_bytes_per_second
        .map_or(Duration::ZERO, |rate| Duration::from_secs_f64(bytes as f64 / rate.get() as f64))
}

async fn upload_pack(
    repository: &Repository,
    pack: FinishedPack,
    pause: Duration,
) -> Result<FinishedPack, FilesError> {
    tokio::time::sleep(pause).await;
    failpoint::trigger("files.save.pack")?;
    repository.write_pack(&pack).await?;
    Ok(pack)
}

/// Uploaded packs not yet in an index file.
#[derive(Default)]
struct PendingIndex {
    file: IndexFile,
    blobs: usize,
    bytes: u64,
}

impl PendingIndex {
    /// Adds an uploaded pack. Returns whether an index file is due.
    fn add(&mut self, pack: FinishedPack) -> bool {
        self.blobs += pack.blobs.len();
        self.bytes += pack.bytes.len() as u64;
        self.file.packs.push(IndexedPack::from(pack));
        self.blobs >= TARGET_INDEX_BLOBS || self.bytes >= TARGET_INDEX_BYTES
    }

    /// Writes an index file if any packs are pending.
    async fn write(&mut self, repository: &Repository) -> Result<Option<Id>, FilesError> {
        if self.blobs == 0 {
            return Ok(None);
        }
        failpoint::trigger("files.save.index")?;
        let Self { file, .. } = std::mem::take(self);
        Ok(Some(repository.write_json(ObjectKind::Index, &file).await?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_limit_applies_across_saves_without_credit_for_idle_time() {
        let start = Instant::now();
        let after = |seconds: u64| start + Duration::from_secs(seconds);
        let seconds = Duration::from_secs;
        let mut limiter = RateLimiter::default();
        assert_eq!(limiter.admit(seconds(2), start), seconds(2), "the first pack waits, too");
        assert_eq!(limiter.admit(seconds(1), start), seconds(3));
        assert_eq!(limiter.admit(seconds(1), after(1)), seconds(3), "2 s of uploads are pending");
        assert_eq!(limiter.admit(seconds(5), after(100)), seconds(5), "idle time gives no credit");
        assert_eq!(limiter.admit(Duration::ZERO, after(100)), Duration::ZERO, "there is no limit");
        assert_eq!(duration_at_rate(5000, NonZeroU64::new(1000)), seconds(5));
        assert_eq!(duration_at_rate(5000, None), Duration::ZERO);
    }
}
