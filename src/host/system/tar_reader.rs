//! The one reader of tar archives that come from outside: bundles and owners' archives.
//!
//! It hands out files, directories and links by their full names, GNU and PAX long names included, and refuses all other
//! kinds of entries. What it holds in memory is bounded by [`TarLimits`] and not by what a header claims: a record is measured
//! before it is read, and the `tar` crate, which would allocate what a record claims, only ever reads raw headers.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tar::EntryType;

/// Room for the attributes of an entry beside its path and its link.
const MAX_ATTRIBUTE_BYTES: u64 = 16 * 1024;
/// Of a name in an error.
const MAX_SHOWN_CHARS: usize = 200;

/// What an entry of an archive is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EntryKind {
    File,
    Directory,
    Link,
}

/// What an archive may hold.
#[derive(Debug, Clone, Copy)]
pub struct TarLimits {
    /// Entries, records of names included.
    pub entries: usize,
    /// Of one path or link.
    pub name_bytes: usize,
    /// Of all paths and links together.
    pub all_name_bytes: u64,
    /// Of one file.
    pub file_bytes: u64,
    /// Of all files together.
    pub all_file_bytes: u64,
}

/// Why an archive is not read on.
#[derive(Debug, thiserror::Error)]
pub enum TarError {
    #[error("it is damaged or cut off")]
    Damaged(#[source] io::Error),
    /// The entry is quoted, and safe to print.
    #[error("{entry}: {why}")]
    Refused { entry: String, why: &'static str },
    #[error("it has more than {limit} {what}")]
    TooMuch { what: &'static str, limit: u64 },
}

impl TarError {
    fn refused(path: &Path, why: &'static str) -> Self {
        Self::Refused { entry: quoted(path), why }
    }
}

/// The entries of an archive, one after the other.
pub struct TarReader<'a, R: Read> {
    entries: tar::Entries<'a, R>,
    limits: TarLimits,
    seen: HashSet<u128>,
    count: usize,
    name_bytes: u64,
    file_bytes: u64,
}

impl<'a, R: Read> TarReader<'a, R> {
    /// # Errors
    /// [`TarError`] when something was read from the archive before.
    pub fn new(archive: &'a mut tar::Archive<R>, limits: TarLimits) -> Result<Self, TarError> {
        let entries = archive.entries().map_err(TarError::Damaged)?.raw(true);
        Ok(Self { entries, limits, seen: HashSet::new(), count: 0, name_bytes: 0, file_bytes: 0 })
    }

    /// The next file, directory or link; `None` at the archive's end.
    ///
    /// # Errors
    /// [`TarError`]; nothing that comes later may be used then.
    pub fn next_entry(&mut self) -> Result<Option<TarEntry<'a, R>>, TarError> {
        let mut names = LongNames::default();
        while let Some(raw) = self.entries.next() {
            let mut raw = raw.map_err(TarError::Damaged)?;
            self.count += 1;
            if self.count > self.limits.entries {
                return Err(TarError::TooMuch { what: "entries", limit: self.limits.entries as u64 });
            }
            if !names.read_record(&mut raw, self.limits.name_bytes)? {
                return self.accept(raw, names).map(Some);
            }
        }
        if names == LongNames::default() {
            Ok(None)
        } else {
            Err(TarError::Damaged(io::Error::other("its last entry is missing")))
        }
    }

    fn accept(&mut self, raw: tar::Entry<'a, R>, names: LongNames) -> Result<TarEntry<'a, R>, TarError> {
        let path = match names.path {
            Some(path) => path,
            None => raw.path().map_err(TarError::Damaged)?.into_owned(),
        };
        let kind = match raw.header().entry_type() {
            EntryType::Regular => EntryKind::File,
            EntryType::Directory => EntryKind::Directory,
            EntryType::Symlink => EntryKind::Link,
            other => return Err(TarError::refused(&path, refusal(other))),
        };
        let link = match (kind, names.link) {
            (EntryKind::Link, Some(link)) => link,
            (EntryKind::Link, None) => {
                raw.link_name().map_err(TarError::Damaged)?.unwrap_or_default().into_owned()
            }
            (_, Some(_)) => return Err(TarError::refused(&path, "it is no link, and has a target")),
            (_, None) => PathBuf::new(),
        };
        let longest = path.as_os_str().len().max(link.as_os_str().len());
        if longest > self.limits.name_bytes {
            return Err(TarError::refused(&path, "its name or its target is too long"));
        }
        if path.as_os_str().as_bytes().contains(&0) || link.as_os_str().as_bytes().contains(&0) {
            return Err(TarError::refused(&path, "its name or its target has a NUL byte"));
        }
        let header = raw.header();
        let size = header.entry_size().map_err(TarError::Damaged)?;
        if kind != EntryKind::File && size != 0 {
            return Err(TarError::refused(&path, "it is no file, and has content"));
        }
        let (mode, modified) = (header.mode(), header.mtime());
        let (mode, modified) = (mode.map_err(TarError::Damaged)?, modified.map_err(TarError::Damaged)?);
        self.measure(&path, &link, size)?;
        if !self.seen.insert(name_digest(&path)) {
            return Err(TarError::refused(&path, "it is there twice"));
        }
        Ok(TarEntry { path, link, kind, mode, modified, size, unread: size, body: raw })
    }

    /// Counts an entry against the limits of the whole archive.
    fn measure(&mut self, path: &Path, link: &Path, size: u64) -> Result<(), TarError> {
        let limits = self.limits;
        if size > limits.file_bytes {
            return Err(TarError::refused(path, "it is larger than a file of such an archive may be"));
        }
        self.file_bytes = self.file_bytes.saturating_add(size);
        if self.file_bytes > limits.all_file_bytes {
            return Err(TarError::TooMuch { what: "bytes in files", limit: limits.all_file_bytes });
        }
        self.name_bytes += (path.as_os_str().len() + link.as_os_str().len()) as u64;
        if self.name_bytes > limits.all_name_bytes {
            return Err(TarError::TooMuch { what: "bytes in names", limit: limits.all_name_bytes });
        }
        Ok(())
    }
}

/// A file, a directory or a link. Read, it gives a file's content: all of it, or an error.
pub struct TarEntry<'a, R: Read> {
    pub path: PathBuf,
    /// A link's target; empty for all others.
    pub link: PathBuf,
    pub kind: EntryKind,
    pub mode: u32,
    /// In seconds since 1970.
    pub modified: u64,
    pub size: u64,
    unread: u64,
    body: tar::Entry<'a, R>,
}

impl<R: Read> Read for TarEntry<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.body.read(into)?;
        if read == 0 && self.unread > 0 && !into.is_empty() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the archive is cut off"));
        }
        self.unread = self.unread.saturating_sub(read as u64);
        Ok(read)
    }
}

