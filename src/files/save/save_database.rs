//! Saves the files of a SQLite database as a unit.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use svc_base::untrusted_text::truncate_printable;

use super::changes::Scope;
use super::database::{DatabaseFiles, ReadLock};
use super::entry_stat::{StatFingerprint, stat_in};
use super::file::{UNSTABLE_INODE, UNSTABLE_NOTE};
use super::walk::{EntryError, Walker};
use crate::tree::{Node, NodeType};

impl Walker<'_> {
    /// Re-saves databases whose WAL or journal was created after the directory was listed.
    pub(super) fn save_newly_opened_databases(
        &mut self,
        directory: &OwnedFd,
        already_saved: &[DatabaseFiles],
        nodes: &mut Vec<Node>,
        scope: Scope<'_>,
    ) -> Result<(), EntryError> {
        // Listing the directory again would count its excluded entries twice.
        let counts = self.counts.clone();
        let mut names = self.list(directory)?;
        self.counts = counts;
        let databases = DatabaseFiles::extract_from(&mut names);
        for database in databases.into_iter().filter(|database| !already_saved.contains(database)) {
            let mut earlier = BTreeMap::new();
            nodes.retain(|node| {
                let name = node.file_name().filter(|name| database.names.contains(name));
                name.inspect(|name| drop(earlier.insert(name.clone(), node.clone()))).is_none()
            });
            for (name, node) in earlier.iter().filter(|(_, node)| node.node_type == NodeType::File) {
                self.uncount(name, node);
            }
            nodes.extend(self.save_database(directory, &database, &mut earlier, scope)?);
        }
        Ok(())
    }

    /// Removes an entry of the current directory that was saved as an ordinary file from the counts and notes.
    fn uncount(&mut self, name: &OsStr, node: &Node) {
        self.counts.files = self.counts.files.saturating_sub(1);
        self.counts.bytes = self.counts.bytes.saturating_sub(node.size);
        if node.inode == UNSTABLE_INODE {
            let note = truncate_printable(&format!("{UNSTABLE_NOTE}: {}", self.path.join(name).display()));
            self.counts.unstable = self.counts.unstable.saturating_sub(1);
            self.counts.notes.retain(|other| *other != note);
        }
    }

    /// Saves a consistent copy of a database's files, or counts the database as unstable.
    pub(super) fn save_database(
        &mut self,
        directory: &OwnedFd,
        database: &DatabaseFiles,
        earlier: &mut BTreeMap<OsString, Node>,
        scope: Scope<'_>,
    ) -> Result<Vec<Node>, EntryError> {
        let earlier: Vec<_> = database.names.iter().map(|name| (name, earlier.remove(name))).collect();
        let counts = self.counts.clone();
        let mut read_duration = Duration::MAX;
        for is_last in [false, true] {
            self.counts = counts.clone();
            let lock = match database.lock(directory) {
                // If locking fails with an I/O error, so will the read.
                None if is_last => database
                    .open(directory)
                    .and_then(|file| self.lock_database(&file, read_duration).ok().flatten()),
                lock => lock,
            };
            let began = Instant::now();
            let mut nodes = Vec::new();
            for (name, earlier) in &earlier {
                nodes.extend(self.save_entry(directory, name, earlier.clone(), scope)?);
            }
            read_duration = began.elapsed();
            let is_unchanged = is_unchanged(directory, database, &nodes);
            if is_unchanged && lock.as_ref().is_some_and(ReadLock::is_held) {
                // A WAL that grows during the read still yields the state after one of its commits. The next save reads
                // it again.
                (self.counts.unstable, self.counts.notes) = (counts.unstable, counts.notes);
                return Ok(nodes);
            }
            // Without the lock, a commit may have modified the database after the read and removed the journal.
            let is_consistent = is_unchanged && self.counts.unstable == counts.unstable;
            if is_consistent || is_last {
                if !is_consistent {
                    self.counts.unstable += 1;
                    self.retry.mark_directory(&self.path);
                    self.note("a database in this directory changed while it was read");
                }
                return Ok(nodes);
            }
        }
        Ok(Vec::new())
    }
}

/// Whether a database's main file is unchanged since it was saved.
fn is_unchanged(directory: &OwnedFd, database: &DatabaseFiles, nodes: &[Node]) -> bool {
    let Some(name) = database.main_file_name() else { return true };
    let saved = nodes.iter().find(|node| node.file_name().as_deref() == Some(name));
    let saved = saved.filter(|node| node.node_type == NodeType::File).map(StatFingerprint::from_node);
    saved.is_none_or(|saved| {
        stat_in(directory, name).is_ok_and(|stat| StatFingerprint::from_stat(&stat) == saved)
    })
}
