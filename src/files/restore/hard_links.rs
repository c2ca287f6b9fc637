//! Tracks hard-linked files, so that each is counted only once.

use std::collections::HashSet;

use crate::tree::{HardLinkKey, Node};

/// Hard-linked files visited so far.
#[derive(Debug, Default)]
pub(super) struct LinkedFiles(HashSet<HardLinkKey>);

impl LinkedFiles {
    /// Records a visit. Returns whether the file had already been visited under another name.
    pub(super) fn record_visit(&mut self, node: &Node) -> bool {
        node.hard_link_key().is_some_and(|key| !self.0.insert(key))
    }
}
