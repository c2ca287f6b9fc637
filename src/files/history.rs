//! Earlier versions of individual files and directories, and their content.

use std::collections::{HashMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::path::{Component, Path};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::{Stream, StreamExt, stream};
use jiff::Timestamp;
use tokio::sync::Semaphore;

use crate::blocking::run_blocking;
use crate::error::FilesError;
use crate::id::Id;
use crate::index::{BlobLocation, BlobLocations};
use crate::pack::BlobType;
use crate::repository::Repository;
use crate::snapshot::Snapshot;
pub use crate::tree::HardLinkKey;
use crate::tree::{Node, NodeType, Tree};

/// Maximum number of snapshots searched concurrently.
const MAX_CONCURRENT_SEARCHES: usize = 16;
/// Maximum number of trees searched for names concurrently. Large trees take a lot of memory.
const MAX_CONCURRENT_TREES: usize = 4;
/// Maximum compressed size of trees cached on disk.
const MAX_CACHED_TREE_BYTES: u32 = 16 << 10;
/// Maximum number of concurrent chunk reads per file.
const MAX_CONCURRENT_READS: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    File,
    Directory,
    Symlink,
    /// A device, FIFO or socket, saved only by other programs.
    Special,
}

/// A snapshot entry.
#[derive(Debug, Clone)]
pub struct Entry {
    pub(crate) node: Node,
    name: OsString,
}

impl Entry {
    pub(crate) fn new(node: Node) -> Option<Self> {
        let name = node.file_name()?;
        Some(Self { node, name })
    }

    /// A snapshot's home directory. Its name and attributes aren't saved.
    fn root(snapshot: &Snapshot) -> Self {
        let mut node = Node::new(OsStr::new(""), NodeType::Dir, 0o755);
        node.subtree = Some(snapshot.tree);
        node.set_times(snapshot.time, snapshot.time);
        Self { node, name: OsString::new() }
    }

    /// Returns the name, which is empty for the home directory itself.
    pub fn name(&self) -> &OsStr {
        &self.name
    }

    pub fn kind(&self) -> EntryKind {
        match self.node.node_type {
            NodeType::File => EntryKind::File,
            NodeType::Dir => EntryKind::Directory,
            NodeType::Symlink => EntryKind::Symlink,
            NodeType::Special => EntryKind::Special,
        }
    }

    /// Returns the file size in bytes, or 0 for other kinds.
    pub fn size(&self) -> u64 {
        self.node.size
    }

    /// Returns the low twelve bits of the Unix mode.
    pub fn mode(&self) -> u32 {
        self.node.unix_mode()
    }

    pub fn modified_at(&self) -> Timestamp {
        self.node.mtime
    }

    pub fn link_target(&self) -> Option<OsString> {
        self.node.link_target()
    }

    /// Returns the ctime and inode on the machine that saved the entry.
    pub fn ctime_and_inode(&self) -> (Timestamp, u64) {
        (self.node.ctime, self.node.inode)
    }

    /// Identifies a hard-linked file. Returns `None` for other entries. Within a snapshot, entries with the same key
    /// are links to the same file, and have the same content.
    pub fn hard_link_key(&self) -> Option<HardLinkKey> {
        self.node.hard_link_key()
    }

    /// Whether both entries are the same version. Directory modification times are ignored, since they change with
    /// every temporary file.
    pub fn is_same_version(&self, other: &Self) -> bool {
        let (a, b) = (&self.node, &other.node);
        let is_same_time = a.node_type == NodeType::Dir || a.mtime == b.mtime;
        is_same_time
            && a.node_type == b.node_type
            && (a.content.as_ref(), a.subtree, a.link_target())
                == (b.content.as_ref(), b.subtree, b.link_target())
            && (a.unix_mode(), &a.user, a.uid, &a.group, a.gid)
                == (b.unix_mode(), &b.user, b.uid, &b.group, b.gid)
            && a.extended_attributes == b.extended_attributes
    }
}

