//! Directory listing that rejects oversized directories without collecting all of their names.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;

use rustix::fs::Dir;

use super::entry_stat::{CACHE_TAG, has_cache_tag};
use super::walk::{EntryError, MAX_DIRECTORY_BYTES, Walker};
use crate::tree::TYPICAL_NODE_BYTES;

/// Directories with more entries, or with a tree larger than [`MAX_DIRECTORY_BYTES`], aren't saved: a tree is a single
/// blob, parsed in memory.
const MAX_DIRECTORY_ENTRIES: usize = if cfg!(test) { 2000 } else { 200_000 };

impl Walker<'_> {
    /// Returns the sorted names in a directory. Cache directories yield only the tag, and their other entries are
    /// counted as excluded. The home directory itself is never treated as a cache.
    ///
    /// # Errors
    /// `Unreadable` if the directory is too large or can't be listed.
    pub(super) fn list(&mut self, directory: &OwnedFd) -> Result<Vec<OsString>, EntryError> {
        if !self.path.as_os_str().is_empty() && has_cache_tag(directory) {
            return self.exclude_cache(directory);
        }
        let mut names = Vec::new();
        let mut bytes = 0;
        for entry in Dir::read_from(directory)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if !matches!(name, b"." | b"..") {
                names.push(OsStr::from_bytes(name).to_owned());
                bytes += TYPICAL_NODE_BYTES + name.len();
                // Check every name: a directory with millions of entries could exhaust memory.
                check_size(names.len(), bytes)?;
            }
        }
        names.sort_unstable();
        // Some file systems return a name twice if it's removed and recreated during the listing.
        names.dedup();
        Ok(names)
    }

    /// Counts all entries of a cache directory except the tag as excluded, and returns the tag's name. Doesn't collect
    /// the names, since there may be any number of them.
    fn exclude_cache(&mut self, directory: &OwnedFd) -> Result<Vec<OsString>, EntryError> {
        for entry in Dir::read_from(directory)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") || name == CACHE_TAG.as_bytes() {
                continue;
            }
            let name = OsStr::from_bytes(name);
            self.counts.excluded += 1;
            self.path.push(name);
            self.measure_excluded(directory, name);
            self.path.pop();
        }
        Ok(vec![OsString::from(CACHE_TAG)])
    }
}

/// Checks the number of entries so far and the total size of their nodes against the limits.
fn check_size(entries: usize, bytes: usize) -> Result<(), EntryError> {
    if entries <= MAX_DIRECTORY_ENTRIES && bytes <= MAX_DIRECTORY_BYTES {
        return Ok(());
    }
    let reason = format!(
        "its first {entries} entries take about {bytes} bytes, but the limits are {MAX_DIRECTORY_ENTRIES} entries and \
         {MAX_DIRECTORY_BYTES} bytes"
    );
    Err(EntryError::Unreadable(io::Error::other(reason)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_size_refuses_too_many_entries_and_bytes() {
        assert!(check_size(MAX_DIRECTORY_ENTRIES, MAX_DIRECTORY_BYTES).is_ok());
        assert!(check_size(MAX_DIRECTORY_ENTRIES + 1, MAX_DIRECTORY_BYTES).is_err());
        assert!(
            check_size(MAX_DIRECTORY_ENTRIES, MAX_DIRECTORY_BYTES + 1).is_err(),
            "long names take more space"
        );
    }
}
