//! S3 operations on objects and buckets, and the dispatch for all methods; s3s implements the protocol.

use std::sync::Arc;
use std::time::SystemTime;

use s3s::dto::*;
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};

use super::access::HideMissing;
use super::attributes::{attributes_of, object_output};
use super::blob::Blob;
use super::checksum::ProvidedChecksums;
use super::condition::{ReadCondition, WriteCondition, read_condition};
use super::store::{Object, Store};

pub(super) struct Service {
    pub(super) store: Arc<Store>,
}

/// Set on a request that must return the content that the last write replaced.
#[derive(Clone, Copy, Debug)]
pub(super) struct StaleRead;

type ServiceResult<T> = S3Result<S3Response<T>>;

fn respond<T>(output: T) -> ServiceResult<T> {
    Ok(S3Response::new(output))
}

#[async_trait::async_trait]
impl S3 for Service {
    async fn put_object(&self, request: S3Request<PutObjectInput>) -> ServiceResult<PutObjectOutput> {
        let checksums = ProvidedChecksums::from_request(&request);
        let input = request.input;
        // Checked before the body is read, so that a missing bucket is reported without transferring gigabytes.
        self.store.with_bucket(&input.bucket, |_| Ok(()))?;
        let attributes = attributes_of!(input);
        let condition = WriteCondition { if_match: input.if_match, if_none_match: input.if_none_match };
        let received = Blob::receive(self.store.dir(), input.body, &checksums).await?;
        let object = Arc::new(Object::from_blob(received.blob, &received.sha256, attributes));
        let e_tag = Some(object.etag.clone());
        self.store.with_bucket(&input.bucket, |bucket| bucket.put(&input.key, object, &condition))?;
        respond(PutObjectOutput { e_tag, ..PutObjectOutput::default() })
    }

    async fn get_object(&self, request: S3Request<GetObjectInput>) -> ServiceResult<GetObjectOutput> {
        let object = self.find_object(&request, &request.input.bucket, &request.input.key)?;
        let input = request.input;
        read_condition!(input).check(&object)?;
        let len = object.body.len();
        let range = input.range.map_or(Ok(0..len), |range| range.check(len))?;
        let content_range = input
            .range
            .is_some()
            .then(|| format!("bytes {}-{}/{len}", range.start, range.end.saturating_sub(1)));
        let status = content_range.as_ref().map(|_| http::StatusCode::PARTIAL_CONTENT);
        let output = GetObjectOutput {
            content_length: i64::try_from(range.end - range.start).ok(),
            body: Some(object.body.stream(range)),
            content_range,
            ..object_output!(GetObjectOutput, object)
        };
        let mut response = S3Response::new(output);
        response.status = status;
        Ok(response)
    }

    async fn head_object(&self, request: S3Request<HeadObjectInput>) -> ServiceResult<HeadObjectOutput> {
        let object = self.find_object(&request, &request.input.bucket, &request.input.key)?;
        let input = request.input;
        read_condition!(input).check(&object)?;
        respond(object_output!(HeadObjectOutput, object))
    }

    async fn delete_object(
        &self,
        request: S3Request<DeleteObjectInput>,
    ) -> ServiceResult<DeleteObjectOutput> {
        let input = request.input;
        let condition = WriteCondition { if_match: input.if_match, if_none_match: None };
        self.store.with_bucket(&input.bucket, |bucket| bucket.remove(&input.key, &condition))?;
        respond(DeleteObjectOutput::default())
    }

    async fn delete_objects(
        &self,
        request: S3Request<DeleteObjectsInput>,
    ) -> ServiceResult<DeleteObjectsOutput> {
        let input = request.input;
        let mut deleted = Vec::new();
        self.store.with_bucket(&input.bucket, |bucket| {
            for object in input.delete.objects {
                bucket.remove(&object.key, &WriteCondition::default())?;
                deleted.push(DeletedObject { key: Some(object.key), ..DeletedObject::default() });
            }
            Ok(())
        })?;
        let is_quiet = input.delete.quiet.unwrap_or_default();
        respond(DeleteObjectsOutput {
            deleted: (!is_quiet).then_some(deleted),
            ..DeleteObjectsOutput::default()
        })
    }

    async fn copy_object(&self, request: S3Request<CopyObjectInput>) -> ServiceResult<CopyObjectOutput> {
        let condition = WriteCondition::from_headers(&request.headers)?;
        let input = request.input;
        let CopySource::Bucket { bucket, key, .. } = &input.copy_source else {
            return Err(s3_error!(NotImplemented, "only copies from buckets are supported"));
        };
        let source =
            self.store.with_bucket(bucket, |bucket| bucket.get(key).ok_or_else(|| s3_error!(NoSuchKey)))?;
        let source_condition = ReadCondition {
            if_match: input.copy_source_if_match,
            if_none_match: input.copy_source_if_none_match,
            if_modified_since: input.copy_source_if_modified_since,
            if_unmodified_since: input.copy_source_if_unmodified_since,
        };
        // 412 for every condition: unlike a read, a copy never gets 304.
        source_condition.check(&source).map_err(|_| s3_error!(PreconditionFailed))?;
        let copy = Arc::new(Object {
            body: source.body.clone(),
            etag: source.etag.clone(),
            modified: SystemTime::now(),
            attributes: source.attributes.clone(),
        });
        let result = CopyObjectResult {
            e_tag: Some(copy.etag.clone()),
            last_modified: Some(copy.modified()),
            ..CopyObjectResult::default()
        };
        self.store.with_bucket(&input.bucket, |bucket| bucket.put(&input.key, copy, &condition))?;
        respond(CopyObjectOutput { copy_object_result: Some(result), ..CopyObjectOutput::default() })
    }