/// What the records before an entry say of it (GNU `L` and `K`, POSIX `x`).
#[derive(Debug, Default, PartialEq, Eq)]
struct LongNames {
    path: Option<PathBuf>,
    link: Option<PathBuf>,
}

impl LongNames {
    /// Reads an entry that only describes the next one; `false` when it is one itself.
    fn read_record(&mut self, raw: &mut tar::Entry<'_, impl Read>, max: usize) -> Result<bool, TarError> {
        let max_name = max as u64 + 1;
        let max_attributes = 2 * max_name + MAX_ATTRIBUTE_BYTES;
        match raw.header().entry_type() {
            EntryType::GNULongName => {
                let text = read_bounded(raw, max_name)?;
                set_once(&mut self.path, until_nul(&text))?;
            }
            EntryType::GNULongLink => {
                let text = read_bounded(raw, max_name)?;
                set_once(&mut self.link, until_nul(&text))?;
            }
            EntryType::XHeader => self.read_attributes(&read_bounded(raw, max_attributes)?)?,
            // Attributes of all that follow: some writers note a commit or a time so, and nothing else has a meaning here.
            EntryType::XGlobalHeader => {
                let mut global = Self::default();
                global.read_attributes(&read_bounded(raw, max_attributes)?)?;
                if global != Self::default() {
                    return Err(attribute_refused(b"path", "it would name every entry"));
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn read_attributes(&mut self, text: &[u8]) -> Result<(), TarError> {
        for attribute in tar::PaxExtensions::new(text) {
            let attribute = attribute.map_err(TarError::Damaged)?;
            match attribute.key_bytes() {
                b"path" => set_once(&mut self.path, attribute.value_bytes())?,
                b"linkpath" => set_once(&mut self.link, attribute.value_bytes())?,
                key if key == b"size" || key.starts_with(b"GNU.sparse") => {
                    return Err(attribute_refused(key, "this attribute changes an entry's content"));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn set_once(name: &mut Option<PathBuf>, bytes: &[u8]) -> Result<(), TarError> {
    let path = PathBuf::from(OsStr::from_bytes(bytes));
    match name.replace(path) {
        None => Ok(()),
        Some(first) => Err(TarError::refused(&first, "the entry is named twice")),
    }
}

fn attribute_refused(key: &[u8], why: &'static str) -> TarError {
    TarError::refused(Path::new(OsStr::from_bytes(key)), why)
}

/// All of a record that is at most `max` bytes long. Memory grows with what is there, not with what its header claims.
fn read_bounded(raw: &mut tar::Entry<'_, impl Read>, max: u64) -> Result<Vec<u8>, TarError> {
    let claimed = raw.header().entry_size().map_err(TarError::Damaged)?;
    if claimed > max {
        return Err(TarError::TooMuch { what: "bytes in a record of a name", limit: max });
    }
    let mut text = Vec::new();
    raw.read_to_end(&mut text).map_err(TarError::Damaged)?;
    if (text.len() as u64) < claimed {
        return Err(TarError::Damaged(io::ErrorKind::UnexpectedEof.into()));
    }
    Ok(text)
}

fn until_nul(text: &[u8]) -> &[u8] {
    text.split(|&byte| byte == 0).next().unwrap_or_default()
}

fn refusal(kind: EntryType) -> &'static str {
    match kind {
        EntryType::Link => "it is a hard link",
        EntryType::Char | EntryType::Block | EntryType::Fifo => "it is a device or a pipe",
        EntryType::GNUSparse => "it is a sparse file",
        _ => "it is of an unknown kind",
    }
}

/// A path stands for itself in the set of those that were seen: `./a`, `a/` and `a` are one.
pub fn name_digest(path: &Path) -> u128 {
    let mut hash = Sha256::new();
    for part in path.components().filter(|part| *part != Component::CurDir) {
        hash.update(part.as_os_str().as_bytes());
        hash.update(b"/");
    }
    let first: [u8; 16] = hash.finalize()[..16].try_into().expect("SHA-256 has 32 bytes");
    u128::from_be_bytes(first)
}

/// A path for a person's terminal: in quotes, without control characters, and cut.
pub fn quoted(path: &Path) -> String {
    let text = path.as_os_str().to_string_lossy();
    match text.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

#[cfg(test)]
mod tests;
