//! Re-reads a stored snapshot in full, checking its size and SHA-256 and running `pg_restore` over the whole dump.

use futures_util::StreamExt;
use object_store::{GetOptions, GetRange};
use sha2::{Digest, Sha256};

use super::dump_check::{DumpCheck, DumpCheckError};
use crate::system::backoff::Backoff;
use crate::system::postgres_tools::PgTools;
use svc_http::problem::format_chain;
use svc_store::key::SlotPrefix;
use svc_store::snapshot::Sidecar;
use svc_store::{Bucket, StoreError};

/// Errors from verifying a snapshot object.
#[derive(Debug, thiserror::Error)]
pub enum VerifyObjectError {
    /// The state of the snapshot is unknown.
    #[error("the object store could not be read")]
    Store(#[source] StoreError),
    #[error("{key} is missing from the object store")]
    Missing { key: String },
    #[error("{key} has {found} bytes instead of {expected}")]
    WrongSize { key: String, expected: u64, found: u64 },
    #[error("the SHA-256 of {key} does not match its sidecar")]
    WrongDigest { key: String },
    #[error(transparent)]
    Reader(#[from] DumpCheckError),
}

impl VerifyObjectError {
    /// Returns whether the snapshot is damaged. Otherwise, its state is unknown.
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Missing { .. } | Self::WrongSize { .. } | Self::WrongDigest { .. } => true,
            Self::Reader(error) => {
                matches!(error, DumpCheckError::Damaged { .. } | DumpCheckError::ReaderExited)
            }
            Self::Store(_) => false,
        }
    }
}

/// Verifies a snapshot by reading its object in full, resuming the read after transient errors with delays from
/// `backoff`.
pub async fn verify_object(
    bucket: &Bucket,
    slot: &SlotPrefix,
    tools: &PgTools,
    sidecar: &Sidecar,
    backoff: &mut Backoff,
) -> Result<(), VerifyObjectError> {
    let reader = DumpCheck::start(tools)?;
    let mut state = ReadState { length: 0, digest: Sha256::new() };
    while state.length < sidecar.size_bytes {
        let previous_length = state.length;
        match state.read_rest(bucket, slot, &reader, sidecar).await {
            Ok(()) => {}
            Err(VerifyObjectError::Store(error)) if error.is_transient() => {
                tracing::warn!(
                    error = %format_chain(&error), offset = state.length,
                    "read interrupted"
                );
                if state.length > previous_length {
                    backoff.record_progress();
                }
                backoff.pause().await.map_err(|_| VerifyObjectError::Store(error))?;
            }
            // `finish` returns the reason.
            Err(VerifyObjectError::Reader(DumpCheckError::ReaderExited)) => break,
            Err(error) => return Err(error),
        }
    }
    let dump_check = reader.finish().await;
    let is_complete = state.length == sidecar.size_bytes;
    if is_complete && hex::encode(state.digest.finalize()) != sidecar.sha256 {
        return Err(VerifyObjectError::WrongDigest { key: sidecar.key.clone() });
    }
    Ok(dump_check?)
}

/// Read progress across interruptions: the length and digest of the bytes so far.
struct ReadState {
    length: u64,
    digest: Sha256,
}

impl ReadState {
    /// Reads from the current position to the end of the object.
    async fn read_rest(
        &mut self,
        bucket: &Bucket,
        slot: &SlotPrefix,
        reader: &DumpCheck,
        sidecar: &Sidecar,
    ) -> Result<(), VerifyObjectError> {
        let missing = || VerifyObjectError::Missing { key: sidecar.key.clone() };
        let key = slot.snapshot(&sidecar.key).ok_or_else(missing)?;
        let failed = |error| match StoreError::classify(&key, error) {
            StoreError::NotFound { .. } => missing(),
            error => VerifyObjectError::Store(error),
        };
        let range = (self.length > 0).then_some(GetRange::Offset(self.length));
        let options = GetOptions { range, ..GetOptions::default() };
        let response = bucket.raw().get_opts(&key, options).await.map_err(failed)?;
        let wrong_size = |found| VerifyObjectError::WrongSize {
            key: sidecar.key.clone(),
            expected: sidecar.size_bytes,
            found,
        };
        if response.meta.size != sidecar.size_bytes {
            return Err(wrong_size(response.meta.size));
        }
        let mut stream = response.into_stream();
        while let Some(chunk) = stream.next().await {
            let chunk = chunk.map_err(failed)?;
            self.digest.update(&chunk);
            self.length += chunk.len() as u64;
            if self.length > sidecar.size_bytes {
                return Err(wrong_size(self.length));
            }
            reader.push(chunk).await?;
        }
        Ok(())
    }
}
