//! An in-memory file system with the events of inotify(7), changed at random: the reported changes must be the
//! difference of its states, and the tree must match it.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone, PartialEq)]
enum Node {
    File { content: u64, mtime: i64 },
    Link { target: u64, mtime: i64 },
    Folder(BTreeMap<Name, Inode>),
}

/// Inodes are reused as soon as possible.
struct World {
    nodes: BTreeMap<Inode, Node>,
    /// The birth time of each node.
    born: BTreeMap<Inode, i64>,
    watched: BTreeSet<Inode>,
    dirty: DirtySet,
    clock: i64,
}

const ROOT: Inode = 2;

impl World {
    fn new() -> Self {
        let nodes = BTreeMap::from([(ROOT, Node::Folder(BTreeMap::new()))]);
        Self { nodes, born: BTreeMap::new(), watched: BTreeSet::new(), dirty: DirtySet::default(), clock: 0 }
    }

    fn names(&self, folder: Inode) -> &BTreeMap<Name, Inode> {
        match &self.nodes[&folder] {
            Node::Folder(names) => names,
            Node::File { .. } | Node::Link { .. } => panic!("only a folder has names"),
        }
    }

    fn names_mut(&mut self, folder: Inode) -> &mut BTreeMap<Name, Inode> {
        match self.nodes.get_mut(&folder) {
            Some(Node::Folder(names)) => names,
            _ => panic!("only a folder has names"),
        }
    }

    fn find(&self, path: &[u8]) -> Option<Inode> {
        let mut at = ROOT;
        for name in path.split(|&byte| byte == b'/').filter(|name| !name.is_empty()) {
            let Node::Folder(names) = &self.nodes[&at] else { return None };
            at = *names.get(name)?;
        }
        Some(at)
    }

