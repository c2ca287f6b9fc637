//! Reads trees from the store a whole pack at a time, since a save's trees share packs.

use std::collections::VecDeque;

use bytes::Bytes;

use crate::blocking::run_blocking;
use crate::error::FilesError;
use crate::id::Id;
use crate::index::{BlobLocation, BlobLocations};
use crate::pack::BlobType;
use crate::repository::Repository;
use crate::tree::Tree;
use crate::tree_references::TreeReferences;

/// Maximum number of packs held in memory. A save's trees are spread over a few packs, but not in walk order.
const MAX_CACHED_PACKS: usize = 4;

/// Larger trees are decrypted and parsed on a blocking thread: even a pack of a few KB can hold a tree that
/// decompresses to 128 MiB.
const MAX_INLINE_BYTES: usize = 256 << 10;

pub(crate) struct TreeReader<'a> {
    repository: &'a Repository,
    locations: &'a BlobLocations,
    /// Pack contents by index in `locations`, most recently used last.
    packs: VecDeque<(u32, Bytes)>,
    /// Whether to write trees to the cache. Off when reading many snapshots, whose trees would fill it.
    is_caching: bool,
}

impl<'a> TreeReader<'a> {
    pub(crate) fn new(repository: &'a Repository, locations: &'a BlobLocations) -> Self {
        Self { repository, locations, packs: VecDeque::new(), is_caching: true }
    }

    /// Creates a reader that reads from the cache, but never writes to it.
    pub(crate) fn without_caching(repository: &'a Repository, locations: &'a BlobLocations) -> Self {
        Self { is_caching: false, ..Self::new(repository, locations) }
    }

    /// Reads a tree, from the cache if possible.
    ///
    /// # Errors
    /// If the store fails or the pack is missing; [`FilesError::Corrupt`] if the tree isn't in the index, or all of its
    /// copies are corrupt.
    pub(crate) async fn read(&mut self, id: Id) -> Result<Tree, FilesError> {
        if let Some(tree) = self.repository.read_cached_tree(id)? {
            return Ok(tree);
        }
        let json = self.read_json(id).await?;
        if self.is_caching {
            self.repository.cache_tree(id, &json);
        }
        run_blocking_if_large(json.len(), move || Tree::parse(id, &json)).await
    }

    /// Reads a tree's blob references. Takes a fraction of the memory of [`Self::read`], and bypasses the cache.
    ///
    /// # Errors
    /// See [`Self::read`], except that entry names aren't checked.
    pub(crate) async fn read_references(&mut self, id: Id) -> Result<TreeReferences, FilesError> {
        let json = self.read_json(id).await?;
        run_blocking_if_large(json.len(), move || TreeReferences::parse(id, &json)).await
    }

    /// Reads a tree's JSON from the first copy whose hash matches its id.
    async fn read_json(&mut self, id: Id) -> Result<Vec<u8>, FilesError> {
        let first = self.locations.find(BlobType::Tree, id)?;
        let mut result = self.read_at(id, first).await;
        for other in self.locations.find_others(BlobType::Tree, id) {
            if !result.as_ref().is_err_and(FilesError::is_damage) {
                break;
            }
            result = self.read_at(id, other).await;
        }
        result
    }

    async fn read_at(&mut self, id: Id, location: BlobLocation) -> Result<Vec<u8>, FilesError> {
        let sealed = self.read_sealed(location).await?;
        let (repository, blob) = (self.repository.clone(), location.to_packed(BlobType::Tree, id));
        let length = location.content_length().max(sealed.len() as u64) as usize;
        run_blocking_if_large(length, move || repository.open_blob(&blob, &sealed)).await
    }

    /// Reads an encrypted tree. If the pack is damaged, reads just the tree's range, which may lie in the intact part
    /// of a truncated pack.
    async fn read_sealed(&mut self, location: BlobLocation) -> Result<Bytes, FilesError> {
        let pack = match self.read_pack(location).await {
            Err(error) if error.is_damage() => {
                return self.repository.read_pack(self.locations.pack(location).id, location.range()).await;
            }
            pack => pack?,
        };
        let range = location.range();
        let range = usize::try_from(range.start).unwrap_or(0)..usize::try_from(range.end).unwrap_or(0);
        Ok(pack.get(range).map(|sealed| pack.slice_ref(sealed)).unwrap_or_default())
    }

    /// Whether the pack is in memory, so its trees can be read without a request.
    pub(crate) fn has_pack(&self, pack: u32) -> bool {
        self.packs.iter().any(|(cached, _)| *cached == pack)
    }

    /// Adds a pack whose content the caller has read up to the end of the last blob.
    pub(crate) fn add_pack(&mut self, pack: u32, bytes: Bytes) {
        self.packs.retain(|(cached, _)| *cached != pack);
        if self.packs.len() >= MAX_CACHED_PACKS {
            self.packs.pop_front();
        }
        self.packs.push_back((pack, bytes));
    }

    async fn read_pack(&mut self, location: BlobLocation) -> Result<Bytes, FilesError> {
        if let Some(index) = self.packs.iter().position(|(pack, _)| *pack == location.pack)
            && let Some(cached) = self.packs.remove(index)
        {
            let bytes = cached.1.clone();
            self.packs.push_back(cached);
            return Ok(bytes);
        }
        let pack = self.locations.pack(location);
        let bytes = self.repository.read_pack(pack.id, 0..pack.end).await?;
        self.add_pack(location.pack, bytes.clone());
        Ok(bytes)
    }
}

/// Runs the work inline, or on a blocking thread if the tree is large. Inline work consumes the task's budget, since
/// reads from cached packs never await I/O.
async fn run_blocking_if_large<T: Send + 'static>(
    length: usize,
    work: impl FnOnce() -> Result<T, FilesError> + Send + 'static,
) -> Result<T, FilesError> {
    if length > MAX_INLINE_BYTES {
        return run_blocking(work).await;
    }
    tokio::task::consume_budget().await;
    work()
}
