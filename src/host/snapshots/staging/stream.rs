//! Streams the dump from the store straight into `pg_restore`, for disks too small to hold both the dump and the
//! database.
//!
//! Bytes are hashed in transit, so the SHA-256 is only known at the end. The caller drops the database after any error,
//! including a size or SHA-256 mismatch.

use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use object_store::{GetOptions, GetRange};
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, ChildStdin};

use super::RestoreContext;
use super::download::DownloadError;
use super::error::LoadError;
use crate::system::backoff::Backoff;
use crate::system::postgres_tools;
use svc_base::failpoint;
use svc_http::problem::format_chain;
use svc_store::StoreError;
use svc_store::pointer::SnapshotRef;

/// Maximum time for `pg_restore` to build indexes and exit, after the last byte.
pub const INDEX_BUILD_TIMEOUT: Duration = Duration::from_secs(6 * 3600);

/// Loads the dump into a database without writing it to disk.
///
/// # Errors
/// [`LoadError`]; `Download` if the store doesn't return the recorded dump.
pub async fn load(context: &RestoreContext, snapshot: &SnapshotRef, database: &str) -> Result<(), LoadError> {
    let mut command = context.tools.load_stream_command(&context.server, database);
    let mut child = command.spawn().map_err(LoadError::Tool)?;
    let stderr = tokio::spawn(postgres_tools::read_stderr_tail(child.stderr.take()));
    let mut transfer = Transfer { length: 0, digest: Sha256::new(), stdin: child.stdin.take() };
    let received = transfer.receive(context, snapshot, &mut child).await;
    transfer.stdin = None;
    if let Err(TransferError::Download(error)) = received {
        return Err(error.into());
    }
    let result = tokio::time::timeout(INDEX_BUILD_TIMEOUT, child.wait()).await;
    let exited = result.map_err(|_| LoadError::TimedOut { seconds: INDEX_BUILD_TIMEOUT.as_secs() })?;
    let status = exited.map_err(LoadError::Tool)?;
    if !status.success() {
        return Err(LoadError::Restore { status, stderr: stderr.await.unwrap_or_default() });
    }
    if hex::encode(transfer.digest.finalize()) != snapshot.sha256 {
        return Err(DownloadError::WrongDigest { key: snapshot.key.clone() }.into());
    }
    Ok(())
}

/// Reasons a transfer stops before the last byte.
enum TransferError {
    /// `pg_restore` failed; its exit status and stderr have the details.
    PgRestore,
    Download(DownloadError),
}

impl<E: Into<DownloadError>> From<E> for TransferError {
    fn from(error: E) -> Self {
        Self::Download(error.into())
    }
}

struct Transfer {
    length: u64,
    digest: Sha256,
    /// `None` once `pg_restore` has stopped reading. The remaining bytes are still hashed.
    stdin: Option<ChildStdin>,
}

impl Transfer {
    /// Receives the whole dump, resuming after interruptions.
    async fn receive(
        &mut self,
        context: &RestoreContext,
        snapshot: &SnapshotRef,
        child: &mut Child,
    ) -> Result<(), TransferError> {
        let mut backoff = Backoff::new(context.outage_timeout);
        while self.length < snapshot.size_bytes {
            let previous_length = self.length;
            match self.receive_rest(context, snapshot, child).await {
                Ok(()) => {}
                Err(TransferError::Download(DownloadError::Store(error))) if error.is_transient() => {
                    tracing::warn!(
                        error = %format_chain(&error), offset = self.length,
                        "the transfer was interrupted"
                    );
                    if self.length > previous_length {
                        backoff.record_progress();
                    }
                    backoff.pause().await.map_err(|_| DownloadError::Store(error))?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn receive_rest(
        &mut self,
        context: &RestoreContext,
        snapshot: &SnapshotRef,
        child: &mut Child,
    ) -> Result<(), TransferError> {
        let key = context.slot.snapshot(&snapshot.key).expect("the key has already been validated");
        let store_error = |error| DownloadError::Store(StoreError::classify(&key, error));
        let wrong_size = |found| DownloadError::WrongSize {
            key: snapshot.key.clone(),
            expected: snapshot.size_bytes,
            found,
        };
        let range = (self.length > 0).then_some(GetRange::Offset(self.length));
        let options = GetOptions { range, ..GetOptions::default() };
        let response = context.bucket.raw().get_opts(&key, options).await.map_err(store_error)?;
        if response.meta.size != snapshot.size_bytes {
            return Err(wrong_size(response.meta.size).into());
        }
        let mut stream = response.into_stream();
        while let Some(chunk) = stream.next().await {
            let chunk = chunk.map_err(store_error)?;
            self.digest.update(&chunk);
            self.length += chunk.len() as u64;
            failpoint::trigger("restore.downloading").map_err(DownloadError::from)?;
            if self.length > snapshot.size_bytes {
                return Err(wrong_size(self.length).into());
            }
            self.write_chunk(chunk, child).await?;
        }
        Ok(())
    }

    async fn write_chunk(&mut self, chunk: Bytes, child: &mut Child) -> Result<(), TransferError> {
        let Some(stdin) = &mut self.stdin else { return Ok(()) };
        if stdin.write_all(&chunk).await.is_ok() {
            return Ok(());
        }
        // `pg_restore` has closed its stdin: either it needs no more input or it failed.
        self.stdin = None;
        match tokio::time::timeout(INDEX_BUILD_TIMEOUT, child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            _ => Err(TransferError::PgRestore),
        }
    }
}
