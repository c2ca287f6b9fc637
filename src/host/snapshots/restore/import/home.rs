//! Installs an archive's home entries by renaming each into place, running as the user who owns them.

use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::snapshots::archive::{self, REPLACED_PREFIX, STAGING_PREFIX};
use svc_base::fsx::{self, FileError};

/// Working directories of an import, one for staged files and one for replaced files.
pub struct ImportStaging {
    directory: PathBuf,
    staged: PathBuf,
    replaced: PathBuf,
}

impl ImportStaging {
    /// Names the directories of import `number` under `directory`, without creating them.
    pub fn new(directory: &Path, number: i64) -> Self {
        Self {
            directory: directory.to_owned(),
            staged: directory.join(format!("{STAGING_PREFIX}{number}")),
            replaced: directory.join(format!("{REPLACED_PREFIX}{number}")),
        }
    }

    /// Creates an empty staging directory, removing those left behind by killed runs.
    pub fn create(&self) -> Result<&Path, FileError> {
        fs::create_dir_all(&self.directory).map_err(FileError::wrap("create directory", &self.directory))?;
        remove_staged(&self.directory)?;
        let mut builder = fs::DirBuilder::new();
        builder
            .mode(0o700)
            .create(&self.staged)
            .map_err(FileError::wrap("create directory", &self.staged))?;
        Ok(&self.staged)
    }

    /// Flushes the staged entries to disk. Otherwise, a power failure soon after installing them could leave empty
    /// files.
    pub fn sync(&self) -> Result<(), FileError> {
        // Syncing the file system once is cheaper than syncing each file.
        fs::File::open(&self.staged)
            .and_then(|dir| Ok(nix::unistd::syncfs(dir)?))
            .map_err(FileError::wrap("sync", &self.staged))
    }

    /// Checks that this user may rename the files to be replaced. In a sticky directory such as the home directory,
    /// users can rename only their own files.
    ///
    /// # Errors
    /// [`FileError`] if a directory can't be read, or a file to be replaced belongs to another user. The error names
    /// the file to move away first.
    pub fn ensure_replaceable(&self) -> Result<(), FileError> {
        let user = nix::unistd::geteuid().as_raw();
        let home = fs::metadata(&self.directory).map_err(FileError::wrap("inspect", &self.directory))?;
        if user == 0 || home.uid() == user || home.mode() & 0o1000 == 0 {
            return Ok(());
        }
        for name in list_names(&self.staged)? {
            let path = self.directory.join(name);
            if fs::symlink_metadata(&path).is_ok_and(|meta| meta.uid() != user) {
                let wrong_owner = io::Error::other("it belongs to another user: move it away first");
                return Err(FileError::wrap("replace", &path)(wrong_owner));
            }
        }
        Ok(())
    }

    /// Installs all staged entries and returns the directory with the replaced files, if any.
    ///
    /// # Errors
    /// [`FileError`] if a directory can't be read, created or removed, or an entry can't be moved. Each entry is then
    /// either fully replaced or unchanged, except that one may already be in the directory of replaced files without
    /// its new version installed.
    pub fn install(&self) -> Result<Option<&Path>, FileError> {
        for name in list_names(&self.staged)? {
            self.replace_entry(&name)?;
        }
        fs::remove_dir_all(&self.staged).map_err(FileError::wrap("remove", &self.staged))?;
        fsx::sync_dir(&self.directory)?;
        Ok(self.replaced.exists().then_some(self.replaced.as_path()))
    }

    /// Moves any existing entry of this name into the directory of replaced files, then installs the staged one.
    fn replace_entry(&self, name: &OsString) -> Result<(), FileError> {
        let to = self.directory.join(name);
        if fs::symlink_metadata(&to).is_ok() {
            let mut builder = fs::DirBuilder::new();
            let created = builder.recursive(true).mode(0o750).create(&self.replaced);
            created.map_err(FileError::wrap("create directory", &self.replaced))?;
            move_entry(&to, &self.replaced.join(name)).map_err(FileError::wrap("move", &to))?;
        }
        move_entry(&self.staged.join(name), &to).map_err(FileError::wrap("install", &to))
    }
}

