//! Multipart uploads. A completed upload consists of its parts' blobs: nothing is copied.
//!
//! R2's stricter rules are enforced: all parts except the last have the same size, of at least 5 MiB, and the last part
//! is not larger.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use s3s::dto::*;
use s3s::{S3Request, S3Result, s3_error};

use super::attributes::Attributes;
use super::blob::{Blob, Body, ReceivedBlob};
use super::checksum::ProvidedChecksums;
use super::condition::WriteCondition;
use super::store::{Bucket, Object, Store, content_etag};

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
    pub(super) fn new(received: &ReceivedBlob) -> Self {
        Self {
            body: Body::new(vec![Arc::clone(&received.blob)]),
            etag: content_etag(&received.sha256),
            blob: Arc::clone(&received.blob),
            sha256: received.sha256,
            modified: SystemTime::now(),
        }
    }
}

impl Store {
    pub(super) async fn upload_part(
        &self,
        request: S3Request<UploadPartInput>,
    ) -> S3Result<UploadPartOutput> {
        let checksums = ProvidedChecksums::from_request(&request);
        let input = request.input;
        if !(1..=10_000).contains(&input.part_number) {
            return Err(s3_error!(InvalidArgument, "part numbers must be 1 to 10000"));
        }
        // Rejects an unknown upload before receiving the body.
        self.with_bucket(&input.bucket, |bucket| {
            bucket.find_upload(&input.key, &input.upload_id).map(|_| ())
        })?;
        let part = Part::new(&Blob::receive(self.dir(), input.body, &checksums).await?);
        let e_tag = Some(part.etag.clone());
        self.with_bucket(&input.bucket, |bucket| {
            bucket.find_upload(&input.key, &input.upload_id)?.parts.insert(input.part_number, part);
            Ok(())
        })?;
        Ok(UploadPartOutput { e_tag, ..UploadPartOutput::default() })
    }

    pub(super) fn complete_multipart(
        &self,
        input: CompleteMultipartUploadInput,
    ) -> S3Result<CompleteMultipartUploadOutput> {
        let parts = input.multipart_upload.and_then(|upload| upload.parts).unwrap_or_default();
        let condition = WriteCondition { if_match: input.if_match, if_none_match: input.if_none_match };
        let etag = self.with_bucket(&input.bucket, |bucket| {
            bucket.complete_upload(&input.key, &input.upload_id, &parts, &condition)
        })?;
        Ok(CompleteMultipartUploadOutput {
            e_tag: Some(etag),
            bucket: Some(input.bucket),
            key: Some(input.key),
            ..CompleteMultipartUploadOutput::default()
        })
    }

    pub(super) fn list_uploads(
        &self,
        input: ListMultipartUploadsInput,
    ) -> S3Result<ListMultipartUploadsOutput> {
        let prefix = input.prefix.clone().unwrap_or_default();
        let mut uploads = self.with_bucket(&input.bucket, |bucket| {
            let uploads = bucket.uploads.iter().filter(|(_, upload)| upload.key.starts_with(&prefix));
            let uploads = uploads.map(|(id, upload)| MultipartUpload {
                key: Some(upload.key.clone()),
                upload_id: Some(id.clone()),
                initiated: Some(upload.initiated.into()),
                ..MultipartUpload::default()
            });
            Ok(uploads.collect::<Vec<_>>())
        })?;
        uploads.sort_by(|a, b| (&a.key, &a.initiated).cmp(&(&b.key, &b.initiated)));
        Ok(ListMultipartUploadsOutput {
            uploads: Some(uploads),
            bucket: Some(input.bucket),
            prefix: input.prefix,
            is_truncated: Some(false),
            ..ListMultipartUploadsOutput::default()
        })
    }

    pub(super) fn list_parts(&self, input: ListPartsInput) -> S3Result<ListPartsOutput> {
        let parts = self.with_bucket(&input.bucket, |bucket| {
            let parts = bucket.find_upload(&input.key, &input.upload_id)?.parts.iter();
            let parts = parts.map(|(number, part)| s3s::dto::Part {
                part_number: Some(*number),
                e_tag: Some(part.etag.clone()),
                size: i64::try_from(part.body.len()).ok(),
                last_modified: Some(part.modified.into()),
                ..s3s::dto::Part::default()
            });
            Ok(parts.collect::<Vec<_>>())
        })?;
        Ok(ListPartsOutput {
            parts: Some(parts),
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(input.upload_id),
            is_truncated: Some(false),
            ..ListPartsOutput::default()
        })
    }
}

impl Bucket {
    pub(super) fn create_upload(&mut self, key: String, attributes: Attributes) -> String {
        let id = uuid::Uuid::new_v4().simple().to_string();
        let upload = Upload { key, initiated: SystemTime::now(), attributes, parts: BTreeMap::new() };
        self.uploads.insert(id.clone(), upload);
        id
    }

    pub(super) fn find_upload(&mut self, key: &str, id: &str) -> S3Result<&mut Upload> {
        self.uploads.get_mut(id).filter(|upload| upload.key == key).ok_or_else(|| s3_error!(NoSuchUpload))
    }

    pub(super) fn abort_upload(&mut self, key: &str, id: &str) -> S3Result<()> {
        self.find_upload(key, id)?;
        self.uploads.remove(id);
        Ok(())
    }

    /// Creates the object from the given parts. If this fails, the upload is unchanged: it can be aborted, or its
    /// completion retried.
    pub(super) fn complete_upload(
        &mut self,
        key: &str,
        id: &str,
        completed: &[CompletedPart],
        condition: &WriteCondition,
    ) -> S3Result<ETag> {
        let upload = self.find_upload(key, id)?;
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
        let part = part.filter(matches_etag).ok_or_else(|| {
            s3_error!(InvalidPart, "part {number} was not uploaded or has a different ETag")
        })?;
        parts.push(part.clone());
    }
    let Some((_, all_but_last)) = parts.split_last() else {
        return Err(s3_error!(MalformedXML, "an upload needs at least one part"));
    };
    let part_bytes = all_but_last.first().map_or(MIN_PART_BYTES, |part| part.body.len());
    if part_bytes < MIN_PART_BYTES {
        return Err(s3_error!(
            EntityTooSmall,
            "a part before the last has {part_bytes} bytes; the minimum is {MIN_PART_BYTES}"
        ));
    }
    if all_but_last.iter().any(|part| part.body.len() != part_bytes)
        || parts.last().is_some_and(|last| last.body.len() > part_bytes && parts.len() > 1)
    {
        return Err(s3_error!(
            InvalidPart,
            "all parts except the last must have the same size, and the last must not be larger"
        ));
    }
    Ok(parts)
}
