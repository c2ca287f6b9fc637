//! The exclusions of a save.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// The entries that a save excludes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exclusions {
    /// Names of directories that are left out wherever they are.
    pub directory_names: Vec<OsString>,
    /// Paths below the home.
    pub paths: Vec<PathBuf>,
}

impl Exclusions {
    pub(super) fn excludes(&self, path: &Path, name: &OsStr, is_directory: bool) -> bool {
        let has_name = || self.directory_names.iter().any(|excluded| excluded == name);
        is_directory && has_name() || self.paths.iter().any(|excluded| excluded == path)
    }
}
