//! The only reader for untrusted tar archives: bundles and owners' archives.
//!
//! Returns files, directories and symbolic links by their full names, including GNU and PAX long names, and rejects all
//! other kinds of entries. Memory is bounded by [`TarLimits`], not by the sizes in headers: the size of a long-name
//! record or PAX header is checked before it is read. The `tar` crate would allocate that size unchecked, so it reads
//! only raw headers here.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io::{self, Read, Seek};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tar::EntryType;

/// Maximum size of an entry's PAX attributes, in addition to its path and link target.
const MAX_ATTRIBUTE_BYTES: u64 = 16 * 1024;
/// Maximum length of a path in an error.
const MAX_QUOTED_CHARS: usize = 200;

/// The kind of an archive entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EntryKind {
    File,
    Directory,
    #[serde(rename = "link")]
    Symlink,
}

/// Limits for an archive.
#[derive(Debug, Clone, Copy)]
pub struct TarLimits {
    /// Maximum number of entries, including long-name records and PAX headers.
    pub max_entries: usize,
    /// Maximum number of bytes in one path or link target.
    pub max_name_bytes: usize,
    /// Maximum number of bytes in all paths and link targets.
    pub max_total_name_bytes: u64,
    /// Maximum number of bytes in one file.
    pub max_file_bytes: u64,
    /// Maximum number of bytes in all files.
    pub max_total_file_bytes: u64,
}

