//! Files with several names.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use crate::id::Id;
use crate::tree::{Node, NodeType};

/// Device, inode and content. The inode does not suffice: a save of changes visits only some of a file's names, so the
/// names may have different versions of its content.
type LinkedFile = (u64, u64, Id);

/// Returns `None` unless the entry is a file with several names and a known inode.
fn identify(node: &Node) -> Option<LinkedFile> {
    let has_other_names = node.node_type == NodeType::File && node.links > 1 && node.inode != 0;
    has_other_names
        .then(|| (node.device_id, node.inode, Id::of_all(node.content.as_deref().unwrap_or_default())))
}

/// The files with several names that have been visited.
#[derive(Debug, Default)]
pub(super) struct LinkedFiles(HashSet<LinkedFile>);

impl LinkedFiles {
    /// Returns whether another name of the file has been visited.
    pub(super) fn is_further_name(&mut self, node: &Node) -> bool {
        identify(node).is_some_and(|file| !self.0.insert(file))
    }
}

/// The first name of each file with several names.
#[derive(Debug, Default)]
pub(super) struct FirstNames(HashMap<LinkedFile, Box<Path>>);

impl FirstNames {
    /// Returns the first name of the file if `path` is a further one. Otherwise, `path` becomes the first one.
    pub(super) fn find_or_insert(&mut self, path: &Path, node: &Node) -> Option<Box<Path>> {
        let file = identify(node)?;
        let known = self.0.get(&file).cloned();
        if known.is_none() {
            self.0.insert(file, path.into());
        }
        known
    }
}
