//! A file that requests a backup, a drill or the acceptance of a held-back snapshot. The run that serves the request
//! removes the file.
//!
//! A request made during a run needs a later snapshot than that run's, so it is kept for the next run.

use std::cell::Cell;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use crate::system::layout::Layout;
use svc_base::error_chain::format_chain;
use svc_base::fsx;
use svc_http::request_id;

/// A request file, and the version of it that this run serves.
pub struct RequestFile {
    path: PathBuf,
    served_version: Cell<Option<FileVersion>>,
}

/// Inode and modification time.
type FileVersion = (u64, i64, i64);

impl RequestFile {
    pub fn new(layout: &Layout, name: &str) -> Self {
        let path = layout.request(name);
        let served_version = Cell::new(read_version(&path));
        Self { path, served_version }
    }

    /// Returns whether this run has a request to serve: one that existed when this value was created, or at the last
    /// [`RequestFile::begin`], and that was not postponed.
    pub fn is_pending(&self) -> bool {
        self.served_version.get().is_some()
    }

    /// Returns the request's id, if the file has a well-formed one.
    pub fn id(&self) -> Option<String> {
        let text = fsx::read_if_exists(&self.path).ok()??;
        let request: serde_json::Value = serde_json::from_slice(&text).ok()?;
        request["requestId"].as_str().filter(|id| request_id::is_well_formed(id)).map(str::to_owned)
    }

    /// Marks every request made so far as served by this run, whose snapshot is taken later.
    pub fn begin(&self) {
        self.served_version.set(read_version(&self.path));
    }

    /// Leaves the request to the next run, because this one is stopped before it succeeds.
    pub fn postpone(&self) {
        self.served_version.set(None);
    }

    /// Removes the file, unless it holds a newer request, or a postponed one.
    pub fn complete(&self) {
        if read_version(&self.path) != self.served_version.get() {
            return;
        }
        if let Err(error) = fsx::remove_if_exists(&self.path) {
            tracing::error!(error = %format_chain(&error), "could not remove the request file");
        }
    }
}

fn read_version(path: &PathBuf) -> Option<FileVersion> {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.ino(), meta.mtime(), meta.mtime_nsec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complete_keeps_newer_or_postponed_request() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let path = layout.request("backup");
        fsx::write_atomic(&path, b"1", 0o600).unwrap();
        let request = RequestFile::new(&layout, "backup");
        request.begin();
        fsx::write_atomic(&path, b"2", 0o600).unwrap();
        request.complete();
        assert!(path.exists());
        request.begin();
        request.postpone();
        request.complete();
        assert!(path.exists());
        request.begin();
        request.complete();
        assert!(!path.exists());
    }
}
