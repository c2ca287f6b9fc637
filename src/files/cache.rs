//! A directory with copies of index files and trees, so that they are not read from the store again. It can be deleted
//! at any time.

use std::io::Write;
use std::path::{Path, PathBuf};

use crate::id::Id;

/// The cache's directory; `None` for no cache.
#[derive(Debug, Clone)]
pub struct Cache(Option<PathBuf>);

impl Cache {
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self(Some(dir.into()))
    }

    pub fn none() -> Self {
        Self(None)
    }

    fn path(&self, kind: &str, id: Id) -> Option<PathBuf> {
        let name = id.to_string();
        Some(self.0.as_ref()?.join(kind).join(&name[..2]).join(name))
    }

    /// Reads a file whose hash is its id; `None` if it is not there or is damaged.
    pub(crate) fn read(&self, kind: &str, id: Id) -> Option<Vec<u8>> {
        self.read_unverified(kind, id).filter(|bytes| Id::of(bytes) == id)
    }

    /// Like [`Self::read`], but the caller checks the content.
    pub(crate) fn read_unverified(&self, kind: &str, id: Id) -> Option<Vec<u8>> {
        std::fs::read(self.path(kind, id)?).ok()
    }

    /// Writes a file. A failure is not reported: the file is read from the store again.
    pub(crate) fn write(&self, kind: &str, id: Id, bytes: &[u8]) {
        if let Some(path) = self.path(kind, id)
            && let Err(error) = write_atomically(&path, bytes)
        {
            tracing::debug!(%error, path = %path.display(), "cannot write to the cache");
        }
    }

    /// Removes the files of a kind whose ids `is_used` rejects.
    pub(crate) fn retain(&self, kind: &str, is_used: impl Fn(Id) -> bool) {
        let Some(dir) = &self.0 else { return };
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
