//! Computes the changes since the last check: the net difference of the tree, reading only names with events.
//!
//! A replaced name and a moved folder are compared by path with everything that was below them before. A file that was
//! created and deleted, or moved away and back, is no change.

use std::collections::HashMap;

use super::tree::{FileId, FileState, Inode, Kind, Name, Paths, Tree, TreeEntry, below};
use crate::records::entry::Op;

/// Maximum names with events; beyond that, the whole tree is checked.
pub const MAX_NAMES: usize = 200_000;

/// Reads the file system. Links are never followed.
pub trait FsProbe {
    /// The current state of these names in a folder; `None` for all if the folder is gone.
    fn probe(&mut self, path: &[u8], folder: Inode, names: &[Name]) -> Vec<Option<FileState>>;

    /// Lists a folder, and watches it from before it is read.
    fn list(&mut self, path: &[u8], folder: Inode) -> Vec<(Name, FileState)>;
}

/// The events of a name since the last check.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Marks {
    /// The name was created, deleted or moved.
    pub named: bool,
    /// The current file was created under this name.
    pub made: bool,
    /// The current file was written.
    pub written: bool,
    /// The current file's times, mode or owner changed.
    pub touched: bool,
    /// The previous file was written, or its metadata changed.
    pub was_written: bool,
    pub was_touched: bool,
}

impl Marks {
    /// Adds the next event.
    pub fn add(&mut self, next: Self) {
        if !next.named {
            self.written |= next.written;
            self.touched |= next.touched;
        } else if self.named {
            let Self { was_written, was_touched, .. } = *self;
            *self = Self { was_written, was_touched, ..next };
        } else {
            *self = Self { was_written: self.written, was_touched: self.touched, ..next };
        }
    }

    /// Whether the first file of this name was written, and touched.
    fn of_first_file(self) -> (bool, bool) {
        if self.named { (self.was_written, self.was_touched) } else { (self.written, self.touched) }
    }
}

/// The names to check.
#[derive(Debug, Default)]
pub struct DirtySet {
    folders: HashMap<Inode, HashMap<Name, Marks>>,
    names: usize,
    /// Events were lost: check everything.
    everywhere: bool,
}

impl DirtySet {
    pub fn mark(&mut self, folder: Inode, name: &[u8], marks: Marks) {
        let names = self.folders.entry(folder).or_default();
        if let Some(known) = names.get_mut(name) {
            return known.add(marks);
        }
        if self.names >= MAX_NAMES {
            return self.mark_all();
        }
        names.insert(name.into(), marks);
        self.names += 1;
    }

    pub fn mark_all(&mut self) {
        self.folders.clear();
        self.names = 0;
        self.everywhere = true;
    }

    pub fn is_clean(&self) -> bool {
        !self.everywhere && self.names == 0
    }

    pub fn names(&self) -> usize {
        self.names
    }

    fn marks(&self, folder: Inode, path: &[u8]) -> Marks {
        let names = self.folders.get(&folder);
        names.and_then(|names| names.get(super::tree::last(path)).copied()).unwrap_or_default()
    }
}

/// A changed path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub op: Op,
    pub path: Vec<u8>,
    pub size: u64,
}

/// The result of a check.
#[derive(Debug, Default)]
pub struct TreeChanges {
    /// Deletions first, deepest first; then creations and writes, parents first.
    pub changes: Vec<Change>,
    /// Folders that are no longer in the tree.
    pub removed_folders: Vec<Inode>,
}

