//! Files with several names.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use crate::id::Id;
use crate::tree::{Node, NodeType};

/// The first name of each file with several names, by device, inode and content: a save of changes visits only some of
/// the names, so an inode alone may mean two versions of the file.
#[derive(Debug, Default)]
pub(super) struct FirstNames(HashMap<(u64, u64, Id), Arc<Path>>);

impl FirstNames {
    /// Returns the first name of the file if this is a further one. Otherwise it becomes the first.
    pub(super) fn find_or_insert(&mut self, path: &Path, node: &Node) -> Option<Arc<Path>> {
        if node.node_type != NodeType::File || node.links <= 1 || node.inode == 0 {
            return None;
        }
        let key = (node.device_id, node.inode, Id::of_all(node.content.as_deref().unwrap_or_default()));
        let known = self.0.get(&key).cloned();
        if known.is_none() {
            self.0.insert(key, path.into());
        }
        known
    }
}
