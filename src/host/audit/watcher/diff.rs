//! What has changed since the last look: the net difference of the tree, found by looking only where something was told.
//!
//! A name that was given to something else, and a folder that came from elsewhere, are compared with all that was below
//! before, by path. What was made and is gone again, or moved and came back, is no change.

use std::collections::HashMap;

use super::tree::{Inode, Kind, Known, Name, Paths, Seen, Tree, below};
use crate::host::records::entry::Op;

/// So many names with something to look at are kept; more are as if all of the tree were to be looked at.
pub const MOST_NAMES: usize = 200_000;

/// How the tree is looked at. Links are never followed.
pub trait Sight {
    /// What these names of a folder stand for; nothing, where the folder is not there any more.
    fn look(&mut self, path: &[u8], folder: Inode, names: &[Name]) -> Vec<Option<Seen>>;

    /// All that is in a folder. From before that is read, its changes are told.
    fn list(&mut self, path: &[u8], folder: Inode) -> Vec<(Name, Seen)>;
}

/// What was told of a name.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Marks {
    /// It was given or taken: made, deleted, moved.
    pub named: bool,
    /// What it stands for since then was made by this name.
    pub made: bool,
    /// Of what it stands for since then.
    pub written: bool,
    /// The same: times, mode, owner.
    pub touched: bool,
    /// What it stood for before that was written, and touched.
    pub was_written: bool,
    pub was_touched: bool,
}

impl Marks {
    /// What was told next.
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

    /// Of what it stood for at first: whether that was written, and touched.
    fn of_first(self) -> (bool, bool) {
        if self.named { (self.was_written, self.was_touched) } else { (self.written, self.touched) }
    }
}

/// Where to look.
#[derive(Debug, Default)]
pub struct Dirt {
    folders: HashMap<Inode, HashMap<Name, Marks>>,
    names: usize,
    /// Something was not told: everywhere.
    everywhere: bool,
}

impl Dirt {
    pub fn mark(&mut self, folder: Inode, name: &[u8], marks: Marks) {
        let names = self.folders.entry(folder).or_default();
        if let Some(known) = names.get_mut(name) {
            return known.add(marks);
        }
        if self.names >= MOST_NAMES {
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

    fn of(&self, folder: Inode, path: &[u8]) -> Marks {
        let names = self.folders.get(&folder);
        names.and_then(|names| names.get(super::tree::last(path)).copied()).unwrap_or_default()
    }
}

/// A path that is not what it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub op: Op,
    pub path: Vec<u8>,
    pub size: u64,
}

/// What a look came to.
#[derive(Debug, Default)]
pub struct Settled {
    /// Deletions first, the deepest before those above it; then what was made, folders before what is in them.
    pub changes: Vec<Change>,
    /// Folders that are not in the tree any more.
    pub left: Vec<Inode>,
}

/// Brings the tree up to date.
pub fn settle(tree: &mut Tree, dirt: &Dirt, sight: &mut impl Sight) -> Settled {
    let (mut before, mut after, mut left) = (Paths::new(), Paths::new(), Vec::new());
    if dirt.everywhere {
        let root = tree.root();
        for name in tree.names(root) {
            tree.take(root, &name, name.to_vec(), &mut before, &mut left);
        }
        Walk { tree, sight, before: &mut before, left: &mut left }.below(
            root,
            Vec::new(),
            &mut |path, known| {
                after.insert(path, known);
            },
        );
    } else {
        let found = forget(tree, dirt, sight, &mut before, &mut left);
        for Found { folder, path, name, now } in found {
            let path = below(&path, &name);
            let mut walk = Walk { tree, sight, before: &mut before, left: &mut left };
            walk.put(folder, name, now);
            after.insert(path.clone(), Known { seen: now, folder });
            if now.kind == Kind::Folder {
                walk.below(now.inode, path, &mut |path, known| {
                    after.insert(path, known);
                });
            }
        }
    }
    let shared = Shared::of(&before, &after, dirt);
    let mut changes = compare(&before, &after, dirt, &shared);
    changes.extend(other_names(tree, sight, &after, &shared));
    changes.sort_by(|one, other| {
        let (is_gone, other_is_gone) = (one.op == Op::Delete, other.op == Op::Delete);
        let by_path = if is_gone { other.path.cmp(&one.path) } else { one.path.cmp(&other.path) };
        other_is_gone.cmp(&is_gone).then(by_path)
    });
    left.retain(|inode| !tree.has(*inode));
    Settled { changes, left }
}

/// A name that stands for something, to be put into the tree.
struct Found {
    folder: Inode,
    path: Vec<u8>,
    name: Name,
    now: Seen,
}

/// Forgets each name that something was told of, but for folders that are where they were. All is forgotten before
/// anything is put: what moved is then in one place.
fn forget(
    tree: &mut Tree,
    dirt: &Dirt,
    sight: &mut impl Sight,
    before: &mut Paths<Known>,
    left: &mut Vec<Inode>,
) -> Vec<Found> {
    let mut found = Vec::new();
    let mut folders: Vec<(Vec<u8>, Inode)> =
        dirt.folders.keys().filter_map(|folder| Some((tree.path(*folder)?, *folder))).collect();
    // Above before below.
    folders.sort();
    for (path, folder) in folders {
        if !tree.has(folder) {
            // It went with a folder above it; where it is now, it is listed anew.
            continue;
        }
        let Some(marked) = dirt.folders.get(&folder) else { continue };
        let names: Vec<Name> = marked.keys().cloned().collect();
        let seen = sight.look(&path, folder, &names);
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
                found.push(Found { folder, path: path.clone(), name, now });
            }
        }
    }
    found
}

