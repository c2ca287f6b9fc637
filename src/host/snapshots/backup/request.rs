//! A request file: written by the requester of a backup or a drill, removed by the run that serves it.
//!
//! A request made during a run needs a later snapshot than that run's, so it is left for the next run.

use std::cell::Cell;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use crate::system::layout::Layout;
use svc_base::fsx;
use svc_http::request_id;

/// The request file as it was when this run started.
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

    /// Returns whether there was a request when this was created.
    pub fn is_pending(&self) -> bool {
        self.seen.get().is_some()
    }

    /// The request's id, if the file has one.
    pub fn id(&self) -> Option<String> {
        let text = fsx::read_if_exists(&self.path).ok()??;
        let request: serde_json::Value = serde_json::from_slice(&text).ok()?;
        request["requestId"].as_str().filter(|id| request_id::is_well_formed(id)).map(str::to_owned)
    }

    /// Marks the requests that this run serves: all until now, because the snapshot is taken later.
    pub fn begin(&self) {
        self.seen.set(version(&self.path));
    }

    pub fn complete(&self) {
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
    fn newer_request_is_left_for_the_next_run() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let path = layout.request("backup");
        fsx::write_atomic(&path, b"1", 0o600).unwrap();
        let request = Request::new(&layout, "backup");
        request.begin();
        fsx::write_atomic(&path, b"2", 0o600).unwrap();
        request.complete();
        assert!(path.exists());
        request.begin();
        request.complete();
        assert!(!path.exists());
    }
}
