//! Reads the index of a repository, in the forms that saves, restores and pruning need.

use std::collections::HashSet;
use std::time::Duration;

use futures_util::{StreamExt, stream};

use svc_store::StoreError;

use crate::error::FilesError;
use crate::id::Id;
use crate::index::{
    BlobLocations, IndexFile, IndexToPrune, KnownBlobs, ListedPacks, MAX_INDEX_BLOBS, MAX_PRUNED_INDEX_BLOBS,
};
use crate::pack::BlobType;
use crate::repository::{Kind, Repository};

/// Maximum number of index files read concurrently.
const MAX_CONCURRENT_READS: usize = 4;
/// Maximum number of attempts to read an index that pruning changes, and maximum pause between two attempts.
const MAX_INDEX_READS: u32 = 12;
const MAX_INDEX_PAUSE: Duration = Duration::from_secs(5);

/// An index file that was read, without the packs that earlier files list.
struct ReadIndexFile {
    id: Id,
    file: IndexFile,
    /// Whether earlier files list some of its packs.
    has_repeats: bool,
}

/// An index that was read.
struct ReadIndex<T> {
    content: T,
    files: Vec<Id>,
    /// The number of blobs that it lists.
    blobs: usize,
}

impl Repository {
    /// Reads the index, unless it lists more than `max_blobs` blobs.
    ///
    /// If pruning replaces files in the meantime, the index is read again.
    async fn read_index<T: Default>(
        &self,
        max_blobs: usize,
        add: impl Fn(&mut T, ReadIndexFile),
    ) -> Result<ReadIndex<T>, FilesError> {
        let mut attempts = 1;
        loop {
            let files = self.list(Kind::Index).await?;
            match self.read_index_files(&files, max_blobs, &add).await {
                Ok((content, blobs)) => {
                    let present: HashSet<Id> = self.list(Kind::Index).await?.into_iter().collect();
                    // Additional files are from a concurrent save; the caller does not need them.
                    if files.iter().all(|id| present.contains(id)) {
                        return Ok(ReadIndex { content, files, blobs });
                    }
                }
                Err(FilesError::Store(StoreError::NotFound { .. })) => {}
                Err(error) => return Err(error),
            }
            if attempts >= MAX_INDEX_READS {
                return Err(FilesError::IndexChanging);
            }
            tokio::time::sleep((Duration::from_millis(50) * 2_u32.pow(attempts)).min(MAX_INDEX_PAUSE)).await;
            attempts += 1;
        }
    }

    async fn read_index_files<T: Default>(
        &self,
        files: &[Id],
        max_blobs: usize,
        add: impl Fn(&mut T, ReadIndexFile),
    ) -> Result<(T, usize), FilesError> {
        let mut content = T::default();
        let mut listed = ListedPacks::default();
        // Owned values, because the compiler cannot prove that futures of borrowing closures are `Send`.
        let read = |id: Id| {
            let repository = self.clone();
            async move { repository.read_json::<IndexFile>(Kind::Index, id).await.map(|file| (id, file)) }
        };
        let mut reads = stream::iter(files.to_vec()).map(read).buffer_unordered(MAX_CONCURRENT_READS);
        while let Some(read) = reads.next().await {
            let (id, mut file) = read?;
            let has_repeats = listed.remove_repeats(&mut file);
            if listed.blobs > max_blobs {
                return Err(FilesError::corrupt("index", &"it has too many blobs"));
            }
            add(&mut content, ReadIndexFile { id, file, has_repeats });
        }
        Ok((content, listed.blobs))
    }

    /// Reads which blobs are in the index, and returns the ids of the index files as well.
    pub(crate) async fn load_known_blobs(&self) -> Result<(KnownBlobs, Vec<Id>), FilesError> {
        let add = |known: &mut KnownBlobs, read: ReadIndexFile| known.load(&read.file);
        let ReadIndex { content: mut known, files, blobs } = self.read_index(MAX_INDEX_BLOBS, add).await?;
        known.finish_loading(blobs);
        Ok((known, files))
    }

    /// Reads all index files. Each pack is only in the first file that lists it.
    pub(crate) async fn load_index(&self) -> Result<Vec<(Id, IndexFile)>, FilesError> {
        let add = |files: &mut Vec<_>, read: ReadIndexFile| files.push((read.id, read.file));
        Ok(self.read_index(MAX_INDEX_BLOBS, add).await?.content)
    }

    /// Like [`Self::load_index`], but reads a larger index as well.
    pub(crate) async fn load_index_to_prune(&self) -> Result<IndexToPrune, FilesError> {
        let add = |index: &mut IndexToPrune, read: ReadIndexFile| {
            index.files_with_repeats.extend(read.has_repeats.then_some(read.id));
            index.files.push((read.id, read.file));
        };
        let ReadIndex { content, blobs, .. } = self.read_index(MAX_PRUNED_INDEX_BLOBS, add).await?;
        Ok(IndexToPrune { blobs, ..content })
    }

    pub(crate) async fn load_locations(&self) -> Result<BlobLocations, FilesError> {
        let add = |all: &mut BlobLocations, read: ReadIndexFile| all.load(read.file);
        Ok(self.read_index(MAX_INDEX_BLOBS, add).await?.content.finish_loading())
    }

    /// Like [`Self::load_locations`], but only for trees, which takes much less memory.
    pub(crate) async fn load_tree_locations(&self) -> Result<BlobLocations, FilesError> {
        let add = |all: &mut BlobLocations, mut read: ReadIndexFile| {
            read.file.retain_blobs(BlobType::Tree);
            all.load(read.file);
        };
        Ok(self.read_index(MAX_INDEX_BLOBS, add).await?.content.finish_loading())
    }
}
