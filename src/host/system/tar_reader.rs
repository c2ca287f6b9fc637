//! Reader for untrusted tar archives: bundles and owners' archives. All of them must be read through this module.
//!
//! Yields files, directories and symlinks under their full names, including GNU and PAX long names, and rejects all
//! other entry types. Memory is bounded by [`TarLimits`] rather than by header sizes: long-name records and PAX headers
//! are size-checked before they're read. The `tar` crate would allocate the size that the header claims, so we only use
//! it for raw headers.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io::{self, Read, Seek};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tar::EntryType;

/// Maximum size of an entry's PAX attributes, not counting its path and link target.
const MAX_ATTRIBUTE_BYTES: u64 = 16 * 1024;
/// Maximum length of a path in error messages.
const MAX_QUOTED_CHARS: usize = 200;

/// Archive entry type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EntryKind {
    File,
    Directory,
    #[serde(rename = "link")]
    Symlink,
}

/// Archive limits.
#[derive(Debug, Clone, Copy)]
pub struct TarLimits {
    /// Maximum number of entries, including long-name records and PAX headers.
    pub max_entries: usize,
    /// Maximum bytes per path or link target.
    pub max_name_bytes: usize,
    /// Maximum total bytes in paths and link targets.
    pub max_total_name_bytes: u64,
    /// Maximum bytes per file.
    pub max_file_bytes: u64,
    /// Maximum total bytes in files.
    pub max_total_file_bytes: u64,
}

/// Errors that stop reading an archive.
#[derive(Debug, thiserror::Error)]
pub enum TarError {
    #[error("malformed or truncated")]
    Malformed(#[source] io::Error),
    /// `entry` is an entry path or a PAX attribute key, quoted for safe printing.
    #[error("{entry}: {reason}")]
    Rejected { entry: String, reason: &'static str },
    #[error("more than {limit} {quantity}")]
    LimitExceeded { quantity: &'static str, limit: u64 },
}

impl TarError {
    fn rejected(path: &Path, reason: &'static str) -> Self {
        Self::Rejected { entry: quote_path(path), reason }
    }
}

/// Iterates over the entries of an archive, in order.
pub struct TarReader<'a, R: Read> {
    entries: tar::Entries<'a, R>,
    limits: TarLimits,
    path_digests: HashSet<u128>,
    count: usize,
    name_bytes: u64,
    file_bytes: u64,
}

impl<'a, R: Read> TarReader<'a, R> {
    /// Creates a reader.
    ///
    /// # Errors
    /// [`TarError`] if the archive has already been read from.
    pub fn new(archive: &'a mut tar::Archive<R>, limits: TarLimits) -> Result<Self, TarError> {
        let entries = archive.entries().map_err(TarError::Malformed)?;
        Ok(Self::from_entries(entries, limits))
    }

    /// Creates a reader that seeks past unread content, and therefore can't detect missing content.
    ///
    /// # Errors
    /// [`TarError`] if the archive has already been read from.
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

    /// Returns the next file, directory or symlink, or `None` at the end of the archive. The end-of-archive marker is
    /// optional, so callers need another way to detect truncation between two entries.
    ///
    /// # Errors
    /// [`TarError`] if the archive is malformed or ends within an entry, the entry is rejected, or a limit is exceeded.
    /// The rest of the archive must not be used after an error.
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
            Err(TarError::Malformed(io::Error::other("missing last entry")))
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
                return Err(TarError::rejected(&path, "has a link target but is not a symlink"));
            }
            (_, None) => PathBuf::new(),
        };
        let longest_len = path.as_os_str().len().max(link.as_os_str().len());
        if longest_len > self.limits.max_name_bytes {
            return Err(TarError::rejected(&path, "name or link target too long"));
        }
        if path.as_os_str().as_bytes().contains(&0) || link.as_os_str().as_bytes().contains(&0) {
            return Err(TarError::rejected(&path, "name or link target contains a NUL byte"));
        }
        let header = raw.header();
        let size = header.entry_size().map_err(TarError::Malformed)?;
        if kind != EntryKind::File && size != 0 {
            return Err(TarError::rejected(&path, "has content but is not a file"));
        }
        let (mode, modified) = (header.mode(), header.mtime());
        let (mode, modified) = (mode.map_err(TarError::Malformed)?, modified.map_err(TarError::Malformed)?);
        self.count_against_limits(&path, &link, size)?;
        if !self.path_digests.insert(hash_path(&path)) {
            return Err(TarError::rejected(&path, "duplicate path"));
        }
        Ok(TarEntry { path, link, kind, mode, modified, size, unread: size, body: raw })
    }

    fn count_against_limits(&mut self, path: &Path, link: &Path, size: u64) -> Result<(), TarError> {
        let limits = self.limits;
        if size > limits.max_file_bytes {
            return Err(TarError::rejected(path, "exceeds the file size limit"));
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

/// A file, directory or symlink. Reading a file yields its whole content or fails.
pub struct TarEntry<'a, R: Read> {
    pub path: PathBuf,
    /// Symlink target; empty for other kinds.
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
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "archive is truncated"));
        }
        self.unread = self.unread.saturating_sub(read as u64);
        Ok(read)
    }
}

/// Path and link target from records preceding an entry (GNU `L` and `K`, POSIX `x`), overriding those in its header.
#[derive(Debug, Default, PartialEq, Eq)]
struct LongNames {
    path: Option<PathBuf>,
    link: Option<PathBuf>,
}

impl LongNames {
    /// Reads a record describing the next entry. Returns `false` if `raw` is itself an entry.
    fn read_record(
        &mut self,
        raw: &mut tar::Entry<'_, impl Read>,
        max_name_bytes: usize,
    ) -> Result<bool, TarError> {
        // The name may be NUL-terminated.
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
            // Applies to all later entries. Some writers store a commit id or a time here, which we ignore.
            EntryType::XGlobalHeader => {
                let mut global = Self::default();
                global.read_attributes(&read_bounded(raw, max_header_bytes)?)?;
                if global != Self::default() {
                    return Err(rejected_attribute(b"path or linkpath", "not allowed in a global header"));
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
                    return Err(rejected_attribute(key, "would change the entry's content"));
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
        Some(first) => Err(TarError::rejected(&first, "path or link target set twice")),
    }
}

fn rejected_attribute(key: &[u8], reason: &'static str) -> TarError {
    TarError::rejected(Path::new(OsStr::from_bytes(key)), reason)
}

/// Reads a whole long-name record or PAX header of at most `max_bytes`. Memory use grows with the bytes actually
/// present, not with the size in the header.
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
        EntryType::Link => "hard links are not supported",
        EntryType::Char | EntryType::Block | EntryType::Fifo => "devices and FIFOs are not supported",
        EntryType::GNUSparse => "sparse files are not supported",
        _ => "unsupported entry type",
    }
}

/// Hashes a path to a compact set key, to keep large sets small. Equivalent paths, such as `./a`, `a/` and `a`, hash to
/// the same value.
pub fn hash_path(path: &Path) -> u128 {
    let mut hash = Sha256::new();
    for part in path.components().filter(|part| *part != Component::CurDir) {
        hash.update(part.as_os_str().as_bytes());
        hash.update(b"/");
    }
    let first: [u8; 16] = hash.finalize()[..16].try_into().expect("SHA-256 has 32 bytes");
    u128::from_be_bytes(first)
}

/// Formats a path for terminal output: quoted, without control characters, and truncated.
pub fn quote_path(path: &Path) -> String {
    let text = path.as_os_str().to_string_lossy();
    match text.char_indices().nth(MAX_QUOTED_CHARS) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

#[cfg(test)]
mod tests;
