//! Probes of uploads in parts.

use bytes::Bytes;
use object_store::path::Path;

use super::{Outcome, delete, temporary_key};
use crate::bucket::{Bucket, StoreError};
use crate::key::SNAPSHOTS;
use crate::upload::{PartLayout, Upload, UploadError};

async fn started(bucket: &Bucket, key: &Path, content: &'static [u8]) -> Result<Upload, StoreError> {
    let mut upload = Upload::begin(bucket, key, PartLayout::for_max_bytes(0)).await?;
    let sent = async {
        upload.push(Bytes::from_static(content)).await?;
        upload.flush().await
    };
    match sent.await {
        Ok(()) => Ok(upload),
        Err(error) => {
            upload.abort().await;
            Err(store_error(key, error))
        }
    }
}

fn store_error(key: &Path, error: UploadError) -> StoreError {
    match error {
        UploadError::Store(error) => error,
        other => StoreError::corrupt(key, &other),
    }
}

pub(super) async fn visible_when_completed(bucket: &Bucket) -> Outcome {
    let key = temporary_key("upload");
    let tried = async {
        let aborted = started(bucket, &key, b"aborted").await?;
        if !aborted.abort().await {
            return Ok(Some("it could not be aborted".to_owned()));
        }
        let mut upload = started(bucket, &key, b"whole").await?;
        if bucket.head(&key).await?.is_some() {
            upload.abort().await;
            return Ok(Some("it was visible before".to_owned()));
        }
        if let Err(error) = upload.complete().await {
            upload.abort().await;
            return Err(store_error(&key, error));
        }
        let read = bucket.get(&key, 1024).await?.map(|read| read.value);
        Ok((read.as_deref() != Some(b"whole")).then(|| "it stored other bytes".to_owned()))
    };
    let end = tried.await;
    delete(bucket, &key).await;
    end
}

/// Only uploads of snapshots are completed on condition, so the key looks like one.
pub(super) async fn created_once(bucket: &Bucket) -> Outcome {
    let key = temporary_key(&format!("{}/probe.dump", SNAPSHOTS.trim_matches('/')));
    let tried = async {
        bucket.put(&key, &b"first"[..]).await?;
        let mut second = started(bucket, &key, b"the second").await?;
        let completed = second.complete().await;
        let end = match completed {
            Err(UploadError::Store(StoreError::Precondition { .. })) => None,
            Ok(_) => Some("it replaced an existing object".to_owned()),
            Err(error) => {
                second.abort().await;
                return Err(store_error(&key, error));
            }
        };
        if end.is_none() {
            second.abort().await;
        }
        Ok(end)
    };
    let end = tried.await;
    delete(bucket, &key).await;
    end
}
