//! Tracks directories changed since the parent snapshot, so that a save doesn't have to walk the whole home directory.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::path::{Component, Path};

/// Changes in a directory and below it. The root is the home directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChangeSet {
    /// Whether an entry was added to, removed from or changed in this directory.
    has_changed: bool,
    /// Whether anything below the directory may have changed.
    is_subtree_marked: bool,
    below: HashMap<OsString, ChangeSet>,
}

impl ChangeSet {
    pub fn is_empty(&self) -> bool {
        !self.has_changed && !self.is_subtree_marked && self.below.is_empty()
    }

    /// Marks a directory in which an entry was added, removed or changed.
    pub fn mark_directory(&mut self, path: &Path) {
        self.entry_mut(path).has_changed = true;
    }

    /// Marks a directory and everything below it.
    pub fn mark_subtree(&mut self, path: &Path) {
        self.entry_mut(path).is_subtree_marked = true;
    }

    pub fn merge(&mut self, other: Self) {
        self.has_changed |= other.has_changed;
        self.is_subtree_marked |= other.is_subtree_marked;
        for (name, changes) in other.below {
            self.below.entry(name).or_default().merge(changes);
        }
    }

    fn entry_mut(&mut self, path: &Path) -> &mut Self {
        path.components().fold(self, |changes, component| match component {
            Component::Normal(name) => changes.below.entry(name.to_owned()).or_default(),
            _ => changes,
        })
    }
}

/// Which entries of a directory a save visits.
#[derive(Debug, Clone, Copy)]
pub(super) enum Scope<'a> {
    /// Every entry, at any depth.
    All,
    /// Only the entries marked by these changes.
    Changed(&'a ChangeSet),
}

impl<'a> Scope<'a> {
    /// Whether every entry of the directory itself is visited.
    pub(super) fn lists_directory(self) -> bool {
        match self {
            Self::All => true,
            Self::Changed(changes) => changes.has_changed || changes.is_subtree_marked,
        }
    }

    /// Returns the scope for a subdirectory present in the parent snapshot, or `None` if neither it nor anything below
    /// it is marked.
    pub(super) fn below(self, name: &OsStr) -> Option<Self> {
        match self {
            Self::All => Some(Self::All),
            Self::Changed(changes) if changes.is_subtree_marked => Some(Self::All),
            Self::Changed(changes) => changes.below.get(name).map(Self::Changed),
        }
    }

    /// Names of the marked entries, for directories that aren't listed.
    pub(super) fn marked_names(self) -> impl Iterator<Item = &'a OsString> {
        let below = match self {
            Self::All => None,
            Self::Changed(changes) => Some(changes.below.keys()),
        };
        below.into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scope_covers_marked_paths_only() {
        let mut changes = ChangeSet::default();
        assert!(changes.is_empty());
        changes.mark_directory(Path::new("a/b"));
        changes.mark_subtree(Path::new("c"));
        let scope = Scope::Changed(&changes);
        let below = |scope: Scope<'_>, name: &str| scope.below(OsStr::new(name)).is_some();
        assert!(!scope.lists_directory());
        assert!(below(scope, "a") && below(scope, "c") && !below(scope, "b"));
        let a = scope.below(OsStr::new("a")).unwrap();
        assert!(!a.lists_directory() && below(a, "b") && !below(a, "x"));
        assert!(a.below(OsStr::new("b")).unwrap().lists_directory());
        let c = scope.below(OsStr::new("c")).unwrap();
        assert!(c.lists_directory() && matches!(c.below(OsStr::new("any")), Some(Scope::All)));

        let mut root_changes = ChangeSet::default();
        root_changes.mark_directory(Path::new(""));
        changes.merge(root_changes);
        assert!(Scope::Changed(&changes).lists_directory());
    }
}