/// Fills a tree of which nothing is known.
pub fn fill(tree: &mut Tree, sight: &mut impl Sight) {
    let (mut before, mut left, root) = (Paths::new(), Vec::new(), tree.root());
    Walk { tree, sight, before: &mut before, left: &mut left }.below(root, Vec::new(), &mut |_, _| {});
}

/// Puts what is found into the tree.
struct Walk<'a, S> {
    tree: &'a mut Tree,
    sight: &'a mut S,
    before: &'a mut Paths<Known>,
    left: &'a mut Vec<Inode>,
}

impl<S: Sight> Walk<'_, S> {
    /// All that is below a folder.
    fn below(&mut self, folder: Inode, path: Vec<u8>, found: &mut impl FnMut(Vec<u8>, Known)) {
        let mut rest = vec![(folder, path)];
        while let Some((folder, path)) = rest.pop() {
            for (name, seen) in self.sight.list(&path, folder) {
                let path = below(&path, &name);
                self.put(folder, name, seen);
                found(path.clone(), Known { seen, folder });
                if seen.kind == Kind::Folder {
                    rest.push((seen.inode, path));
                }
            }
        }
    }

    /// A folder that is known elsewhere has just been moved: there it is no more.
    fn put(&mut self, folder: Inode, name: Name, seen: Seen) {
        if seen.kind == Kind::Folder
            && let Some((above, old)) = self.tree.place(seen.inode)
            && let Some(path) = self.tree.path(seen.inode)
        {
            self.tree.take(above, &old, path, self.before, self.left);
        }
        self.tree.put(folder, name, seen);
    }
}

/// Files with several names: what was told of one of them holds for all.
struct Shared(HashMap<Inode, (bool, bool)>);

impl Shared {
    fn of(before: &Paths<Known>, after: &Paths<Known>, dirt: &Dirt) -> Self {
        let is_shared = |known: &&Known| known.seen.is_shared && known.seen.kind == Kind::File;
        let known = before.values().chain(after.values()).filter(is_shared);
        let mut all: HashMap<Inode, (bool, bool)> =
            known.map(|known| (known.seen.inode, (false, false))).collect();
        let mut add = |known: &Known, (written, touched): (bool, bool)| {
            if let Some(all) = all.get_mut(&known.seen.inode) {
                all.0 |= written;
                all.1 |= touched;
            }
        };
        for (path, known) in before {
            add(known, dirt.of(known.folder, path).of_first());
        }
        for (path, known) in after {
            let marks = dirt.of(known.folder, path);
            add(known, (marks.written, marks.touched));
        }
        Self(all)
    }
}

fn compare(before: &Paths<Known>, after: &Paths<Known>, dirt: &Dirt, shared: &Shared) -> Vec<Change> {
    let mut changes = Vec::new();
    for path in before.keys().filter(|path| !after.contains_key(*path)) {
        changes.push(Change { op: Op::Delete, path: path.clone(), size: 0 });
    }
    for (path, now) in after {
        let was = before.get(path).map(|was| was.seen);
        let mut marks = dirt.of(now.folder, path);
        if was.is_some_and(|was| was.inode == now.seen.inode) {
            let (written, touched) = marks.of_first();
            marks.written |= written;
            marks.touched |= touched;
        }
        if let Some((written, touched)) = shared.0.get(&now.seen.inode) {
            marks.written |= written;
            marks.touched |= touched;
        }
        changes.extend(change(was, now.seen, marks, path));
    }
    changes
}

/// What has become of a path that is there.
fn change(was: Option<Seen>, now: Seen, marks: Marks, path: &[u8]) -> Option<Change> {
    let is_other = was.is_none_or(|was| was.kind != now.kind);
    if now.kind == Kind::Folder {
        return is_other.then(|| Change { op: Op::Mkdir, path: path.to_vec(), size: 0 });
    }
    let is_written = is_other || was.is_some_and(|was| is_written(was, now, marks));
    is_written.then(|| Change { op: Op::Write, path: path.to_vec(), size: now.size })
}

/// Whether what is not a folder was written, or something else put in its place.
fn is_written(was: Seen, now: Seen, marks: Marks) -> bool {
    if was.inode != now.inode {
        return true;
    }
    if marks.named && (was.size, was.mtime) == (now.size, now.mtime) {
        // It was moved and came back, or was linked again; what was written of this name meanwhile was something else.
        return false;
    }
    if marks.made {
        // Something else, which has got its number.
        return true;
    }
    if now.kind != Kind::File || (was.size, now.size) == (0, 0) {
        return false;
    }
    // A file that is mapped is written without a word, and its time tells. One whose times were set was not written.
    was.size != now.size || marks.written || (was.mtime != now.mtime && !marks.touched)
}

/// Other names of files that were written by one of theirs.
fn other_names(
    tree: &mut Tree,
    sight: &mut impl Sight,
    after: &Paths<Known>,
    shared: &Shared,
) -> Vec<Change> {
    if shared.0.is_empty() {
        return Vec::new();
    }
    let mut changes = Vec::new();
    for (folder, name, was) in tree.of_inodes(|inode| shared.0.contains_key(&inode)) {
        let Some(path) = tree.path(folder) else { continue };
        let full = below(&path, &name);
        if after.contains_key(&full) {
            continue;
        }
        let now = sight.look(&path, folder, std::slice::from_ref(&name)).pop().flatten();
        // Where it is something else by now, that is told, too.
        let Some(now) = now.filter(|now| now.inode == was.inode) else { continue };
        let (written, touched) = shared.0.get(&now.inode).copied().unwrap_or_default();
        let marks = Marks { written, touched, ..Marks::default() };
        tree.refresh(folder, &name, now);
        changes.extend(change(Some(was), now, marks, &full));
    }
    changes
}

#[cfg(test)]
mod tests;
