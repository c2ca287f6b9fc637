//! Unpacks an archive into an empty directory while it is being downloaded.
//!
//! The archive is not yet trusted, so nothing outside the directory is touched. Only files, directories and symbolic
//! links are created, and only links whose targets are inside the directory are accepted. No entry is written through a
//! link, over another entry, or with setuid, setgid or sticky bits.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, BufReader, Read};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use bytes::{Buf, Bytes};
use flate2::bufread::MultiGzDecoder;
use tokio::sync::mpsc;

use crate::system::tar_reader::EntryKind;
use crate::system::tar_reader::{TarEntry, TarError, TarLimits, TarReader, quote_path};

/// Number of chunks queued between the download and the unpacker; each can be a few hundred KiB.
const CHUNK_QUEUE_CAPACITY: usize = 2;
const MAX_PATH_BYTES: usize = 1024;

/// Limits for the unpacked content.
#[derive(Debug, Clone, Copy)]
pub struct UnpackLimits {
    pub entries: usize,
    pub bytes: u64,
}

impl UnpackLimits {
    pub const BUNDLE: Self = Self { entries: 200_000, bytes: 8 << 30 };

    fn tar_limits(self) -> TarLimits {
        TarLimits {
            max_entries: self.entries,
            max_name_bytes: MAX_PATH_BYTES,
            max_total_name_bytes: 64 << 20,
            max_file_bytes: self.bytes,
            max_total_file_bytes: self.bytes,
        }
    }
}

/// The reason an archive was not unpacked.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    #[error("the archive is corrupt")]
    Archive(#[source] io::Error),
    #[error("the archive was rejected")]
    Tar(#[source] TarError),
    #[error("the archive was rejected: {path}: {reason}")]
    Refused { path: String, reason: &'static str },
    #[error("cannot unpack {}", .path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl From<TarError> for UnpackError {
    fn from(error: TarError) -> Self {
        match error {
            TarError::Malformed(error) => Self::Archive(error),
            error => Self::Tar(error),
        }
    }
}

impl UnpackError {
    /// Returns whether the cause is this machine, for example its disk, rather than the archive.
    pub fn is_local_error(&self) -> bool {
        use io::ErrorKind::{AlreadyExists, InvalidFilename, IsADirectory, NotADirectory};
        let archive_errors = [AlreadyExists, InvalidFilename, IsADirectory, NotADirectory];
        matches!(self, Self::Write { source, .. } if !archive_errors.contains(&source.kind()))
    }
}

/// Creates a sender for the download and a reader for the archive.
pub fn channel() -> (mpsc::Sender<Bytes>, impl Read + Send + 'static) {
    let (chunks, receiver) = mpsc::channel(CHUNK_QUEUE_CAPACITY);
    (chunks, ChunkReader { receiver, current: Bytes::new() })
}

struct ChunkReader {
    receiver: mpsc::Receiver<Bytes>,
    current: Bytes,
}

impl Read for ChunkReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() {
            match self.receiver.blocking_recv() {
                Some(next) => self.current = next,
                None => return Ok(0),
            }
        }
        let count = self.current.len().min(into.len());
        self.current.copy_to_slice(&mut into[..count]);
        Ok(count)
    }
}

/// Unpacks a `.tar.gz` into the empty directory `into` and reads the archive to its end.
///
/// # Errors
/// [`UnpackError`] if the archive is corrupt or rejected, or a file cannot be written. The caller must remove the
/// partial content of `into`.
pub fn unpack(archive: impl Read, into: &Path, limits: UnpackLimits) -> Result<(), UnpackError> {
    let inflated = MultiGzDecoder::new(BufReader::with_capacity(64 * 1024, archive));
    let mut archive = tar::Archive::new(inflated);
    let mut tree = Tree { root: into, directories: HashSet::new(), links: Vec::new() };
    let mut entries = TarReader::new(&mut archive, limits.tar_limits())?;
    while let Some(entry) = entries.next_entry()? {
        tree.add(entry)?;
    }
    // The digest covers the padding after the end marker, so the padding is read, too, up to the limit.
    let mut padding = archive.into_inner().take(limits.bytes);
    io::copy(&mut padding, &mut io::sink()).map_err(UnpackError::Archive)?;
    tree.check_links()
}

struct Tree<'a> {
    root: &'a Path,
    /// The directories that have been created, relative to `root`. None of them is a link.
    directories: HashSet<PathBuf>,
    /// The symbolic links that have been created, relative to `root`.
    links: Vec<PathBuf>,
}

