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
use crate::repository::{MAX_PACK_BYTES, REQUEST_TIMEOUT, Repository};

/// Delays between the attempts to read a pack during an outage of the store.
const OUTAGE_BACKOFF: ExponentialBuilder = ExponentialBuilder::new()
    .with_min_delay(Duration::from_millis(125))
    .with_max_delay(Duration::from_secs(5))
    .with_jitter()
    .without_max_times();

impl Repository {
    /// Retries each read of a pack for `timeout` while the store is unavailable, so that an outage does not abort a
    /// restore that takes hours. By default, only the store's client retries.
    pub fn with_outage_timeout(mut self, timeout: Duration) -> Self {
        self.outage_timeout = timeout;
        self
    }

    /// Reads a range of a pack.
    pub(crate) async fn read_pack(&self, id: Id, range: Range<u64>) -> Result<Bytes, FilesError> {
        let warn = |error: &FilesError, _| {
            tracing::warn!(error = %format_chain(error), "cannot read the file backup; retrying");
        };
        let began = Instant::now();
        let may_retry = |error: &FilesError| error.is_transient() && began.elapsed() < self.outage_timeout;
        (|| self.read_pack_once(id, range.clone())).retry(OUTAGE_BACKOFF).when(may_retry).notify(warn).await
    }

    async fn read_pack_once(&self, id: Id, range: Range<u64>) -> Result<Bytes, FilesError> {
        let path = self.pack_path(id);
        let expected = range.end.saturating_sub(range.start);
        if expected > MAX_PACK_BYTES {
            return Err(FilesError::corrupt(format!("pack {id}"), &"its size in the index is implausible"));
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
                // The store rejects a range beyond the end of the pack. Such a pack is damaged; a retry would fail too.
                let head = async {
                    let meta = self.bucket.raw().head(&path).await;
                    meta.map_err(|error| StoreError::classify(&path, error))
                };
                let meta = self.bucket.run_with_timeout(&path, REQUEST_TIMEOUT, head).await;
                if meta.is_ok_and(|meta| meta.size < end) {
                    return Err(FilesError::corrupt(
                        format!("pack {id}"),
                        &"it is shorter than the index says",
                    ));
                }
                return Err(error.into());
            }
        };
        if bytes.len() as u64 != expected {
            return Err(FilesError::corrupt(format!("pack {id}"), &"it is shorter than the index says"));
        }
        Ok(bytes)
    }
}
