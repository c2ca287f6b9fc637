//! Multipart uploads. A completed upload consists of its parts' blobs: nothing is copied.
//!
//! R2's stricter rules are enforced: all parts except the last have the same size, of at least 5 MiB.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use s3s::dto::{CompletedPart, ETag};
use s3s::{S3Result, s3_error};

use super::attributes::Attributes;
use super::blob::{Blob, Body, ReceivedUpload};
use super::condition::WriteCondition;
use super::store::{Bucket, Object, content_tag};

const MIN_PART_BYTES: u64 = 5 * 1024 * 1024;

#[derive(Debug)]
pub(super) struct Upload {
    pub(super) key: String,
    pub(super) initiated: SystemTime,
    attributes: Attributes,
    pub(super) parts: BTreeMap<i32, Part>,
}

#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) body: Body,
    pub(super) etag: ETag,
    blob: Arc<Blob>,
    sha256: [u8; 32],
    pub(super) modified: SystemTime,
}

impl Part {
    pub(super) fn new(received: &ReceivedUpload) -> Self {
        Self {
            body: Body::new(vec![Arc::clone(&received.blob)]),
            etag: content_tag(&received.sha256),
            blob: Arc::clone(&received.blob),
            sha256: received.sha256,
            modified: SystemTime::now(),
        }
    }
}

impl Bucket {
    pub(super) fn create_upload(&mut self, key: String, attributes: Attributes) -> String {
        let id = uuid::Uuid::new_v4().simple().to_string();
        let upload = Upload { key, initiated: SystemTime::now(), attributes, parts: BTreeMap::new() };
        self.uploads.insert(id.clone(), upload);
        id
    }

    pub(super) fn upload(&mut self, key: &str, id: &str) -> S3Result<&mut Upload> {
        self.uploads.get_mut(id).filter(|upload| upload.key == key).ok_or_else(|| s3_error!(NoSuchUpload))
    }

    pub(super) fn abort_upload(&mut self, key: &str, id: &str) -> S3Result<()> {
        self.upload(key, id)?;
        self.uploads.remove(id);
        Ok(())
    }

    /// Creates the object from the given parts. If this fails, the upload is unchanged and can be aborted or completed
    /// again.
    pub(super) fn complete_upload(
        &mut self,
        key: &str,
        id: &str,
        completed: &[CompletedPart],
        condition: &WriteCondition,
    ) -> S3Result<ETag> {
        let upload = self.upload(key, id)?;
        let parts = select_parts(upload, completed)?;
        let attributes = upload.attributes.clone();
        let mut digests = ring::digest::Context::new(&ring::digest::SHA256);
        for part in &parts {
            digests.update(&part.sha256);
        }
        let etag = ETag::Strong(format!("{}-{}", hex::encode(&digests.finish().as_ref()[..16]), parts.len()));
        let body = Body::new(parts.into_iter().map(|part| part.blob).collect());
        let object = Object { body, etag: etag.clone(), modified: SystemTime::now(), attributes };
        self.put(key, Arc::new(object), condition)?;
        self.uploads.remove(id);
        Ok(etag)
    }
}

fn select_parts(upload: &Upload, completed: &[CompletedPart]) -> S3Result<Vec<Part>> {
    let mut parts: Vec<Part> = Vec::with_capacity(completed.len());
    let mut last_number = 0;
    for entry in completed {
        let number = entry.part_number.unwrap_or_default();
        if number <= last_number {
            return Err(s3_error!(InvalidPartOrder));
        }
        last_number = number;
        let part = upload.parts.get(&number);
        let matches_etag =
            |part: &&Part| entry.e_tag.as_ref().is_some_and(|etag| etag.strong_cmp(&part.etag));
        let part = part
            .filter(matches_etag)
            .ok_or_else(|| s3_error!(InvalidPart, "part {number} does not match its upload"))?;
        parts.push(part.clone());
    }
    let Some((_, all_but_last)) = parts.split_last() else {
        return Err(s3_error!(MalformedXML, "an upload needs at least one part"));
    };
    let first = all_but_last.first().map_or(MIN_PART_BYTES, |part| part.body.len());
    if first < MIN_PART_BYTES {
        return Err(s3_error!(
            EntityTooSmall,
            "a part before the last has {first} bytes; the minimum is {MIN_PART_BYTES}"
        ));
    }
    if all_but_last.iter().any(|part| part.body.len() != first)
        || parts.last().is_some_and(|l| l.body.len() > first && parts.len() > 1)
    {
        return Err(s3_error!(InvalidPart, "all parts except the last must have the same size"));
    }
    Ok(parts)
}
