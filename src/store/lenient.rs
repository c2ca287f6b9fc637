//! Test store that ignores one kind of condition, and counts the names in its listings.

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
pub(crate) enum Ignored {
    Create,
    Replace,
}

#[derive(Debug)]
pub(crate) struct Lenient {
    inner: InMemory,
    ignored: Ignored,
    listed: Arc<AtomicUsize>,
}

impl Lenient {
    pub(crate) fn new(ignored: Ignored) -> Self {
        Self { inner: InMemory::new(), ignored, listed: Arc::default() }
    }

    /// The number of names that were listed.
    pub(crate) fn listed(&self) -> usize {
        self.listed.load(Ordering::Relaxed)
    }

    fn count_calls(
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

impl fmt::Display for Lenient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for Lenient {
    async fn put_opts(&self, at: &Path, payload: PutPayload, mut options: PutOptions) -> Result<PutResult> {
        let is_ignored = match options.mode {
            PutMode::Create => self.ignored == Ignored::Create,
            PutMode::Update(_) => self.ignored == Ignored::Replace,
            PutMode::Overwrite => false,
        };
        if is_ignored {
            options.mode = PutMode::Overwrite;
        }
        self.inner.put_opts(at, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        at: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(at, options).await
    }

    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        self.inner.get_opts(at, options).await
    }

    fn delete_stream(&self, at: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(at)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.count_calls(self.inner.list(prefix))
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.count_calls(self.inner.list_with_offset(prefix, offset))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
