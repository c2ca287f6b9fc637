//! A directory as a bucket, for development: `OBJECT_STORE_URL=file:///dir`.
//!
//! A file system has no conditional replace, so every put and copy takes the store's lock, which also excludes other
//! processes, and a replace compares the ETag while holding the lock. Multipart uploads take no lock.

use std::fmt;
use std::fs::File;
use std::path::{Path as FilePath, PathBuf};

use async_trait::async_trait;
use futures_util::stream::{self, BoxStream};
use futures_util::{StreamExt, TryStreamExt};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

/// The subdirectory that contains the objects.
pub(super) const OBJECTS_DIR: &str = "objects";

#[derive(Debug)]
pub(super) struct LocalStore {
    inner: LocalFileSystem,
    lock_path: PathBuf,
}

impl LocalStore {
    /// Opens `dir`, and creates it if it does not exist.
    pub(super) fn open(dir: &FilePath) -> anyhow::Result<Self> {
        let objects = dir.join(OBJECTS_DIR);
        std::fs::create_dir_all(&objects)?;
        Ok(Self { inner: LocalFileSystem::new_with_prefix(objects)?, lock_path: dir.join("lock") })
    }

    /// Takes the lock, which is held until the file is dropped or the process ends.
    async fn lock(&self) -> Result<File> {
        let path = self.lock_path.clone();
        let locked = tokio::task::spawn_blocking(move || {
            let file = File::options().create(true).append(true).open(path)?;
            file.lock()?;
            Ok::<_, std::io::Error>(file)
        });
        let lock_error = |source| Error::Generic { store: "directory", source };
        locked.await?.map_err(|error| lock_error(Box::new(error)))
    }
}

impl fmt::Display for LocalStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for LocalStore {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        mut options: PutOptions,
    ) -> Result<PutResult> {
        let _lock = self.lock().await?;
        if let PutMode::Update(expected) = &options.mode {
            let precondition_error =
                |reason: &str| Error::Precondition { path: location.to_string(), source: reason.into() };
            match self.inner.head(location).await {
                Ok(current) if current.e_tag == expected.e_tag => options.mode = PutMode::Overwrite,
                Ok(_) => return Err(precondition_error("the object has a different version")),
                Err(Error::NotFound { .. }) => return Err(precondition_error("the object was deleted")),
                Err(error) => return Err(error),
            }
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

    /// Lists in key order, as S3 does.
    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let listing = self.inner.list(prefix);
        let sorted = async move {
            let mut all: Vec<ObjectMeta> = listing.try_collect().await?;
            all.sort_unstable_by(|a, b| a.location.cmp(&b.location));
            Ok::<_, Error>(stream::iter(all).map(Ok))
        };
        stream::once(sorted).try_flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let _lock = self.lock().await?;
        self.inner.copy_opts(from, to, options).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::key::SlotPrefix;
    use crate::pointer::Fence;
    use crate::pointer::tests::{sidecar, snapshot};
    use crate::{Bucket, pointer_io};
    use svc_machine::epoch::Epoch;
    use svc_machine::id::MachineId;
    use svc_machine::name::Slot;

    #[tokio::test(flavor = "multi_thread")]
    async fn concurrent_writers_never_lose_a_pointer_update() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Bucket::new(Arc::new(LocalStore::open(dir.path()).unwrap()));
        let slot = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
        pointer_io::fence(&open(), &slot, &Fence::unsigned(Epoch(1), MachineId(uuid::Uuid::nil())))
            .await
            .unwrap();
        let writers: Vec<_> = (0..8)
            .map(|n| {
                let (bucket, slot) = (open(), slot.clone());
                tokio::spawn(async move {
                    let sidecar = sidecar(&snapshot(n, Epoch(1)));
                    let recorded =
                        crate::snapshot::write_sidecar(&bucket, &slot, &sidecar, None).await.unwrap();
                    pointer_io::advance(&bucket, &slot, &recorded).await
                })
            })
            .collect();
        let mut successes = 0;
        for writer in writers {
            successes += u64::from(writer.await.unwrap().is_ok());
        }
        let pointer = pointer_io::read(&open(), &slot).await.unwrap().unwrap().value;
        assert_eq!(pointer.seq, 1 + successes, "not every successful writer incremented seq once");
        assert!(successes > 0, "no writer succeeded");
    }
}
