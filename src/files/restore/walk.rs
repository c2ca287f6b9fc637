//! Walks the entries to restore, one directory at a time.

use std::path::{Path, PathBuf};

use super::DamagedEntries;
use crate::error::FilesError;
use crate::id::Id;
use crate::index::BlobLocations;
use crate::repository::Repository;
use crate::tree::{Node, NodeType};
use crate::tree_reader::TreeReader;

/// The part of a snapshot to restore.
#[derive(Debug, Clone)]
pub(super) enum WalkStart {
    /// Everything in a tree.
    Tree(Id),
    /// These entries, with their paths relative to the target.
    Entries(Vec<(PathBuf, Node)>),
}

pub(super) struct Walk<'a> {
    trees: TreeReader<'a>,
    /// The entries with which the walk starts.
    start_entries: Vec<(PathBuf, Node)>,
    /// Directories whose entries have not been returned yet.
    pending: Vec<(PathBuf, Id)>,
    /// Whether a damaged directory counts as empty, unless the walk starts with it.
    pub(super) should_skip_damaged: bool,
    /// The number of names in the paths of the directories with which the walk starts.
    start_depth: usize,
    /// The damaged directories since the start.
    pub(super) damaged: DamagedEntries,
}

impl<'a> Walk<'a> {
    pub(super) fn new(
        repository: &'a Repository,
        locations: &'a BlobLocations,
        should_skip_damaged: bool,
    ) -> Self {
        Self {
            trees: TreeReader::new(repository, locations),
            start_entries: Vec::new(),
            pending: Vec::new(),
            should_skip_damaged,
            start_depth: 0,
            damaged: DamagedEntries::default(),
        }
    }

    /// Starts or restarts the walk. At a restart, the most recently read trees are still in memory.
    pub(super) fn start(&mut self, start: WalkStart) {
        self.damaged = DamagedEntries::default();
        (self.start_entries, self.pending, self.start_depth) = match start {
            WalkStart::Tree(root) => (Vec::new(), vec![(PathBuf::new(), root)], 0),
            WalkStart::Entries(entries) => (entries, Vec::new(), 1),
        };
    }

    /// Returns the entries of the next directory, with their paths relative to the target. A directory is returned
    /// before its entries. `None` at the end.
    ///
    /// # Errors
    /// If the store fails; [`FilesError::Corrupt`] if a tree is damaged and not skipped, or an entry is invalid.
    pub(super) async fn next(&mut self) -> Result<Option<Vec<(PathBuf, Node)>>, FilesError> {
        let mut entries = std::mem::take(&mut self.start_entries);
        if entries.is_empty() {
            let Some((directory, tree)) = self.pending.pop() else { return Ok(None) };
            // Damage to a directory with which the walk starts is an error, because nothing in it would be restored.
            let may_skip = self.should_skip_damaged && directory.components().count() > self.start_depth;
            entries = match self.read_entries(&directory, tree).await {
                Err(error) if may_skip && error.is_damage() => {
                    tracing::warn!(path = %directory.display(), %error, "a directory is damaged");
                    self.damaged.add(directory);
                    Vec::new()
                }
                entries => entries?,
            };
        }
        for (path, node) in &entries {
            let corrupt = |why: &str| FilesError::corrupt(format!("entry {}", path.display()), &why);
            match node.node_type {
                NodeType::Dir => {
                    let tree = node.subtree.ok_or_else(|| corrupt("it has no tree"))?;
                    self.pending.push((path.clone(), tree));
                }
                NodeType::Symlink if node.link_target().is_none() => return Err(corrupt("it has no target")),
                NodeType::Symlink | NodeType::File | NodeType::Special => {}
            }
        }
        Ok(Some(entries))
    }

    async fn read_entries(&mut self, directory: &Path, tree: Id) -> Result<Vec<(PathBuf, Node)>, FilesError> {
        let nodes = self.trees.read(tree).await?.nodes;
        let mut entries = Vec::with_capacity(nodes.len());
        for node in nodes {
            let invalid = || FilesError::corrupt(format!("tree {tree}"), &"an entry has an invalid name");
            let name = node.file_name().ok_or_else(invalid)?;
            entries.push((directory.join(name), node));
        }
        Ok(entries)
    }
}
