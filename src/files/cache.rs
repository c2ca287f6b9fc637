//! Caches index files, snapshots and trees in a local directory, to avoid reading them from the store again. The
//! directory can be deleted at any time. Files that can't be written, for example because the disk is full, are held in
//! memory instead, up to a limit.

use std::collections::{HashMap, VecDeque};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::id::Id;

/// Maximum total size of files held in memory because they couldn't be written.
const MAX_UNWRITTEN_BYTES: usize = 16 << 20;

/// A local cache of a repository. Clones share the in-memory files.
#[derive(Debug, Clone)]
pub struct Cache {
    /// `None` disables caching.
    dir: Option<PathBuf>,
    /// Files that couldn't be written. Without the last save's trees, the next save would have to reread the whole home
    /// directory.
    unwritten: Arc<Mutex<UnwrittenFiles>>,
}

/// Files that couldn't be written, by kind and id.
#[derive(Debug, Default)]
struct UnwrittenFiles {
    files: HashMap<(String, Id), Vec<u8>>,
    /// Keys in insertion order. The oldest are evicted first, since the next save reads the newest tree of each
    /// directory.
    order: VecDeque<(String, Id)>,
    bytes: usize,
}

impl UnwrittenFiles {
    fn insert(&mut self, kind: &str, id: Id, bytes: &[u8]) {
        let key = (kind.to_owned(), id);
        if bytes.len() > MAX_UNWRITTEN_BYTES || self.files.contains_key(&key) {
            return;
        }
        self.bytes += bytes.len();
        self.order.push_back(key.clone());
        self.files.insert(key, bytes.to_owned());
        while self.bytes > MAX_UNWRITTEN_BYTES
            && let Some(oldest) = self.order.pop_front()
        {
            self.bytes -= self.files.remove(&oldest).map_or(0, |bytes| bytes.len());
        }
    }

    fn retain(&mut self, kind: &str, is_used: impl Fn(Id) -> bool) {
        self.files.retain(|(file_kind, id), _| file_kind != kind || is_used(*id));
        self.order.retain(|key| self.files.contains_key(key));
        self.bytes = self.files.values().map(Vec::len).sum();
    }
}

impl Cache {
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: Some(dir.into()), unwritten: Arc::default() }
    }

    pub fn none() -> Self {
        Self { dir: None, unwritten: Arc::default() }
    }

    fn path(&self, kind: &str, id: Id) -> Option<PathBuf> {
        let name = id.to_string();
        Some(self.dir.as_ref()?.join(kind).join(&name[..2]).join(name))
    }

    fn lock_unwritten(&self) -> MutexGuard<'_, UnwrittenFiles> {
        self.unwritten.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads a file whose hash is its id. Returns `None` if it is missing or corrupt.
    pub(crate) fn read(&self, kind: &str, id: Id) -> Option<Vec<u8>> {
        self.read_unverified(kind, id).filter(|bytes| Id::of(bytes) == id)
    }

    /// Like [`Self::read`], but leaves verification to the caller.
    pub(crate) fn read_unverified(&self, kind: &str, id: Id) -> Option<Vec<u8>> {
        let path = self.path(kind, id)?;
        // Prefer the copy in memory: the file it couldn't replace may be corrupt.
        let unwritten = self.lock_unwritten().files.get(&(kind.to_owned(), id)).cloned();
        unwritten.or_else(|| std::fs::read(path).ok())
    }

    /// Writes a file. Failures are only logged: the file is held in memory, or read from the store again.
    pub(crate) fn write(&self, kind: &str, id: Id, bytes: &[u8]) {
        if let Some(path) = self.path(kind, id)
            && let Err(error) = write_atomically(&path, bytes)
        {
            tracing::debug!(%error, path = %path.display(), "cannot write to the cache");
            self.lock_unwritten().insert(kind, id, bytes);
        }
    }

    /// Removes files of the given kind whose ids `is_used` rejects.
    pub(crate) fn retain(&self, kind: &str, is_used: impl Fn(Id) -> bool) {
        let Some(dir) = &self.dir else { return };
        self.lock_unwritten().retain(kind, &is_used);
        let entries = |dir: &Path| std::fs::read_dir(dir).into_iter().flatten().flatten();
        for file in entries(&dir.join(kind)).flat_map(|dir| entries(&dir.path())) {
            let id = file.file_name().to_str().and_then(|name| name.parse::<Id>().ok());
            if !id.is_some_and(&is_used) {
                // Best effort: the next call retries.
                let _ = std::fs::remove_file(file.path());
            }
        }
    }
}

fn write_atomically(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    std::fs::create_dir_all(dir)?;
    let mut file = tempfile::NamedTempFile::new_in(dir)?;
    file.write_all(bytes)?;
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_unwritten_files_are_held_in_memory() {
        let root = tempfile::tempdir().unwrap();
        // A file in place of the directory makes every write fail.
        std::fs::write(root.path().join("cache"), "").unwrap();
        let cache = Cache::new(root.path().join("cache"));
        let content = vec![1; MAX_UNWRITTEN_BYTES / 4];
        let ids: Vec<Id> = (0..6_u8).map(|n| Id::of(&[n])).collect();
        ids.iter().for_each(|id| cache.write("trees", *id, &content));
        let in_memory =
            || ids.iter().map(|id| cache.read_unverified("trees", *id).is_some()).collect::<Vec<_>>();
        assert_eq!(in_memory(), [false, false, true, true, true, true]);
        cache.write("trees", Id::of(b"large"), &vec![1; MAX_UNWRITTEN_BYTES + 1]);
        cache.retain("trees", |id| id == ids[5]);
        cache.retain("index", |_| false);
        assert_eq!(in_memory(), [false, false, false, false, false, true]);
        ids[..3].iter().for_each(|id| cache.write("trees", *id, &content));
        assert_eq!(in_memory(), [true, true, true, false, false, true]);
    }

    #[test]
    fn copy_in_memory_shadows_corrupt_file() {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache::new(root.path());
        let id = Id::of(b"intact");
        cache.write("index", id, b"damaged");
        assert_eq!(cache.read("index", id), None);
        cache.lock_unwritten().insert("index", id, b"intact");
        assert_eq!(cache.read("index", id).unwrap(), b"intact");
    }
}
