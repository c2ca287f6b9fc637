//! A directory with copies of index files and trees, so that they are not read from the store again. It can be deleted
//! at any time. Copies that cannot be written, for example because the disk is full, are kept in memory, up to a limit.

use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::id::Id;

/// Maximum size of the files that are kept in memory because they cannot be written.
const MAX_UNWRITTEN_BYTES: usize = 16 << 20;

/// Clones share the copies in memory.
#[derive(Debug, Clone)]
pub struct Cache {
    /// `None` for no cache.
    dir: Option<PathBuf>,
    /// Without the trees of the last save, the next one would read the whole home.
    unwritten: Arc<Mutex<Unwritten>>,
}

/// Files that could not be written, by kind and id.
#[derive(Debug, Default)]
struct Unwritten {
    files: HashMap<(String, Id), Vec<u8>>,
    bytes: usize,
}

impl Unwritten {
    fn insert(&mut self, kind: &str, id: Id, bytes: &[u8]) {
        let key = (kind.to_owned(), id);
        if !self.files.contains_key(&key) && self.bytes + bytes.len() <= MAX_UNWRITTEN_BYTES {
            self.bytes += bytes.len();
            self.files.insert(key, bytes.to_owned());
        }
    }

    fn retain(&mut self, kind: &str, is_used: impl Fn(Id) -> bool) {
        self.files.retain(|(other, id), _| other != kind || is_used(*id));
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

    fn lock_unwritten(&self) -> std::sync::MutexGuard<'_, Unwritten> {
        self.unwritten.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads a file whose hash is its id; `None` if it is not there or is damaged.
    pub(crate) fn read(&self, kind: &str, id: Id) -> Option<Vec<u8>> {
        self.read_unverified(kind, id).filter(|bytes| Id::of(bytes) == id)
    }

    /// Like [`Self::read`], but the caller checks the content.
    pub(crate) fn read_unverified(&self, kind: &str, id: Id) -> Option<Vec<u8>> {
        let file = std::fs::read(self.path(kind, id)?);
        file.ok().or_else(|| self.lock_unwritten().files.get(&(kind.to_owned(), id)).cloned())
    }

    /// Writes a file. A failure is not reported: the file is kept in memory, or read from the store again.
    pub(crate) fn write(&self, kind: &str, id: Id, bytes: &[u8]) {
        if let Some(path) = self.path(kind, id)
            && let Err(error) = write_atomically(&path, bytes)
        {
            tracing::debug!(%error, path = %path.display(), "cannot write to the cache");
            self.lock_unwritten().insert(kind, id, bytes);
        }
    }

    /// Removes the files of a kind whose ids `is_used` rejects.
    pub(crate) fn retain(&self, kind: &str, is_used: impl Fn(Id) -> bool) {
        let Some(dir) = &self.dir else { return };
        self.lock_unwritten().retain(kind, &is_used);
        let entries = |dir: &Path| std::fs::read_dir(dir).into_iter().flatten().flatten();
        for file in entries(&dir.join(kind)).flat_map(|folder| entries(&folder.path())) {
            let id = file.file_name().to_str().and_then(|name| name.parse::<Id>().ok());
            if !id.is_some_and(&is_used) {
                // A failure is harmless; the next call tries it again.
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
