//! A store that injects random faults: a failed request either has no effect, or takes effect but loses its response.
//! It can also execute each write twice, as if the client had retried after a lost response.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use futures_util::stream::BoxStream;
use futures_util::{StreamExt, stream};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

use super::randomized::Random;

/// Decides which requests fail. Shared by a test and its store.
#[derive(Debug, Default)]
pub(super) struct Faults {
    percent: AtomicUsize,
    /// Seed for the next decision.
    next_seed: AtomicUsize,
    should_duplicate_writes: AtomicBool,
}

impl Faults {
    /// Sets the failure probability per check, in percent. Some requests are checked twice.
    pub(super) fn set_percent(&self, percent: usize) {
        self.percent.store(percent, Ordering::Relaxed);
    }

    /// Executes each write twice from now on, simulating client retries after lost responses.
    pub(super) fn duplicate_writes(&self) {
        self.should_duplicate_writes.store(true, Ordering::Relaxed);
    }

    fn should_fail(&self) -> bool {
        let percent = self.percent.load(Ordering::Relaxed);
        percent > 0 && Random::new(self.next_seed.fetch_add(1, Ordering::Relaxed) as u64).chance(percent)
    }

    fn check(&self) -> Result<()> {
        if self.should_fail() { Err(unavailable()) } else { Ok(()) }
    }
}

fn unavailable() -> Error {
    Error::Generic { store: "faulty", source: "the request failed".into() }
}

#[derive(Debug)]
pub(super) struct FaultyStore {
    inner: Arc<dyn ObjectStore>,
    faults: Arc<Faults>,
}

impl FaultyStore {
    /// Wraps a store. Failures are determined by `seed` and the order of requests.
    pub(super) fn new(inner: Arc<dyn ObjectStore>, seed: u64) -> (Self, Arc<Faults>) {
        let next_seed = AtomicUsize::new((seed as usize).wrapping_mul(1_000_003));
        let faults = Arc::new(Faults { next_seed, ..Faults::default() });
        (Self { inner, faults: Arc::clone(&faults) }, faults)
    }

    fn check_each<T: Send + 'static>(
        &self,
        items: BoxStream<'static, Result<T>>,
    ) -> BoxStream<'static, Result<T>> {
        let faults = Arc::clone(&self.faults);
        if let Err(error) = self.faults.check() {
            return stream::once(async { Err(error) }).boxed();
        }
        // Listings may also fail at any item. They have many items, so draw twice per item to keep this rare.
        let should_fail = move || faults.should_fail() && faults.should_fail();
        items.map(move |item| if should_fail() { Err(unavailable()) } else { item }).boxed()
    }
}

impl fmt::Display for FaultyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[async_trait::async_trait]
impl ObjectStore for FaultyStore {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.faults.check()?;
        if self.faults.should_duplicate_writes.load(Ordering::Relaxed) {
            self.inner.put_opts(location, payload.clone(), options.clone()).await?;
        }
        let result = self.inner.put_opts(location, payload, options).await?;
        self.faults.check()?;
        Ok(result)
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.faults.check()?;
        self.inner.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.faults.check()?;
        self.inner.get_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let faults = Arc::clone(&self.faults);
        let failing = locations.map(move |location| faults.check().and(location));
        let faults = Arc::clone(&self.faults);
        // The deletion may have taken effect even though its response is lost.
        self.inner.delete_stream(failing.boxed()).map(move |deleted| faults.check().and(deleted)).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.check_each(self.inner.list(prefix))
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.check_each(self.inner.list_with_offset(prefix, offset))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.faults.check()?;
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.faults.check()?;
        self.inner.copy_opts(from, to, options).await
    }
}
