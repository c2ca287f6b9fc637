//! Multipart uploads with ids, so that another process can abort a killed process's upload.
//!
//! Stores without upload ids (directories and in-memory stores) are not covered: their uploads cannot be aborted by
//! another process.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{Error, MultipartId, MultipartUpload, PutPayload, PutResult, Result, UploadPart};
use serde::{Deserialize, Serialize};

/// A multipart upload that has been neither completed nor aborted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OpenUpload {
    /// The key of the object in the bucket.
    pub key: String,
    pub upload_id: String,
}

/// A store whose uploads have ids.
#[derive(Clone)]
pub(super) struct MultipartBackend(pub(super) Arc<dyn MultipartStore>);

impl fmt::Debug for MultipartBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MultipartBackend")
    }
}

impl MultipartBackend {
    pub(super) async fn start_upload(&self, key: &Path) -> Result<(Box<dyn MultipartUpload>, OpenUpload)> {
        let id = self.0.create_multipart(key).await?;
        let open = OpenUpload { key: key.to_string(), upload_id: id.clone() };
        let upload = UploadInProgress {
            store: self.clone(),
            key: key.clone(),
            id,
            started_parts: 0,
            uploaded_parts: Arc::default(),
        };
        Ok((Box::new(upload), open))
    }

    /// Aborts an upload. Also succeeds if the upload no longer exists because it was completed or aborted.
    pub(super) async fn abort_upload(&self, open: &OpenUpload) -> Result<()> {
        match self.0.abort_multipart(&Path::parse(&open.key)?, &open.upload_id).await {
            Err(Error::NotFound { .. }) => Ok(()),
            result => result,
        }
    }
}

/// Numbers the parts of an upload in progress, and collects their ids.
#[derive(Debug)]
struct UploadInProgress {
    store: MultipartBackend,
    key: Path,
    id: MultipartId,
    started_parts: usize,
    uploaded_parts: Arc<Mutex<BTreeMap<usize, PartId>>>,
}

#[async_trait]
impl MultipartUpload for UploadInProgress {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let index = self.started_parts;
        self.started_parts += 1;
        let (store, key, id) = (self.store.clone(), self.key.clone(), self.id.clone());
        let uploaded_parts = Arc::clone(&self.uploaded_parts);
        Box::pin(async move {
            let part = store.0.put_part(&key, &id, index, data).await?;
            uploaded_parts.lock().unwrap_or_else(PoisonError::into_inner).insert(index, part);
            Ok(())
        })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let parts: Vec<PartId> =
            self.uploaded_parts.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        if parts.len() < self.started_parts {
            let source = format!("only {} of {} parts were uploaded", parts.len(), self.started_parts).into();
            return Err(Error::Generic { store: "multipart", source });
        }
        self.store.0.complete_multipart(&self.key, &self.id, parts).await
    }

    async fn abort(&mut self) -> Result<()> {
        self.store.0.abort_multipart(&self.key, &self.id).await
    }
}
