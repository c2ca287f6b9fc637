//! Walks the home directory. Unchanged files reuse their content from the parent snapshot; all others are read.
//!
//! Entries are opened relative to their directory's descriptor, one component at a time and without following symlinks,
//! so links and renamed directories can't lead out of the home directory. The walk doesn't cross file systems.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FileType, Mode, OFlags, Statx};
use rustix::io::Errno;
use tokio::sync::mpsc;

use svc_base::accounts::{AccountNames, Accounts};
use svc_base::untrusted_text::truncate_printable;

use super::changes::{ChangeSet, Scope};
use super::database::DatabaseFiles;
use super::entry_stat::{CACHE_TAG, open_in, stat_in, stat_open, to_timestamp};
use super::file::HardLinkedContent;
use super::git;
use super::workers::Workers;
use super::write_back::WriteBack;
use super::{ExcludedSizes, SaveCounts, SaveOptions};
use crate::chunker::Chunker;
use crate::error::FilesError;
use crate::id::Id;
use crate::index::KnownBlobs;
use crate::pack::{BlobType, FinishedPack, MAX_BLOB_BYTES, PackWriter};
use crate::repository::Repository;
use crate::tree::{Node, NodeType, Tree};
use crate::xattrs::read_xattrs;

/// Maximum number of attempts to read a file that keeps changing.
pub(super) const MAX_READ_ATTEMPTS: u32 = 3;
/// Deeper directories aren't saved, since each level takes a file descriptor and stack space.
const MAX_DEPTH: usize = 1000;
/// Maximum size of a directory's tree, which is built in memory.
pub(super) const MAX_DIRECTORY_BYTES: usize = if cfg!(test) { 6 << 20 } else { MAX_BLOB_BYTES };
/// Prefix of notes about sockets, FIFOs and devices.
pub const SPECIAL_FILE_NOTE: &str = "special file";
/// Maximum number of notes in the result.
const MAX_NOTES: usize = 20;

/// Inputs to [`Walk::run`].
pub(super) struct Walk {
    pub(super) repository: Repository,
    pub(super) options: SaveOptions,
    pub(super) known: KnownBlobs,
    pub(super) packs: mpsc::Sender<FinishedPack>,
    pub(super) is_stopped: Arc<AtomicBool>,
}

pub(super) struct WalkResult {
    pub(super) tree: Id,
    pub(super) counts: SaveCounts,
    pub(super) retry: ChangeSet,
    /// All trees in the snapshot; `None` if only changes were visited.
    pub(super) trees: Option<HashSet<Id>>,
    pub(super) known: KnownBlobs,
}

impl Walk {
    /// Walks the home directory and sends all packs to the uploader. `parent_tree` is the parent snapshot's root tree.
    pub(super) fn run(self, parent_tree: Option<Id>, scope: Scope<'_>) -> Result<WalkResult, FilesError> {
        let Self { repository, options, known, packs, is_stopped } = self;
        let home = &options.home;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = rustix::fs::open(home, flags, Mode::empty()).map_err(FilesError::io("open", home))?;
        let stat = stat_open(&directory).map_err(FilesError::io("read", home))?;
        let workers = Workers::start(options.workers, &repository.key, &packs)?;
        let mut walker = Walker {
            tree_packs: PackWriter::new(repository.key.clone(), BlobType::Tree)?,
            chunker: Chunker::new(repository.polynomial),
            account_names: Accounts::load(&options.system_root).names(),
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            repository,
            options,
            known,
            packs,
            is_stopped,
            workers: &workers,
            counts: SaveCounts::default(),
            retry: ChangeSet::default(),
            trees: matches!(scope, Scope::All).then(HashSet::new),
            linked: HashMap::new(),
            path: PathBuf::new(),
            node_bytes: 0,
            has_read_database: false,
            is_in_git_objects: false,
            has_vanished_entry: false,
            write_back: WriteBack::default(),
        };
        if walker.options.should_measure_excluded && matches!(scope, Scope::All) {
            walker.counts.excluded_sizes = Some(ExcludedSizes::default());
        }
        let saved = walker.save_home(&directory, parent_tree, scope);
        let Walker { counts, retry, trees, known, packs, .. } = walker;
        drop(packs);
        // If a worker error stopped the walk, report that error.
        let finished = workers.finish();
        let tree = match (saved, finished) {
            (Ok(tree), Ok(())) => tree,
            (Err(FilesError::Stopped) | Ok(_), Err(error)) | (Err(error), _) => {
                return Err(error);
            }
        };
        Ok(WalkResult { tree, counts, retry, trees, known })
    }
}

