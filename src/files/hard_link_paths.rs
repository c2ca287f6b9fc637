//! The first path of each file with several hard links.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::tree::HardLinkKey;

/// The first path of each file with several hard links.
///
/// Consecutive paths in one directory share the directory's path, because a path can be 4 KiB long and a directory can
/// contain any number of such files.
#[derive(Debug, Default)]
pub struct HardLinkPaths {
    paths: HashMap<HardLinkKey, (Arc<Path>, Box<OsStr>)>,
    /// The directory of the path that was added last.
    directory: Option<Arc<Path>>,
}

impl HardLinkPaths {
    /// Returns the first path of the file if `path` is an additional one. Otherwise, `path` becomes the first one.
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
