//! The home directory's last known state: the names in each directory and the file behind each name.
//!
//! Held only in memory; performs no I/O. Directories are keyed by inode, so they keep their identity when moved.

use std::collections::{BTreeMap, HashMap, HashSet};

pub type Inode = u64;
/// File name as bytes, since it may not be valid UTF-8.
pub type Name = Box<[u8]>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeKind {
    File,
    Directory,
    Symlink,
    Other,
}

/// Metadata of the file behind a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileState {
    pub inode: Inode,
    pub size: u64,
    /// Modification time in nanoseconds.
    pub mtime: i64,
    /// Birth time in nanoseconds, to tell a file from an earlier one with the same inode. 0 if the file system doesn't
    /// record it.
    pub birth_time: i64,
    pub kind: NodeKind,
    /// Whether the file has other names (hard links).
    pub has_other_names: bool,
}

impl FileState {
    /// Returns the file's identity. The inode alone isn't enough, since inodes are reused.
    pub fn id(&self) -> FileId {
        FileId { inode: self.inode, birth_time: self.birth_time }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileId {
    inode: Inode,
    birth_time: i64,
}

#[derive(Debug)]
struct Directory {
    parent: Option<(Inode, Name)>,
    entries: BTreeMap<Name, FileState>,
}

/// Values keyed by path relative to the root. The root's own path is empty.
pub type PathMap<T> = BTreeMap<Vec<u8>, T>;

#[derive(Debug)]
pub struct Tree {
    root: Inode,
    dirs: HashMap<Inode, Directory>,
    /// All names of the files passed to [`Self::find_names`], and possibly stale ones.
    indexed: HashMap<FileId, HashSet<(Inode, Name)>>,
}

/// Maximum directory depth. Linux limits paths to 4096 bytes.
const MAX_DEPTH: usize = 4096;
/// The index is cleared when it would exceed this many files.
const MAX_INDEXED_FILES: usize = 20_000;

impl Tree {
    pub fn new(root: Inode) -> Self {
        let dir = Directory { parent: None, entries: BTreeMap::new() };
        Self { root, dirs: HashMap::from([(root, dir)]), indexed: HashMap::new() }
    }

    pub fn root(&self) -> Inode {
        self.root
    }

    pub fn has_dir(&self, dir: Inode) -> bool {
        self.dirs.contains_key(&dir)
    }

    /// Returns the number of names.
    pub fn len(&self) -> usize {
        self.dirs.values().map(|dir| dir.entries.len()).sum()
    }

    pub fn get(&self, dir: Inode, name: &[u8]) -> Option<FileState> {
        self.dirs.get(&dir)?.entries.get(name).copied()
    }

    pub fn names(&self, dir: Inode) -> Vec<Name> {
        self.dirs.get(&dir).map_or_else(Vec::new, |dir| dir.entries.keys().cloned().collect())
    }

    /// Returns a directory's path relative to the root, or `None` if it isn't in the tree.
    pub fn path(&self, dir: Inode) -> Option<Vec<u8>> {
        let mut names = Vec::new();
        let mut current = self.dirs.get(&dir)?;
        while let Some((parent, name)) = &current.parent {
            names.push(name);
            current = self.dirs.get(parent)?;
            // This must be a cycle: between two checks, two directories were each moved into the other.
            if names.len() > MAX_DEPTH {
                return None;
            }
        }
        let mut path = Vec::new();
        for name in names.into_iter().rev() {
            path = join_path(&path, name);
        }
        Some(path)
    }

    /// Returns a directory's parent and its name there.
    pub fn parent(&self, dir: Inode) -> Option<(Inode, Name)> {
        self.dirs.get(&dir)?.parent.clone()
    }

    /// Adds or replaces a name if its directory is in the tree. New directories start out empty.
    pub fn insert(&mut self, dir: Inode, name: Name, state: FileState) {
        if !self.has_dir(dir) {
            return;
        }
        if state.kind == NodeKind::Directory && state.inode != self.root {
            let parent = Some((dir, name.clone()));
            self.dirs.insert(state.inode, Directory { parent, entries: BTreeMap::new() });
        }
        self.index(dir, &name, state);
        if let Some(dir) = self.dirs.get_mut(&dir) {
            dir.entries.insert(name, state);
        }
    }

    fn index(&mut self, dir: Inode, name: &[u8], state: FileState) {
        if let Some(names) = self.indexed.get_mut(&state.id()) {
            names.insert((dir, name.into()));
        }
    }

    /// Updates the state of an unmoved file or directory.
    pub fn refresh(&mut self, dir: Inode, name: &[u8], state: FileState) {
        if let Some(entry) = self.dirs.get_mut(&dir).and_then(|dir| dir.entries.get_mut(name)) {
            *entry = state;
            self.index(dir, name, state);
        }
    }

    /// Moves a name and everything below it from the tree into `before`, keyed by path, and adds the inodes of removed
    /// directories to `removed_dirs`.
    pub fn remove(
        &mut self,
        dir: Inode,
        name: &[u8],
        path: Vec<u8>,
        before: &mut PathMap<TreeEntry>,
        removed_dirs: &mut Vec<Inode>,
    ) {
        let Some(state) = self.dirs.get_mut(&dir).and_then(|dir| dir.entries.remove(name)) else {
            return;
        };
        let mut pending = vec![(path, TreeEntry { state, dir })];
        while let Some((path, entry)) = pending.pop() {
            if entry.state.kind == NodeKind::Directory && self.is_at(entry.state.inode, entry.dir, &path) {
                removed_dirs.push(entry.state.inode);
                let contents = self.dirs.remove(&entry.state.inode).map(|dir| dir.entries);
                for (name, state) in contents.into_iter().flatten() {
                    pending.push((join_path(&path, &name), TreeEntry { state, dir: entry.state.inode }));
                }
            }
            before.insert(path, entry);
        }
    }

    /// Whether the directory is still at this path. It may have been re-added at another path since.
    fn is_at(&self, inode: Inode, expected_parent: Inode, path: &[u8]) -> bool {
        let parent = self.dirs.get(&inode).and_then(|dir| dir.parent.as_ref());
        parent.is_some_and(|(parent, name)| *parent == expected_parent && last_component(path) == &name[..])
    }

    /// Finds all names of these files. The first lookup of a file scans the whole tree.
    pub fn find_names(&mut self, files: impl Iterator<Item = FileId>) -> Vec<(Inode, Name, FileState)> {
        let files: Vec<FileId> = files.collect();
        if self.indexed.len() + files.len() > MAX_INDEXED_FILES {
            self.indexed.clear();
        }
        let new: HashSet<FileId> =
            files.iter().filter(|file| !self.indexed.contains_key(file)).copied().collect();
        if !new.is_empty() {
            self.indexed.extend(new.iter().map(|file| (*file, HashSet::new())));
            for (inode, dir) in &self.dirs {
                for (name, state) in dir.entries.iter().filter(|(_, state)| new.contains(&state.id())) {
                    self.indexed.entry(state.id()).or_default().insert((*inode, name.clone()));
                }
            }
        }
        let mut found = Vec::new();
        for file in files {
            let Some(names) = self.indexed.get_mut(&file) else { continue };
            names.retain(|(dir, name)| {
                let state = self.dirs.get(dir).and_then(|dir| dir.entries.get(name));
                let is_current = state.is_some_and(|state| state.id() == file);
                let state = state.filter(|state| is_current && state.kind == NodeKind::File);
                found.extend(state.map(|state| (*dir, name.clone(), *state)));
                is_current
            });
        }
        found
    }
}

/// A file's state and containing directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeEntry {
    pub state: FileState,
    pub dir: Inode,
}

/// Joins a directory path and a name.
pub fn join_path(path: &[u8], name: &[u8]) -> Vec<u8> {
    let mut joined = Vec::with_capacity(path.len() + 1 + name.len());
    joined.extend_from_slice(path);
    if !path.is_empty() {
        joined.push(b'/');
    }
    joined.extend_from_slice(name);
    joined
}

pub fn last_component(path: &[u8]) -> &[u8] {
    path.rsplit(|&byte| byte == b'/').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(inode: Inode) -> FileState {
        FileState { inode, size: 1, mtime: 1, birth_time: 1, kind: NodeKind::File, has_other_names: true }
    }

    fn names(tree: &mut Tree, inode: Inode) -> Vec<(Inode, String)> {
        let found = tree.find_names([file(inode).id()].into_iter());
        let mut found: Vec<_> =
            found.into_iter().map(|(dir, name, _)| (dir, String::from_utf8_lossy(&name).into())).collect();
        found.sort();
        found
    }

    #[test]
    fn find_names_follows_added_replaced_and_removed_names() {
        let mut tree = Tree::new(1);
        let dir = FileState { kind: NodeKind::Directory, ..file(2) };
        tree.insert(1, b"sub"[..].into(), dir);
        for (dir, name) in [(1, &b"a"[..]), (2, &b"b"[..])] {
            tree.insert(dir, name.into(), file(10));
        }
        assert_eq!(names(&mut tree, 10), [(1, "a".to_owned()), (2, "b".to_owned())]);
        tree.insert(1, b"c"[..].into(), file(10));
        tree.insert(1, b"a"[..].into(), file(11));
        assert_eq!(names(&mut tree, 10), [(1, "c".to_owned()), (2, "b".to_owned())]);
        assert_eq!(names(&mut tree, 11), [(1, "a".to_owned())]);
        tree.refresh(1, b"c", file(11));
        assert_eq!(names(&mut tree, 11), [(1, "a".to_owned()), (1, "c".to_owned())]);
        let (mut before, mut removed_dirs) = (PathMap::new(), Vec::new());
        tree.remove(1, b"sub", b"sub".to_vec(), &mut before, &mut removed_dirs);
        assert_eq!(names(&mut tree, 10), []);
    }
}