pub(super) struct Walker<'a> {
    repository: Repository,
    options: SaveOptions,
    pub(super) known: KnownBlobs,
    packs: mpsc::Sender<FinishedPack>,
    pub(super) is_stopped: Arc<AtomicBool>,
    pub(super) workers: &'a Workers,
    tree_packs: PackWriter,
    pub(super) chunker: Chunker,
    account_names: AccountNames,
    device: (u32, u32),
    pub(super) counts: SaveCounts,
    /// Entries not saved in their current state.
    pub(super) retry: ChangeSet,
    /// All trees in the snapshot; `None` if only changes are visited.
    trees: Option<HashSet<Id>>,
    /// Contents of hard-linked files with unvisited links, by inode.
    pub(super) linked: HashMap<u64, HardLinkedContent>,
    /// Path of the current entry, relative to the home directory.
    pub(super) path: PathBuf,
    /// Lower bound on the total size of the nodes saved so far in the current directory.
    node_bytes: usize,
    /// Whether a database was read in the current directory.
    pub(super) has_read_database: bool,
    /// Whether the current directory contains the objects of a git repository.
    pub(super) is_in_git_objects: bool,
    /// Whether an entry of the current directory vanished before it was saved.
    pub(super) has_vanished_entry: bool,
    pub(super) write_back: WriteBack,
}