/// The reason the rest of an archive is not read.
#[derive(Debug, thiserror::Error)]
pub enum TarError {
    #[error("it is malformed or truncated")]
    Malformed(#[source] io::Error),
    /// `entry` is the entry's path or a PAX attribute's key, quoted so that it is safe to print.
    #[error("{entry}: {reason}")]
    Rejected { entry: String, reason: &'static str },
    #[error("it has more than {limit} {quantity}")]
    LimitExceeded { quantity: &'static str, limit: u64 },
}

impl TarError {
    fn rejected(path: &Path, reason: &'static str) -> Self {
        Self::Rejected { entry: quote_path(path), reason }
    }
}

/// The entries of an archive, in order.
pub struct TarReader<'a, R: Read> {
    entries: tar::Entries<'a, R>,
    limits: TarLimits,
    path_digests: HashSet<u128>,
    count: usize,
    name_bytes: u64,
    file_bytes: u64,
}

impl<'a, R: Read> TarReader<'a, R> {
    /// Creates a reader for an archive.
    ///
    /// # Errors
    /// [`TarError`] if the archive has been read before.
    pub fn new(archive: &'a mut tar::Archive<R>, limits: TarLimits) -> Result<Self, TarError> {
        let entries = archive.entries().map_err(TarError::Malformed)?;
        Ok(Self::from_entries(entries, limits))
    }

    /// Creates a reader that skips unread content by seeking, so it does not detect missing content.
    ///
    /// # Errors
    /// [`TarError`] if the archive has been read before.
    pub fn with_seek(archive: &'a mut tar::Archive<R>, limits: TarLimits) -> Result<Self, TarError>
    where
        R: Seek,
    {
        let entries = archive.entries_with_seek().map_err(TarError::Malformed)?;
        Ok(Self::from_entries(entries, limits))
    }

    fn from_entries(entries: tar::Entries<'a, R>, limits: TarLimits) -> Self {
        let entries = entries.raw(true);
        Self { entries, limits, path_digests: HashSet::new(), count: 0, name_bytes: 0, file_bytes: 0 }
    }

    /// Returns the next file, directory or symbolic link; `None` at the end of the archive. The end marker may be
    /// missing, so the caller must detect by other means that an archive was cut off between two entries.
    ///
    /// # Errors
    /// [`TarError`] if the archive is malformed or ends within an entry, the entry is rejected, or a limit is exceeded.
    /// The rest of the archive must not be used.
    pub fn next_entry(&mut self) -> Result<Option<TarEntry<'a, R>>, TarError> {
        let mut names = LongNames::default();
        while let Some(raw) = self.entries.next() {
            let mut raw = raw.map_err(TarError::Malformed)?;
            self.count += 1;
            if self.count > self.limits.max_entries {
                return Err(TarError::LimitExceeded {
                    quantity: "entries",
                    limit: self.limits.max_entries as u64,
                });
            }
            if !names.read_record(&mut raw, self.limits.max_name_bytes)? {
                return self.accept(raw, names).map(Some);
            }
        }
        if names == LongNames::default() {
            Ok(None)
        } else {
            Err(TarError::Malformed(io::Error::other("its last entry is missing")))
        }
    }

    fn accept(&mut self, raw: tar::Entry<'a, R>, names: LongNames) -> Result<TarEntry<'a, R>, TarError> {
        let path = match names.path {
            Some(path) => path,
            None => raw.path().map_err(TarError::Malformed)?.into_owned(),
        };
        let kind = match raw.header().entry_type() {
            EntryType::Regular => EntryKind::File,
            EntryType::Directory => EntryKind::Directory,
            EntryType::Symlink => EntryKind::Symlink,
            other => return Err(TarError::rejected(&path, rejection_reason(other))),
        };
        let link = match (kind, names.link) {
            (EntryKind::Symlink, Some(link)) => link,
            (EntryKind::Symlink, None) => {
                raw.link_name().map_err(TarError::Malformed)?.unwrap_or_default().into_owned()
            }
            (_, Some(_)) => {
                return Err(TarError::rejected(&path, "it is not a symbolic link, but has a target"));
            }
            (_, None) => PathBuf::new(),
        };
        let longest_len = path.as_os_str().len().max(link.as_os_str().len());
        if longest_len > self.limits.max_name_bytes {
            return Err(TarError::rejected(&path, "its name or its target is too long"));
        }
        if path.as_os_str().as_bytes().contains(&0) || link.as_os_str().as_bytes().contains(&0) {
            return Err(TarError::rejected(&path, "its name or its target has a NUL byte"));
        }
        let header = raw.header();
        let size = header.entry_size().map_err(TarError::Malformed)?;
        if kind != EntryKind::File && size != 0 {
            return Err(TarError::rejected(&path, "it is not a file, but has content"));
        }
        let (mode, modified) = (header.mode(), header.mtime());
        let (mode, modified) = (mode.map_err(TarError::Malformed)?, modified.map_err(TarError::Malformed)?);
        self.count_against_limits(&path, &link, size)?;
        if !self.path_digests.insert(hash_path(&path)) {
            return Err(TarError::rejected(&path, "it occurs more than once"));
        }
        Ok(TarEntry { path, link, kind, mode, modified, size, unread: size, body: raw })
    }

    fn count_against_limits(&mut self, path: &Path, link: &Path, size: u64) -> Result<(), TarError> {
        let limits = self.limits;
        if size > limits.max_file_bytes {
            return Err(TarError::rejected(path, "it exceeds the size limit for a file"));
        }
        self.file_bytes = self.file_bytes.saturating_add(size);
        if self.file_bytes > limits.max_total_file_bytes {
            return Err(TarError::LimitExceeded {
                quantity: "bytes in files",
                limit: limits.max_total_file_bytes,
            });
        }
        self.name_bytes += (path.as_os_str().len() + link.as_os_str().len()) as u64;
        if self.name_bytes > limits.max_total_name_bytes {
            return Err(TarError::LimitExceeded {
                quantity: "bytes in names",
                limit: limits.max_total_name_bytes,
            });
        }
        Ok(())
    }
}

/// A file, a directory or a symbolic link. Reading returns a file's whole content, or an error.
pub struct TarEntry<'a, R: Read> {
    pub path: PathBuf,
    /// A symbolic link's target; empty for all other kinds.
    pub link: PathBuf,
    pub kind: EntryKind,
    pub mode: u32,
    /// Unix seconds.
    pub modified: u64,
    pub size: u64,
    unread: u64,
    body: tar::Entry<'a, R>,
}

impl<R: Read> Read for TarEntry<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.body.read(into)?;
        if read == 0 && self.unread > 0 && !into.is_empty() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the archive is truncated"));
        }
        self.unread = self.unread.saturating_sub(read as u64);
        Ok(read)
    }
}

/// A path and a link target from the records before an entry (GNU `L` and `K`, POSIX `x`), which replace those in the
/// entry's header.
#[derive(Debug, Default, PartialEq, Eq)]
struct LongNames {
    path: Option<PathBuf>,
    link: Option<PathBuf>,
}

