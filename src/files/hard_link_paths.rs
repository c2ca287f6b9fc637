//! Tracks the first path of each hard-linked file.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::tree::HardLinkKey;

/// The first path of each hard-linked file.
///
/// To save memory, consecutive paths in a directory share its path: a path can be 4 KiB long, and a directory can
/// contain any number of hard links.
#[derive(Debug, Default)]
pub struct HardLinkPaths {
    paths: HashMap<HardLinkKey, (Arc<Path>, Box<OsStr>)>,
    /// Directory of the most recently added path.
    directory: Option<Arc<Path>>,
}

impl HardLinkPaths {
    /// Returns the file's first path, or records `path` as the first one and returns `None`.
    pub fn find_or_insert(&mut self, path: &Path, key: HardLinkKey) -> Option<PathBuf> {
        if let Some((directory, name)) = self.paths.get(&key) {
            return Some(directory.join(&**name));
        }
        let parent = path.parent().unwrap_or(Path::new(""));
        let directory = match &self.directory {
            Some(directory) if **directory == *parent => Arc::clone(directory),
            _ => Arc::clone(self.directory.insert(parent.into())),
        };
        self.paths.insert(key, (directory, path.file_name().unwrap_or_default().into()));
        None
    }
}
