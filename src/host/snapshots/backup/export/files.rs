//! What lies below the home, in order: each directory before what is in it.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::host::snapshots::archive;
use crate::host::system::tar_reader::EntryKind;

/// One entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Relative to the home.
    pub path: PathBuf,
    pub kind: EntryKind,
    pub mode: u32,
    /// Seconds since 1970.
    pub modified: u64,
}

/// Something of the home that is not in the archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    /// Relative to the home.
    pub path: PathBuf,
    pub reason: String,
}

/// Everything but the files of `except`, and what is neither file, directory nor link or cannot be read. Links are not
/// followed.
pub fn below(home: &Path, except: &[&Path]) -> (Vec<Found>, Vec<LeftOut>) {
    let except: Vec<PathBuf> = except.iter().filter_map(|path| std::path::absolute(path).ok()).collect();
    let (mut found, mut left_out) = (Vec::new(), Vec::new());
    let mut directories = vec![PathBuf::new()];
    while let Some(directory) = directories.pop() {
        let at = home.join(&directory);
        let entries = match fs::read_dir(&at) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => {
                left_out.push(LeftOut { path: directory, reason: error.to_string() });
                continue;
            }
        };
        let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
        names.sort_unstable();
        let mut inside = Vec::new();
        for name in names {
            let (path, whole) = (directory.join(&name), at.join(&name));
            if (is_imports_place(&directory) && archive::is_an_imports(&name)) || except.contains(&whole) {
                continue;
            }
            match fs::symlink_metadata(&whole).ok().and_then(|meta| Some((kind(&meta)?, meta))) {
                Some((kind, meta)) => {
                    if kind == EntryKind::Directory {
                        inside.push(path.clone());
                    }
                    let modified = u64::try_from(meta.mtime()).unwrap_or(0);
                    found.push(Found { path, kind, mode: meta.mode() & 0o7777, modified });
                }
                None => {
                    left_out.push(LeftOut { path, reason: "neither file, directory nor link".to_owned() });
                }
            }
        }
        directories.extend(inside.into_iter().rev());
    }
    (found, left_out)
}

/// Where imports stage files and put aside what was there: the home, and the gateway's part of it.
fn is_imports_place(directory: &Path) -> bool {
    directory.as_os_str().is_empty() || directory == Path::new(archive::SYSTEM)
}

fn kind(meta: &Metadata) -> Option<EntryKind> {
    let kind = meta.file_type();
    match () {
        () if kind.is_file() => Some(EntryKind::File),
        () if kind.is_dir() => Some(EntryKind::Directory),
        () if kind.is_symlink() => Some(EntryKind::Link),
        () => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_directory_comes_before_what_is_in_it_and_links_are_not_followed() {
        let home = tempfile::tempdir().unwrap();
        let at = |path: &str| home.path().join(path);
        for dir in ["b/c", ".import-7/x", ".before-import-7", "system/.import-7", "system/.before-import-7"] {
            fs::create_dir_all(at(dir)).unwrap();
        }
        fs::write(at("b/c/d"), "").unwrap();
        fs::write(at("a"), "").unwrap();
        fs::write(at("out.tar.partial"), "").unwrap();
        std::os::unix::fs::symlink("/", at("b/root")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        let (found, left_out) = below(home.path(), &[&at("out.tar.partial")]);
        let paths: Vec<_> = found.iter().map(|one| one.path.to_str().unwrap()).collect();
        assert_eq!(paths, ["a", "b", "system", "b/c", "b/root", "b/c/d"]);
        let left_out: Vec<_> = left_out.iter().map(|left| left.path.to_str().unwrap()).collect();
        assert_eq!(left_out, ["socket"]);
    }
}
