//! Uploads a stream of unknown length in equal parts, with bounded memory. The object becomes visible only when the
//! upload is completed.
//!
//! [`Upload`] owns the parts; its caller must complete or abort it.

use std::time::Duration;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{MultipartUpload, ObjectMeta, PutPayload};
use tokio::task::JoinSet;

use super::bucket::{Bucket, StoreError};
use super::multipart::OpenUpload;
use svc_base::error_chain::format_chain;

/// Maximum number of parts in an S3 upload.
const MAX_PARTS: u64 = 10_000;
const MIB: u64 = 1 << 20;
/// Minimum size of an S3 part, except for the last.
const MIN_PART_BYTES: u64 = 5 * MIB;
/// Maximum memory for the parts in flight and the part being filled.
const MEMORY_BUDGET_BYTES: u64 = 20 * MIB;
const ABORT_TIMEOUT: Duration = Duration::from_secs(30);

/// The layout of an upload: all parts except the last have the same size, which some stores require.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartLayout {
    part_bytes: usize,
    /// Maximum number of parts in flight while the next one is filled.
    max_in_flight: usize,
}

impl PartLayout {
    /// Returns the layout for a stream of at most `bytes`. Parts grow for streams of more than 50 GB; memory stays
    /// within the budget up to 200 GB.
    pub fn for_max_bytes(bytes: u64) -> Self {
        let part_bytes = bytes.div_ceil(MAX_PARTS).div_ceil(MIB).max(MIN_PART_BYTES / MIB) * MIB;
        let max_in_flight = (MEMORY_BUDGET_BYTES / part_bytes).saturating_sub(1);
        Self {
            part_bytes: usize::try_from(part_bytes).unwrap_or(usize::MAX),
            max_in_flight: max_in_flight as usize,
        }
    }
}

/// The reason an upload failed.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the stream is longer than {MAX_PARTS} parts of {part_bytes} bytes")]
    TooLong { part_bytes: usize },
    #[error("the size of {key} in the object store is {found} bytes instead of {sent}")]
    WrongSize { key: String, sent: u64, found: u64 },
}

/// An upload in progress.
#[derive(Debug)]
pub struct Upload {
    key: Path,
    bucket: Bucket,
    open_upload: Option<OpenUpload>,
    inner: Box<dyn MultipartUpload>,
    layout: PartLayout,
    /// The chunks in the next part.
    buffer: Vec<Bytes>,
    buffered_bytes: usize,
    started_parts: u64,
    sent_bytes: u64,
    acknowledged_bytes: u64,
    /// Each task returns the size of its part.
    in_flight_parts: JoinSet<object_store::Result<u64>>,
}

impl Upload {
    /// Begins an upload of an object with this key.
    pub async fn begin(bucket: &Bucket, key: &Path, layout: PartLayout) -> Result<Self, StoreError> {
        let (inner, open_upload) =
            bucket.start_upload(key).await.map_err(|error| StoreError::classify(key, error))?;
        Ok(Self {
            open_upload,
            key: key.clone(),
            bucket: bucket.clone(),
            inner,
            layout,
            buffer: Vec::new(),
            buffered_bytes: 0,
            started_parts: 0,
            sent_bytes: 0,
            acknowledged_bytes: 0,
            in_flight_parts: JoinSet::new(),
        })
    }

    /// Returns the handle with which another process can abort the upload, if the store supports upload ids.
    pub fn open_upload(&self) -> Option<&OpenUpload> {
        self.open_upload.as_ref()
    }

    /// Returns the number of bytes that the store has acknowledged.
    pub fn acknowledged_bytes(&self) -> u64 {
        self.acknowledged_bytes
    }

    /// Returns the maximum number of bytes for the next [`Self::push`].
    pub fn part_space(&self) -> usize {
        self.layout.part_bytes - self.buffered_bytes
    }

    /// Adds at most [`Self::part_space`] bytes. When they complete a part, starts to send it, and waits while more
    /// parts are in flight than the memory budget allows.
    ///
    /// # Errors
    /// [`UploadError`] if this part or an earlier one could not be sent, or if the upload already has the maximum
    /// number of parts.
    ///
    /// # Panics
    /// If the chunk is larger than [`Self::part_space`].
    pub async fn push(&mut self, chunk: Bytes) -> Result<(), UploadError> {
        assert!(chunk.len() <= self.part_space(), "a chunk must fit in the current part");
        self.buffered_bytes += chunk.len();
        self.buffer.push(chunk);
        if self.buffered_bytes == self.layout.part_bytes {
            self.send_part()?;
            self.wait_for_parts(self.layout.max_in_flight).await?;
        }
        Ok(())
    }

