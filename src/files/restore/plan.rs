//! Plans a restore: reads the trees, and lists the chunks of each file. [`RestorePlan::create_entries`] then creates
//! the directories, the links and the files without content.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::available_bytes;
use super::target::Target;
use crate::error::FilesError;
use crate::id::Id;
use crate::index::{BlobLocation, BlobLocations};
use crate::pack::BlobType;
use crate::repository::Repository;
use crate::tree::{Node, NodeType};
use crate::tree_reader::TreeReader;

/// A chunk of zeros is this many times as long as its compressed form, or more.
const HOLE_RATIO: u64 = 500;

/// An entry to restore. Its node has no list of chunks, and a file's size is the sum of its chunks' sizes.
#[derive(Debug)]
pub(super) struct PlannedEntry {
    /// Below the target.
    pub(super) path: PathBuf,
    pub(super) node: Node,
}

/// A chunk of a file.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChunkPlacement {
    pub(super) location: BlobLocation,
    pub(super) id: Id,
    /// The file's position in [`RestorePlan::files`].
    pub(super) file: u32,
    /// The chunk's offset in the file, in bytes.
    pub(super) file_offset: u64,
}

#[derive(Debug, Default)]
pub(super) struct RestorePlan {
    /// Parents come before their subdirectories.
    pub(super) directories: Vec<PlannedEntry>,
    pub(super) files: Vec<PlannedEntry>,
    pub(super) links: Vec<PlannedEntry>,
    /// Further names of files: the path, and the file's position in `files`.
    pub(super) hard_links: Vec<(PathBuf, u32)>,
    /// Sorted by pack and offset.
    pub(super) pieces: Vec<ChunkPlacement>,
    pub(super) total_bytes: u64,
    /// The first name of each file with several names, by device, inode and content: a save of changes visits only some
    /// of the names.
    linked: HashMap<(u64, u64, Id), u32>,
}

/// The part of a snapshot to restore.
pub(super) enum Start {
    /// Everything in a tree.
    Tree(Id),
    /// These entries, each to a path below the target.
    Entries(Vec<(Node, PathBuf)>),
}

impl RestorePlan {
    pub(super) async fn create(
        repository: &Repository,
        locations: &BlobLocations,
        start: Start,
    ) -> Result<Self, FilesError> {
        let mut plan = Self::default();
        let mut trees = TreeReader::new(repository, locations);
        let mut pending = match start {
            Start::Tree(root) => vec![(root, PathBuf::new())],
            Start::Entries(entries) => {
                let mut subtrees = Vec::new();
                for (node, path) in entries {
                    let subtree = plan.add(node, path.clone(), locations)?;
                    subtrees.extend(subtree.map(|tree| (tree, path)));
                }
                subtrees
            }
        };
        while let Some((id, directory)) = pending.pop() {
            let tree = trees.read(id).await?;
            for node in tree.nodes {
                let name = node.file_name().ok_or_else(|| {
                    FilesError::corrupt(format!("tree {id}"), &"an entry has an invalid name")
                })?;
                let path = directory.join(name);
                if let Some(subtree) = plan.add(node, path.clone(), locations)? {
                    pending.push((subtree, path));
                }
            }
        }
        plan.pieces.sort_unstable_by_key(|piece| (piece.location.pack, piece.location.offset));
        Ok(plan)
    }

    /// Adds an entry. Returns the tree of a directory.
    fn add(
        &mut self,
        mut node: Node,
        path: PathBuf,
        locations: &BlobLocations,
    ) -> Result<Option<Id>, FilesError> {
        match node.node_type {
            NodeType::Dir => {
                let missing = || FilesError::corrupt(format!("entry {}", path.display()), &"it has no tree");
                let subtree = node.subtree.ok_or_else(missing)?;
                self.directories.push(PlannedEntry { path, node });
                return Ok(Some(subtree));
            }
            NodeType::Symlink => {
                let missing =
                    || FilesError::corrupt(format!("entry {}", path.display()), &"it has no target");
                node.link_target().ok_or_else(missing)?;
                self.links.push(PlannedEntry { path, node });
            }
            NodeType::File => {
                let number = u32::try_from(self.files.len())
                    .map_err(|_| FilesError::corrupt("snapshot", &"it has more than 2^32 files"))?;
                let content = node.content.take().unwrap_or_default();
                if node.links > 1 && node.inode != 0 {
                    let key = (node.device_id, node.inode, Id::of_all(&content));
                    let first = *self.linked.entry(key).or_insert(number);
                    if first != number {
                        self.hard_links.push((path, first));
                        return Ok(None);
                    }
                }
                node.size = self.add_pieces(number, content, locations)?;
                self.total_bytes += node.size;
                self.files.push(PlannedEntry { path, node });
            }
            NodeType::Special => {}
        }
        Ok(None)
    }

    /// Lists a file's chunks, and returns its size.
    fn add_pieces(
        &mut self,
        file: u32,
        content: Vec<Id>,
        locations: &BlobLocations,
    ) -> Result<u64, FilesError> {
        let mut size = 0;
        for id in content {
            let location = locations.find(BlobType::Data, id)?;
            self.pieces.push(ChunkPlacement { location, id, file, file_offset: size });
            size += location.content_length();
        }
        Ok(size)
    }

    /// Creates the directories, the links, and each file in its full size, without content. The target must be empty.
    pub(super) fn create_entries(&self, target: &Path) -> Result<(), FilesError> {
        let mut target = Target::open(target).map_err(FilesError::io("open", target))?;
        for PlannedEntry { path, .. } in &self.directories {
            target.create_directory(path).map_err(FilesError::io("create", path))?;
        }
        for PlannedEntry { path, node } in &self.links {
            let link_target = node.link_target().unwrap_or_default();
            target.create_symlink(path, &link_target).map_err(FilesError::io("create", path))?;
        }
        for PlannedEntry { path, node } in &self.files {
            let file = target.create_file(path).map_err(FilesError::io("create", path))?;
            file.set_len(node.size).map_err(FilesError::io("extend", path))?;
        }
        Ok(())
    }

    /// Returns the space that the files take, in bytes: holes take none. What compresses as well as zeros counts as a
    /// hole.
    pub(super) fn needed_bytes(&self) -> u64 {
        let is_hole = |location: &BlobLocation| {
            location.content_length() > u64::from(location.length).saturating_mul(HOLE_RATIO)
        };
        let locations = self.pieces.iter().map(|piece| piece.location);
        locations.filter(|location| !is_hole(location)).map(BlobLocation::content_length).sum()
    }

    /// Checks that the files fit.
    ///
    /// # Errors
    /// [`FilesError::NoSpace`].
    pub(super) fn check_space(&self, target: &Path) -> Result<(), FilesError> {
        let (needed, available) = (self.needed_bytes(), available_bytes(target)?);
        if needed > available { Err(FilesError::NoSpace { needed, available }) } else { Ok(()) }
    }
}