impl Walker<'_> {
    fn save_home(
        &mut self,
        directory: &OwnedFd,
        parent_tree: Option<Id>,
        scope: Scope<'_>,
    ) -> Result<Id, FilesError> {
        let tree = self.save_directory(directory, parent_tree, scope).map_err(|error| match error {
            EntryError::Fatal(error) => error,
            EntryError::Unreadable(error) => FilesError::io("list", &self.options.home)(error),
            EntryError::Vanished | EntryError::Replaced => {
                FilesError::io("list", &self.options.home)(io::Error::from(io::ErrorKind::NotFound))
            }
        })?;
        self.finish_trees()?;
        Ok(tree)
    }

    /// Saves a directory and returns its tree id. `parent_tree` is its tree in the parent snapshot.
    fn save_directory(
        &mut self,
        directory: &OwnedFd,
        parent_tree: Option<Id>,
        scope: Scope<'_>,
    ) -> Result<Id, EntryError> {
        self.counts.directories += 1;
        let parent_nodes = self.load_parent_nodes(parent_tree)?;
        let is_cached = parent_nodes.is_some();
        let outer_bytes = std::mem::take(&mut self.node_bytes);
        let outer_has_read_database = std::mem::take(&mut self.has_read_database);
        let nodes = match parent_nodes {
            Some(parent_nodes) if can_save_marked(&parent_nodes, scope) => {
                self.save_marked(directory, parent_nodes, scope).map_err(EntryError::from)
            }
            Some(parent_nodes) => self.save_all(directory, parent_nodes, scope),
            None => self.save_all(directory, BTreeMap::new(), Scope::All),
        };
        let node_bytes = std::mem::replace(&mut self.node_bytes, outer_bytes);
        self.has_read_database = outer_has_read_database;
        let mut nodes = nodes?;
        // The listing checks only an estimate: link targets, attributes and chunk lists may be long.
        let too_large = || {
            let reason = format!("entries exceed {MAX_DIRECTORY_BYTES} bytes");
            EntryError::Unreadable(io::Error::other(reason))
        };
        if node_bytes > MAX_DIRECTORY_BYTES {
            return Err(too_large());
        }
        nodes.sort_by_cached_key(Node::file_name);
        let json = Tree { nodes }.to_json()?;
        if json.len() > MAX_DIRECTORY_BYTES {
            return Err(too_large());
        }
        let id = Id::of(&json);
        if parent_tree != Some(id) || !is_cached {
            self.repository.cache_tree(id, &json);
        }
        if let Some(trees) = &mut self.trees {
            trees.insert(id);
        }
        if self.known.insert_new(BlobType::Tree, id)? {
            let pack = self.tree_packs.add(id, &json)?;
            self.send(pack)?;
        }
        Ok(id)
    }

    fn save_all(
        &mut self,
        directory: &OwnedFd,
        mut parent_nodes: BTreeMap<OsString, Node>,
        scope: Scope<'_>,
    ) -> Result<Vec<Node>, EntryError> {
        if self.is_in_git_objects {
            return self.save_git_objects(directory, parent_nodes);
        }
        let mut nodes = Vec::new();
        let mut names = self.list(directory)?;
        let is_git_repository =
            git::is_repository(|name| names.binary_search_by(|found| found.as_os_str().cmp(name)).is_ok());
        if is_git_repository {
            git::sort_for_save(&mut names);
        }
        let databases = DatabaseFiles::extract_from(&mut names);
        for database in &databases {
            nodes.extend(self.save_database(directory, database, &mut parent_nodes, scope)?);
        }
        // These databases were saved together with their WALs and journals.
        self.has_read_database = false;
        for name in names {
            let earlier = parent_nodes.remove(&name);
            let node = if is_git_repository && name == git::OBJECTS {
                self.save_all_git_objects(directory, earlier)?
            } else {
                self.save_entry(directory, &name, earlier, scope)?
            };
            nodes.extend(node);
        }
        if self.has_read_database {
            self.save_newly_opened_databases(directory, &databases, &mut nodes, scope)?;
        }
        Ok(nodes)
    }

    /// Saves the entries marked in `scope` and carries over all others.
    fn save_marked(
        &mut self,
        directory: &OwnedFd,
        mut parent_nodes: BTreeMap<OsString, Node>,
        scope: Scope<'_>,
    ) -> Result<Vec<Node>, FilesError> {
        let mut nodes = Vec::new();
        for name in scope.marked_names() {
            let earlier = parent_nodes.remove(name);
            nodes.extend(self.save_entry(directory, name, earlier, scope)?);
        }
        nodes.extend(parent_nodes.into_values());
        Ok(nodes)
    }

    fn finish_trees(&mut self) -> Result<(), FilesError> {
        let pack = self.tree_packs.finish()?;
        self.send(pack)
    }

    fn send(&self, pack: Option<FinishedPack>) -> Result<(), FilesError> {
        pack.map_or(Ok(()), |pack| self.packs.blocking_send(pack).map_err(|_| FilesError::Stopped))
    }

    /// Returns a directory's nodes in the parent snapshot, by name. Returns `None` if it has no tree there or the tree
    /// isn't cached, in which case all files are read again.
    fn load_parent_nodes(&self, tree: Option<Id>) -> Result<Option<BTreeMap<OsString, Node>>, FilesError> {
        let Some(tree) = tree.map(|id| self.repository.read_cached_tree(id)).transpose()?.flatten() else {
            return Ok(None);
        };
        Ok(Some(tree.nodes.into_iter().filter_map(|node| Some((node.file_name()?, node))).collect()))
    }

    /// Saves an entry. Returns `None` if it's skipped, has vanished, or can't be read and `earlier` is `None`.
    /// `earlier` is its node in the parent snapshot, or one already created by this save.
    pub(super) fn save_entry(
        &mut self,
        directory: &OwnedFd,
        name: &OsStr,
        earlier: Option<Node>,
        scope: Scope<'_>,
    ) -> Result<Option<Node>, FilesError> {
        if self.is_stopped.load(Ordering::Relaxed) {
            return Err(FilesError::Stopped);
        }
        if self.node_bytes > MAX_DIRECTORY_BYTES {
            // The directory can't be saved, so further nodes would only waste memory.
            return Ok(None);
        }
        self.path.push(name);
        let mut attempts = 1;
        let saved = loop {
            match self.try_save_entry(directory, name, earlier.as_ref(), scope) {
                Err(EntryError::Replaced) if attempts < MAX_READ_ATTEMPTS => attempts += 1,
                saved => break saved,
            }
        };
        let saved = match saved {
            Ok(node) => Ok(node),
            Err(EntryError::Vanished) => {
                self.has_vanished_entry = true;
                Ok(None)
            }
            Err(EntryError::Replaced) => {
                Ok(self.keep_unreadable(&"replaced during every read attempt", earlier))
            }
            Err(EntryError::Unreadable(error)) => Ok(self.keep_unreadable(&error, earlier)),
            Err(EntryError::Fatal(error)) => Err(error),
        };
        self.path.pop();
        if let Ok(Some(node)) = &saved {
            self.node_bytes += node.min_bytes();
        }
        saved
    }

    fn try_save_entry(
        &mut self,
        directory: &OwnedFd,
        name: &OsStr,
        earlier: Option<&Node>,
        scope: Scope<'_>,
    ) -> Result<Option<Node>, EntryError> {
        let stat = stat_in(directory, name)?;
        let file_type = FileType::from_raw_mode(stat.stx_mode.into());
        let is_directory = file_type == FileType::Directory;
        if self.options.exclusions.excludes(&self.path, name, is_directory)
            || (stat.stx_dev_major, stat.stx_dev_minor) != self.device
        {
            self.counts.excluded += 1;
            self.measure_excluded(directory, name);
            return Ok(None);
        }
        match file_type {
            FileType::RegularFile => self.save_file(directory, name, &stat, earlier),
            FileType::Directory => self.save_subdirectory(directory, name, &stat, earlier, scope),
            FileType::Symlink => self.save_symlink(directory, name, &stat),
            _ => {
                self.counts.special += 1;
                self.note(SPECIAL_FILE_NOTE);
                Ok(None)
            }
        }
    }

    /// Measures the current excluded entry, if measuring is enabled.
    pub(super) fn measure_excluded(&mut self, directory: &OwnedFd, name: &OsStr) {
        if let Some(sizes) = &mut self.counts.excluded_sizes {
            sizes.add(directory, name, &self.path, self.device, &self.is_stopped);
        }
    }

    /// Counts an unreadable entry and carries over its earlier node.
    fn keep_unreadable(&mut self, error: &dyn std::fmt::Display, earlier: Option<Node>) -> Option<Node> {
        self.counts.unreadable += 1;
        self.mark_for_retry();
        let path = self.path.display();
        self.counts.first_unreadable.get_or_insert_with(|| truncate_printable(&format!("{path}: {error}")));
        self.keep_trees(earlier.as_ref().and_then(|node| node.subtree));
        earlier
    }

    /// Adds a carried-over tree and all trees below it to `trees`.
    fn keep_trees(&mut self, root: Option<Id>) {
        let mut pending: Vec<Id> = root.into_iter().collect();
        while let (Some(trees), Some(id)) = (&mut self.trees, pending.pop()) {
            let tree =
                trees.insert(id).then(|| self.repository.read_cached_tree(id).ok().flatten()).flatten();
            pending.extend(tree.into_iter().flat_map(|tree| tree.nodes).filter_map(|node| node.subtree));
        }
    }

    pub(super) fn note(&mut self, description: &str) {
        if self.counts.notes.len() < MAX_NOTES {
            let note = truncate_printable(&format!("{description}: {}", self.path.display()));
            self.counts.notes.push(note);
        }
    }

    pub(super) fn new_node(&self, name: &OsStr, node_type: NodeType, stat: &Statx) -> Node {
        let mut node = Node::new(name, node_type, stat.stx_mode.into());
        node.set_times(to_timestamp(stat.stx_mtime), to_timestamp(stat.stx_ctime));
        (node.uid, node.gid) = (stat.stx_uid, stat.stx_gid);
        node.user = self.account_names.user(node.uid).unwrap_or_default().to_owned();
        node.group = self.account_names.group(node.gid).unwrap_or_default().to_owned();
        (node.inode, node.links) = (stat.stx_ino, stat.stx_nlink.into());
        node.device_id = rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor);
        node
    }

    fn save_subdirectory(
        &mut self,
        directory: &OwnedFd,
        name: &OsStr,
        stat: &Statx,
        earlier: Option<&Node>,
        scope: Scope<'_>,
    ) -> Result<Option<Node>, EntryError> {
        if self.path.components().count() > MAX_DEPTH {
            let reason = format!("nested more than {MAX_DEPTH} levels deep");
            return Err(EntryError::Unreadable(io::Error::other(reason)));
        }
        let opened = open_in(directory, name, OFlags::DIRECTORY)?;
        let opened_stat = stat_open(&opened)?;
        check_same(stat, &opened_stat)?;
        let mut node = self.new_node(name, NodeType::Dir, &opened_stat);
        node.extended_attributes = read_xattrs(&opened)?;
        // A different inode means the directory was created or moved here, so all of its entries may be new.
        let scope = match earlier {
            Some(earlier) if earlier.inode == node.inode => scope.below(name),
            _ => Some(Scope::All),
        };
        // The ctime also catches a directory that was moved away, changed and moved back, and a reused inode.
        let is_untouched = earlier.is_some_and(|earlier| earlier.ctime == node.ctime);
        let parent_tree = earlier.and_then(|node| node.subtree);
        node.subtree = match (scope, parent_tree) {
            (None, Some(unchanged)) if is_untouched && self.known.contains(BlobType::Tree, unchanged) => {
                Some(unchanged)
            }
            (scope, _) => Some(self.save_directory(&opened, parent_tree, scope.unwrap_or(Scope::All))?),
        };
        Ok(Some(node))
    }

    fn save_symlink(
        &mut self,
        directory: &OwnedFd,
        name: &OsStr,
        stat: &Statx,
    ) -> Result<Option<Node>, EntryError> {
        let target = rustix::fs::readlinkat(directory, name, Vec::new())?;
        let mut node = self.new_node(name, NodeType::Symlink, stat);
        node.set_link_target(OsStr::from_bytes(target.to_bytes()));
        Ok(Some(node))
    }
}

