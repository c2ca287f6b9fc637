//! Verifies a stored archive against the one being published.

use futures_util::TryStreamExt;
use object_store::{Error as ObjectError, GetOptions};
use sha2::{Digest, Sha256};

use super::companions::BundleContext;
use svc_store::bucket::{Bucket, StoreError};
use svc_store::key;

/// Whether the stored archive exists with the bundle's size and digest. Only downloads it if the size matches.
///
/// # Errors
/// If a store request fails.
pub async fn is_intact(bucket: &Bucket, bundle: &BundleContext<'_>) -> Result<bool, StoreError> {
    let key = key::bundle(bundle.version, "");
    let store_error = |error: ObjectError| StoreError::classify(&key, error);
    let has_expected_size = bucket.head(&key).await?.is_some_and(|meta| meta.size == bundle.size_bytes);
    if !has_expected_size {
        return Ok(false);
    }
    let stored = bucket.raw().get_opts(&key, GetOptions::default()).await.map_err(store_error)?;
    let mut chunks = stored.into_stream();
    let mut hasher = Sha256::new();
    while let Some(chunk) = chunks.try_next().await.map_err(store_error)? {
        hasher.update(&chunk);
    }
    Ok(hex::encode(hasher.finalize()) == bundle.sha256)
}