impl Tree<'_> {
    fn add(&mut self, mut entry: TarEntry<'_, impl Read>) -> Result<(), UnpackError> {
        let refuse = |reason| Err(UnpackError::Refused { path: quote_path(&entry.path), reason });
        let Some(path) = relative_path(&entry.path) else {
            return refuse("its path escapes the release directory");
        };
        if entry.mode & 0o7000 != 0 {
            return refuse("it has a setuid, setgid or sticky bit");
        }
        match entry.kind {
            EntryKind::Directory => self.create_directory(&path),
            EntryKind::File => self.create_file(&mut entry, &path),
            EntryKind::Symlink => self.create_link(&path, &entry.link),
        }
    }

    /// Creates the directory and its parents. Fails if a file or link already has that path.
    fn create_directory(&mut self, path: &Path) -> Result<(), UnpackError> {
        if path.as_os_str().is_empty() || self.directories.contains(path) {
            return Ok(());
        }
        if let Some(parent) = path.parent() {
            self.create_directory(parent)?;
        }
        let full_path = self.root.join(path);
        fs::create_dir(&full_path)
            .and_then(|()| fs::set_permissions(&full_path, Permissions::from_mode(0o755)))
            .map_err(|source| UnpackError::Write { path: path.to_owned(), source })?;
        self.directories.insert(path.to_owned());
        Ok(())
    }

    fn create_parent(&mut self, path: &Path) -> Result<(), UnpackError> {
        path.parent().map_or(Ok(()), |parent| self.create_directory(parent))
    }

    fn create_file(&mut self, entry: &mut TarEntry<'_, impl Read>, path: &Path) -> Result<(), UnpackError> {
        self.create_parent(path)?;
        let write_error = |source| UnpackError::Write { path: path.to_owned(), source };
        // Readable by all users and writable by root only, regardless of the umask with which the bundle was built.
        let mode = 0o644 | (entry.mode & 0o111);
        let mut file: File = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(self.root.join(path))
            .map_err(write_error)?;
        copy_content(entry, &mut file, path)?;
        file.set_permissions(Permissions::from_mode(mode)).map_err(write_error)
    }

    fn create_link(&mut self, path: &Path, target: &Path) -> Result<(), UnpackError> {
        let refuse = |reason| Err(UnpackError::Refused { path: quote_path(path), reason });
        if !stays_inside(path, target) {
            return refuse("it is a link that escapes the release directory");
        }
        self.create_parent(path)?;
        std::os::unix::fs::symlink(target, self.root.join(path))
            .map_err(|source| UnpackError::Write { path: path.to_owned(), source })?;
        self.links.push(path.to_owned());
        Ok(())
    }

    /// Resolves all links once everything is unpacked, because a link can lead through another link to somewhere other
    /// than its target suggests.
    fn check_links(&self) -> Result<(), UnpackError> {
        let write_error = |path: &Path, source| UnpackError::Write { path: path.to_owned(), source };
        let root = fs::canonicalize(self.root).map_err(|source| write_error(self.root, source))?;
        for link in &self.links {
            let target =
                fs::canonicalize(self.root.join(link)).map_err(|error| classify_link_error(link, error))?;
            if !target.starts_with(&root) {
                let reason = "it is a link that escapes the release directory";
                return Err(UnpackError::Refused { path: quote_path(link), reason });
            }
        }
        Ok(())
    }
}

/// Returns the error for a link that cannot be resolved. Only a link that leads nowhere is the archive's fault.
fn classify_link_error(link: &Path, source: io::Error) -> UnpackError {
    let is_dangling = matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
        || source.raw_os_error() == Some(nix::libc::ELOOP);
    if is_dangling {
        UnpackError::Refused { path: quote_path(link), reason: "it is a dangling link" }
    } else {
        UnpackError::Write { path: link.to_owned(), source }
    }
}

/// Copies an entry's content to a file. Errors from the archive and from the disk are distinguished.
fn copy_content(from: &mut impl Read, to: &mut File, path: &Path) -> Result<(), UnpackError> {
    let mut buffer = [0; 64 * 1024];
    loop {
        let read = from.read(&mut buffer).map_err(UnpackError::Archive)?;
        if read == 0 {
            return Ok(());
        }
        io::Write::write_all(to, &buffer[..read])
            .map_err(|source| UnpackError::Write { path: path.to_owned(), source })?;
    }
}

/// Returns the path without `.` components; `None` if it is absolute or contains `..`.
fn relative_path(path: &Path) -> Option<PathBuf> {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(clean)
}

/// Returns whether a link's target, resolved from the link's directory without following other links, never leaves the
/// tree.
fn stays_inside(link: &Path, target: &Path) -> bool {
    let mut depth = link.components().count().saturating_sub(1);
    if target.as_os_str().is_empty() {
        return false;
    }
    for part in target.components() {
        match part {
            Component::Normal(_) => depth += 1,
            Component::CurDir => {}
            Component::ParentDir if depth > 0 => depth -= 1,
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests;
