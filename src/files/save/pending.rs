//! Estimates how much a save would have to read.

use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use rustix::fs::{Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::changes::{ChangeSet, Scope};
use super::entry_stat::{has_cache_tag, open_in, stat_in, stat_open, to_timestamp};
use super::exclusions::Exclusions;
use super::file::BLOCK_BYTES;

/// Maximum number of entries to examine.
const MAX_ENTRIES: u32 = 100_000;
/// Deeper directories aren't examined.
const MAX_DEPTH: usize = 1000;

/// Estimates the total size of files marked by `changes` that changed at or after `since`, without holes. Skips
/// excluded and unreadable entries, and doesn't follow symlinks. Examines at most `MAX_ENTRIES` entries, so the
/// estimate can be too low.
pub fn estimate_pending_bytes(
    home: &Path,
    changes: &ChangeSet,
    exclusions: &Exclusions,
    since: Option<Timestamp>,
) -> u64 {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Ok(directory) = rustix::fs::open(home, flags, Mode::empty()) else { return 0 };
    let Ok(stat) = stat_open(&directory) else { return 0 };
    let device = (stat.stx_dev_major, stat.stx_dev_minor);
    let since = since.unwrap_or(Timestamp::MIN);
    let mut estimate =
        Estimate { exclusions, since, device, path: PathBuf::new(), bytes: 0, remaining: MAX_ENTRIES };
    estimate.add_directory(&directory, Scope::Changed(changes), 0);
    estimate.bytes
}

struct Estimate<'a> {
    exclusions: &'a Exclusions,
    since: Timestamp,
    device: (u32, u32),
    /// Path of the current entry, relative to the home directory.
    path: PathBuf,
    bytes: u64,
    /// Remaining entry budget.
    remaining: u32,
}

impl Estimate<'_> {
    fn add_directory(&mut self, directory: &OwnedFd, scope: Scope<'_>, depth: usize) {
        // Only the tag of a cache directory is saved, even if something below it is marked.
        if depth > 0 && has_cache_tag(directory) {
            return;
        }
        let names: Vec<OsString> = if scope.lists_directory() {
            list_names(directory, self.remaining).unwrap_or_default()
        } else {
            scope.marked_names().cloned().collect()
        };
        for name in names {
            if self.remaining == 0 || depth > MAX_DEPTH {
                return;
            }
            self.remaining -= 1;
            self.path.push(&name);
            // Entries that vanished or can't be read aren't counted.
            let _ = self.add_entry(directory, &name, scope, depth);
            self.path.pop();
        }
    }

    fn add_entry(
        &mut self,
        directory: &OwnedFd,
        name: &OsStr,
        scope: Scope<'_>,
        depth: usize,
    ) -> Result<(), Errno> {
        let stat = stat_in(directory, name)?;
        let file_type = FileType::from_raw_mode(stat.stx_mode.into());
        let is_directory = file_type == FileType::Directory;
        let is_on_other_file_system = (stat.stx_dev_major, stat.stx_dev_minor) != self.device;
        if is_on_other_file_system || self.exclusions.excludes(&self.path, name, is_directory) {
            return Ok(());
        }
        match file_type {
            FileType::RegularFile if to_timestamp(stat.stx_ctime) >= self.since => {
                let allocated = stat.stx_blocks.saturating_mul(BLOCK_BYTES);
                self.bytes = self.bytes.saturating_add(stat.stx_size.min(allocated));
            }
            FileType::Directory => {
                if let Some(below) = scope.below(name) {
                    self.add_directory(&open_in(directory, name, OFlags::DIRECTORY)?, below, depth + 1);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// Returns at most `remaining` names from a directory.
fn list_names(directory: &OwnedFd, remaining: u32) -> Result<Vec<OsString>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)?.take(remaining as usize) {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if !matches!(name, b"." | b"..") {
            names.push(OsStr::from_bytes(name).to_owned());
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn estimate_counts_each_changed_file_once() {
        let home = tempfile::tempdir().unwrap();
        let write = |path: &str, size: usize| {
            let path = home.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, vec![1; size]).unwrap();
        };
        write("notes/a", 10);
        write("notes/inner/not-marked", 1000);
        write("new/deep/b", 300);
        write("new/node_modules/c", 7000);
        write("new/target/debug/d", 7000);
        let tag = "Signature: 8a477f597d28d172789f06886806bc55";
        fs::write(home.path().join("new/target/CACHEDIR.TAG"), tag).unwrap();
        write("built/target/debug/e", 7000);
        fs::write(home.path().join("built/target/CACHEDIR.TAG"), tag).unwrap();
        std::os::unix::fs::symlink("/etc", home.path().join("new/link")).unwrap();
        let sparse = fs::File::create(home.path().join("new/sparse")).unwrap();
        sparse.set_len(1 << 40).unwrap();
        let mut changes = ChangeSet::default();
        // Both a new file and its directory are marked.
        for path in ["notes", "gone", "new", "built/target/debug"] {
            changes.mark_directory(Path::new(path));
        }
        for path in ["new", "new/deep", "new/deep/b", "notes/a"] {
            changes.mark_subtree(Path::new(path));
        }
        let mut exclusions = Exclusions::default();
        assert!(exclusions.set_rules(&["node_modules/"], "", Path::new("x"), Vec::new()).is_empty());
        let estimate = |since| estimate_pending_bytes(home.path(), &changes, &exclusions, since);
        assert_eq!(estimate(None), 310);
        assert_eq!(estimate(Some(Timestamp::now() + jiff::SignedDuration::from_secs(60))), 0);
    }
}
