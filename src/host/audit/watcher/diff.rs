//! Computes the net difference in the tree since the last check. Reads only names with events, or everything if events
//! may have been lost, the watch limit is reached, or too many names have events.
//!
//! For replaced names and moved directories, compares the paths below them before and after. Files that were created
//! and deleted, or moved away and back, aren't reported.

use std::collections::HashMap;

use super::tree::{FileId, FileState, Inode, Name, NodeKind, PathMap, Tree, TreeEntry, join_path};
use crate::records::entry::FileOperation;

/// Maximum number of dirty names, beyond which the whole tree is checked.
pub const MAX_DIRTY_NAMES: usize = 200_000;

/// File system access. Symlinks are never followed.
pub trait FsProbe {
    /// Reads the current state of names in a directory: `None` for names that don't exist, and for all names if `path`
    /// is no longer this directory.
    fn probe(&mut self, path: &[u8], dir: Inode, names: &[Name]) -> Vec<Option<FileState>>;

    /// Lists a directory, after adding a watch for it.
    fn list(&mut self, path: &[u8], dir: Inode) -> Vec<(Name, FileState)>;
}

/// Events for a name since the last check.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Marks {
    /// The name was created, deleted or moved.
    pub has_name_change: bool,
    /// The current file was created or hard-linked under this name.
    pub is_created: bool,
    /// The current file was written.
    pub is_written: bool,
    /// The current file's times, mode or owner changed.
    pub is_touched: bool,
    /// The file that had this name at the last check was written.
    pub was_written: bool,
    /// The times, mode or owner of the file that had this name at the last check changed.
    pub was_touched: bool,
}

impl Marks {
    /// Adds the next event.
    pub fn add(&mut self, next: Self) {
        if !next.has_name_change {
            self.is_written |= next.is_written;
            self.is_touched |= next.is_touched;
        } else if self.has_name_change {
            let Self { was_written, was_touched, .. } = *self;
            *self = Self { was_written, was_touched, ..next };
        } else {
            *self = Self { was_written: self.is_written, was_touched: self.is_touched, ..next };
        }
    }

    /// Whether the file that had this name at the last check was written, and whether it was touched.
    fn for_original_file(self) -> (bool, bool) {
        if self.has_name_change {
            (self.was_written, self.was_touched)
        } else {
            (self.is_written, self.is_touched)
        }
    }
}

/// Names to check.
#[derive(Debug, Default)]
pub struct DirtySet {
    dirs: HashMap<Inode, HashMap<Name, Marks>>,
    name_count: usize,
    /// Everything must be checked: events may have been lost, the watch limit is reached, or there were too many names.
    is_everything_dirty: bool,
}

impl DirtySet {
    pub fn mark(&mut self, dir: Inode, name: &[u8], marks: Marks) {
        let names = self.dirs.entry(dir).or_default();
        if let Some(existing) = names.get_mut(name) {
            return existing.add(marks);
        }
        if self.name_count >= MAX_DIRTY_NAMES {
            return self.mark_all();
        }
        names.insert(name.into(), marks);
        self.name_count += 1;
    }

    pub fn mark_all(&mut self) {
        self.dirs.clear();
        self.name_count = 0;
        self.is_everything_dirty = true;
    }

    pub fn is_clean(&self) -> bool {
        !self.is_everything_dirty && self.name_count == 0
    }

    pub fn is_everything_dirty(&self) -> bool {
        self.is_everything_dirty
    }

    /// Returns the dirty names by directory.
    pub fn names(&self) -> impl Iterator<Item = (Inode, &HashMap<Name, Marks>)> {
        self.dirs.iter().map(|(dir, names)| (*dir, names))
    }

    pub fn name_count(&self) -> usize {
        self.name_count
    }

    fn marks(&self, dir: Inode, path: &[u8]) -> Marks {
        let names = self.dirs.get(&dir);
        names.and_then(|names| names.get(super::tree::last_component(path)).copied()).unwrap_or_default()
    }
}

/// A changed path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub op: FileOperation,
    pub path: Vec<u8>,
    pub size: u64,
}

/// The result of a check.
#[derive(Debug, Default)]
pub struct TreeChanges {
    /// Deletions first, children before parents; then creations and writes, parents before children.
    pub changes: Vec<Change>,
    /// Directories that are no longer in the tree.
    pub removed_dirs: Vec<Inode>,
}

