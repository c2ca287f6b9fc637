//! Puts the home's entries of an archive in place, each by one rename, as the user who owns them.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::snapshots::archive::{REPLACED_PREFIX, STAGING_PREFIX};
use svc_base::fsx::{self, FileError};

/// The working directories of an import: one for staged files, one for the replaced ones.
pub struct Staging {
    directory: PathBuf,
    staged: PathBuf,
    before: PathBuf,
}

impl Staging {
    /// The directories of import `number`, below `directory`.
    pub fn new(directory: &Path, number: i64) -> Self {
        Self {
            directory: directory.to_owned(),
            staged: directory.join(format!("{STAGING_PREFIX}{number}")),
            before: directory.join(format!("{REPLACED_PREFIX}{number}")),
        }
    }

    /// Creates an empty staging directory and removes those of killed runs.
    pub fn create(&self) -> Result<&Path, FileError> {
        fs::create_dir_all(&self.directory).map_err(FileError::at("create directory", &self.directory))?;
        remove_staged(&self.directory)?;
        let mut private = fs::DirBuilder::new();
        private.mode(0o700).create(&self.staged).map_err(FileError::at("create directory", &self.staged))?;
        Ok(&self.staged)
    }

    /// Checks that this user may rename the files to be replaced. In a directory with the sticky bit, such as the home,
    /// a user may rename only files that it owns.
    ///
    /// # Errors
    /// [`FileError`]; it names the file that must change its owner or be moved away first.
    pub fn ensure_replaceable(&self) -> Result<(), FileError> {
        let user = nix::unistd::geteuid().as_raw();
        let home = fs::metadata(&self.directory).map_err(FileError::at("inspect", &self.directory))?;
        if user == 0 || home.uid() == user || home.mode() & 0o1000 == 0 {
            return Ok(());
        }
        for name in names(&self.staged)? {
            let path = self.directory.join(name);
            if fs::symlink_metadata(&path).is_ok_and(|meta| meta.uid() != user) {
                let of_another = std::io::Error::other("it belongs to another user: move it away first");
                return Err(FileError::at("replace", &path)(of_another));
            }
        }
        Ok(())
    }

    /// Puts everything in place; returns the directory with the replaced files, if any.
    ///
    /// # Errors
    /// [`FileError`]; every entry is then either completely replaced or unchanged.
    pub fn install(&self) -> Result<Option<&Path>, FileError> {
        for name in names(&self.staged)? {
            self.exchange(&name)?;
        }
        fs::remove_dir_all(&self.staged).map_err(FileError::at("remove", &self.staged))?;
        fsx::sync_dir(&self.directory)?;
        Ok(self.before.exists().then_some(self.before.as_path()))
    }

    /// Puts a staged entry in place and sets the existing one of that name aside.
    fn exchange(&self, name: &OsString) -> Result<(), FileError> {
        let to = self.directory.join(name);
        if fs::symlink_metadata(&to).is_ok() {
            let mut private = fs::DirBuilder::new();
            let made = private.recursive(true).mode(0o750).create(&self.before);
            made.map_err(FileError::at("create directory", &self.before))?;
            fs::rename(&to, self.before.join(name)).map_err(FileError::at("put aside", &to))?;
        }
        fs::rename(self.staged.join(name), &to).map_err(FileError::at("put in place", &to))
    }
}

/// Removes the staging directories of killed runs.
pub fn remove_staged(directory: &Path) -> Result<(), FileError> {
    for name in names(directory)? {
        if name.to_string_lossy().starts_with(STAGING_PREFIX) {
            let path = directory.join(name);
            fs::remove_dir_all(&path).map_err(FileError::at("remove", &path))?;
        }
    }
    Ok(())
}

fn names(dir: &Path) -> Result<Vec<OsString>, FileError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(FileError::at("read", dir)(error)),
    };
    let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
    names.sort_unstable();
    Ok(names)
}
