//! A request file: whoever wants a backup or a drill writes it, the run that serves it removes it.
//!
//! A request made while a run is under way asks for a later snapshot than that run's: it is left for the next one.

use std::cell::Cell;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use crate::fsx;
use crate::host::system::layout::Layout;
use crate::http::request_id;

/// The file as it was when this run began.
pub struct Request {
    path: PathBuf,
    seen: Cell<Option<Version>>,
}

type Version = (u64, i64, i64);

impl Request {
    pub fn new(layout: &Layout, name: &str) -> Self {
        let path = layout.request(name);
        let seen = Cell::new(version(&path));
        Self { path, seen }
    }

    /// Whether something was asked when this was made.
    pub fn is_there(&self) -> bool {
        self.seen.get().is_some()
    }

    /// The id of the request that asked, where the file tells one.
    pub fn id(&self) -> Option<String> {
        let text = fsx::read_if_exists(&self.path).ok()??;
        let told: serde_json::Value = serde_json::from_slice(&text).ok()?;
        told["requestId"].as_str().filter(|id| request_id::fits(id)).map(str::to_owned)
    }

    /// The snapshot comes after this moment: it serves what was asked until now.
    pub fn begin(&self) {
        self.seen.set(version(&self.path));
    }

    pub fn done(&self) {
        if version(&self.path) != self.seen.get() {
            return;
        }
        if let Err(error) = fsx::remove_if_exists(&self.path) {
            tracing::error!(%error, "could not remove the request");
        }
    }
}

fn version(path: &PathBuf) -> Option<Version> {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.ino(), meta.mtime(), meta.mtime_nsec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newer_request_is_left_for_the_next_run() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let path = layout.request("backup");
        fsx::write_atomic(&path, b"1", 0o600).unwrap();
        let request = Request::new(&layout, "backup");
        request.begin();
        fsx::write_atomic(&path, b"2", 0o600).unwrap();
        request.done();
        assert!(path.exists());
        request.begin();
        request.done();
        assert!(!path.exists());
    }
}
