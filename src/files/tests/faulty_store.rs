//! A store whose requests fail at random: a failed request has no effect, or it takes effect and its response is lost.
//! It can also execute each write twice, as if a client had repeated it after a lost response.

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

/// Decides which requests fail. A test and its store share it.
#[derive(Debug, Default)]
pub(super) struct Faults {
    percent: AtomicUsize,
    /// The seed of the next decision.
    next_seed: AtomicUsize,
    should_repeat_writes: AtomicBool,
}

impl Faults {
    /// Sets the probability, in percent, that a check fails. Some requests are checked twice.
    pub(super) fn set_percent(&self, percent: usize) {
        self.percent.store(percent, Ordering::Relaxed);
    }

    /// Repeats each write from now on, as the store's client does if a response is lost.
    pub(super) fn repeat_writes(&self) {
        self.should_repeat_writes.store(true, Ordering::Relaxed);
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
    /// Wraps a store. Which requests fail depends on `seed` and on the order of the requests.
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
        // A listing may also fail at any item. Two draws per item make this rare, because a listing has many items.
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
        if self.faults.should_repeat_writes.load(Ordering::Relaxed) {
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
        // A deletion may take effect even if its response is lost.
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