/// A version of an entry, covering one or more consecutive snapshots between which it didn't change.
#[derive(Debug, Clone)]
pub struct Version {
    /// `None` if the entry didn't exist.
    pub entry: Option<Entry>,
    /// Times of the first and last snapshots with this version.
    pub first_saved_at: Timestamp,
    pub last_saved_at: Timestamp,
    /// The last snapshot with this version.
    pub snapshot: Id,
}

/// A page of versions, newest first.
#[derive(Debug, Clone, Default)]
pub struct VersionPage {
    pub versions: Vec<Version>,
    /// [`VersionQuery::before`] for the next page, or `None` on the last page. The last version on a page may extend to
    /// earlier snapshots than the page covers.
    pub next_before: Option<Timestamp>,
    /// Number of snapshots that are damaged, or contain a damaged directory above the entry.
    pub damaged_snapshots: u64,
}

/// Selects the versions to return.
#[derive(Debug, Clone, Copy)]
pub struct VersionQuery {
    /// Only snapshots before this time.
    pub before: Option<Timestamp>,
    /// Maximum number of versions.
    pub limit: usize,
    /// Maximum number of snapshots to search, rounded up to a multiple of 16 since they're searched in batches.
    pub max_snapshots: usize,
    /// When to stop the search. Checked after each batch of snapshots.
    pub deadline: Option<Instant>,
}

/// Reads earlier versions from a repository.
pub struct History {
    repository: Repository,
    /// All intact snapshots, newest first, or only the latest one. Read before the index, so the index is sure to
    /// contain their blobs.
    snapshots: Vec<(Id, Snapshot)>,
    damaged_snapshots: u64,
    locations: BlobLocations,
    /// Whether entries returned by [`Self::find`] include their chunk lists. If not, each list is replaced by its hash
    /// to save memory.
    has_chunk_lists: bool,
    tree_reads: Semaphore,
    /// Cached name lookups by tree. Snapshots share most of their trees.
    lookups: Mutex<HashMap<(Id, OsString), Option<Node>>>,
    /// LRU cache of packs, most recently used last. `None` unless whole packs are read.
    packs: Option<tokio::sync::Mutex<VecDeque<(u32, Bytes)>>>,
}

/// Larger packs, which only other programs write, are fetched with range reads.
const MAX_WHOLE_PACK_BYTES: u64 = 32 << 20;
/// Maximum number of packs held in memory. Files saved together share packs.
const MAX_CACHED_PACKS: usize = 3;

impl History {
    /// Reads only the tree index, which is enough to list and compare entries.
    ///
    /// # Errors
    /// If the store fails; [`FilesError::Corrupt`] if the index is corrupt; [`FilesError::IndexChanging`] if it changed
    /// during every attempt to read it.
    pub async fn open(repository: Repository) -> Result<Self, FilesError> {
        let snapshots = repository.list_intact_snapshots().await?;
        let locations = repository.load_tree_locations().await?;
        Ok(Self::new(repository, snapshots, locations, false))
    }

    /// Like [`Self::open`], but reads only the `latest` snapshot, or all snapshots if `latest` is `None`, missing or
    /// corrupt.
    ///
    /// # Errors
    /// See [`Self::open`].
    pub async fn open_latest(repository: Repository, latest: Option<Id>) -> Result<Self, FilesError> {
        let snapshots = read_latest(&repository, latest).await?;
        let locations = repository.load_tree_locations().await?;
        Ok(Self::new(repository, snapshots, locations, false))
    }

    /// Like [`Self::open`], but [`Self::find`] returns restorable entries.
    ///
    /// # Errors
    /// See [`Self::open`].
    pub async fn open_for_restore(repository: Repository) -> Result<Self, FilesError> {
        Ok(Self { has_chunk_lists: true, ..Self::open(repository).await? })
    }

    /// Like [`Self::open_latest`], but reads the full index, so that file contents can be read too.
    ///
    /// # Errors
    /// See [`Self::open`].
    pub async fn open_with_contents(repository: Repository, latest: Option<Id>) -> Result<Self, FilesError> {
        let snapshots = read_latest(&repository, latest).await?;
        let locations = repository.load_locations().await?;
        Ok(Self::new(repository, snapshots, locations, true))
    }

