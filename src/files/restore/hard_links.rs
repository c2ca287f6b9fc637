//! Files with several names.

use std::collections::{HashMap, HashSet};
use std::path::Path;

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

/// The first name of each file with several names.
#[derive(Debug, Default)]
pub(super) struct FirstNames(HashMap<HardLinkKey, Box<Path>>);

impl FirstNames {
    /// Returns the first name of the file if `path` is an additional one. Otherwise, `path` becomes the first name.
    pub(super) fn find_or_insert(&mut self, path: &Path, node: &Node) -> Option<Box<Path>> {
        let key = node.hard_link_key()?;
        let first = self.0.get(&key).cloned();
        if first.is_none() {
            self.0.insert(key, path.into());
        }
        first
    }
}
