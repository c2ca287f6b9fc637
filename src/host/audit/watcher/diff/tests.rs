//! Tests against a randomly changing in-memory file system that emits inotify(7) events: the reported changes must be
//! the difference between its states, and the updated tree must have as many names as one built from scratch.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone, PartialEq)]
enum Node {
    File { content: u64, mtime: i64 },
    Symlink { target: u64, mtime: i64 },
    Directory(BTreeMap<Name, Inode>),
}

/// In-memory file system. Reuses inodes as early as possible.
struct FakeFs {
    nodes: BTreeMap<Inode, Node>,
    birth_time: BTreeMap<Inode, i64>,
    watched: BTreeSet<Inode>,
    dirty: DirtySet,
    clock: i64,
}

const ROOT: Inode = 2;

impl FakeFs {
    fn new() -> Self {
        let nodes = BTreeMap::from([(ROOT, Node::Directory(BTreeMap::new()))]);
        Self {
            nodes,
            birth_time: BTreeMap::new(),
            watched: BTreeSet::new(),
            dirty: DirtySet::default(),
            clock: 0,
        }
    }

    fn names(&self, dir: Inode) -> &BTreeMap<Name, Inode> {
        match &self.nodes[&dir] {
            Node::Directory(names) => names,
            Node::File { .. } | Node::Symlink { .. } => panic!("not a directory"),
        }
    }

    fn names_mut(&mut self, dir: Inode) -> &mut BTreeMap<Name, Inode> {
        match self.nodes.get_mut(&dir) {
            Some(Node::Directory(names)) => names,
            _ => panic!("not a directory"),
        }
    }

    fn find(&self, path: &[u8]) -> Option<Inode> {
        let mut inode = ROOT;
        for name in path.split(|&byte| byte == b'/').filter(|name| !name.is_empty()) {
            let Node::Directory(names) = &self.nodes[&inode] else { return None };
            inode = *names.get(name)?;
        }
        Some(inode)
    }