    fn new(
        repository: Repository,
        (snapshots, damaged): ListedSnapshots,
        locations: BlobLocations,
        has_chunk_lists: bool,
    ) -> Self {
        Self {
            repository,
            snapshots,
            damaged_snapshots: damaged.len() as u64,
            locations,
            has_chunk_lists,
            tree_reads: Semaphore::new(MAX_CONCURRENT_TREES),
            lookups: Mutex::default(),
            packs: None,
        }
    }

    /// Fetches whole packs when reading, which is faster for many small files.
    #[must_use]
    pub fn with_whole_packs(self) -> Self {
        Self { packs: Some(tokio::sync::Mutex::default()), ..self }
    }

    /// Returns the last snapshot at or before `time`, or the latest one for `None`. Times are compared at millisecond
    /// precision, as displayed. Corrupt snapshots are skipped.
    pub fn find_snapshot(&self, time: Option<Timestamp>) -> Option<&(Id, Snapshot)> {
        let is_wanted = |at: Timestamp| time.is_none_or(|time| at.as_millisecond() <= time.as_millisecond());
        self.snapshots.iter().find(|(_, snapshot)| is_wanted(snapshot.time))
    }

    /// Returns the newest snapshot at or before `up_to` in which `directory` is readable or doesn't exist.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn find_readable_snapshot(
        &self,
        directory: &Path,
        up_to: Timestamp,
    ) -> Result<Option<(Id, Snapshot)>, FilesError> {
        for listed in self.snapshots.iter().filter(|(_, snapshot)| snapshot.time <= up_to) {
            let found = match self.find(&listed.1, directory).await {
                Ok(Some(entry)) => self.list(&entry).await.map(drop),
                found => found.map(drop),
            };
            match found {
                Ok(()) => return Ok(Some(listed.clone())),
                Err(error) if !error.is_damage() => return Err(error),
                Err(error) => tracing::warn!(snapshot = %listed.0, %error, "a snapshot is damaged"),
            }
        }
        Ok(None)
    }

    /// Returns a snapshot, or `None` if it doesn't exist, is corrupt, or wasn't read.
    pub fn find_snapshot_by_id(&self, id: Id) -> Option<&(Id, Snapshot)> {
        self.snapshots.iter().find(|(other, _)| *other == id)
    }

    /// Finds an entry, or returns `None` if it didn't exist. `path` is relative to the snapshot's root, and an empty
    /// path is the root itself.
    ///
    /// # Errors
    /// If the store fails; [`FilesError::Corrupt`] if an object is corrupt.
    pub async fn find(&self, snapshot: &Snapshot, path: &Path) -> Result<Option<Entry>, FilesError> {
        let mut entry = Entry::root(snapshot);
        for component in path.components() {
            let (Component::Normal(name), Some(tree)) = (component, entry.node.subtree) else {
                return Ok(None);
            };
            let Some(node) = self.find_in_tree(tree, name).await? else { return Ok(None) };
            entry = Entry { node, name: name.to_owned() };
        }
        Ok(Some(entry))
    }

    async fn find_in_tree(&self, tree: Id, name: &OsStr) -> Result<Option<Node>, FilesError> {
        let key = (tree, name.to_owned());
        let lock = || self.lookups.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cached) = lock().get(&key) {
            return Ok(cached.clone());
        }
        // Large directories take a lot of memory, and concurrent searches often need the same one.
        let _permit = self.tree_reads.acquire().await;
        if let Some(cached) = lock().get(&key) {
            return Ok(cached.clone());
        }
        let nodes = self.read_tree(tree).await?.nodes;
        let mut node = nodes.into_iter().find(|node| node.file_name().as_deref() == Some(name));
        if let Some(content) =
            node.as_mut().and_then(|node| node.content.as_mut()).filter(|_| !self.has_chunk_lists)
        {
            *content = vec![Id::of_all(content)];
        }
        lock().insert(key, node.clone());
        Ok(node)
    }

    /// Lists a directory, sorted by name. Other kinds of entries yield an empty list.
    ///
    /// # Errors
    /// If the store fails; [`FilesError::Corrupt`] if an object is corrupt.
    pub async fn list(&self, directory: &Entry) -> Result<Vec<Entry>, FilesError> {
        let Some(tree) = directory.node.subtree else { return Ok(Vec::new()) };
        let mut entries: Vec<Entry> =
            self.read_tree(tree).await?.nodes.into_iter().filter_map(Entry::new).collect();
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// Returns the versions of an entry, newest first.
    ///
    /// # Errors
    /// If the store fails. Damaged snapshots aren't errors: the page counts them.
    pub async fn list_versions(&self, path: &Path, query: VersionQuery) -> Result<VersionPage, FilesError> {
        // Not a `filter`: the compiler can't prove that the borrowing iterator is `Send`.
        let mut wanted = Vec::new();
        for snapshot in &self.snapshots {
            let at = snapshot.1.time.as_millisecond();
            if query.before.is_none_or(|before| at < before.as_millisecond()) {
                wanted.push(snapshot);
            }
        }
        let mut pending = wanted.into_iter().peekable();
        let mut page = VersionPage { damaged_snapshots: self.damaged_snapshots, ..VersionPage::default() };
        let mut searched = 0;
        while pending.peek().is_some() {
            let batch: Vec<_> = pending.by_ref().take(MAX_CONCURRENT_SEARCHES).collect();
            // Not a `map`: the compiler can't prove that a borrowing closure's futures are `Send`.
            let mut searches = Vec::with_capacity(batch.len());
            for (_, snapshot) in &batch {
                searches.push(self.find(snapshot, path));
            }
            let entries = join_all(searches).await;
            let last_searched = batch.last().map(|(_, snapshot)| snapshot.time);
            for ((snapshot, Snapshot { time, .. }), entry) in batch.into_iter().zip(entries) {
                let (snapshot, time) = (*snapshot, *time);
                let entry = match entry {
                    Ok(entry) => entry,
                    // Other snapshots may be intact.
                    Err(error) if error.is_damage() => {
                        page.damaged_snapshots += 1;
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                if !page.extend_last(entry.as_ref(), time) {
                    if page.versions.len() >= query.limit.max(1) {
                        page.next_before = page.versions.last().map(|last| last.first_saved_at);
                        return Ok(page);
                    }
                    let version = Version { entry, first_saved_at: time, last_saved_at: time, snapshot };
                    page.versions.push(version);
                }
            }
            searched += MAX_CONCURRENT_SEARCHES;
            let is_past_deadline = query.deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if (is_past_deadline || searched >= query.max_snapshots) && pending.peek().is_some() {
                page.next_before = last_searched;
                return Ok(page);
            }
        }
        // The entry's absence before its first version isn't a version.
        if page.versions.last().is_some_and(|last| last.entry.is_none()) {
            page.versions.pop();
        }
        Ok(page)
    }

    /// Reads a file's content chunk by chunk, verifying each chunk's hash. Requires [`Self::open_with_contents`].
    pub fn read_content<'a>(&'a self, file: &Entry) -> impl Stream<Item = Result<Vec<u8>, FilesError>> + 'a {
        let chunks = file.node.content.clone().unwrap_or_default();
        stream::iter(chunks).map(|chunk| self.read_blob(BlobType::Data, chunk)).buffered(MAX_CONCURRENT_READS)
    }

    /// Checks that the index contains all of a file's chunks, before any of them are sent to a client.
    ///
    /// # Errors
    /// [`FilesError::Corrupt`] if a chunk is not in the index.
    pub fn check_content(&self, file: &Entry) -> Result<(), FilesError> {
        let mut chunks = file.node.content.iter().flatten();
        chunks.try_for_each(|chunk| self.locations.find(BlobType::Data, *chunk).map(drop))
    }

    async fn read_tree(&self, id: Id) -> Result<Tree, FilesError> {
        if let Some(tree) = self.repository.read_cached_tree(id)? {
            return Ok(tree);
        }
        let json = self.read_blob(BlobType::Tree, id).await?;
        // Caching large trees of many snapshots would fill the disk.
        if self.locations.find(BlobType::Tree, id)?.length <= MAX_CACHED_TREE_BYTES {
            self.repository.cache_tree(id, &json);
        }
        Tree::parse(id, &json)
    }

    /// Reads a blob, falling back to other copies if the first is damaged.
    async fn read_blob(&self, blob_type: BlobType, id: Id) -> Result<Vec<u8>, FilesError> {
        let first = self.locations.find(blob_type, id)?;
        let others = self.locations.find_others(blob_type, id);
        let mut damage = None;
        for location in [first].into_iter().chain(others) {
            let read = async {
                let sealed = self.read_sealed(blob_type, location).await?;
                let (repository, blob) = (self.repository.clone(), location.to_packed(blob_type, id));
                run_blocking(move || repository.open_blob(&blob, &sealed)).await
            };
            match read.await {
                Err(error) if error.is_damage() => damage = damage.or(Some(error)),
                result => return result,
            }
        }
        Err(damage.unwrap_or_else(|| FilesError::corrupt(format!("blob {id}"), &"it is not in the index")))
    }
}

