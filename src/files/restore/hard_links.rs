//! Files with several names.

use std::collections::HashSet;

use crate::tree::{HardLinkKey, Node};

/// The files with several names that have been visited.
#[derive(Debug, Default)]
pub(super) struct LinkedFiles(HashSet<HardLinkKey>);

impl LinkedFiles {
    /// Returns whether another name of the file has been visited.
    pub(super) fn is_additional_name(&mut self, node: &Node) -> bool {
        node.hard_link_key().is_some_and(|key| !self.0.insert(key))
    }
}