impl LongNames {
    /// Reads a record about the next entry. Returns `false` if `raw` is itself an entry.
    fn read_record(
        &mut self,
        raw: &mut tar::Entry<'_, impl Read>,
        max_name_bytes: usize,
    ) -> Result<bool, TarError> {
        // A NUL byte may follow the name.
        let max_record_bytes = max_name_bytes as u64 + 1;
        let max_header_bytes = 2 * max_record_bytes + MAX_ATTRIBUTE_BYTES;
        match raw.header().entry_type() {
            EntryType::GNULongName => {
                let text = read_bounded(raw, max_record_bytes)?;
                set_once(&mut self.path, truncate_at_nul(&text))?;
            }
            EntryType::GNULongLink => {
                let text = read_bounded(raw, max_record_bytes)?;
                set_once(&mut self.link, truncate_at_nul(&text))?;
            }
            EntryType::XHeader => self.read_attributes(&read_bounded(raw, max_header_bytes)?)?,
            // Attributes for all later entries. Some writers store a commit id or a time there; both are ignored.
            EntryType::XGlobalHeader => {
                let mut global = Self::default();
                global.read_attributes(&read_bounded(raw, max_header_bytes)?)?;
                if global != Self::default() {
                    return Err(rejected_attribute(b"path or linkpath", "it would apply to every entry"));
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn read_attributes(&mut self, text: &[u8]) -> Result<(), TarError> {
        for attribute in tar::PaxExtensions::new(text) {
            let attribute = attribute.map_err(TarError::Malformed)?;
            match attribute.key_bytes() {
                b"path" => set_once(&mut self.path, attribute.value_bytes())?,
                b"linkpath" => set_once(&mut self.link, attribute.value_bytes())?,
                key if key == b"size" || key.starts_with(b"GNU.sparse") => {
                    return Err(rejected_attribute(key, "this attribute changes an entry's content"));
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
        Some(first) => Err(TarError::rejected(&first, "an entry's path or target is given twice")),
    }
}

fn rejected_attribute(key: &[u8], reason: &'static str) -> TarError {
    TarError::rejected(Path::new(OsStr::from_bytes(key)), reason)
}

/// Reads a whole long-name record or PAX header of at most `max_bytes`. Memory grows with the bytes present, not with
/// the size in the header.
fn read_bounded(raw: &mut tar::Entry<'_, impl Read>, max_bytes: u64) -> Result<Vec<u8>, TarError> {
    let claimed = raw.header().entry_size().map_err(TarError::Malformed)?;
    if claimed > max_bytes {
        let quantity = "bytes in a long-name record or PAX header";
        return Err(TarError::LimitExceeded { quantity, limit: max_bytes });
    }
    let mut text = Vec::new();
    raw.read_to_end(&mut text).map_err(TarError::Malformed)?;
    if (text.len() as u64) < claimed {
        return Err(TarError::Malformed(io::ErrorKind::UnexpectedEof.into()));
    }
    Ok(text)
}

fn truncate_at_nul(text: &[u8]) -> &[u8] {
    text.split(|&byte| byte == 0).next().unwrap_or_default()
}

fn rejection_reason(kind: EntryType) -> &'static str {
    match kind {
        EntryType::Link => "it is a hard link",
        EntryType::Char | EntryType::Block | EntryType::Fifo => "it is a device or a pipe",
        EntryType::GNUSparse => "it is a sparse file",
        _ => "it is of an unknown kind",
    }
}

/// Hashes a path to a digest that identifies it in a set, so that a large set needs little memory. Equivalent paths,
/// such as `./a`, `a/` and `a`, have the same digest.
pub fn hash_path(path: &Path) -> u128 {
    let mut hash = Sha256::new();
    for part in path.components().filter(|part| *part != Component::CurDir) {
        hash.update(part.as_os_str().as_bytes());
        hash.update(b"/");
    }
    let first: [u8; 16] = hash.finalize()[..16].try_into().expect("SHA-256 has 32 bytes");
    u128::from_be_bytes(first)
}

/// Formats a path for the terminal: quoted, without control characters, and truncated.
pub fn quote_path(path: &Path) -> String {
    let text = path.as_os_str().to_string_lossy();
    match text.char_indices().nth(MAX_QUOTED_CHARS) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

#[cfg(test)]
mod tests;
