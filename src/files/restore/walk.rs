//! Walks the entries to restore, one directory at a time.

use std::path::{Path, PathBuf};

use svc_base::untrusted_text::truncate_printable;

use super::DamagedEntries;
use crate::error::FilesError;
use crate::id::Id;
use crate::index::BlobLocations;
use crate::path_stack::PathStack;
use crate::repository::Repository;
use crate::tree::{Node, NodeType};
use crate::tree_reader::TreeReader;

/// Starting point of a walk.
#[derive(Debug, Clone)]
pub(super) enum WalkStart {
    /// All entries of a tree.
    Tree(Id),
    /// The given entries, under their names in the target.
    Entries(Vec<Node>),
}

/// A directory with its entries. Entries don't carry full paths, which would take a lot of memory in deep directories.
pub(super) struct WalkedDirectory {
    /// Relative to the target.
    pub(super) path: PathBuf,
    pub(super) nodes: Vec<Node>,
}

impl WalkedDirectory {
    /// Pairs each entry with its path relative to the target.
    pub(super) fn into_entries(self) -> impl Iterator<Item = (PathBuf, Node)> {
        let Self { path, nodes } = self;
        nodes.into_iter().filter_map(move |node| Some((path.join(node.file_name()?), node)))
    }
}

pub(super) struct Walk<'a> {
    trees: TreeReader<'a>,
    /// Initial entries of the walk.
    start_entries: Vec<Node>,
    /// Paths of directories not visited yet; `pending` holds their trees.
    pending_paths: PathStack,
    pending: Vec<Id>,
    /// Whether to skip corrupt entries. Corrupt directories are then treated as empty, except for those the walk starts
    /// with.
    pub(super) should_skip_damaged: bool,
    /// Path depth of the directories the walk starts with.
    start_depth: usize,
    /// Corrupt directories and invalid entries found since the start of the walk.
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
            pending_paths: PathStack::default(),
            pending: Vec::new(),
            should_skip_damaged,
            start_depth: 0,
            damaged: DamagedEntries::default(),
        }
    }

    /// Starts or restarts the walk. A restart keeps the most recently read trees in memory.
    pub(super) fn start(&mut self, start: WalkStart) {
        self.damaged = DamagedEntries::default();
        (self.pending_paths, self.pending) = (PathStack::default(), Vec::new());
        (self.start_entries, self.start_depth) = match start {
            WalkStart::Tree(root) => {
                self.push(Path::new(""), root);
                (Vec::new(), 0)
            }
            WalkStart::Entries(entries) => (entries, 1),
        };
    }

    fn push(&mut self, path: &Path, tree: Id) {
        self.pending_paths.push(path);
        self.pending.push(tree);
    }

    fn pop(&mut self) -> Option<(PathBuf, Id)> {
        Some((self.pending_paths.pop()?, self.pending.pop()?))
    }

    /// Returns the next directory with its entries, or `None` at the end. Parents come before their subdirectories.
    ///
    /// # Errors
    /// If the store fails; [`FilesError::Corrupt`] if a tree is corrupt or an entry is invalid and isn't skipped.
    pub(super) async fn next(&mut self) -> Result<Option<WalkedDirectory>, FilesError> {
        let (mut path, mut nodes) = (PathBuf::new(), std::mem::take(&mut self.start_entries));
        if nodes.is_empty() {
            let Some((directory, tree)) = self.pop() else { return Ok(None) };
            // Never skip a directory the walk starts with: nothing in it would be restored.
            let may_skip = self.should_skip_damaged && directory.components().count() > self.start_depth;
            nodes = match self.trees.read(tree).await {
                Err(error) if may_skip && error.is_damage() => {
                    tracing::warn!(tree = %tree, %error, "skipping corrupt directory");
                    self.damaged.add(directory.clone());
                    Vec::new()
                }
                tree => tree?.nodes,
            };
            path = directory;
        }
        let mut valid = Vec::with_capacity(nodes.len());
        for node in nodes {
            // Names were validated by `Tree::parse`.
            let Some(name) = node.file_name() else { continue };
            let reason = match (node.node_type, node.subtree) {
                (NodeType::Dir, None) => "missing tree",
                (NodeType::Symlink, _) if node.link_target().is_none() => "missing or invalid link target",
                (NodeType::Dir, Some(tree)) => {
                    self.push(&path.join(name), tree);
                    valid.push(node);
                    continue;
                }
                _ => {
                    valid.push(node);
                    continue;
                }
            };
            let path = path.join(name);
            if !self.should_skip_damaged {
                let entry = truncate_printable(&path.display().to_string());
                return Err(FilesError::corrupt(format!("entry {entry}"), &reason));
            }
            self.damaged.add(path);
        }
        Ok(Some(WalkedDirectory { path, nodes: valid }))
    }
}
