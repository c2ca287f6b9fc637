//! Changed paths not yet saved by the file backup.

use std::collections::BTreeSet;

use super::diff::{Change, DirtySet};
use super::tree::{Tree, join_path};
use crate::audit::file_changes::{ChangedPaths, ChangesReply};

/// Maximum number of paths in a [`PathSet`]. Larger sets become [`PathSet::everything`].
const MAX_PATHS: usize = 50_000;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct PathSet {
    is_everything: bool,
    directories: BTreeSet<Vec<u8>>,
    subtrees: BTreeSet<Vec<u8>>,
}

impl PathSet {
    /// Returns the set of all paths, meaning that anything may have changed.
    fn everything() -> Self {
        Self { is_everything: true, ..Self::default() }
    }

    fn limit(&mut self) {
        if self.directories.len() + self.subtrees.len() > MAX_PATHS {
            *self = Self::everything();
        }
    }

    fn merge(&mut self, other: Self) {
        if self.is_everything || other.is_everything {
            *self = Self::everything();
            return;
        }
        self.directories.extend(other.directories);
        self.subtrees.extend(other.subtrees);
        self.limit();
    }
}

/// Accumulates changed paths until the file backup acknowledges having saved them.
#[derive(Debug)]
pub struct ChangeLog {
    /// Distinguishes our tokens from those of earlier processes.
    instance: String,
    /// Sequence number of the last reply; 0 before the first one.
    last_reply: u64,
    /// Sequence number of the last reply whose changes are saved.
    last_saved: Option<u64>,
    /// Changes in replies after the last saved one.
    unsaved: PathSet,
    /// Changes since the last reply.
    fresh: PathSet,
    /// Event count at the last reply.
    last_event_count: u64,
}

impl ChangeLog {
    /// Creates a log that reports everything as changed until the file backup has saved the home directory.
    pub fn new() -> Self {
        Self {
            instance: uuid::Uuid::now_v7().simple().to_string(),
            last_reply: 0,
            last_saved: None,
            unsaved: PathSet::everything(),
            fresh: PathSet::default(),
            last_event_count: 0,
        }
    }

    /// Whether the next reply will report that anything may have changed, so there's no need to record changes.
    fn will_report_everything(&self) -> bool {
        self.fresh.is_everything || self.last_reply == 0
    }

    pub fn record_everything(&mut self) {
        if self.last_reply > 0 {
            self.fresh = PathSet::everything();
        }
    }

    /// Records dirty names under their paths in the tree. Must be called both before and after a check, since a moved
    /// directory's changes are at both of its paths.
    pub fn record(&mut self, dirty: &DirtySet, tree: &Tree) {
        if self.will_report_everything() {
            return;
        }
        if dirty.is_everything_dirty() {
            return self.record_everything();
        }
        for (dir, names) in dirty.names() {
            // A directory missing from the tree is below a dirty name, which is recorded with its subtree.
            let Some(path) = tree.path(dir) else { continue };
            for (name, _) in names.iter().filter(|(_, marks)| marks.has_name_change) {
                self.fresh.subtrees.insert(join_path(&path, name));
            }
            self.fresh.directories.insert(path);
        }
        self.fresh.limit();
    }

    /// Records the parent directories of changed paths, including those of a hard-linked file's other names.
    pub fn record_changes(&mut self, changes: &[Change]) {
        if self.will_report_everything() {
            return;
        }
        for change in changes {
            let dir_end = change.path.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
            self.fresh.directories.insert(change.path[..dir_end].to_vec());
        }
        self.fresh.limit();
    }

    /// Returns the changes since the reply identified by `last_saved_token`. `event_count` is the number of events so
    /// far.
    pub fn take(&mut self, last_saved_token: Option<&str>, event_count: u64) -> ChangesReply {
        let saved = last_saved_token
            .and_then(|token| token.strip_prefix(&self.instance)?.strip_prefix('-')?.parse().ok());
        let fresh = std::mem::take(&mut self.fresh);
        if saved.is_some() && saved == Some(self.last_reply) {
            (self.unsaved, self.last_saved) = (PathSet::default(), saved);
        } else if saved.is_none() || saved != self.last_saved {
            // Nothing has been saved yet, or the token is too old or from an earlier process.
            (self.unsaved, self.last_saved) = (PathSet::everything(), None);
        }
        // A non-empty `fresh` doesn't mean new events: while a tool is running, every request records the same names
        // again.
        let has_new = event_count != self.last_event_count;
        self.last_event_count = event_count;
        self.unsaved.merge(fresh);
        self.last_reply += 1;
        let paths = (!self.unsaved.is_everything).then(|| ChangedPaths {
            directories: self.unsaved.directories.iter().cloned().collect(),
            subtrees: self.unsaved.subtrees.iter().cloned().collect(),
        });
        ChangesReply { token: format!("{}-{}", self.instance, self.last_reply), has_new, paths }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directories(reply: &ChangesReply) -> Option<Vec<&str>> {
        let paths = reply.paths.as_ref()?;
        Some(paths.directories.iter().map(|path| std::str::from_utf8(path).unwrap()).collect())
    }

    fn add_change(log: &mut ChangeLog, path: &str) {
        log.fresh.directories.insert(path.as_bytes().to_vec());
    }

    #[test]
    fn take_resends_changes_until_saved() {
        let mut log = ChangeLog::new();
        let first = log.take(None, 1);
        assert_eq!(first.paths, None, "the first reply must report everything");
        add_change(&mut log, "a");
        let second = log.take(Some(&first.token), 2);
        assert_eq!((directories(&second), second.has_new), (Some(vec!["a"]), true));
        add_change(&mut log, "b");
        let third = log.take(Some(&first.token), 2);
        assert_eq!(directories(&third), Some(vec!["a", "b"]), "unsaved changes must be resent");
        let fourth = log.take(Some(&third.token), 2);
        assert_eq!((directories(&fourth), fourth.has_new), (Some(vec![]), false));
        for token in [None, Some("other-1"), Some(second.token.as_str())] {
            let mut log = ChangeLog { instance: log.instance.clone(), last_reply: 9, ..ChangeLog::new() };
            assert_eq!(log.take(token, 0).paths, None, "{token:?}");
        }
    }

    #[test]
    fn too_many_changes_are_reported_as_everything() {
        let mut log = ChangeLog::new();
        let first = log.take(None, 0);
        for number in 0..=MAX_PATHS {
            add_change(&mut log, &number.to_string());
        }
        log.fresh.limit();
        let second = log.take(Some(&first.token), 0);
        assert_eq!(second.paths, None);
        assert_eq!(directories(&log.take(Some(&second.token), 0)), Some(vec![]));
    }
}