/// Updates the tree and returns its changes.
pub fn update_tree(tree: &mut Tree, dirty: &DirtySet, probe: &mut impl FsProbe) -> TreeChanges {
    let (mut before, mut after, mut left) = (Paths::new(), Paths::new(), Vec::new());
    if dirty.everywhere {
        let root = tree.root();
        for name in tree.names(root) {
            tree.take(root, &name, name.to_vec(), &mut before, &mut left);
        }
        Walk { tree, probe, before: &mut before, left: &mut left }.below(
            root,
            Vec::new(),
            &mut |path, known| {
                after.insert(path, known);
            },
        );
    } else {
        let found = remove_dirty(tree, dirty, probe, &mut before, &mut left);
        for FoundName { folder, path, name, now } in found {
            let path = below(&path, &name);
            let mut walk = Walk { tree, probe, before: &mut before, left: &mut left };
            walk.put(folder, name, now);
            after.insert(path.clone(), TreeEntry { seen: now, folder });
            if now.kind == Kind::Folder {
                walk.below(now.inode, path, &mut |path, known| {
                    after.insert(path, known);
                });
            }
        }
    }
    let shared = SharedFiles::of(&before, &after, dirty);
    let mut changes = compare(&before, &after, dirty, &shared);
    changes.extend(other_names(tree, probe, &after, &shared));
    changes.sort_by(|one, other| {
        let (is_gone, other_is_gone) = (one.op == Op::Delete, other.op == Op::Delete);
        let by_path = if is_gone { other.path.cmp(&one.path) } else { one.path.cmp(&other.path) };
        other_is_gone.cmp(&is_gone).then(by_path)
    });
    left.retain(|inode| !tree.has(*inode));
    TreeChanges { changes, removed_folders: left }
}

/// A name to be added to the tree.
struct FoundName {
    folder: Inode,
    path: Vec<u8>,
    name: Name,
    now: FileState,
}

/// Removes all dirty names, except unmoved folders. Everything is removed before anything is added, so that a moved
/// file is in one place only.
fn remove_dirty(
    tree: &mut Tree,
    dirty: &DirtySet,
    probe: &mut impl FsProbe,
    before: &mut Paths<TreeEntry>,
    left: &mut Vec<Inode>,
) -> Vec<FoundName> {
    let mut found = Vec::new();
    let mut folders: Vec<(Vec<u8>, Inode)> =
        dirty.folders.keys().filter_map(|folder| Some((tree.path(*folder)?, *folder))).collect();
    // Parents first.
    folders.sort();
    for (path, folder) in folders {
        if !tree.has(folder) {
            // It was moved together with a parent, and is listed again at its new place.
            continue;
        }
        let Some(marked) = dirty.folders.get(&folder) else { continue };
        let names: Vec<Name> = marked.keys().cloned().collect();
        let seen = probe.probe(&path, folder, &names);
        for (name, now) in names.into_iter().zip(seen) {
            let was = tree.get(folder, &name);
            let is_named = marked.get(&name).is_some_and(|marks| marks.named);
            if let (Some(was), Some(now)) = (was, now)
                && was.kind == Kind::Folder
                && (was.kind, was.inode) == (now.kind, now.inode)
                && !is_named
            {
                tree.refresh(folder, &name, now);
                continue;
            }
            tree.take(folder, &name, below(&path, &name), before, left);
            if let Some(now) = now {
                found.push(FoundName { folder, path: path.clone(), name, now });
            }
        }
    }
    found
}

/// Fills an empty tree.
pub fn fill(tree: &mut Tree, probe: &mut impl FsProbe) {
    let (mut before, mut left, root) = (Paths::new(), Vec::new(), tree.root());
    Walk { tree, probe, before: &mut before, left: &mut left }.below(root, Vec::new(), &mut |_, _| {});
}

/// Adds found names to the tree.
struct Walk<'a, S> {
    tree: &'a mut Tree,
    probe: &'a mut S,
    before: &'a mut Paths<TreeEntry>,
    left: &'a mut Vec<Inode>,
}

impl<S: FsProbe> Walk<'_, S> {
    /// Adds everything below a folder.
    fn below(&mut self, folder: Inode, path: Vec<u8>, found: &mut impl FnMut(Vec<u8>, TreeEntry)) {
        let mut rest = vec![(folder, path)];
        while let Some((folder, path)) = rest.pop() {
            for (name, seen) in self.probe.list(&path, folder) {
                let path = below(&path, &name);
                self.put(folder, name, seen);
                found(path.clone(), TreeEntry { seen, folder });
                if seen.kind == Kind::Folder {
                    rest.push((seen.inode, path));
                }
            }
        }
    }

    /// Adds a name. A folder that is known elsewhere was moved: it is removed there.
    fn put(&mut self, folder: Inode, name: Name, seen: FileState) {
        if seen.kind == Kind::Folder
            && let Some((above, old)) = self.tree.parent(seen.inode)
            && let Some(path) = self.tree.path(seen.inode)
        {
            self.tree.take(above, &old, path, self.before, self.left);
        }
        self.tree.put(folder, name, seen);
    }
}

