//! Storage usage of repositories.

use futures_util::TryStreamExt;
use jiff::Timestamp;
use object_store::path::Path;
use svc_store::{Bucket, StoreError};

use crate::error::FilesError;
use crate::repository::{REQUEST_TIMEOUT, for_each_object};

/// Object counts and sizes of a repository. Times are upload times by the store's clock.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoreUsage {
    pub snapshots: u64,
    pub oldest_snapshot: Option<Timestamp>,
    pub newest_snapshot: Option<Timestamp>,
    pub packs: u64,
    pub pack_bytes: u64,
    /// Total size of all objects, including the index, the snapshots and the files pointer.
    pub total_bytes: u64,
}

/// Returns whether the repository at `root` has any snapshots. Doesn't need the repository key.
///
/// # Errors
/// If the store fails.
pub async fn has_snapshots(bucket: &Bucket, root: &Path) -> Result<bool, FilesError> {
    let dir = root.clone().join("snapshots");
    let first = async {
        let first = bucket.raw().list(Some(&dir)).try_next().await;
        first.map_err(|error| StoreError::classify(&dir, error))
    };
    Ok(bucket.run_with_timeout(&dir, REQUEST_TIMEOUT, first).await?.is_some())
}

/// Lists the objects of the repository at `root` and adds up their sizes. Doesn't need the repository key.
///
/// # Errors
/// If the store fails.
pub async fn measure_usage(bucket: &Bucket, root: &Path) -> Result<StoreUsage, FilesError> {
    let mut usage = StoreUsage::default();
    for_each_object(bucket, root, |object| {
        usage.total_bytes += object.size;
        let mut names = object.location.prefix_match(root).into_iter().flatten();
        match names.next().as_ref().map(AsRef::as_ref) {
            Some("data") => {
                usage.packs += 1;
                usage.pack_bytes += object.size;
            }
            Some("snapshots") => {
                let uploaded_at = Timestamp::from_second(object.last_modified.timestamp()).ok();
                usage.snapshots += 1;
                usage.oldest_snapshot = usage.oldest_snapshot.into_iter().chain(uploaded_at).min();
                usage.newest_snapshot = usage.newest_snapshot.into_iter().chain(uploaded_at).max();
            }
            _ => {}
        }
    })
    .await?;
    Ok(usage)
}