    /// The folder of a path, and its last name.
    fn split<'a>(&self, path: &'a [u8]) -> Option<(Inode, &'a [u8])> {
        let name = super::super::tree::last(path);
        let folder = self.find(&path[..path.len() - name.len()])?;
        matches!(self.nodes[&folder], Node::Folder(_)).then_some((folder, name))
    }

    fn emit(&mut self, folder: Inode, name: &[u8], marks: Marks) {
        if self.watched.contains(&folder) {
            self.dirty.mark(folder, name, marks);
        }
    }

    fn new_inode(&self) -> Inode {
        (ROOT + 1..).find(|inode| !self.nodes.contains_key(inode)).unwrap()
    }

    fn make(&mut self, path: &[u8], node: Node) {
        let Some((folder, name)) = self.split(path) else { return };
        if self.names(folder).contains_key(name) {
            return;
        }
        let inode = self.new_inode();
        self.nodes.insert(inode, node);
        self.clock += 1;
        self.born.insert(inode, self.clock);
        self.names_mut(folder).insert(name.into(), inode);
        let written = matches!(self.nodes[&inode], Node::File { .. });
        self.emit(folder, name, Marks { named: true, made: true, written, ..Marks::default() });
    }

    fn write(&mut self, path: &[u8], by_map: bool) {
        self.clock += 1;
        let node = Node::File { content: self.clock.unsigned_abs(), mtime: self.clock };
        match (self.find(path), self.split(path)) {
            (Some(inode), Some((folder, name))) if matches!(self.nodes[&inode], Node::File { .. }) => {
                self.nodes.insert(inode, node);
                // Closing a mapped file causes an event, but not a write event.
                self.emit(folder, name, Marks { written: !by_map, ..Marks::default() });
            }
            (None, Some(_)) => self.make(path, node),
            // A write through a link changes its target.
            _ => {}
        }
    }

    /// Replaces a name by a symbolic link, as `ln -sfn` does: a link with a temporary name is renamed.
    fn symlink(&mut self, path: &[u8]) {
        let is_folder = self.find(path).is_some_and(|inode| matches!(self.nodes[&inode], Node::Folder(_)));
        if is_folder || self.split(path).is_none() {
            return;
        }
        let temporary = [path, b".tmp"].concat();
        self.clock += 1;
        self.make(&temporary, Node::Link { target: self.clock.unsigned_abs(), mtime: self.clock });
        self.rename(&temporary, path);
    }

    fn touch(&mut self, path: &[u8]) {
        self.clock += 1;
        let at = self.clock;
        if let (Some(inode), Some((folder, name))) = (self.find(path), self.split(path)) {
            if let Some(Node::File { mtime, .. }) = self.nodes.get_mut(&inode) {
                *mtime = at;
            }
            self.emit(folder, name, Marks { touched: true, ..Marks::default() });
        }
    }

    fn remove(&mut self, path: &[u8]) {
        let (Some(inode), Some((folder, name))) = (self.find(path), self.split(path)) else { return };
        if let Node::Folder(names) = &self.nodes[&inode] {
            for name in names.keys().cloned().collect::<Vec<_>>() {
                self.remove(&below(path, &name));
            }
        }
        self.names_mut(folder).remove(name);
        self.emit(folder, name, Marks { named: true, ..Marks::default() });
        let links = self.nodes.values().filter(
            |node| matches!(node, Node::Folder(names) if names.values().any(|other| *other == inode)),
        );
        if links.count() == 0 {
            self.nodes.remove(&inode);
            self.watched.remove(&inode);
        }
    }

    fn rename(&mut self, from: &[u8], to: &[u8]) {
        let inside = to.starts_with(from) && (to.len() == from.len() || to[from.len()] == b'/');
        let above = from.starts_with(to) && from.get(to.len()) == Some(&b'/');
        let (Some(inode), Some((old, old_name)), Some((new, new_name))) =
            (self.find(from), self.split(from), self.split(to))
        else {
            return;
        };
        if inside || above || self.find(to) == Some(inode) {
            return;
        }
        self.remove(to);
        self.names_mut(old).remove(old_name);
        self.names_mut(new).insert(new_name.into(), inode);
        let marks = Marks { named: true, ..Marks::default() };
        self.emit(old, old_name, marks);
        self.emit(new, new_name, marks);
    }

    fn link(&mut self, from: &[u8], to: &[u8]) {
        let (Some(inode), Some((folder, name))) = (self.find(from), self.split(to)) else { return };
        if matches!(self.nodes[&inode], Node::File { .. }) && !self.names(folder).contains_key(name) {
            self.names_mut(folder).insert(name.into(), inode);
            self.emit(folder, name, Marks { named: true, made: true, ..Marks::default() });
        }
    }

    fn seen(&self, inode: Inode) -> FileState {
        let links = self.nodes.values().map(|node| match node {
            Node::Folder(names) => names.values().filter(|other| **other == inode).count(),
            Node::File { .. } | Node::Link { .. } => 0,
        });
        let born = self.born.get(&inode).copied().unwrap_or_default();
        match &self.nodes[&inode] {
            // All files have the same size, so that sizes cannot reveal a change.
            Node::File { mtime, .. } => FileState {
                inode,
                size: 9,
                mtime: *mtime,
                born,
                kind: Kind::File,
                is_shared: links.sum::<usize>() > 1,
            },
            Node::Link { mtime, .. } => {
                FileState { inode, size: 9, mtime: *mtime, born, kind: Kind::Link, is_shared: false }
            }
            Node::Folder(_) => {
                FileState { inode, size: 0, mtime: 0, born, kind: Kind::Folder, is_shared: false }
            }
        }
    }

    /// All paths, with contents.
    fn states(&self) -> BTreeMap<Vec<u8>, Option<u64>> {
        let (mut all, mut rest) = (BTreeMap::new(), vec![(Vec::new(), ROOT)]);
        while let Some((path, folder)) = rest.pop() {
            for (name, inode) in self.names(folder) {
                let path = below(&path, name);
                let content = match &self.nodes[inode] {
                    Node::File { content, .. } | Node::Link { target: content, .. } => Some(*content),
                    Node::Folder(_) => {
                        rest.push((path.clone(), *inode));
                        None
                    }
                };
                all.insert(path, content);
            }
        }
        all
    }
}

impl FsProbe for World {
    fn probe(&mut self, path: &[u8], folder: Inode, names: &[Name]) -> Vec<Option<FileState>> {
        if self.find(path) != Some(folder) {
            return vec![None; names.len()];
        }
        let known = self.names(folder);
        names.iter().map(|name| known.get(name).map(|inode| self.seen(*inode))).collect()
    }

    fn list(&mut self, path: &[u8], folder: Inode) -> Vec<(Name, FileState)> {
        if self.find(path) != Some(folder) {
            return Vec::new();
        }
        self.watched.insert(folder);
        self.names(folder).iter().map(|(name, inode)| (name.clone(), self.seen(*inode))).collect()
    }
}

