//! The home's entries of an archive, put in place: each by one rename, by the user whose they are.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::fsx::{self, FileError};
use crate::host::snapshots::archive::{BEFORE, STAGED};

/// Where an import's files are made ready in the directory that they come to, and where it puts aside what was there.
pub struct Staging {
    directory: PathBuf,
    staged: PathBuf,
    before: PathBuf,
}

impl Staging {
    /// Of the import of this number into a directory.
    pub fn of(directory: &Path, number: i64) -> Self {
        Self {
            directory: directory.to_owned(),
            staged: directory.join(format!("{STAGED}{number}")),
            before: directory.join(format!("{BEFORE}{number}")),
        }
    }

    /// Makes an empty directory for the files, and removes those of runs that were killed.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn create(&self) -> Result<&Path, FileError> {
        fs::create_dir_all(&self.directory).map_err(FileError::at("create directory", &self.directory))?;
        remove_staged(&self.directory)?;
        let mut private = fs::DirBuilder::new();
        private.mode(0o700).create(&self.staged).map_err(FileError::at("create directory", &self.staged))?;
        Ok(&self.staged)
    }

    /// Whether this user may move away what has the names of the staged files: in a directory with the sticky bit, which the
    /// home is on a machine, only what is this user's own.
    ///
    /// # Errors
    /// [`FileError`]; it names what has to be given to this user or moved away first.
    pub fn ensure_replaceable(&self) -> Result<(), FileError> {
        let user = nix::unistd::geteuid().as_raw();
        let home = fs::metadata(&self.directory).map_err(FileError::at("look at", &self.directory))?;
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

    /// Puts everything in place; gives the directory with what was there before, if anything was.
    ///
    /// # Errors
    /// [`FileError`]; what is in place then is whole, and so is what is not.
    pub fn place(&self) -> Result<Option<&Path>, FileError> {
        for name in names(&self.staged)? {
            self.exchange(&name)?;
        }
        fs::remove_dir_all(&self.staged).map_err(FileError::at("remove", &self.staged))?;
        fsx::sync_dir(&self.directory)?;
        Ok(self.before.exists().then_some(self.before.as_path()))
    }

    /// The staged entry takes the place of the one of the same name, which is put aside.
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

/// Removes what runs that were killed have made ready.
///
/// # Errors
/// [`FileError`].
pub fn remove_staged(directory: &Path) -> Result<(), FileError> {
    for name in names(directory)? {
        if name.to_string_lossy().starts_with(STAGED) {
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