    async fn create_bucket(
        &self,
        request: S3Request<CreateBucketInput>,
    ) -> ServiceResult<CreateBucketOutput> {
        if !self.store.create_bucket(&request.input.bucket) {
            return Err(s3_error!(BucketAlreadyOwnedByYou));
        }
        respond(CreateBucketOutput::default())
    }

    async fn delete_bucket(
        &self,
        request: S3Request<DeleteBucketInput>,
    ) -> ServiceResult<DeleteBucketOutput> {
        self.store.delete_bucket(&request.input.bucket)?;
        respond(DeleteBucketOutput::default())
    }

    async fn head_bucket(&self, request: S3Request<HeadBucketInput>) -> ServiceResult<HeadBucketOutput> {
        self.store.with_bucket(&request.input.bucket, |_| Ok(()))?;
        respond(HeadBucketOutput::default())
    }

    async fn get_bucket_location(
        &self,
        request: S3Request<GetBucketLocationInput>,
    ) -> ServiceResult<GetBucketLocationOutput> {
        self.store.with_bucket(&request.input.bucket, |_| Ok(()))?;
        respond(GetBucketLocationOutput::default())
    }

    async fn list_buckets(&self, _request: S3Request<ListBucketsInput>) -> ServiceResult<ListBucketsOutput> {
        let buckets = self.store.buckets().into_iter();
        let buckets = buckets.map(|(name, created)| Bucket {
            name: Some(name),
            creation_date: Some(created.into()),
            ..Bucket::default()
        });
        respond(ListBucketsOutput { buckets: Some(buckets.collect()), ..ListBucketsOutput::default() })
    }

    async fn list_objects(&self, request: S3Request<ListObjectsInput>) -> ServiceResult<ListObjectsOutput> {
        respond(self.store.list_objects(request.input)?)
    }

    async fn list_objects_v2(
        &self,
        request: S3Request<ListObjectsV2Input>,
    ) -> ServiceResult<ListObjectsV2Output> {
        respond(self.store.list_objects_v2(request.input)?)
    }

    async fn create_multipart_upload(
        &self,
        request: S3Request<CreateMultipartUploadInput>,
    ) -> ServiceResult<CreateMultipartUploadOutput> {
        let input = request.input;
        let attributes = attributes_of!(input);
        let id = self
            .store
            .with_bucket(&input.bucket, |bucket| Ok(bucket.create_upload(input.key.clone(), attributes)))?;
        respond(CreateMultipartUploadOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(id),
            ..CreateMultipartUploadOutput::default()
        })
    }

    async fn upload_part(&self, request: S3Request<UploadPartInput>) -> ServiceResult<UploadPartOutput> {
        respond(self.store.upload_part(request).await?)
    }

    async fn complete_multipart_upload(
        &self,
        request: S3Request<CompleteMultipartUploadInput>,
    ) -> ServiceResult<CompleteMultipartUploadOutput> {
        respond(self.store.complete_multipart(request.input)?)
    }

    async fn abort_multipart_upload(
        &self,
        request: S3Request<AbortMultipartUploadInput>,
    ) -> ServiceResult<AbortMultipartUploadOutput> {
        let input = request.input;
        self.store.with_bucket(&input.bucket, |bucket| bucket.abort_upload(&input.key, &input.upload_id))?;
        respond(AbortMultipartUploadOutput::default())
    }

    async fn list_multipart_uploads(
        &self,
        request: S3Request<ListMultipartUploadsInput>,
    ) -> ServiceResult<ListMultipartUploadsOutput> {
        respond(self.store.list_uploads(request.input)?)
    }

    async fn list_parts(&self, request: S3Request<ListPartsInput>) -> ServiceResult<ListPartsOutput> {
        respond(self.store.list_parts(request.input)?)
    }
}

impl Service {
    fn find_object<T>(&self, request: &S3Request<T>, bucket: &str, key: &str) -> S3Result<Arc<Object>> {
        let is_stale = request.extensions.get::<StaleRead>().is_some();
        let get = |bucket: &mut super::store::Bucket| {
            Ok(if is_stale { bucket.get_stale(key) } else { bucket.get(key) })
        };
        let is_hidden = request.extensions.get::<HideMissing>().is_some();
        self.store.with_bucket(bucket, get)?.ok_or_else(|| match is_hidden {
            true => s3_error!(
                AccessDenied,
                "the session may not list the bucket, so a missing object is reported as forbidden"
            ),
            false => s3_error!(NoSuchKey),
        })
    }
}