#[derive(Debug, Clone)]
enum Step {
    Write(Vec<u8>),
    Map(Vec<u8>),
    Touch(Vec<u8>),
    Symlink(Vec<u8>),
    Mkdir(Vec<u8>),
    Remove(Vec<u8>),
    Rename(Vec<u8>, Vec<u8>),
    Link(Vec<u8>, Vec<u8>),
    Check,
}

fn path() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(prop::sample::select(vec!["a", "b", "c"]), 1..4)
        .prop_map(|names| names.join("/").into_bytes())
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => path().prop_map(Step::Write),
        1 => path().prop_map(Step::Map),
        1 => path().prop_map(Step::Touch),
        2 => path().prop_map(Step::Symlink),
        4 => path().prop_map(Step::Mkdir),
        3 => path().prop_map(Step::Remove),
        4 => (path(), path()).prop_map(|(from, to)| Step::Rename(from, to)),
        2 => (path(), path()).prop_map(|(from, to)| Step::Link(from, to)),
        3 => Just(Step::Check),
    ]
}

/// Checks the reported changes against the expected ones.
fn check(world: &mut World, tree: &mut Tree, before: &mut BTreeMap<Vec<u8>, Option<u64>>, all: bool) {
    let mut dirty = std::mem::take(&mut world.dirty);
    if all {
        dirty.mark_all();
    }
    let update = update_tree(tree, &dirty, world);
    for folder in &update.removed_folders {
        world.watched.remove(folder);
    }
    let now = world.states();
    let mut expected: BTreeMap<Vec<u8>, Op> = BTreeMap::new();
    expected
        .extend(before.keys().filter(|path| !now.contains_key(*path)).map(|path| (path.clone(), Op::Delete)));
    for (path, content) in now.iter().filter(|(path, content)| before.get(*path) != Some(content)) {
        expected.insert(path.clone(), if content.is_some() { Op::Write } else { Op::Mkdir });
    }
    let reported: BTreeMap<Vec<u8>, Op> =
        update.changes.iter().map(|change| (change.path.clone(), change.op)).collect();
    assert_eq!(reported.len(), update.changes.len(), "each path once");
    assert_eq!(reported, expected);
    let mut known = Tree::new(ROOT);
    fill(&mut known, world);
    assert_eq!(tree.len(), known.len());
    *before = now;
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn changes_are_the_difference_of_states(steps in prop::collection::vec(step(), 1..40), all in prop::bool::weighted(0.1)) {
        let mut world = World::new();
        let mut tree = Tree::new(ROOT);
        fill(&mut tree, &mut world);
        let mut before = world.states();
        for step in steps {
            match step {
                Step::Write(path) => world.write(&path, false),
                Step::Map(path) => world.write(&path, true),
                // A touch and a mapped write of the same file look alike.
                Step::Touch(path) if !all => {
                    check(&mut world, &mut tree, &mut before, false);
                    world.touch(&path);
                    check(&mut world, &mut tree, &mut before, false);
                }
                Step::Touch(_) => {}
                Step::Symlink(path) => world.symlink(&path),
                Step::Mkdir(path) => world.make(&path, Node::Folder(BTreeMap::new())),
                Step::Remove(path) => world.remove(&path),
                Step::Rename(from, to) => world.rename(&from, &to),
                // A link that is created and deleted between two checks leaves no trace.
                Step::Link(from, to) => {
                    world.link(&from, &to);
                    check(&mut world, &mut tree, &mut before, all);
                }
                Step::Check => check(&mut world, &mut tree, &mut before, all),
            }
        }
        check(&mut world, &mut tree, &mut before, all);
    }
}

#[test]
fn too_many_dirty_names_mark_everything() {
    let mut dirty = DirtySet::default();
    for n in 0..=MAX_NAMES {
        dirty.mark(1, n.to_string().as_bytes(), Marks::default());
    }
    assert!(dirty.everywhere && dirty.names() == 0 && !dirty.is_clean());
}

/// Found by a random script: the new link had the inode of the old one, and came by a rename.
#[test]
fn link_that_reuses_the_inode_of_the_replaced_link_is_written() {
    let mut world = World::new();
    let mut tree = Tree::new(ROOT);
    fill(&mut tree, &mut world);
    let mut before = world.states();
    world.symlink(b"a");
    world.write(b"b", false);
    check(&mut world, &mut tree, &mut before, false);
    let replaced = world.find(b"a");
    world.rename(b"b", b"a");
    world.symlink(b"a");
    assert_eq!(world.find(b"a"), replaced);
    check(&mut world, &mut tree, &mut before, false);
}
