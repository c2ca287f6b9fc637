//! The last known state of the home's files: the names in each folder, and the file behind each name.
//!
//! In memory only; performs no I/O. Folders are identified by inode, so that they keep their identity when moved.

use std::collections::{BTreeMap, HashMap};

pub type Inode = u64;
/// Bytes, since a name need not be valid UTF-8.
pub type Name = Box<[u8]>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    File,
    Folder,
    Link,
    Other,
}

/// The state of the file behind a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileState {
    pub inode: Inode,
    pub size: u64,
    /// In nanoseconds.
    pub mtime: i64,
    /// The birth time in nanoseconds, which distinguishes a file from an earlier one with the same inode; 0 if the
    /// file system has none.
    pub born: i64,
    pub kind: Kind,
    /// The file has other names.
    pub is_shared: bool,
}

impl FileState {
    /// The file's identity; inodes are reused.
    pub fn id(&self) -> FileId {
        FileId { inode: self.inode, born: self.born }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileId {
    inode: Inode,
    born: i64,
}

#[derive(Debug)]
struct Folder {
    parent: Option<(Inode, Name)>,
    entries: BTreeMap<Name, FileState>,
}

/// Values by path below the root, whose own path is empty.
pub type Paths<T> = BTreeMap<Vec<u8>, T>;

#[derive(Debug)]
pub struct Tree {
    root: Inode,
    folders: HashMap<Inode, Folder>,
}

impl Tree {
    /// An empty tree.
    pub fn new(root: Inode) -> Self {
        let folder = Folder { parent: None, entries: BTreeMap::new() };
        Self { root, folders: HashMap::from([(root, folder)]) }
    }

    pub fn root(&self) -> Inode {
        self.root
    }

    pub fn has(&self, folder: Inode) -> bool {
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

    /// The path of a folder.
    pub fn path(&self, folder: Inode) -> Option<Vec<u8>> {
        let mut names = Vec::new();
        let mut at = self.folders.get(&folder)?;
        while let Some((above, name)) = &at.parent {
            names.push(name);
            at = self.folders.get(above)?;
            // No path is that deep: two folders contained each other in turn, between two checks.
            if names.len() > 4096 {
                return None;
            }
        }
        let mut path = Vec::new();
        for name in names.into_iter().rev() {
            path = below(&path, name);
        }
        Some(path)
    }

    /// The parent of a folder, and its name there.
    pub fn parent(&self, folder: Inode) -> Option<(Inode, Name)> {
        self.folders.get(&folder)?.parent.clone()
    }

    /// Adds a name. A new folder is empty.
    pub fn put(&mut self, folder: Inode, name: Name, seen: FileState) {
        if !self.has(folder) {
            return;
        }
        if seen.kind == Kind::Folder && seen.inode != self.root {
            let parent = Some((folder, name.clone()));
            self.folders.insert(seen.inode, Folder { parent, entries: BTreeMap::new() });
        }
        if let Some(folder) = self.folders.get_mut(&folder) {
            folder.entries.insert(name, seen);
        }
    }

    /// Updates the state of an unmoved file.
    pub fn refresh(&mut self, folder: Inode, name: &[u8], seen: FileState) {
        if let Some(entry) = self.folders.get_mut(&folder).and_then(|folder| folder.entries.get_mut(name)) {
            *entry = seen;
        }
    }

    /// Removes a name and everything below it into `before`, by path; folders also go to `left`.
    pub fn take(
        &mut self,
        folder: Inode,
        name: &[u8],
        path: Vec<u8>,
        before: &mut Paths<TreeEntry>,
        left: &mut Vec<Inode>,
    ) {
        let Some(seen) = self.folders.get_mut(&folder).and_then(|folder| folder.entries.remove(name)) else {
            return;
        };
        let mut rest = vec![(path, TreeEntry { seen, folder })];
        while let Some((path, known)) = rest.pop() {
            if known.seen.kind == Kind::Folder && self.is_at(known.seen.inode, known.folder, &path) {
                left.push(known.seen.inode);
                let inside = self.folders.remove(&known.seen.inode).map(|folder| folder.entries);
                for (name, seen) in inside.into_iter().flatten() {
                    rest.push((below(&path, &name), TreeEntry { seen, folder: known.seen.inode }));
                }
            }
            before.insert(path, known);
        }
    }

    /// Whether the folder is still at this place, rather than found elsewhere since.
    fn is_at(&self, inode: Inode, above: Inode, path: &[u8]) -> bool {
        let parent = self.folders.get(&inode).and_then(|folder| folder.parent.as_ref());
        parent.is_some_and(|(of, name)| *of == above && last(path) == &name[..])
    }

    /// All names of the matching files.
    pub fn of_files(&self, wanted: impl Fn(FileId) -> bool) -> Vec<(Inode, Name, FileState)> {
        let mut found = Vec::new();
        for (inode, folder) in &self.folders {
            let files =
                folder.entries.iter().filter(|(_, seen)| seen.kind == Kind::File && wanted(seen.id()));
            found.extend(files.map(|(name, seen)| (*inode, name.clone(), *seen)));
        }
        found
    }
}

/// A file's state, and its folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeEntry {
    pub seen: FileState,
    pub folder: Inode,
}

/// Joins a folder's path and a name.
pub fn below(path: &[u8], name: &[u8]) -> Vec<u8> {
    let mut joined = Vec::with_capacity(path.len() + 1 + name.len());
    joined.extend_from_slice(path);
    if !path.is_empty() {
        joined.push(b'/');
    }
    joined.extend_from_slice(name);
    joined
}

/// The last component of a path.
pub fn last(path: &[u8]) -> &[u8] {
    path.rsplit(|&byte| byte == b'/').next().unwrap_or_default()
}