    /// Splits a path into its directory and last component, or returns `None` if the directory doesn't exist.
    fn split<'a>(&self, path: &'a [u8]) -> Option<(Inode, &'a [u8])> {
        let name = super::super::tree::last_component(path);
        let dir = self.find(&path[..path.len() - name.len()])?;
        matches!(self.nodes[&dir], Node::Directory(_)).then_some((dir, name))
    }

    fn emit(&mut self, dir: Inode, name: &[u8], marks: Marks) {
        if self.watched.contains(&dir) {
            self.dirty.mark(dir, name, marks);
        }
    }

    fn new_inode(&self) -> Inode {
        (ROOT + 1..).find(|inode| !self.nodes.contains_key(inode)).unwrap()
    }

    fn create(&mut self, path: &[u8], node: Node) {
        let Some((dir, name)) = self.split(path) else { return };
        if self.names(dir).contains_key(name) {
            return;
        }
        let inode = self.new_inode();
        self.nodes.insert(inode, node);
        self.clock += 1;
        self.birth_time.insert(inode, self.clock);
        self.names_mut(dir).insert(name.into(), inode);
        let is_written = matches!(self.nodes[&inode], Node::File { .. });
        let marks = Marks { has_name_change: true, is_created: true, is_written, ..Marks::default() };
        self.emit(dir, name, marks);
    }

    fn write(&mut self, path: &[u8], is_mapped: bool) {
        self.clock += 1;
        let node = Node::File { content: self.clock.unsigned_abs(), mtime: self.clock };
        match (self.find(path), self.split(path)) {
            (Some(inode), Some((dir, name))) if matches!(self.nodes[&inode], Node::File { .. }) => {
                self.nodes.insert(inode, node);
                // Closing a mapped file emits an event, but not a write event.
                self.emit(dir, name, Marks { is_written: !is_mapped, ..Marks::default() });
            }
            (None, Some(_)) => self.create(path, node),
            // A write through a symlink would change the target, not this name.
            _ => {}
        }
    }

    /// Replaces a name with a symlink like `ln -sfn`: creates a temporary link, then renames it.
    fn symlink(&mut self, path: &[u8]) {
        let is_dir = self.find(path).is_some_and(|inode| matches!(self.nodes[&inode], Node::Directory(_)));
        if is_dir || self.split(path).is_none() {
            return;
        }
        let temporary = [path, b".tmp"].concat();
        self.clock += 1;
        self.create(&temporary, Node::Symlink { target: self.clock.unsigned_abs(), mtime: self.clock });
        self.rename(&temporary, path);
    }

    fn touch(&mut self, path: &[u8]) {
        self.clock += 1;
        let now = self.clock;
        if let (Some(inode), Some((dir, name))) = (self.find(path), self.split(path)) {
            if let Some(Node::File { mtime, .. }) = self.nodes.get_mut(&inode) {
                *mtime = now;
            }
            self.emit(dir, name, Marks { is_touched: true, ..Marks::default() });
        }
    }

    fn remove(&mut self, path: &[u8]) {
        let (Some(inode), Some((dir, name))) = (self.find(path), self.split(path)) else { return };
        if let Node::Directory(names) = &self.nodes[&inode] {
            for name in names.keys().cloned().collect::<Vec<_>>() {
                self.remove(&join_path(path, &name));
            }
        }
        self.names_mut(dir).remove(name);
        self.emit(dir, name, Marks { has_name_change: true, ..Marks::default() });
        let dirs = self.nodes.values().filter(
            |node| matches!(node, Node::Directory(names) if names.values().any(|other| *other == inode)),
        );
        if dirs.count() == 0 {
            self.nodes.remove(&inode);
            self.watched.remove(&inode);
        }
    }

    fn rename(&mut self, from: &[u8], to: &[u8]) {
        let is_into_itself = to.starts_with(from) && (to.len() == from.len() || to[from.len()] == b'/');
        let is_onto_ancestor = from.starts_with(to) && from.get(to.len()) == Some(&b'/');
        let (Some(inode), Some((old, old_name)), Some((new, new_name))) =
            (self.find(from), self.split(from), self.split(to))
        else {
            return;
        };
        if is_into_itself || is_onto_ancestor || self.find(to) == Some(inode) {
            return;
        }
        self.remove(to);
        self.names_mut(old).remove(old_name);
        self.names_mut(new).insert(new_name.into(), inode);
        let marks = Marks { has_name_change: true, ..Marks::default() };
        self.emit(old, old_name, marks);
        self.emit(new, new_name, marks);
    }

    fn hard_link(&mut self, from: &[u8], to: &[u8]) {
        let (Some(inode), Some((dir, name))) = (self.find(from), self.split(to)) else { return };
        if matches!(self.nodes[&inode], Node::File { .. }) && !self.names(dir).contains_key(name) {
            self.names_mut(dir).insert(name.into(), inode);
            let marks = Marks { has_name_change: true, is_created: true, ..Marks::default() };
            self.emit(dir, name, marks);
        }
    }

    fn state(&self, inode: Inode) -> FileState {
        let links = self.nodes.values().map(|node| match node {
            Node::Directory(names) => names.values().filter(|other| **other == inode).count(),
            Node::File { .. } | Node::Symlink { .. } => 0,
        });
        let birth_time = self.birth_time.get(&inode).copied().unwrap_or_default();
        match &self.nodes[&inode] {
            // All files are the same size, so that sizes can't reveal a change.
            Node::File { mtime, .. } => FileState {
                inode,
                size: 9,
                mtime: *mtime,
                birth_time,
                kind: NodeKind::File,
                has_other_names: links.sum::<usize>() > 1,
            },
            Node::Symlink { mtime, .. } => FileState {
                inode,
                size: 9,
                mtime: *mtime,
                birth_time,
                kind: NodeKind::Symlink,
                has_other_names: false,
            },
            Node::Directory(_) => FileState {
                inode,
                size: 0,
                mtime: 0,
                birth_time,
                kind: NodeKind::Directory,
                has_other_names: false,
            },
        }
    }

    /// Lists all paths, with file contents.
    fn list_contents(&self) -> BTreeMap<Vec<u8>, Option<u64>> {
        let (mut all, mut rest) = (BTreeMap::new(), vec![(Vec::new(), ROOT)]);
        while let Some((path, dir)) = rest.pop() {
            for (name, inode) in self.names(dir) {
                let path = join_path(&path, name);
                let content = match &self.nodes[inode] {
                    Node::File { content, .. } | Node::Symlink { target: content, .. } => Some(*content),
                    Node::Directory(_) => {
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

impl FsProbe for FakeFs {
    fn probe(&mut self, path: &[u8], dir: Inode, names: &[Name]) -> Vec<Option<FileState>> {
        if self.find(path) != Some(dir) {
            return vec![None; names.len()];
        }
        let entries = self.names(dir);
        names.iter().map(|name| entries.get(name).map(|inode| self.state(*inode))).collect()
    }

    fn list(&mut self, path: &[u8], dir: Inode) -> Vec<(Name, FileState)> {
        if self.find(path) != Some(dir) {
            return Vec::new();
        }
        self.watched.insert(dir);
        self.names(dir).iter().map(|(name, inode)| (name.clone(), self.state(*inode))).collect()
    }
}

#[derive(Debug, Clone)]
enum Step {
    Write(Vec<u8>),
    MappedWrite(Vec<u8>),
    Touch(Vec<u8>),
    Symlink(Vec<u8>),
    Mkdir(Vec<u8>),
    Remove(Vec<u8>),
    Rename(Vec<u8>, Vec<u8>),
    HardLink(Vec<u8>, Vec<u8>),
    Check,
}

fn any_path() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(prop::sample::select(vec!["a", "b", "c"]), 1..4)
        .prop_map(|names| names.join("/").into_bytes())
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => any_path().prop_map(Step::Write),
        1 => any_path().prop_map(Step::MappedWrite),
        1 => any_path().prop_map(Step::Touch),
        2 => any_path().prop_map(Step::Symlink),
        4 => any_path().prop_map(Step::Mkdir),
        3 => any_path().prop_map(Step::Remove),
        4 => (any_path(), any_path()).prop_map(|(from, to)| Step::Rename(from, to)),
        2 => (any_path(), any_path()).prop_map(|(from, to)| Step::HardLink(from, to)),
        3 => Just(Step::Check),
    ]
}

/// Compares the reported changes with the expected ones.
fn check(fs: &mut FakeFs, tree: &mut Tree, before: &mut BTreeMap<Vec<u8>, Option<u64>>, is_full: bool) {
    let mut dirty = std::mem::take(&mut fs.dirty);
    if is_full {
        dirty.mark_all();
    }
    let update = update_tree(tree, &dirty, fs);
    for dir in &update.removed_dirs {
        fs.watched.remove(dir);
    }
    let after = fs.list_contents();
    let mut expected: BTreeMap<Vec<u8>, FileOperation> = BTreeMap::new();
    expected.extend(
        before
            .keys()
            .filter(|path| !after.contains_key(*path))
            .map(|path| (path.clone(), FileOperation::Delete)),
    );
    for (path, content) in after.iter().filter(|(path, content)| before.get(*path) != Some(content)) {
        expected.insert(
            path.clone(),
            if content.is_some() { FileOperation::Write } else { FileOperation::Mkdir },
        );
    }
    let reported: BTreeMap<Vec<u8>, FileOperation> =
        update.changes.iter().map(|change| (change.path.clone(), change.op)).collect();
    assert_eq!(reported.len(), update.changes.len(), "duplicate path");
    assert_eq!(reported, expected);
    let mut rebuilt = Tree::new(ROOT);
    fill_tree(&mut rebuilt, fs);
    assert_eq!(tree.len(), rebuilt.len());
    *before = after;
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn update_tree_reports_difference_between_states(steps in prop::collection::vec(any_step(), 1..40), is_full in prop::bool::weighted(0.1)) {
        let mut fs = FakeFs::new();
        let mut tree = Tree::new(ROOT);
        fill_tree(&mut tree, &mut fs);
        let mut before = fs.list_contents();
        for step in steps {
            match step {
                Step::Write(path) => fs.write(&path, false),
                Step::MappedWrite(path) => fs.write(&path, true),
                // A touch and a mapped write of the same file are indistinguishable.
                Step::Touch(path) if !is_full => {
                    check(&mut fs, &mut tree, &mut before, false);
                    fs.touch(&path);
                    check(&mut fs, &mut tree, &mut before, false);
                }
                Step::Touch(_) => {}
                Step::Symlink(path) => fs.symlink(&path),
                Step::Mkdir(path) => fs.create(&path, Node::Directory(BTreeMap::new())),
                Step::Remove(path) => fs.remove(&path),
                Step::Rename(from, to) => fs.rename(&from, &to),
                // A hard link created and deleted between two checks can't be detected.
                Step::HardLink(from, to) => {
                    fs.hard_link(&from, &to);
                    check(&mut fs, &mut tree, &mut before, is_full);
                }
                Step::Check => check(&mut fs, &mut tree, &mut before, is_full),
            }
        }
        check(&mut fs, &mut tree, &mut before, is_full);
    }
}

#[test]
fn too_many_dirty_names_mark_everything() {
    let mut dirty = DirtySet::default();
    for n in 0..=MAX_DIRTY_NAMES {
        dirty.mark(1, n.to_string().as_bytes(), Marks::default());
    }
    assert!(dirty.is_everything_dirty && dirty.name_count() == 0 && !dirty.is_clean());
}

/// Found by proptest: a rename replaced a symlink with a new one reusing the inode.
#[test]
fn update_tree_reports_symlink_reusing_inode() {
    let mut fs = FakeFs::new();
    let mut tree = Tree::new(ROOT);
    fill_tree(&mut tree, &mut fs);
    let mut before = fs.list_contents();
    fs.symlink(b"a");
    fs.write(b"b", false);
    check(&mut fs, &mut tree, &mut before, false);
    let replaced = fs.find(b"a");
    fs.rename(b"b", b"a");
    fs.symlink(b"a");
    assert_eq!(fs.find(b"a"), replaced);
    check(&mut fs, &mut tree, &mut before, false);
}