/// Files with several names: events of one name apply to all.
struct SharedFiles(HashMap<FileId, (bool, bool)>);

impl SharedFiles {
    fn of(before: &Paths<TreeEntry>, after: &Paths<TreeEntry>, dirty: &DirtySet) -> Self {
        let is_shared = |known: &&TreeEntry| known.seen.is_shared && known.seen.kind == Kind::File;
        let known = before.values().chain(after.values()).filter(is_shared);
        let mut all: HashMap<FileId, (bool, bool)> =
            known.map(|known| (known.seen.id(), (false, false))).collect();
        let mut add = |known: &TreeEntry, (written, touched): (bool, bool)| {
            if let Some(all) = all.get_mut(&known.seen.id()) {
                all.0 |= written;
                all.1 |= touched;
            }
        };
        for (path, known) in before {
            add(known, dirty.marks(known.folder, path).of_first_file());
        }
        for (path, known) in after {
            let marks = dirty.marks(known.folder, path);
            add(known, (marks.written, marks.touched));
        }
        Self(all)
    }
}

fn compare(
    before: &Paths<TreeEntry>,
    after: &Paths<TreeEntry>,
    dirty: &DirtySet,
    shared: &SharedFiles,
) -> Vec<Change> {
    let mut changes = Vec::new();
    for path in before.keys().filter(|path| !after.contains_key(*path)) {
        changes.push(Change { op: Op::Delete, path: path.clone(), size: 0 });
    }
    for (path, now) in after {
        let was = before.get(path).map(|was| was.seen);
        let mut marks = dirty.marks(now.folder, path);
        if was.is_some_and(|was| was.id() == now.seen.id()) {
            let (written, touched) = marks.of_first_file();
            marks.written |= written;
            marks.touched |= touched;
        }
        if let Some((written, touched)) = shared.0.get(&now.seen.id()) {
            marks.written |= written;
            marks.touched |= touched;
        }
        changes.extend(change(was, now.seen, marks, path));
    }
    changes
}

/// The change of an existing path.
fn change(was: Option<FileState>, now: FileState, marks: Marks, path: &[u8]) -> Option<Change> {
    let is_other = was.is_none_or(|was| was.kind != now.kind);
    if now.kind == Kind::Folder {
        return is_other.then(|| Change { op: Op::Mkdir, path: path.to_vec(), size: 0 });
    }
    let is_written = is_other || was.is_some_and(|was| is_written(was, now, marks));
    is_written.then(|| Change { op: Op::Write, path: path.to_vec(), size: now.size })
}

/// Whether a file or link was written or replaced.
fn is_written(was: FileState, now: FileState, marks: Marks) -> bool {
    if was.id() != now.id() {
        return true;
    }
    if marks.named && (was.size, was.mtime) == (now.size, now.mtime) {
        // It was moved and came back, or was linked again; the write events belong to another file.
        return false;
    }
    if marks.made {
        // A new file that reuses the inode, on a file system without birth times.
        return true;
    }
    if now.kind != Kind::File || (was.size, now.size) == (0, 0) {
        return false;
    }
    // Writes to a mapping cause no event, but change the mtime. After a touch, the mtime says nothing.
    was.size != now.size || marks.written || (was.mtime != now.mtime && !marks.touched)
}

/// Changes of the other names of shared files.
fn other_names(
    tree: &mut Tree,
    probe: &mut impl FsProbe,
    after: &Paths<TreeEntry>,
    shared: &SharedFiles,
) -> Vec<Change> {
    if shared.0.is_empty() {
        return Vec::new();
    }
    let mut changes = Vec::new();
    for (folder, name, was) in tree.names_of(shared.0.keys().copied()) {
        let Some(path) = tree.path(folder) else { continue };
        let full = below(&path, &name);
        if after.contains_key(&full) {
            continue;
        }
        let now = probe.probe(&path, folder, std::slice::from_ref(&name)).pop().flatten();
        // If it is another file now, its own events report that.
        let Some(now) = now.filter(|now| now.id() == was.id()) else { continue };
        let (written, touched) = shared.0.get(&now.id()).copied().unwrap_or_default();
        let marks = Marks { written, touched, ..Marks::default() };
        tree.refresh(folder, &name, now);
        changes.extend(change(Some(was), now, marks, &full));
    }
    changes
}

#[cfg(test)]
mod tests;
