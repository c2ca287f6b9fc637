//! A test store that ignores one kind of condition, and counts the objects in its listings.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IgnoredCondition {
    Create,
    Replace,
}

#[derive(Debug)]
pub(crate) struct LenientStore {
    inner: InMemory,
    ignored: IgnoredCondition,
    listed: Arc<AtomicUsize>,
}

impl LenientStore {
    pub(crate) fn new(ignored: IgnoredCondition) -> Self {
        Self { inner: InMemory::new(), ignored, listed: Arc::default() }
    }

    /// Returns the number of objects that `list` and `list_with_offset` have returned so far.
    pub(crate) fn listed_count(&self) -> usize {
        self.listed.load(Ordering::Relaxed)
    }

    fn count_objects(
        &self,
        listing: BoxStream<'static, Result<ObjectMeta>>,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        let listed = Arc::clone(&self.listed);
        let count = move |_: &Result<ObjectMeta>| {
            listed.fetch_add(1, Ordering::Relaxed);
        };
        listing.inspect(count).boxed()
    }
}

impl fmt::Display for LenientStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for LenientStore {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        mut options: PutOptions,
    ) -> Result<PutResult> {
        let is_ignored = match options.mode {
            PutMode::Create => self.ignored == IgnoredCondition::Create,
            PutMode::Update(_) => self.ignored == IgnoredCondition::Replace,
            PutMode::Overwrite => false,
        };
        if is_ignored {
            options.mode = PutMode::Overwrite;
        }
        self.inner.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.inner.get_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.count_objects(self.inner.list(prefix))
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.count_objects(self.inner.list_with_offset(prefix, offset))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
