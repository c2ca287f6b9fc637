//! Measures entries excluded from a save.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Dir, FileType, OFlags, Statx};
use rustix::io::Errno;

use super::entry_stat::{open_in, stat_in, stat_open};
use super::file::BLOCK_BYTES;

/// Maximum number of entries to count. Bounds the running time.
const MAX_ENTRIES: u64 = 1_000_000;
/// Deeper directories aren't counted, since each level takes a file descriptor and stack space.
const MAX_DEPTH: usize = 1000;
/// Maximum length of [`ExcludedSizes::largest`].
const MAX_LISTED_ENTRIES: usize = 20;

/// Sizes of the entries excluded from a save.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExcludedSizes {
    /// Number of entries, including everything in excluded directories.
    pub entries: u64,
    /// Total file size, excluding holes.
    pub bytes: u64,
    /// Whether some entries weren't counted because there are too many, they're nested too deeply or they can't be
    /// read.
    pub is_partial: bool,
    /// The largest excluded files and directories, largest first.
    pub largest: Vec<ExcludedEntry>,
}

/// An excluded file or directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExcludedEntry {
    /// Relative to the saved directory.
    pub path: PathBuf,
    /// Number of entries, including everything in the directory.
    pub entries: u64,
    pub bytes: u64,
}

impl ExcludedSizes {
    /// Adds an entry and everything below it, except entries on other file systems.
    pub(super) fn add(
        &mut self,
        directory: &OwnedFd,
        name: &OsStr,
        path: &Path,
        device: (u32, u32),
        is_stopped: &AtomicBool,
    ) {
        let mut counter =
            SizeCounter { entries: 0, bytes: 0, remaining: MAX_ENTRIES.saturating_sub(self.entries), device };
        let added = counter.add(directory, name, 0, is_stopped);
        self.is_partial |= !added.unwrap_or_else(|error| error == Errno::NOENT);
        let SizeCounter { entries, bytes, .. } = counter;
        self.entries += entries;
        self.bytes += bytes;
        if entries == 0 {
            return;
        }
        let entry = ExcludedEntry { path: path.to_owned(), entries, bytes };
        let position = self.largest.partition_point(|larger| larger.bytes >= bytes);
        if position < MAX_LISTED_ENTRIES {
            self.largest.insert(position, entry);
            self.largest.truncate(MAX_LISTED_ENTRIES);
        }
    }
}

struct SizeCounter {
    entries: u64,
    bytes: u64,
    /// Remaining entry budget.
    remaining: u64,
    device: (u32, u32),
}

impl SizeCounter {
    /// Adds an entry recursively, and returns whether everything was counted.
    fn add(
        &mut self,
        directory: &OwnedFd,
        name: &OsStr,
        depth: usize,
        is_stopped: &AtomicBool,
    ) -> Result<bool, Errno> {
        if self.remaining == 0 || depth > MAX_DEPTH || is_stopped.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let stat = stat_in(directory, name)?;
        if !self.is_on_saved_device(&stat) {
            return Ok(true);
        }
        self.remaining -= 1;
        self.entries += 1;
        match FileType::from_raw_mode(stat.stx_mode.into()) {
            FileType::Directory => {}
            FileType::RegularFile => {
                self.bytes += stat.stx_size.min(stat.stx_blocks.saturating_mul(BLOCK_BYTES));
                return Ok(true);
            }
            _ => return Ok(true),
        }
        let opened = open_in(directory, name, OFlags::DIRECTORY)?;
        if !self.is_on_saved_device(&stat_open(&opened)?) {
            return Ok(true);
        }
        let mut is_complete = true;
        for entry in Dir::read_from(&opened)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if !matches!(name, b"." | b"..") {
                let added = self.add(&opened, OsStr::from_bytes(name), depth + 1, is_stopped);
                // Vanished entries don't make the sum incomplete.
                is_complete &= added.unwrap_or_else(|error| error == Errno::NOENT);
            }
        }
        Ok(is_complete)
    }

    fn is_on_saved_device(&self, stat: &Statx) -> bool {
        (stat.stx_dev_major, stat.stx_dev_minor) == self.device
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uncounted_entry_is_not_listed() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("present"), "x").unwrap();
        let directory = OwnedFd::from(std::fs::File::open(dir.path()).unwrap());
        let stat = stat_open(&directory).unwrap();
        let device = (stat.stx_dev_major, stat.stx_dev_minor);
        let mut sizes = ExcludedSizes::default();
        for name in ["gone", "present"] {
            sizes.add(&directory, OsStr::new(name), Path::new(name), device, &AtomicBool::new(false));
        }
        let listed: Vec<&Path> = sizes.largest.iter().map(|entry| entry.path.as_path()).collect();
        assert_eq!((listed, sizes.is_partial), (vec![Path::new("present")], false));
    }
}
