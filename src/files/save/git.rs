//! Consistent copies of git repositories. Git writes objects before the refs to them. Because we read the refs first
//! and then all objects, a snapshot includes every object its refs need, even while git is writing.

use std::collections::{BTreeMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;

use super::changes::Scope;
use super::walk::{EntryError, MAX_READ_ATTEMPTS, Walker};
use crate::error::FilesError;
use crate::tree::Node;

pub(super) const OBJECTS: &str = "objects";
/// Git moves refs from this directory to the `packed-refs` file, deleting the loose refs last, so the file must be read
/// after the directory.
const REFS: &str = "refs";
const HEAD: &str = "HEAD";

/// Whether a directory with these names is a git repository.
pub(super) fn is_repository(contains: impl Fn(&OsStr) -> bool) -> bool {
    [HEAD, OBJECTS, REFS].iter().all(|name| contains(OsStr::new(name)))
}

/// Sorts a repository's entries into save order.
pub(super) fn sort_for_save(names: &mut [OsString]) {
    names.sort_by_key(|name| match name.to_str() {
        Some(REFS) => 0,
        Some(OBJECTS) => 2,
        _ => 1,
    });
}

impl Walker<'_> {
    /// Saves a git repository's objects, right after its refs. Checks all objects, because the watcher may not have
    /// reported the newest ones yet.
    pub(super) fn save_all_git_objects(
        &mut self,
        repository: &OwnedFd,
        earlier: Option<Node>,
    ) -> Result<Option<Node>, FilesError> {
        let was_in_git_objects = std::mem::replace(&mut self.is_in_git_objects, true);
        let saved = self.save_entry(repository, OsStr::new(OBJECTS), earlier, Scope::All);
        self.is_in_git_objects = was_in_git_objects;
        saved
    }

    /// Saves a git object directory. Lists it again if a listed file has vanished, because git replaces packs.
    pub(super) fn save_git_objects(
        &mut self,
        directory: &OwnedFd,
        mut parent_nodes: BTreeMap<OsString, Node>,
    ) -> Result<Vec<Node>, EntryError> {
        let mut nodes = Vec::new();
        let mut listed: HashSet<OsString> = HashSet::new();
        for attempt in 1..=MAX_READ_ATTEMPTS {
            let outer_has_vanished_entry = std::mem::take(&mut self.has_vanished_entry);
            for name in self.list(directory)? {
                if listed.insert(name.clone()) {
                    let earlier = parent_nodes.remove(&name);
                    nodes.extend(self.save_entry(directory, &name, earlier, Scope::All)?);
                }
            }
            if !std::mem::replace(&mut self.has_vanished_entry, outer_has_vanished_entry) {
                break;
            }
            if attempt == MAX_READ_ATTEMPTS {
                self.mark_for_retry();
            }
        }
        Ok(nodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refs_are_saved_before_objects() {
        let mut names: Vec<OsString> =
            ["HEAD", "index", "logs", "objects", "packed-refs", "refs"].map(OsString::from).into();
        assert!(is_repository(|name| names.iter().any(|found| found == name)));
        sort_for_save(&mut names);
        assert_eq!(names, ["refs", "HEAD", "index", "logs", "packed-refs", "objects"]);
        names.pop();
        assert!(!is_repository(|name| names.iter().any(|found| found == name)));
    }
}