/// Updates the tree and returns the changes.
pub fn update_tree(tree: &mut Tree, dirty: &DirtySet, probe: &mut impl FsProbe) -> TreeChanges {
    let (mut before, mut after, mut removed_dirs) = (PathMap::new(), PathMap::new(), Vec::new());
    if dirty.is_everything_dirty {
        let root = tree.root();
        for name in tree.names(root) {
            tree.remove(root, &name, name.to_vec(), &mut before, &mut removed_dirs);
        }
        let mut walk = TreeWalk { tree, probe, before: &mut before, removed_dirs: &mut removed_dirs };
        walk.add_contents(root, Vec::new(), &mut |path, entry| {
            after.insert(path, entry);
        });
    } else {
        let found = remove_dirty(tree, dirty, probe, &mut before, &mut removed_dirs);
        for FoundName { dir, path, name, state } in found {
            let path = join_path(&path, &name);
            let mut walk = TreeWalk { tree, probe, before: &mut before, removed_dirs: &mut removed_dirs };
            walk.add_name(dir, name, state);
            after.insert(path.clone(), TreeEntry { state, dir });
            if state.kind == NodeKind::Directory {
                walk.add_contents(state.inode, path, &mut |path, entry| {
                    after.insert(path, entry);
                });
            }
        }
    }
    let hard_linked = HardLinkedFiles::collect(&before, &after, dirty);
    let mut changes = compare_paths(&before, &after, dirty, &hard_linked);
    changes.extend(compare_other_names(tree, probe, &after, &hard_linked));
    changes.sort_by(|a, b| {
        let (a_deletes, b_deletes) = (a.op == FileOperation::Delete, b.op == FileOperation::Delete);
        let by_path = if a_deletes { b.path.cmp(&a.path) } else { a.path.cmp(&b.path) };
        b_deletes.cmp(&a_deletes).then(by_path)
    });
    removed_dirs.retain(|inode| !tree.has_dir(*inode));
    TreeChanges { changes, removed_dirs }
}

/// A name to add to the tree.
struct FoundName {
    dir: Inode,
    /// Directory path.
    path: Vec<u8>,
    name: Name,
    state: FileState,
}

/// Removes all dirty names from the tree, except unmoved directories, and returns the names that still exist, for
/// re-adding. Everything is removed before anything is added, so a moved file is never at two paths.
fn remove_dirty(
    tree: &mut Tree,
    dirty: &DirtySet,
    probe: &mut impl FsProbe,
    before: &mut PathMap<TreeEntry>,
    removed_dirs: &mut Vec<Inode>,
) -> Vec<FoundName> {
    let mut found = Vec::new();
    let mut dirs: Vec<(Vec<u8>, Inode)> =
        dirty.dirs.keys().filter_map(|dir| Some((tree.path(*dir)?, *dir))).collect();
    // Parents first.
    dirs.sort();
    for (path, dir) in dirs {
        if !tree.has_dir(dir) {
            // The directory or an ancestor was deleted or moved. Moved directories are listed again at their new path.
            continue;
        }
        let Some(marked) = dirty.dirs.get(&dir) else { continue };
        let names: Vec<Name> = marked.keys().cloned().collect();
        let states = probe.probe(&path, dir, &names);
        for (name, new) in names.into_iter().zip(states) {
            let old = tree.get(dir, &name);
            let has_name_change = marked.get(&name).is_some_and(|marks| marks.has_name_change);
            if let (Some(old), Some(new)) = (old, new)
                && old.kind == NodeKind::Directory
                && (old.kind, old.inode) == (new.kind, new.inode)
                && !has_name_change
            {
                tree.refresh(dir, &name, new);
                continue;
            }
            tree.remove(dir, &name, join_path(&path, &name), before, removed_dirs);
            if let Some(new) = new {
                found.push(FoundName { dir, path: path.clone(), name, state: new });
            }
        }
    }
    found
}

/// Populates an empty tree.
pub fn fill_tree(tree: &mut Tree, probe: &mut impl FsProbe) {
    let (mut before, mut removed_dirs, root) = (PathMap::new(), Vec::new(), tree.root());
    let mut walk = TreeWalk { tree, probe, before: &mut before, removed_dirs: &mut removed_dirs };
    walk.add_contents(root, Vec::new(), &mut |_, _| {});
}

/// Adds found names to the tree.
struct TreeWalk<'a, S> {
    tree: &'a mut Tree,
    probe: &'a mut S,
    before: &'a mut PathMap<TreeEntry>,
    removed_dirs: &'a mut Vec<Inode>,
}

impl<S: FsProbe> TreeWalk<'_, S> {
    /// Adds everything below a directory, calling `on_added` for each path.
    fn add_contents(&mut self, dir: Inode, path: Vec<u8>, on_added: &mut impl FnMut(Vec<u8>, TreeEntry)) {
        let mut pending = vec![(dir, path)];
        while let Some((dir, path)) = pending.pop() {
            for (name, state) in self.probe.list(&path, dir) {
                let path = join_path(&path, &name);
                self.add_name(dir, name, state);
                on_added(path.clone(), TreeEntry { state, dir });
                if state.kind == NodeKind::Directory {
                    pending.push((state.inode, path));
                }
            }
        }
    }

    /// Adds a name. A directory already in the tree under another path was moved, so it's removed from there.
    fn add_name(&mut self, dir: Inode, name: Name, state: FileState) {
        if state.kind == NodeKind::Directory
            && let Some((parent, old_name)) = self.tree.parent(state.inode)
            && let Some(path) = self.tree.path(state.inode)
        {
            self.tree.remove(parent, &old_name, path, self.before, self.removed_dirs);
        }
        self.tree.insert(dir, name, state);
    }
}

