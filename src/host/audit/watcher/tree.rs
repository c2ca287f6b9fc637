//! What is known of the home's files: which folder has which names, and what stood behind each when it was last looked at.
//!
//! Memory alone; nothing here looks at a disk. A folder is known by its inode, so that it stays itself wherever it goes.

use std::collections::{BTreeMap, HashMap};

pub type Inode = u64;
/// Bytes, for a name need not be a text.
pub type Name = Box<[u8]>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    File,
    Folder,
    Link,
    Other,
}

/// What a name stood for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    pub inode: Inode,
    pub size: u64,
    /// Nanoseconds.
    pub mtime: i64,
    pub kind: Kind,
    /// It has other names.
    pub is_shared: bool,
}

#[derive(Debug)]
struct Folder {
    place: Option<(Inode, Name)>,
    entries: BTreeMap<Name, Seen>,
}

/// Paths below the root; the root's own is empty.
pub type Paths<T> = BTreeMap<Vec<u8>, T>;

#[derive(Debug)]
pub struct Tree {
    root: Inode,
    folders: HashMap<Inode, Folder>,
}

impl Tree {
    /// Of which nothing but the root is known.
    pub fn new(root: Inode) -> Self {
        let folder = Folder { place: None, entries: BTreeMap::new() };
        Self { root, folders: HashMap::from([(root, folder)]) }
    }

    pub fn root(&self) -> Inode {
        self.root
    }

    pub fn has(&self, folder: Inode) -> bool {
        self.folders.contains_key(&folder)
    }

    /// How many names are known.
    pub fn len(&self) -> usize {
        self.folders.values().map(|folder| folder.entries.len()).sum()
    }

    pub fn get(&self, folder: Inode, name: &[u8]) -> Option<Seen> {
        self.folders.get(&folder)?.entries.get(name).copied()
    }

    pub fn names(&self, folder: Inode) -> Vec<Name> {
        self.folders.get(&folder).map_or_else(Vec::new, |folder| folder.entries.keys().cloned().collect())
    }

    /// Where a folder is.
    pub fn path(&self, folder: Inode) -> Option<Vec<u8>> {
        let mut names = Vec::new();
        let mut at = self.folders.get(&folder)?;
        while let Some((above, name)) = &at.place {
            names.push(name);
            at = self.folders.get(above)?;
            // Deeper than any path may be: two folders that were each other's in turn, between two looks.
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

    /// The folder that a folder is in, and its name there.
    pub fn place(&self, folder: Inode) -> Option<(Inode, Name)> {
        self.folders.get(&folder)?.place.clone()
    }

    /// A name, and what it stands for now. A folder begins empty.
    pub fn put(&mut self, folder: Inode, name: Name, seen: Seen) {
        if !self.has(folder) {
            return;
        }
        if seen.kind == Kind::Folder && seen.inode != self.root {
            let place = Some((folder, name.clone()));
            self.folders.insert(seen.inode, Folder { place, entries: BTreeMap::new() });
        }
        if let Some(folder) = self.folders.get_mut(&folder) {
            folder.entries.insert(name, seen);
        }
    }

    /// The same thing, as it looks now.
    pub fn refresh(&mut self, folder: Inode, name: &[u8], seen: Seen) {
        if let Some(entry) = self.folders.get_mut(&folder).and_then(|folder| folder.entries.get_mut(name)) {
            *entry = seen;
        }
    }

    /// Forgets a name and all below it, which goes to `before` by its path; folders go to `left`, too.
    pub fn take(
        &mut self,
        folder: Inode,
        name: &[u8],
        path: Vec<u8>,
        before: &mut Paths<Known>,
        left: &mut Vec<Inode>,
    ) {
        let Some(seen) = self.folders.get_mut(&folder).and_then(|folder| folder.entries.remove(name)) else {
            return;
        };
        let mut rest = vec![(path, Known { seen, folder })];
        while let Some((path, known)) = rest.pop() {
            if known.seen.kind == Kind::Folder && self.is_at(known.seen.inode, known.folder, &path) {
                left.push(known.seen.inode);
                let inside = self.folders.remove(&known.seen.inode).map(|folder| folder.entries);
                for (name, seen) in inside.into_iter().flatten() {
                    rest.push((below(&path, &name), Known { seen, folder: known.seen.inode }));
                }
            }
            before.insert(path, known);
        }
    }

    /// Whether the folder of this inode is still the one in that place, and not one that was found elsewhere since.
    fn is_at(&self, inode: Inode, above: Inode, path: &[u8]) -> bool {
        let place = self.folders.get(&inode).and_then(|folder| folder.place.as_ref());
        place.is_some_and(|(of, name)| *of == above && last(path) == &name[..])
    }

    /// All names of files that have one of these inodes.
    pub fn of_inodes(&self, wanted: impl Fn(Inode) -> bool) -> Vec<(Inode, Name, Seen)> {
        let mut found = Vec::new();
        for (inode, folder) in &self.folders {
            let files =
                folder.entries.iter().filter(|(_, seen)| seen.kind == Kind::File && wanted(seen.inode));
            found.extend(files.map(|(name, seen)| (*inode, name.clone(), *seen)));
        }
        found
    }
}

/// What was known at a path, and in which folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Known {
    pub seen: Seen,
    pub folder: Inode,
}

/// The path of a name in a folder.
pub fn below(path: &[u8], name: &[u8]) -> Vec<u8> {
    let mut joined = Vec::with_capacity(path.len() + 1 + name.len());
    joined.extend_from_slice(path);
    if !path.is_empty() {
        joined.push(b'/');
    }
    joined.extend_from_slice(name);
    joined
}

/// The last name of a path.
pub fn last(path: &[u8]) -> &[u8] {
    path.rsplit(|&byte| byte == b'/').next().unwrap_or_default()
}
