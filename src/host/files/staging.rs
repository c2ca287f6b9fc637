//! Restore staging directory, on the same file system as the owner's files.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::PathBuf;

use serde::Serialize;
use serde::de::DeserializeOwned;
use svc_base::fsx::{self, FileError};

use crate::system::layout::Layout;

/// Names of the staging directories in the user's home directory: one for restores on a new machine, one for
/// single-entry restores. Never included in backups.
pub const HOME_STAGING: &str = ".svc-restore";
pub const ENTRY_STAGING: &str = ".svc-restore-entry";
pub const STAGING_NAMES: [&str; 2] = [HOME_STAGING, ENTRY_STAGING];
/// Marker file created in the staging directory once it contains all files.
const COMPLETION_MARKER: &str = "complete";

/// A directory that holds restored files until they are moved into place.
pub struct Staging {
    path: PathBuf,
    /// Uid that owns the file-backup state directory (svc-gateway).
    service_uid: u32,
}

impl Staging {
    /// `name` is the directory's name in the user's home directory.
    pub fn new(layout: &Layout, name: &str) -> Self {
        let service_uid = fs::metadata(layout.files_state()).map_or(0, |meta| meta.uid());
        Self { path: layout.user_home().join(name), service_uid }
    }

    /// Directory for restored files.
    pub fn files(&self) -> PathBuf {
        self.path.join("files")
    }

    /// Directory for replaced entries. Outside [`Self::files`], where owner entries may have any name.
    pub fn replaced(&self) -> PathBuf {
        self.path.join("replaced")
    }

    /// Returns whether the directory exists. Rejects one that belongs to another user, because the owner's programs can
    /// create a directory with this name. They can't enter a directory created by this process because of its mode, nor
    /// rename or remove it, because its parent is sticky and root-owned.
    ///
    /// # Errors
    /// If the path exists but isn't a directory owned by svc-gateway or root, or if its metadata can't be read.
    pub fn verify_if_exists(&self) -> Result<bool, FileError> {
        match fs::symlink_metadata(&self.path) {
            Ok(meta) if meta.is_dir() && [0, self.service_uid].contains(&meta.uid()) => Ok(true),
            Ok(_) => {
                let reason = "not a directory owned by svc-gateway or root; remove it";
                Err(FileError::wrap("use", &self.path)(std::io::Error::other(reason)))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(FileError::wrap("read", &self.path)(error)),
        }
    }

    /// Returns the data written by [`Self::mark_complete`]; `None` if the directory isn't complete yet or the data is
    /// invalid.
    pub fn read_complete<T: DeserializeOwned>(&self) -> Result<Option<T>, FileError> {
        let text = fsx::read_if_exists(&self.path.join(COMPLETION_MARKER))?;
        Ok(text.and_then(|text| serde_json::from_slice(&text).ok()))
    }

    /// Marks the directory as complete, storing `data` for the next step.
    pub fn mark_complete(&self, data: &impl Serialize) -> Result<(), FileError> {
        let text = serde_json::to_vec(data).expect("plain fields serialize to JSON");
        fsx::write_atomic(&self.path.join(COMPLETION_MARKER), &text, 0o600)
    }

    /// Creates the directory, empty and inaccessible to other users, after removing any left by a killed run.
    ///
    /// # Errors
    /// If another user has created a directory with this name, or a directory cannot be removed or created.
    pub fn recreate(&self) -> Result<(), FileError> {
        self.remove()?;
        if let Some(home) = self.path.parent() {
            fs::create_dir_all(home).map_err(FileError::wrap("create", home))?;
        }
        // Not `recursive`: creation must fail if another user has just created the directory.
        for path in [self.path.clone(), self.files()] {
            let created = DirBuilder::new().mode(0o700).create(&path);
            created.map_err(FileError::wrap("create", &path))?;
        }
        Ok(())
    }

    /// Removes the directory if it exists.
    ///
    /// # Errors
    /// If the directory belongs to another user, or cannot be removed.
    pub fn remove(&self) -> Result<(), FileError> {
        if !self.verify_if_exists()? {
            return Ok(());
        }
        // Remove the completion marker first: a killed run must not leave it without the files.
        fsx::remove_if_exists(&self.path.join(COMPLETION_MARKER))?;
        fs::remove_dir_all(&self.path).map_err(FileError::wrap("remove", &self.path))
    }
}
