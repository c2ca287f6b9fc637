//! Lists the files in the home directory, parents before children.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::snapshots::archive;
use crate::system::tar_reader::EntryKind;
use svc_base::fsx::FileError;

/// A file, directory or symbolic link to export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HomeEntry {
    /// Relative to the home directory.
    pub path: PathBuf,
    pub kind: EntryKind,
    pub mode: u32,
    /// Seconds since the Unix epoch.
    pub modified: u64,
}

/// A home directory entry that is missing from the archive, or incomplete in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OmittedEntry {
    /// Relative to the home directory.
    pub path: PathBuf,
    pub reason: String,
}

/// Lists everything under `home`, except import directories and the files in `except`. Does not follow symbolic links.
/// The second list holds the entries that cannot be exported: unreadable ones, and those that are not files,
/// directories or symbolic links. A missing home directory is treated as empty.
///
/// # Errors
/// [`FileError`] if `home` itself cannot be listed in full: the archive would lack an unknown part of the owner's data.
pub fn list_files(home: &Path, except: &[&Path]) -> Result<(Vec<HomeEntry>, Vec<OmittedEntry>), FileError> {
    // Compare inodes rather than paths: `home` may be a symbolic link, so a file can have several paths.
    let except: Vec<_> = except.iter().filter_map(|path| fs::symlink_metadata(path).ok()).collect();
    let is_excluded =
        |meta: &Metadata| except.iter().any(|file| (file.dev(), file.ino()) == (meta.dev(), meta.ino()));
    let (mut listed, mut omitted) = (Vec::new(), Vec::new());
    let mut directories = vec![PathBuf::new()];
    while let Some(directory) = directories.pop() {
        let full_directory = home.join(&directory);
        let is_home = directory.as_os_str().is_empty();
        let entries = match fs::read_dir(&full_directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) if is_home => return Err(FileError::wrap("list", home)(error)),
            Err(error) => {
                omitted.push(OmittedEntry { path: directory, reason: error.to_string() });
                continue;
            }
        };
        let mut names = Vec::new();
        for entry in entries {
            match entry {
                Ok(entry) => names.push(entry.file_name()),
                Err(error) if is_home => return Err(FileError::wrap("list", home)(error)),
                Err(error) => {
                    omitted.push(OmittedEntry { path: directory.clone(), reason: error.to_string() });
                    break;
                }
            }
        }
        names.sort_unstable();
        let mut subdirectories = Vec::new();
        for name in names {
            let (path, full_path) = (directory.join(&name), full_directory.join(&name));
            let meta = match fs::symlink_metadata(&full_path) {
                Ok(meta) => meta,
                Err(error) => {
                    omitted.push(OmittedEntry { path, reason: error.to_string() });
                    continue;
                }
            };
            if is_excluded(&meta) {
                continue;
            }
            let Some(kind) = entry_kind(&meta) else {
                let reason = "not a file, directory or symbolic link".to_owned();
                omitted.push(OmittedEntry { path, reason });
                continue;
            };
            if kind == EntryKind::Directory {
                if is_import_target(&directory) && archive::is_import_directory(&name) {
                    continue;
                }
                subdirectories.push(path.clone());
            }
            let modified = u64::try_from(meta.mtime()).unwrap_or(0);
            listed.push(HomeEntry { path, kind, mode: meta.mode() & 0o7777, modified });
        }
        directories.extend(subdirectories.into_iter().rev());
    }
    Ok((listed, omitted))
}

/// Returns whether imports stage files in this directory: the home directory or its `system` subdirectory.
fn is_import_target(directory: &Path) -> bool {
    directory.as_os_str().is_empty() || directory == Path::new(archive::SYSTEM)
}

fn entry_kind(meta: &Metadata) -> Option<EntryKind> {
    let kind = meta.file_type();
    if kind.is_file() {
        Some(EntryKind::File)
    } else if kind.is_dir() {
        Some(EntryKind::Directory)
    } else if kind.is_symlink() {
        Some(EntryKind::Symlink)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::*;

    #[test]
    fn list_files_lists_parents_first_and_omits_sockets() {
        let home = tempfile::tempdir().unwrap();
        let in_home = |path: &str| home.path().join(path);
        for dir in ["b/c", ".import-7/x", ".before-import-7", "system/.import-7", "system/.before-import-7"] {
            fs::create_dir_all(in_home(dir)).unwrap();
        }
        fs::write(in_home("b/c/d"), "").unwrap();
        for file in ["a", ".import-8", ".import-log"] {
            fs::write(in_home(file), "").unwrap();
        }
        fs::write(in_home("out.tar.partial"), "").unwrap();
        std::os::unix::fs::symlink("/", in_home("b/root")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(in_home("socket")).unwrap();
        let linked = tempfile::tempdir().unwrap();
        let linked = linked.path().join("home");
        std::os::unix::fs::symlink(home.path(), &linked).unwrap();
        let (listed, omitted) = list_files(&linked, &[&in_home("out.tar.partial")]).unwrap();
        let paths: Vec<_> = listed.iter().map(|entry| entry.path.to_str().unwrap()).collect();
        assert_eq!(paths, [".import-8", ".import-log", "a", "b", "system", "b/c", "b/root", "b/c/d"]);
        let omitted: Vec<_> = omitted.iter().map(|entry| entry.path.to_str().unwrap()).collect();
        assert_eq!(omitted, ["socket"]);
    }

    #[test]
    fn list_files_fails_if_home_cannot_be_listed() {
        let home = tempfile::NamedTempFile::new().unwrap();
        let error = list_files(home.path(), &[]).unwrap_err();
        assert_eq!((error.path.as_path(), error.source.kind()), (home.path(), ErrorKind::NotADirectory));
    }
}