    fn send_part(&mut self) -> Result<(), UploadError> {
        if self.started_parts == MAX_PARTS {
            return Err(UploadError::TooLong { part_bytes: self.layout.part_bytes });
        }
        self.started_parts += 1;
        let size = self.buffered_bytes as u64;
        self.sent_bytes += size;
        self.buffered_bytes = 0;
        let payload: PutPayload = std::mem::take(&mut self.buffer).into_iter().collect();
        let part = self.inner.put_part(payload);
        self.in_flight_parts.spawn(async move { part.await.map(|()| size) });
        Ok(())
    }

    /// Waits until at most `max_in_flight` parts are in flight.
    async fn wait_for_parts(&mut self, max_in_flight: usize) -> Result<(), StoreError> {
        while self.in_flight_parts.len() > max_in_flight {
            let Some(joined) = self.in_flight_parts.join_next().await else { break };
            // Propagate a panic from the store's client.
            let result = joined.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
            self.acknowledged_bytes += result.map_err(|error| StoreError::classify(&self.key, error))?;
        }
        Ok(())
    }

    /// Sends the last part and waits until the store has acknowledged all parts. The object is not visible yet.
    pub async fn flush(&mut self) -> Result<(), UploadError> {
        if self.buffered_bytes > 0 {
            self.send_part()?;
        }
        Ok(self.wait_for_parts(0).await?)
    }

    /// Completes the upload and checks the object's size, which also resolves a lost response. After an error, the
    /// upload may still be open, and the caller must abort it.
    pub async fn complete(&mut self) -> Result<ObjectMeta, UploadError> {
        self.flush().await?;
        let completed = self.inner.complete().await.map_err(|error| StoreError::classify(&self.key, error));
        let stored = self.bucket.head(&self.key).await;
        match (completed, stored) {
            (_, Ok(Some(meta))) if meta.size == self.sent_bytes => Ok(meta),
            (Ok(_), Ok(Some(meta))) => {
                let key = self.key.to_string();
                Err(UploadError::WrongSize { key, sent: self.sent_bytes, found: meta.size })
            }
            (Ok(_), Ok(None)) => Err(StoreError::NotFound { key: self.key.to_string() }.into()),
            (Ok(_), Err(error)) | (Err(error), _) => Err(error.into()),
        }
    }

    /// Aborts the upload, so that the store discards its parts, and returns whether that succeeded. Best effort:
    /// remaining parts are invisible, and [`Bucket::abort_upload`] can discard them later.
    pub async fn abort(mut self) -> bool {
        self.in_flight_parts.shutdown().await;
        match tokio::time::timeout(ABORT_TIMEOUT, self.inner.abort()).await {
            Ok(Ok(()) | Err(object_store::Error::NotFound { .. })) => return true,
            Ok(Err(error)) => {
                tracing::warn!(key = %self.key, error = %format_chain(&error), "cannot abort the upload; the store keeps its parts");
            }
            Err(_) => {
                tracing::warn!(key = %self.key, "timeout while aborting the upload; the store may keep its parts");
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn part_layout_stays_within_part_limit_and_memory_budget(bytes in 0u64..200_000_000_000) {
            let layout = PartLayout::for_max_bytes(bytes);
            prop_assert!(bytes.div_ceil(layout.part_bytes as u64) <= MAX_PARTS);
            prop_assert!(layout.part_bytes as u64 >= MIN_PART_BYTES);
            prop_assert!((layout.max_in_flight as u64 + 1) * layout.part_bytes as u64 <= MEMORY_BUDGET_BYTES);
        }
    }

    #[tokio::test]
    async fn object_is_visible_only_after_completion() {
        let bucket = Bucket::new(std::sync::Arc::new(object_store::memory::InMemory::new()));
        let key = Path::from("a/b.dump");
        let mut upload = Upload::begin(&bucket, &key, PartLayout::for_max_bytes(0)).await.unwrap();
        let content: Bytes = (0..12 * MIB).map(|n| (n % 251) as u8).collect::<Vec<u8>>().into();
        let mut rest = content.clone();
        while !rest.is_empty() {
            let size = upload.part_space().min(rest.len()).min(300_000);
            upload.push(rest.split_to(size)).await.unwrap();
        }
        upload.flush().await.unwrap();
        assert!(bucket.head(&key).await.unwrap().is_none());
        assert_eq!(upload.complete().await.unwrap().size, content.len() as u64);
        assert_eq!(bucket.get(&key, u64::MAX).await.unwrap().unwrap().value, content);
    }
}
