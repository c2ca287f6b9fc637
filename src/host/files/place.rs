//! Moves restored files into place.
//!
//! A new machine's home is nearly empty: it has the directories that the services need, and their first records. The
//! restored files replace files of the same name, and directories are merged. Each step is a rename, so that a killed
//! run can be repeated.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use svc_base::fsx::FileError;

/// Moves everything in `from` to `to`, on the same file system, and gives existing directories the owner and
/// mode of the restored ones. Returns the number of entries that were replaced.
///
/// # Errors
/// If an entry cannot be moved. What was moved stays; a repeated call moves the rest.
pub fn move_contents(from: &Path, to: &Path) -> Result<u64, FileError> {
    let mut replaced = 0;
    for entry in fs::read_dir(from).map_err(FileError::wrap("list", from))? {
        let entry = entry.map_err(FileError::wrap("list", from))?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        let existing = match fs::symlink_metadata(&target) {
            Ok(existing) => Some(existing),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(FileError::wrap("read", &target)(error)),
        };
        let is_directory = entry.file_type().map_err(FileError::wrap("read", &source))?.is_dir();
        match existing {
            Some(existing) if existing.is_dir() && is_directory => {
                replaced += move_contents(&source, &target)?;
                copy_metadata(&source, &target)?;
                fs::remove_dir(&source).map_err(FileError::wrap("remove", &source))?;
                continue;
            }
            Some(existing) if existing.is_dir() => {
                fs::remove_dir_all(&target).map_err(FileError::wrap("replace", &target))?;
                replaced += 1;
            }
            Some(_) if is_directory => {
                fs::remove_file(&target).map_err(FileError::wrap("replace", &target))?;
                replaced += 1;
            }
            Some(_) => replaced += 1,
            None => {}
        }
        fs::rename(&source, &target).map_err(FileError::wrap("move", &source))?;
    }
    Ok(replaced)
}

/// Gives `to` the owner and mode of the directory `from`.
fn copy_metadata(from: &Path, to: &Path) -> Result<(), FileError> {
    let meta = fs::metadata(from).map_err(FileError::wrap("read", from))?;
    let existing = fs::metadata(to).map_err(FileError::wrap("read", to))?;
    if (meta.uid(), meta.gid()) != (existing.uid(), existing.gid()) {
        chown(to, Some(meta.uid()), Some(meta.gid())).map_err(FileError::wrap("change the owner of", to))?;
    }
    // After the owner, whose change can clear bits of the mode.
    fs::set_permissions(to, Permissions::from_mode(meta.mode() & 0o7777))
        .map_err(FileError::wrap("change the mode of", to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn move_contents_merges_directories_and_replaces_files() {
        let root = tempfile::tempdir().unwrap();
        let (from, to) = (root.path().join("from"), root.path().join("to"));
        let write = |path: &Path, text: &str| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(&from.join("system/logs/a.log"), "restored");
        write(&from.join("notes/today"), "restored");
        write(&from.join("was-a-directory"), "restored");
        write(&from.join("was-a-file/inside"), "restored");
        fs::set_permissions(from.join("system"), Permissions::from_mode(0o2750)).unwrap();
        std::os::unix::fs::symlink("/etc", from.join("link")).unwrap();
        write(&to.join("system/logs/a.log"), "new");
        write(&to.join("system/logs/b.log"), "new");
        write(&to.join("was-a-directory/inside"), "new");
        write(&to.join("was-a-file"), "new");
        // A link in the new home is replaced, not followed.
        fs::create_dir(root.path().join("outside")).unwrap();
        std::os::unix::fs::symlink(root.path().join("outside"), to.join("notes")).unwrap();

        assert_eq!(move_contents(&from, &to).unwrap(), 4);
        let read = |path: &str| fs::read_to_string(to.join(path)).unwrap();
        for path in ["system/logs/a.log", "notes/today", "was-a-directory", "was-a-file/inside"] {
            assert_eq!(read(path), "restored", "{path}");
        }
        assert_eq!(read("system/logs/b.log"), "new");
        assert_eq!(fs::metadata(to.join("system")).unwrap().mode() & 0o7777, 0o2750);
        assert_eq!(fs::read_link(to.join("link")).unwrap(), Path::new("/etc"));
        assert_eq!(fs::read_dir(root.path().join("outside")).unwrap().count(), 0);
        assert_eq!(fs::read_dir(&from).unwrap().count(), 0);
        assert_eq!(move_contents(&from, &to).unwrap(), 0, "a repeated call moves nothing");
    }
}