/// Hard-linked files, and whether each was written and whether it was touched. Events for one name apply to all names
/// of the file.
struct HardLinkedFiles(HashMap<FileId, (bool, bool)>);

impl HardLinkedFiles {
    fn collect(before: &PathMap<TreeEntry>, after: &PathMap<TreeEntry>, dirty: &DirtySet) -> Self {
        let is_hard_linked =
            |entry: &&TreeEntry| entry.state.has_other_names && entry.state.kind == NodeKind::File;
        let entries = before.values().chain(after.values()).filter(is_hard_linked);
        let mut all: HashMap<FileId, (bool, bool)> =
            entries.map(|entry| (entry.state.id(), (false, false))).collect();
        let mut add = |entry: &TreeEntry, (is_written, is_touched): (bool, bool)| {
            if let Some(marks) = all.get_mut(&entry.state.id()) {
                marks.0 |= is_written;
                marks.1 |= is_touched;
            }
        };
        for (path, entry) in before {
            add(entry, dirty.marks(entry.dir, path).for_original_file());
        }
        for (path, entry) in after {
            let marks = dirty.marks(entry.dir, path);
            add(entry, (marks.is_written, marks.is_touched));
        }
        Self(all)
    }
}

fn compare_paths(
    before: &PathMap<TreeEntry>,
    after: &PathMap<TreeEntry>,
    dirty: &DirtySet,
    hard_linked: &HardLinkedFiles,
) -> Vec<Change> {
    let mut changes = Vec::new();
    for path in before.keys().filter(|path| !after.contains_key(*path)) {
        changes.push(Change { op: FileOperation::Delete, path: path.clone(), size: 0 });
    }
    for (path, new) in after {
        let old = before.get(path).map(|old| old.state);
        let mut marks = dirty.marks(new.dir, path);
        if old.is_some_and(|old| old.id() == new.state.id()) {
            let (is_written, is_touched) = marks.for_original_file();
            marks.is_written |= is_written;
            marks.is_touched |= is_touched;
        }
        if let Some((is_written, is_touched)) = hard_linked.0.get(&new.state.id()) {
            marks.is_written |= is_written;
            marks.is_touched |= is_touched;
        }
        changes.extend(compare_states(old, new.state, marks, path));
    }
    changes
}

/// Returns the change to an existing path, if any.
fn compare_states(old: Option<FileState>, new: FileState, marks: Marks, path: &[u8]) -> Option<Change> {
    let is_new = old.is_none_or(|old| old.kind != new.kind);
    if new.kind == NodeKind::Directory {
        return is_new.then(|| Change { op: FileOperation::Mkdir, path: path.to_vec(), size: 0 });
    }
    let is_changed = is_new || old.is_some_and(|old| is_written_or_replaced(old, new, marks));
    is_changed.then(|| Change { op: FileOperation::Write, path: path.to_vec(), size: new.size })
}

fn is_written_or_replaced(old: FileState, new: FileState, marks: Marks) -> bool {
    if old.id() != new.id() {
        return true;
    }
    if marks.has_name_change && (old.size, old.mtime) == (new.size, new.mtime) {
        // The file was moved away and back, or hard-linked under this name again; the write events belong to a
        // different file.
        return false;
    }
    if marks.is_created {
        // A new file reusing the inode, on a file system without birth times.
        return true;
    }
    if new.kind != NodeKind::File || (old.size, new.size) == (0, 0) {
        return false;
    }
    // Writes through a memory mapping emit no event but change the mtime. After a touch, a changed mtime doesn't prove
    // a write.
    old.size != new.size || marks.is_written || (old.mtime != new.mtime && !marks.is_touched)
}

/// Refreshes the other names of hard-linked files in the tree and returns their changes.
fn compare_other_names(
    tree: &mut Tree,
    probe: &mut impl FsProbe,
    after: &PathMap<TreeEntry>,
    hard_linked: &HardLinkedFiles,
) -> Vec<Change> {
    if hard_linked.0.is_empty() {
        return Vec::new();
    }
    let mut changes = Vec::new();
    for (dir, name, old) in tree.find_names(hard_linked.0.keys().copied()) {
        let Some(path) = tree.path(dir) else { continue };
        let full_path = join_path(&path, &name);
        if after.contains_key(&full_path) {
            continue;
        }
        let new = probe.probe(&path, dir, std::slice::from_ref(&name)).pop().flatten();
        // If the name now belongs to a different file, that file's events report the change.
        let Some(new) = new.filter(|new| new.id() == old.id()) else { continue };
        let (is_written, is_touched) = hard_linked.0.get(&new.id()).copied().unwrap_or_default();
        let marks = Marks { is_written, is_touched, ..Marks::default() };
        tree.refresh(dir, &name, new);
        changes.extend(compare_states(Some(old), new, marks, &full_path));
    }
    changes
}

#[cfg(test)]
mod tests;
