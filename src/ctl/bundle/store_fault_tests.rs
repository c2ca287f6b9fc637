//! Publishing to a read-only store, or concurrently with another process.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

use super::tests::write_bundle;
use super::*;

#[derive(Debug, Default)]
struct FaultyStore {
    inner: InMemory,
    is_read_only: bool,
    /// How many more times another process replaces the archive, each just before we write the digest.
    replacements: AtomicUsize,
}

impl FaultyStore {
    fn check_write(&self, location: &Path) -> Result<()> {
        if self.is_read_only {
            return Err(Error::PermissionDenied { path: location.to_string(), source: "read-only".into() });
        }
        Ok(())
    }

    /// Replaces the archive before its digest is written to `location`, unless `replacements` is used up.
    async fn replace_archive(&self, location: &Path) -> Result<()> {
        let Some(archive) = location.as_ref().strip_suffix(".sha256") else { return Ok(()) };
        let decrement = |count: usize| count.checked_sub(1);
        if self.replacements.fetch_update(Ordering::Relaxed, Ordering::Relaxed, decrement).is_ok() {
            let other = PutPayload::from_static(b"two");
            self.inner.put_opts(&Path::from(archive), other, PutOptions::default()).await?;
        }
        Ok(())
    }
}

impl fmt::Display for FaultyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for FaultyStore {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.check_write(location)?;
        self.replace_archive(location).await?;
        self.inner.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.check_write(location)?;
        self.inner.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.inner.get_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

#[tokio::test]
async fn publish_without_permission_names_archive_key() {
    let version = "1.0".parse().unwrap();
    // A small archive is uploaded after reading it, a large one while reading.
    for size in [3, 12 << 20] {
        let bucket = Bucket::new(Arc::new(FaultyStore { is_read_only: true, ..FaultyStore::default() }));
        let dir = write_bundle(&vec![7; size]);
        let error = publish(&bucket, dir.path(), &version).await.unwrap_err();
        let expected = "the object store refused access to system-bundles/1.0/svc-host-bundle.tar.gz";
        assert_eq!(error.to_string(), expected);
        assert_eq!(Failure::from(error).exit, Exit::Permission);
    }
}

#[tokio::test]
async fn publish_reuploads_replaced_archive() {
    let version = "1.0".parse().unwrap();
    for (replacements, is_published) in [(1, true), (MAX_UPLOADS - 1, true), (MAX_UPLOADS, false)] {
        let store = FaultyStore { replacements: AtomicUsize::new(replacements), ..FaultyStore::default() };
        let bucket = Bucket::new(Arc::new(store));
        let published = publish(&bucket, write_bundle(b"one").path(), &version).await;
        let stored = bucket.get(&key::bundle(&version, ""), 100).await.unwrap().unwrap();
        if is_published {
            assert_eq!(published.unwrap().outcome, PublishOutcome::Published);
            assert_eq!(&stored.value[..], b"one");
        } else {
            assert_eq!(Failure::from(published.unwrap_err()).exit, Exit::TryAgain);
            assert_eq!(&stored.value[..], b"two");
        }
    }
}

#[tokio::test]
async fn publish_digest_refuses_different_digest_permanently() {
    let (bucket, version) = (Bucket::new(Arc::new(InMemory::new())), "1.0".parse().unwrap());
    let (stored, other) = ("0".repeat(64), "1".repeat(64));
    bucket.put(&key::bundle(&version, ".sha256"), digest_line(&stored)).await.unwrap();
    publish_digest(&bucket, &stored, &version).await.unwrap();
    let error = publish_digest(&bucket, &other, &version).await.unwrap_err();
    assert!(error.to_string().contains("publish the other bundle again"), "{error}");
    assert_eq!(Failure::from(error).exit, Exit::Refused);
}
