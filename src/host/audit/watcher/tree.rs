//! The last known state of the files in the home directory: the names in each folder, and the file behind each name.
//!
//! The tree exists only in memory, and performs no I/O. Folders are identified by inode, so that they keep their
//! identity when they are moved.

use std::collections::{BTreeMap, HashMap, HashSet};

pub type Inode = u64;
/// A name in bytes, because it need not be valid UTF-8.
pub type Name = Box<[u8]>;

/// The kind of the file behind a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeKind {
    File,
    Folder,
    Symlink,
    Other,
}

/// The state of the file behind a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileState {
    pub inode: Inode,
    pub size: u64,
    /// The modification time in nanoseconds.
    pub mtime: i64,
    /// The birth time in nanoseconds, which distinguishes a file from an earlier one with the same inode; 0 if the
    /// file system has none.
    pub birth_time: i64,
    pub kind: NodeKind,
    /// The file has other names (hard links).
    pub has_other_names: bool,
}

impl FileState {
    /// The file's identity. The inode alone is not enough, because inodes are reused.
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
struct Folder {
    parent: Option<(Inode, Name)>,
    entries: BTreeMap<Name, FileState>,
}

/// Values by path below the root, whose own path is empty.
pub type PathMap<T> = BTreeMap<Vec<u8>, T>;

#[derive(Debug)]
pub struct Tree {
    root: Inode,
    folders: HashMap<Inode, Folder>,
    /// All names of the files for which [`Self::find_names`] was called, and possibly names that they no longer have.
    indexed: HashMap<FileId, HashSet<(Inode, Name)>>,
}

/// Maximum number of folders in a path: Linux limits a path to 4096 bytes.
const MAX_DEPTH: usize = 4096;
/// Above this number of indexed files, the index is cleared.
const MAX_INDEXED_FILES: usize = 20_000;

impl Tree {
    pub fn new(root: Inode) -> Self {
        let folder = Folder { parent: None, entries: BTreeMap::new() };
        Self { root, folders: HashMap::from([(root, folder)]), indexed: HashMap::new() }
    }

    pub fn root(&self) -> Inode {
        self.root
    }

    pub fn has_folder(&self, folder: Inode) -> bool {
        self.folders.contains_key(&folder)
    }

    /// The number of names.
    pub fn len(&self) -> usize {
        self.folders.values().map(|folder| folder.entries.len()).sum()
    }

    pub fn get(&self, folder: Inode, name: &[u8]) -> Option<FileState> {
        self.folders.get(&folder)?.entries.get(name).copied()
    }

    pub fn names(&self, folder: Inode) -> Vec<Name> {
        self.folders.get(&folder).map_or_else(Vec::new, |folder| folder.entries.keys().cloned().collect())
    }

