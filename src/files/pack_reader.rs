//! Reads packs from the store.

use std::ops::Range;
use std::time::{Duration, Instant};

use backon::{ExponentialBuilder, Retryable};
use bytes::Bytes;
use object_store::ObjectStoreExt;

use svc_base::error_chain::format_chain;
use svc_store::StoreError;

use crate::error::FilesError;
use crate::id::Id;
use crate::pack::{PackedBlob, header_and_footer_length, parse_header_at_end};
use crate::repository::{MAX_PACK_BYTES, REQUEST_TIMEOUT, Repository};

/// Backoff for pack reads during a store outage.
const OUTAGE_BACKOFF: ExponentialBuilder = ExponentialBuilder::new()
    .with_min_delay(Duration::from_millis(125))
    .with_max_delay(Duration::from_secs(5))
    .with_jitter()
    .without_max_times();

/// Size of the first read for a pack's header: enough for the entries of about 1,600 blobs.
const PACK_END_BYTES: u64 = if cfg!(test) { 512 } else { 64 << 10 };
/// Maximum length of a header read by [`Repository::read_pack_end`]: three times the longest header written by a save.
/// Packs written with a stolen key may have headers of any length.
const MAX_PACK_END_BYTES: u64 = if cfg!(test) { 4096 } else { 1 << 20 };

/// The end of a pack.
pub(crate) struct PackEnd {
    pack: Id,
    /// The size of the whole pack.
    size: u64,
    bytes: Bytes,
}

impl Repository {
    /// Reads the end of a pack, including its header unless that is longer than [`MAX_PACK_END_BYTES`]. Returns `None`
    /// if the pack doesn't exist.
    pub(crate) async fn read_pack_end(&self, pack: Id) -> Result<Option<PackEnd>, FilesError> {
        let Some(meta) = self.bucket.head(&self.pack_path(pack)).await? else { return Ok(None) };
        let end = PackEnd { pack, size: meta.size, bytes: Bytes::new() };
        let read = async {
            let end = self.extend_pack_end(end, PACK_END_BYTES).await?;
            match header_and_footer_length(&end.bytes) {
                Some(length) if length <= MAX_PACK_END_BYTES => self.extend_pack_end(end, length).await,
                _ => Ok(end),
            }
        };
        match read.await {
            Ok(end) => Ok(Some(end)),
            Err(FilesError::Store(StoreError::NotFound { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads the first `length` bytes of a pack, or the whole pack if it's shorter.
    pub(crate) async fn read_pack_start(&self, pack: Id, length: u64) -> Result<Bytes, FilesError> {
        let path = self.pack_path(pack);
        let meta = self.bucket.head(&path).await?;
        let size = meta.ok_or_else(|| StoreError::NotFound { key: path.to_string() })?.size;
        // The store rejects empty ranges.
        if size == 0 || length == 0 {
            return Ok(Bytes::new());
        }
        self.read_pack(pack, 0..length.min(size)).await
    }

    /// Parses a pack's header, first fetching it if it's longer than [`MAX_PACK_END_BYTES`]. Don't call this
    /// concurrently: such a header may take a lot of memory.
    ///
    /// # Errors
    /// [`FilesError::Corrupt`] if the header is invalid or doesn't cover the whole pack; a store error if the store
    /// fails.
    pub(crate) async fn parse_pack_end(&self, end: PackEnd) -> Result<Vec<PackedBlob>, FilesError> {
        let end = match header_and_footer_length(&end.bytes) {
            Some(length) if length <= end.size => self.extend_pack_end(end, length).await?,
            _ => end,
        };
        parse_header_at_end(&self.key, end.pack, &end.bytes, end.size)
    }

    /// Reads the last `length` bytes of a pack, or the whole pack if it's shorter, unless `end` already has them.
    async fn extend_pack_end(&self, end: PackEnd, length: u64) -> Result<PackEnd, FilesError> {
        let length = length.min(end.size);
        // The store rejects empty ranges.
        if length <= end.bytes.len() as u64 {
            return Ok(end);
        }
        let bytes = self.read_pack(end.pack, end.size - length..end.size).await?;
        Ok(PackEnd { bytes, ..end })
    }

    /// Retries each pack read for up to `timeout` while the store is unavailable, so that an outage doesn't abort an
    /// hours-long restore. By default, only the store client retries.
    pub fn with_outage_timeout(mut self, timeout: Duration) -> Self {
        self.outage_timeout = timeout;
        self
    }

    /// Reads a range of a pack.
    pub(crate) async fn read_pack(&self, id: Id, range: Range<u64>) -> Result<Bytes, FilesError> {
        let warn = |error: &FilesError, _| {
            tracing::warn!(error = %format_chain(error), "cannot read a pack of the file backup; retrying");
        };
        let start = Instant::now();
        let may_retry = |error: &FilesError| error.is_transient() && start.elapsed() < self.outage_timeout;
        (|| self.read_pack_once(id, range.clone())).retry(OUTAGE_BACKOFF).when(may_retry).notify(warn).await
    }

    async fn read_pack_once(&self, id: Id, range: Range<u64>) -> Result<Bytes, FilesError> {
        let path = self.pack_path(id);
        let expected = range.end.saturating_sub(range.start);
        if expected > MAX_PACK_BYTES {
            return Err(FilesError::corrupt(format!("pack {id}"), &"range exceeds the maximum pack size"));
        }
        let end = range.end;
        let read = async {
            let bytes = self.bucket.raw().get_range(&path, range).await;
            bytes.map_err(|error| StoreError::classify(&path, error))
        };
        let bytes = match self.bucket.run_with_timeout(&path, REQUEST_TIMEOUT, read).await {
            Ok(bytes) => bytes,
            Err(error @ StoreError::NotFound { .. }) => return Err(error.into()),
            Err(error) => {
                // The store rejects ranges beyond the end of a pack. That means the pack is truncated, so a retry would
                // fail too. The store also responds with 403 if the pack is missing and the credentials may list only
                // part of the bucket.
                let meta = self.bucket.head(&path).await;
                if let Ok(None) = meta {
                    return Err(StoreError::NotFound { key: path.to_string() }.into());
                }
                if meta.is_ok_and(|meta| meta.is_some_and(|meta| meta.size < end)) {
                    return Err(FilesError::corrupt(
                        format!("pack {id}"),
                        &"shorter than recorded in the index",
                    ));
                }
                return Err(error.into());
            }
        };
        if bytes.len() as u64 != expected {
            return Err(FilesError::corrupt(format!("pack {id}"), &"shorter than recorded in the index"));
        }
        Ok(bytes)
    }
}