/// Whether only the marked entries of a directory need to be saved. Git repositories are always listed in full, because
/// their refs must be read before other files.
fn can_save_marked(parent_nodes: &BTreeMap<OsString, Node>, scope: Scope<'_>) -> bool {
    !scope.lists_directory()
        && !parent_nodes.contains_key(OsStr::new(CACHE_TAG))
        && !git::is_repository(|name| parent_nodes.contains_key(name))
}

/// Reason for not saving an entry.
pub(super) enum EntryError {
    /// Removed during the save.
    Vanished,
    /// Replaced by another entry during the save.
    Replaced,
    Unreadable(io::Error),
    /// Aborts the save.
    Fatal(FilesError),
}

impl From<FilesError> for EntryError {
    fn from(error: FilesError) -> Self {
        Self::Fatal(error)
    }
}

impl From<io::Error> for EntryError {
    fn from(error: io::Error) -> Self {
        match Errno::from_io_error(&error) {
            Some(Errno::NOENT) => Self::Vanished,
            Some(Errno::NOTDIR | Errno::LOOP) => Self::Replaced,
            _ => Self::Unreadable(error),
        }
    }
}

impl From<Errno> for EntryError {
    fn from(error: Errno) -> Self {
        io::Error::from(error).into()
    }
}

/// Checks that an entry wasn't replaced between `stat` and `open`.
///
/// # Errors
/// `Replaced` if the opened entry isn't the one `stat` returned; it may even be on another file system.
pub(super) fn check_same(expected: &Statx, opened: &Statx) -> Result<(), EntryError> {
    let identity = |stat: &Statx| (stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino);
    if identity(expected) == identity(opened) { Ok(()) } else { Err(EntryError::Replaced) }
}
