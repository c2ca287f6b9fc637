//! Measures the home directory's disk usage. Hard-linked files are counted once, and other file systems are ignored.
//!
//! Symbolic links are not followed. Directories that are unreadable or not reached before the deadline are skipped.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::FileSizes;
use svc_base::fsx::FileError;

/// A directory to read.
struct Directory {
    path: PathBuf,
    /// The app that owns the directory, if any.
    app: Option<String>,
}

/// Measures the home directory, returning its sizes and each app directory's size by slug.
///
/// # Errors
/// [`FileError`] if the home directory's metadata cannot be read.
pub fn measure_home(
    home: &Path,
    apps: &Path,
    logs: &Path,
    deadline: Instant,
) -> Result<(FileSizes, BTreeMap<String, u64>), FileError> {
    let root = fs::symlink_metadata(home).map_err(FileError::wrap("stat", home))?;
    let (mut sizes, mut app_sizes) = (FileSizes::default(), BTreeMap::new());
    let mut counted = HashSet::new();
    let mut directories = vec![Directory { path: home.to_owned(), app: None }];
    while let Some(Directory { path, app }) = directories.pop() {
        let (is_in_apps, is_in_logs, is_apps) =
            (path.starts_with(apps), path.starts_with(logs), path == apps);
        let entries = if Instant::now() < deadline { fs::read_dir(&path).ok() } else { None };
        let Some(entries) = entries else {
            sizes.skipped_directories += 1;
            continue;
        };
        // Skip entries whose metadata cannot be read: they were deleted during the walk.
        for (entry, meta) in
            entries.flatten().filter_map(|entry| entry.metadata().ok().map(|meta| (entry, meta)))
        {
            if meta.dev() != root.dev() || !mark_counted(&meta, &mut counted) {
                continue;
            }
            let app = if is_apps { parse_slug(&entry, &meta) } else { app.clone() };
            let bytes = meta.blocks() * 512;
            sizes.home_bytes += bytes;
            sizes.apps_bytes += if is_in_apps { bytes } else { 0 };
            sizes.logs_bytes += if is_in_logs { bytes } else { 0 };
            if let Some(slug) = &app {
                *app_sizes.entry(slug.clone()).or_default() += bytes;
            }
            if meta.is_dir() {
                directories.push(Directory { path: entry.path(), app });
            }
        }
    }
    Ok((sizes, app_sizes))
}

/// Marks a file as counted. Returns `false` for a hard link to an already counted file.
fn mark_counted(meta: &Metadata, counted: &mut HashSet<u64>) -> bool {
    meta.is_dir() || meta.nlink() == 1 || counted.insert(meta.ino())
}

/// Returns the slug of an app's directory, or `None` if the entry isn't a directory or its name isn't a valid slug.
fn parse_slug(entry: &fs::DirEntry, meta: &Metadata) -> Option<String> {
    const MAX_SLUG_BYTES: usize = 41;
    let name = entry.file_name().into_string().ok()?;
    let is_slug = name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.len() <= MAX_SLUG_BYTES
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
    (meta.is_dir() && is_slug).then_some(name)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn measure_home_counts_disk_blocks_of_each_file_once() {
        let dir = tempfile::tempdir().unwrap();
        let (home, apps, logs) =
            (dir.path().join("h"), dir.path().join("h/apps"), dir.path().join("h/system/logs"));
        for dir in [&apps.join("notes/deep"), &apps.join("Not An App"), &logs] {
            fs::create_dir_all(dir).unwrap();
        }
        let measure = |deadline| measure_home(&home, &apps, &logs, deadline).unwrap();
        let later = Instant::now() + Duration::from_secs(600);
        let (before, app_sizes_before) = measure(later);
        fs::write(apps.join("notes/deep/a"), vec![1; 100_000]).unwrap();
        fs::hard_link(apps.join("notes/deep/a"), apps.join("notes/b")).unwrap();
        fs::write(apps.join("Not An App/c"), vec![1; 20_000]).unwrap();
        fs::write(logs.join("activity.log"), vec![1; 50_000]).unwrap();
        std::os::unix::fs::symlink("/usr", home.join("elsewhere")).unwrap();
        std::os::unix::fs::symlink(&home, apps.join("loop")).unwrap();
        let (after, app_sizes) = measure(later);
        let apps_bytes = after.apps_bytes - before.apps_bytes;
        let logs_bytes = after.logs_bytes - before.logs_bytes;
        assert!((120_000..200_000).contains(&apps_bytes), "{after:?}");
        assert!((50_000..100_000).contains(&logs_bytes), "{after:?}");
        assert!(after.home_bytes - before.home_bytes < apps_bytes + logs_bytes + 10_000, "{after:?}");
        assert_eq!(app_sizes.keys().collect::<Vec<_>>(), ["notes"]);
        assert!(
            (100_000..120_000).contains(&(app_sizes["notes"] - app_sizes_before["notes"])),
            "{app_sizes:?}"
        );
        let (late, _) = measure(Instant::now());
        assert_eq!((late.home_bytes, late.skipped_directories), (0, 1), "the deadline has passed");
    }
}
