//! Publishes to a store that refuses writes.

use std::sync::Arc;

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

use super::tests::build;
use super::*;

#[derive(Debug, Default)]
struct FaultyStore {
    inner: InMemory,
    is_read_only: bool,
}

impl FaultyStore {
    fn check_write(&self, location: &Path) -> Result<()> {
        if self.is_read_only {
            return Err(Error::PermissionDenied { path: location.to_string(), source: "read-only".into() });
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
async fn publish_without_permission_names_the_archives_key() {
    let version = "1.0".parse().unwrap();
    // A small archive is sent after it has been read, and a large one while it is read.
    for size in [3, 12 << 20] {
        let bucket = Bucket::new(Arc::new(FaultyStore { is_read_only: true, ..FaultyStore::default() }));
        let dir = build(&vec![7; size]);
        let refused = publish(&bucket, dir.path(), &version).await.unwrap_err();
        let expected = "the object store refused access to system-bundles/1.0/svc-host-bundle.tar.gz";
        assert_eq!(refused.to_string(), expected);
        assert_eq!(Failure::from(refused).exit, Exit::Permission);
    }
}
