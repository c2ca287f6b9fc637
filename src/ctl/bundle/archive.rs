//! Verifies a built archive against its `.sha256`, and uploads it.

use std::path::{Path as FilePath, PathBuf};

use bytes::Bytes;
use object_store::Error as ObjectError;
use object_store::buffered::BufWriter;
use object_store::path::Path;
use sha2::{Digest, Sha256};
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::PublishError;
use svc_machine::name::ImageVersion;
use svc_store::bucket::{Bucket, StoreError};
use svc_store::bundle::parse_digest;
use svc_store::key::{self, BUNDLE_FILE};

const CHUNK_BYTES: usize = 256 * 1024;

/// An archive that matched its `.sha256` when read.
pub struct Archive {
    path: PathBuf,
    pub sha256: String,
    pub size_bytes: u64,
}

impl Archive {
    /// Hashes the archive in `dir` and verifies it against its `.sha256`.
    ///
    /// # Errors
    /// [`PublishError::Read`] if a file can't be read; [`PublishError::NoDigest`] if the `.sha256` doesn't contain a
    /// digest; [`PublishError::DigestMismatch`] if the digests differ.
    pub async fn read(dir: &FilePath) -> Result<Self, PublishError> {
        let path = dir.join(BUNDLE_FILE);
        let sha256 = read_expected_digest(&dir.join(format!("{BUNDLE_FILE}.sha256"))).await?;
        let (found, size_bytes) = hash_and_copy(&path, None).await?;
        check_digest(&path, &found, &sha256)?;
        Ok(Self { path, sha256, size_bytes })
    }

    /// Uploads the archive, re-checking its digest in case the file has changed since it was read.
    ///
    /// # Errors
    /// [`PublishError::Read`] if the file can't be read; [`PublishError::DigestMismatch`] if it has changed;
    /// [`PublishError::Store`] if the store fails.
    pub async fn upload(&self, bucket: &Bucket, version: &ImageVersion) -> Result<(), PublishError> {
        let key = key::bundle(version, "");
        let mut sink = BufWriter::new(bucket.raw().clone(), key.clone());
        let result = match hash_and_copy(&self.path, Some((&mut sink, &key))).await {
            Ok((found, _)) => check_digest(&self.path, &found, &self.sha256),
            Err(error) => Err(error),
        };
        if let Err(error) = result {
            // Ignore a failed abort: the upload error is more useful.
            let _ = sink.abort().await;
            return Err(error);
        }
        // Uploads a small archive, or the last parts of a large one.
        sink.shutdown().await.map_err(|error| classify_io_error(&key, error))?;
        Ok(())
    }
}

/// Unwraps and classifies the store error in a [`BufWriter`] I/O error.
fn classify_io_error(key: &Path, error: std::io::Error) -> StoreError {
    let error = error
        .downcast::<ObjectError>()
        .unwrap_or_else(|error| ObjectError::Generic { store: "bundle", source: Box::new(error) });
    StoreError::classify(key, error)
}

async fn read_expected_digest(path: &FilePath) -> Result<String, PublishError> {
    let read = tokio::fs::read_to_string(path).await;
    let text = read.map_err(|source| PublishError::Read { path: path.to_owned(), source })?;
    parse_digest(&text).ok_or_else(|| PublishError::NoDigest { path: path.to_owned() })
}

/// Hashes a file, copying it to the sink if given, and returns its SHA-256 and size. Sink errors name the key.
async fn hash_and_copy(
    path: &FilePath,
    mut sink: Option<(&mut BufWriter, &Path)>,
) -> Result<(String, u64), PublishError> {
    let read_error = |source| PublishError::Read { path: path.to_owned(), source };
    let mut file = File::open(path).await.map_err(read_error)?;
    let (mut hasher, mut size) = (Sha256::new(), 0);
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let n = file.read(&mut chunk).await.map_err(read_error)?;
        if n == 0 {
            return Ok((hex::encode(hasher.finalize()), size));
        }
        hasher.update(&chunk[..n]);
        size += n as u64;
        if let Some((sink, key)) = &mut sink {
            let put = sink.put(Bytes::copy_from_slice(&chunk[..n])).await;
            put.map_err(|error| StoreError::classify(key, error))?;
        }
    }
}

fn check_digest(path: &FilePath, found: &str, expected: &str) -> Result<(), PublishError> {
    if found == expected {
        return Ok(());
    }
    let (found, expected) = (found.to_owned(), expected.to_owned());
    Err(PublishError::DigestMismatch { path: path.to_owned(), found, expected })
}
