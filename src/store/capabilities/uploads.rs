//! Probes with multipart uploads.

use bytes::Bytes;
use object_store::path::Path;

use super::{ProbeOutcome, delete, temporary_key};
use crate::bucket::{Bucket, StoreError};
use crate::key::SNAPSHOTS_DIR;
use crate::upload::{PartLayout, Upload, UploadError};

/// Starts an upload and sends its content, without completing it.
async fn start_upload(bucket: &Bucket, key: &Path, content: &'static [u8]) -> Result<Upload, StoreError> {
    let mut upload = Upload::begin(bucket, key, PartLayout::for_max_bytes(0)).await?;
    let sending = async {
        upload.push(Bytes::from_static(content)).await?;
        upload.flush().await
    };
    match sending.await {
        Ok(()) => Ok(upload),
        Err(error) => {
            upload.abort().await;
            Err(to_store_error(key, error))
        }
    }
}

fn to_store_error(key: &Path, error: UploadError) -> StoreError {
    match error {
        UploadError::Store(error) => error,
        other => StoreError::corrupt(key, &other),
    }
}

pub(super) async fn probe_visibility(bucket: &Bucket) -> ProbeOutcome {
    let key = temporary_key("upload");
    let probe = async {
        let aborted = start_upload(bucket, &key, b"aborted").await?;
        if !aborted.abort().await {
            return Ok(Some("an upload could not be aborted".to_owned()));
        }
        let mut upload = start_upload(bucket, &key, b"whole").await?;
        let head = bucket.head(&key).await;
        if !matches!(head, Ok(None)) {
            upload.abort().await;
            return head.map(|_| Some("an upload was visible before it was completed".to_owned()));
        }
        if let Err(error) = upload.complete().await {
            upload.abort().await;
            return Err(to_store_error(&key, error));
        }
        let read = bucket.get(&key, 1024).await?.map(|read| read.value);
        Ok((read.as_deref() != Some(b"whole")).then(|| "it stored the wrong bytes".to_owned()))
    };
    let outcome = probe.await;
    delete(bucket, &key).await;
    outcome
}

/// The key looks like a snapshot's, because only snapshot uploads are completed conditionally.
pub(super) async fn probe_create_only_upload(bucket: &Bucket) -> ProbeOutcome {
    let key = temporary_key(&format!("{}/probe.dump", SNAPSHOTS_DIR.trim_matches('/')));
    let probe = async {
        bucket.put(&key, &b"first"[..]).await?;
        let mut second = start_upload(bucket, &key, b"the second").await?;
        let completed = second.complete().await;
        let deviation = match completed {
            Err(UploadError::Store(StoreError::Precondition { .. })) => None,
            Ok(_) => Some("it replaced an existing object".to_owned()),
            Err(error) => {
                second.abort().await;
                return Err(to_store_error(&key, error));
            }
        };
        if deviation.is_none() {
            second.abort().await;
        }
        Ok(deviation)
    };
    let outcome = probe.await;
    delete(bucket, &key).await;
    outcome
}

#[cfg(test)]
mod tests {
    use kit::s3::{Fault, FaultRule, S3Server};

    use super::*;
    use crate::config::StoreConfig;
    use svc_base::config::Env;

    #[tokio::test(flavor = "multi_thread")]
    async fn probe_aborts_its_upload_if_a_read_fails() {
        svc_http::tls::install_provider();
        let dir = tempfile::tempdir().unwrap();
        let server = S3Server::start(dir.path()).unwrap();
        server.create_bucket("probe");
        let pairs = server.env("probe");
        let mut env = Env::from_pairs(pairs.iter().map(|(name, value)| (&**name, &**value)));
        let config = StoreConfig::read(&mut env);
        let bucket = env.finish(config).unwrap().open().unwrap();
        let fault = server.add_fault(FaultRule::new(Fault::Status(400)).method("HEAD"));
        let error = probe_visibility(&bucket).await.unwrap_err();
        assert!(matches!(error, StoreError::Unavailable { .. }), "{error}");
        assert_eq!(fault.hits(), 1);
        assert_eq!(server.uploads("probe"), Vec::<String>::new());
    }
}