    /// The path of a folder below the root; `None` if the folder is not in the tree.
    pub fn path(&self, folder: Inode) -> Option<Vec<u8>> {
        let mut names = Vec::new();
        let mut current = self.folders.get(&folder)?;
        while let Some((parent, name)) = &current.parent {
            names.push(name);
            current = self.folders.get(parent)?;
            // Such a path is a cycle: between two checks, each of two folders was moved into the other.
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

    /// A folder's parent, and its name there.
    pub fn parent(&self, folder: Inode) -> Option<(Inode, Name)> {
        self.folders.get(&folder)?.parent.clone()
    }

    /// Adds or replaces a name, if its folder is in the tree. A new folder is empty.
    pub fn insert(&mut self, folder: Inode, name: Name, state: FileState) {
        if !self.has_folder(folder) {
            return;
        }
        if state.kind == NodeKind::Folder && state.inode != self.root {
            let parent = Some((folder, name.clone()));
            self.folders.insert(state.inode, Folder { parent, entries: BTreeMap::new() });
        }
        self.index(folder, &name, state);
        if let Some(folder) = self.folders.get_mut(&folder) {
            folder.entries.insert(name, state);
        }
    }

    fn index(&mut self, folder: Inode, name: &[u8], state: FileState) {
        if let Some(names) = self.indexed.get_mut(&state.id()) {
            names.insert((folder, name.into()));
        }
    }

    /// Updates the state of an unmoved file or folder.
    pub fn refresh(&mut self, folder: Inode, name: &[u8], state: FileState) {
        if let Some(entry) = self.folders.get_mut(&folder).and_then(|folder| folder.entries.get_mut(name)) {
            *entry = state;
            self.index(folder, name, state);
        }
    }

    /// Moves a name and everything below it from the tree to `before`, by path. The inodes of removed folders are also
    /// added to `removed_folders`.
    pub fn remove(
        &mut self,
        folder: Inode,
        name: &[u8],
        path: Vec<u8>,
        before: &mut PathMap<TreeEntry>,
        removed_folders: &mut Vec<Inode>,
    ) {
        let Some(state) = self.folders.get_mut(&folder).and_then(|folder| folder.entries.remove(name)) else {
            return;
        };
        let mut pending = vec![(path, TreeEntry { state, folder })];
        while let Some((path, entry)) = pending.pop() {
            if entry.state.kind == NodeKind::Folder && self.is_at(entry.state.inode, entry.folder, &path) {
                removed_folders.push(entry.state.inode);
                let contents = self.folders.remove(&entry.state.inode).map(|folder| folder.entries);
                for (name, state) in contents.into_iter().flatten() {
                    pending.push((join_path(&path, &name), TreeEntry { state, folder: entry.state.inode }));
                }
            }
            before.insert(path, entry);
        }
    }

    /// Whether the folder is still at this path. It may have been added at another path since.
    fn is_at(&self, inode: Inode, expected_parent: Inode, path: &[u8]) -> bool {
        let parent = self.folders.get(&inode).and_then(|folder| folder.parent.as_ref());
        parent.is_some_and(|(parent, name)| *parent == expected_parent && last_component(path) == &name[..])
    }

    /// Finds all names of these files. The first call for a file searches the whole tree.
    pub fn find_names(&mut self, files: impl Iterator<Item = FileId>) -> Vec<(Inode, Name, FileState)> {
        let files: Vec<FileId> = files.collect();
        if self.indexed.len() + files.len() > MAX_INDEXED_FILES {
            self.indexed.clear();
        }
        let new: HashSet<FileId> =
            files.iter().filter(|file| !self.indexed.contains_key(file)).copied().collect();
        if !new.is_empty() {
            self.indexed.extend(new.iter().map(|file| (*file, HashSet::new())));
            for (inode, folder) in &self.folders {
                for (name, state) in folder.entries.iter().filter(|(_, state)| new.contains(&state.id())) {
                    self.indexed.entry(state.id()).or_default().insert((*inode, name.clone()));
                }
            }
        }
        let mut found = Vec::new();
        for file in files {
            let Some(names) = self.indexed.get_mut(&file) else { continue };
            names.retain(|(folder, name)| {
                let state = self.folders.get(folder).and_then(|folder| folder.entries.get(name));
                let is_current = state.is_some_and(|state| state.id() == file);
                let state = state.filter(|state| is_current && state.kind == NodeKind::File);
                found.extend(state.map(|state| (*folder, name.clone(), *state)));
                is_current
            });
        }
        found
    }
}

/// A file's state, and its folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeEntry {
    pub state: FileState,
    pub folder: Inode,
}

/// Joins a folder's path and a name.
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
        let mut found: Vec<_> = found
            .into_iter()
            .map(|(folder, name, _)| (folder, String::from_utf8_lossy(&name).into()))
            .collect();
        found.sort();
        found
    }

    #[test]
    fn find_names_follows_added_replaced_and_removed_names() {
        let mut tree = Tree::new(1);
        let folder = FileState { kind: NodeKind::Folder, ..file(2) };
        tree.insert(1, b"sub"[..].into(), folder);
        for (folder, name) in [(1, &b"a"[..]), (2, &b"b"[..])] {
            tree.insert(folder, name.into(), file(10));
        }
        assert_eq!(names(&mut tree, 10), [(1, "a".to_owned()), (2, "b".to_owned())]);
        tree.insert(1, b"c"[..].into(), file(10));
        tree.insert(1, b"a"[..].into(), file(11));
        assert_eq!(names(&mut tree, 10), [(1, "c".to_owned()), (2, "b".to_owned())]);
        assert_eq!(names(&mut tree, 11), [(1, "a".to_owned())]);
        tree.refresh(1, b"c", file(11));
        assert_eq!(names(&mut tree, 11), [(1, "a".to_owned()), (1, "c".to_owned())]);
        let (mut before, mut removed_folders) = (PathMap::new(), Vec::new());
        tree.remove(1, b"sub", b"sub".to_vec(), &mut before, &mut removed_folders);
        assert_eq!(names(&mut tree, 10), []);
    }
}