impl History {
    /// Reads an encrypted blob.
    async fn read_sealed(&self, blob_type: BlobType, location: BlobLocation) -> Result<Bytes, FilesError> {
        let pack = self.locations.pack(location);
        let packs = self.packs.as_ref().filter(|_| blob_type == BlobType::Data);
        let Some(packs) = packs.filter(|_| pack.end <= MAX_WHOLE_PACK_BYTES) else {
            return self.repository.read_pack(pack.id, location.range()).await;
        };
        let mut packs = packs.lock().await;
        let bytes = match packs.iter().position(|(number, _)| *number == location.pack) {
            Some(index) => packs.remove(index).map(|(_, bytes)| bytes).unwrap_or_default(),
            None => match self.repository.read_pack(pack.id, 0..pack.end).await {
                // The pack may be truncated after this blob.
                Err(error) if error.is_damage() => {
                    return self.repository.read_pack(pack.id, location.range()).await;
                }
                bytes => bytes?,
            },
        };
        packs.push_back((location.pack, bytes.clone()));
        if packs.len() > MAX_CACHED_PACKS {
            packs.pop_front();
        }
        let range = location.range();
        let range = usize::try_from(range.start).unwrap_or(0)..usize::try_from(range.end).unwrap_or(0);
        Ok(bytes.get(range).map(|sealed| bytes.slice_ref(sealed)).unwrap_or_default())
    }
}

/// Intact snapshots, newest first, and the ids of corrupt ones.
type ListedSnapshots = (Vec<(Id, Snapshot)>, Vec<Id>);

/// Reads the `latest` snapshot, or all snapshots if `latest` is `None`, missing or corrupt.
async fn read_latest(repository: &Repository, latest: Option<Id>) -> Result<ListedSnapshots, FilesError> {
    if let Some(id) = latest {
        match repository.read_snapshot(id).await {
            Ok(snapshot) => return Ok((vec![(id, snapshot)], Vec::new())),
            // Earlier snapshots may be intact.
            Err(error) if error.is_damage() => {}
            Err(error) => return Err(error),
        }
    }
    repository.list_intact_snapshots().await
}

impl VersionPage {
    /// Extends the last version to an earlier snapshot if the entry is the same there, and returns whether it is.
    fn extend_last(&mut self, entry: Option<&Entry>, time: Timestamp) -> bool {
        let Some(last) = self.versions.last_mut() else { return false };
        let is_same = match (&last.entry, entry) {
            (Some(a), Some(b)) => a.is_same_version(b),
            (None, None) => true,
            _ => false,
        };
        if is_same {
            last.first_saved_at = time;
        }
        is_same
    }
}