/// Moves an entry to another directory. Moving a directory rewrites its `..`, so it has to be writable during the move.
fn move_entry(from: &Path, to: &Path) -> io::Result<()> {
    let meta = fs::symlink_metadata(from)?;
    if !meta.is_dir() || meta.mode() & 0o200 != 0 {
        return fs::rename(from, to);
    }
    fs::set_permissions(from, Permissions::from_mode(meta.mode() | 0o200))?;
    let moved = fs::rename(from, to);
    fs::set_permissions(if moved.is_ok() { to } else { from }, meta.permissions())?;
    moved
}

/// Removes all staging directories in `directory`, including those of killed runs.
pub fn remove_staged(directory: &Path) -> Result<(), FileError> {
    for name in list_names(directory)? {
        let path = directory.join(&name);
        let is_directory = || fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_dir());
        if archive::has_import_number(&name, STAGING_PREFIX) && is_directory() {
            remove_directory(&path).map_err(FileError::wrap("remove", &path))?;
        }
    }
    Ok(())
}

/// Removes a directory tree, even if it contains read-only directories, as Go's module cache does.
fn remove_directory(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            make_directories_writable(path)?;
            fs::remove_dir_all(path)
        }
        result => result,
    }
}

fn make_directories_writable(path: &Path) -> io::Result<()> {
    let mut pending = vec![path.to_owned()];
    while let Some(directory) = pending.pop() {
        fs::set_permissions(&directory, Permissions::from_mode(0o700))?;
        for entry in fs::read_dir(&directory)? {
            let entry = entry?;
            // `file_type` doesn't follow symlinks.
            if entry.file_type()?.is_dir() {
                pending.push(entry.path());
            }
        }
    }
    Ok(())
}

/// Lists the names in a directory, sorted. Empty if the directory doesn't exist.
fn list_names(dir: &Path) -> Result<Vec<OsString>, FileError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(FileError::wrap("read", dir)(error)),
    };
    let names: io::Result<Vec<_>> = entries.map(|entry| entry.map(|entry| entry.file_name())).collect();
    let mut names = names.map_err(FileError::wrap("read", dir))?;
    names.sort_unstable();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn create_read_only_directory(path: &Path) {
        fs::create_dir_all(path).unwrap();
        fs::write(path.join("file"), "x").unwrap();
        fs::set_permissions(path, Permissions::from_mode(0o555)).unwrap();
    }

    #[test]
    fn install_moves_read_only_directories_and_keeps_modes() {
        let home = tempfile::tempdir().unwrap();
        let staging = ImportStaging::new(home.path(), 7);
        create_read_only_directory(&staging.create().unwrap().join("go"));
        create_read_only_directory(&home.path().join("go"));
        let replaced = staging.install().unwrap().unwrap();
        for path in [home.path().join("go"), replaced.join("go")] {
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o555, "{}", path.display());
            // Otherwise the temporary directory can't be removed.
            fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        }
    }

    #[test]
    fn remove_staged_removes_read_only_directories() {
        let home = tempfile::tempdir().unwrap();
        create_read_only_directory(&home.path().join(".import-7/go/pkg"));
        remove_staged(home.path()).unwrap();
        assert!(list_names(home.path()).unwrap().is_empty());
    }

    #[test]
    fn remove_staged_keeps_owner_files_with_same_prefix() {
        let home = tempfile::tempdir().unwrap();
        fs::create_dir(home.path().join(".import-notes")).unwrap();
        for file in [".import-8", ".import-log"] {
            fs::write(home.path().join(file), "x").unwrap();
        }
        remove_staged(home.path()).unwrap();
        assert_eq!(list_names(home.path()).unwrap(), [".import-8", ".import-log", ".import-notes"]);
    }
}
