//! Loads the index in the forms needed by saves, restores and pruning.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use svc_store::StoreError;

use crate::blocking::run_blocking;
use crate::error::FilesError;
use crate::id::Id;
use crate::index::{
    BlobLocations, IndexFile, IndexToPrune, KnownBlobs, ListedPacks, MAX_INDEX_BLOBS, MAX_PRUNED_INDEX_BLOBS,
};
use crate::pack::BlobType;
use crate::repository::{ObjectKind, Repository};

/// Maximum number of index files read concurrently.
const MAX_CONCURRENT_READS: usize = 4;
/// Minimum average number of blobs per pack in a full index. Packs take more memory than blobs, so their number is
/// limited too.
const MIN_MEAN_PACK_BLOBS: usize = 5;
/// Maximum number of attempts to read an index while pruning changes it, and maximum backoff between attempts.
const MAX_INDEX_READ_ATTEMPTS: u32 = 12;
const MAX_INDEX_BACKOFF: Duration = Duration::from_secs(5);

struct IndexReadResult<T> {
    content: T,
    files: Vec<Id>,
    listed: ListedPacks,
}

impl Repository {
    /// Reads the index, failing if it lists more than `max_blobs` blobs. Calls `add` with each file, minus the packs
    /// listed with the same marking by earlier files.
    ///
    /// Starts over if pruning replaces files concurrently.
    async fn read_index<T: Default>(
        &self,
        max_blobs: usize,
        add: impl Fn(&mut T, Id, IndexFile),
    ) -> Result<IndexReadResult<T>, FilesError> {
        let mut attempts = 1;
        loop {
            let files = self.list(ObjectKind::Index).await?;
            match self.read_index_files(&files, max_blobs, &add).await {
                Ok((content, listed)) => {
                    let present: HashSet<Id> = self.list(ObjectKind::Index).await?.into_iter().collect();
                    // Additional files come from a concurrent save; the caller doesn't need them.
                    if files.iter().all(|id| present.contains(id)) {
                        return Ok(IndexReadResult { content, files, listed });
                    }
                }
                Err(FilesError::Store(StoreError::NotFound { .. })) => {}
                Err(error) => return Err(error),
            }
            if attempts >= MAX_INDEX_READ_ATTEMPTS {
                return Err(FilesError::IndexChanging);
            }
            tokio::time::sleep((Duration::from_millis(50) * 2_u32.pow(attempts)).min(MAX_INDEX_BACKOFF))
                .await;
            attempts += 1;
        }
    }

    async fn read_index_files<T: Default>(
        &self,
        files: &[Id],
        max_blobs: usize,
        add: impl Fn(&mut T, Id, IndexFile),
    ) -> Result<(T, ListedPacks), FilesError> {
        let mut content = T::default();
        let mut listed = ListedPacks::default();
        let mut unread = files.iter().copied();
        // Spawn each read: unpolled reads could time out while a large file is added. Machines write the files, so any
        // of them may be large; hold only one in memory in parsed form.
        let parsing = Arc::new(Semaphore::new(1));
        let mut reads = JoinSet::new();
        loop {
            while reads.len() < MAX_CONCURRENT_READS
                && let Some(id) = unread.next()
            {
                let (repository, parsing) = (self.clone(), Arc::clone(&parsing));
                reads.spawn(async move {
                    let sealed = repository.read_sealed(ObjectKind::Index, id).await;
                    // Fails only if the semaphore is closed.
                    let permit = parsing.acquire_owned().await.ok();
                    let parse = move || repository.open_json::<IndexFile>(ObjectKind::Index, id, &sealed?);
                    (id, run_blocking(parse).await, permit)
                });
            }
            let Some(read) = reads.join_next().await else { break };
            let (id, file, _permit) = read.map_err(|_| FilesError::Stopped)?;
            let mut file = file?;
            listed.remove_duplicate_packs(id, &mut file);
            if listed.blobs > max_blobs || listed.pack_count() > max_blobs / MIN_MEAN_PACK_BLOBS {
                return Err(FilesError::corrupt("index", &"too many blobs or packs"));
            }
            add(&mut content, id, file);
        }
        Ok((content, listed))
    }

    /// Loads the ids of all indexed blobs, except those found only in packs that are damaged (corrupt or missing) or
    /// marked for deletion. Also returns the ids of the index files.
    pub(crate) async fn load_known_blobs(
        &self,
        damaged_packs: &HashSet<Id>,
    ) -> Result<(KnownBlobs, Vec<Id>), FilesError> {
        let add = |known: &mut KnownBlobs, _: Id, mut file: IndexFile| {
            file.packs.retain(|pack| !damaged_packs.contains(&pack.id));
            known.load(&file);
        };
        let IndexReadResult { content: mut known, files, listed } =
            self.read_index(MAX_INDEX_BLOBS, add).await?;
        known.finish_loading(listed.blobs.max(listed.pack_count() * MIN_MEAN_PACK_BLOBS));
        Ok((known, files))
    }

    /// Loads the ids of blobs in packs that are unmarked, or that were marked for deletion after `marked_after`.
    pub(crate) async fn load_retained_blobs(
        &self,
        marked_after: Timestamp,
    ) -> Result<KnownBlobs, FilesError> {
        let add = move |known: &mut KnownBlobs, _: Id, mut file: IndexFile| {
            let marked = std::mem::take(&mut file.packs_to_delete).into_iter();
            file.packs.extend(marked.filter(|pack| pack.time.is_some_and(|time| time > marked_after)));
            known.load(&file);
        };
        let IndexReadResult { content: mut known, listed, .. } =
            self.read_index(MAX_INDEX_BLOBS, add).await?;
        known.finish_loading(listed.blobs.max(listed.pack_count() * MIN_MEAN_PACK_BLOBS));
        Ok(known)
    }

    /// Reads all index files. Each pack appears only in the first file that lists it with a given marking.
    pub(crate) async fn load_index(&self) -> Result<Vec<(Id, IndexFile)>, FilesError> {
        let add = |files: &mut Vec<_>, id: Id, file: IndexFile| files.push((id, file));
        Ok(self.read_index(MAX_INDEX_BLOBS, add).await?.content)
    }

    /// Like [`Self::load_index`], but accepts a larger index.
    pub(crate) async fn load_index_to_prune(&self) -> Result<IndexToPrune, FilesError> {
        let add = |files: &mut Vec<_>, id: Id, file: IndexFile| files.push((id, file));
        let IndexReadResult { content: files, listed, .. } =
            self.read_index(MAX_PRUNED_INDEX_BLOBS, add).await?;
        let ListedPacks { blobs, files_with_duplicates, .. } = listed;
        Ok(IndexToPrune { files, files_with_duplicates, blobs })
    }

    pub(crate) async fn load_locations(&self) -> Result<BlobLocations, FilesError> {
        let add = |all: &mut BlobLocations, _: Id, file: IndexFile| all.load(&file);
        Ok(self.read_index(MAX_INDEX_BLOBS, add).await?.content.finish_loading())
    }

    /// Like [`Self::load_locations`], but only for trees, which takes much less memory.
    pub(crate) async fn load_tree_locations(&self) -> Result<BlobLocations, FilesError> {
        let add = |all: &mut BlobLocations, _: Id, mut file: IndexFile| {
            file.retain_blobs(BlobType::Tree);
            all.load(&file);
        };
        Ok(self.read_index(MAX_INDEX_BLOBS, add).await?.content.finish_loading())
    }
}
