//! Syncs written files on a separate thread, so that a sync taking seconds doesn't block writes.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A function that syncs a file.
pub type SyncFn = Box<dyn Fn(&File) -> io::Result<()> + Send>;

/// A file or directory with unsynced changes.
pub struct UnsyncedFile {
    path: PathBuf,
    inode: u64,
    file: Arc<File>,
}

impl UnsyncedFile {
    pub fn new(path: PathBuf, inode: u64, file: Arc<File>) -> Self {
        Self { path, inode, file }
    }
}

#[derive(Default)]
struct SyncRequest {
    files: Vec<UnsyncedFile>,
    /// Flush that completes once `files` and all files queued earlier have been synced or failed to sync.
    flush: Option<u64>,
    is_stopping: bool,
}

impl SyncRequest {
    /// Keeps the oldest handle to each file, since a handle only reports errors since it was opened.
    fn add(&mut self, files: Vec<UnsyncedFile>) {
        for file in files {
            if self.files.iter().all(|queued| queued.inode != file.inode) {
                self.files.push(file);
            }
        }
    }
}

/// Queue from the writer thread to the sync thread.
#[derive(Default)]
pub struct Syncer {
    pending: Mutex<SyncRequest>,
    wake: Condvar,
}

impl Syncer {
    fn lock(&self) -> MutexGuard<'_, SyncRequest> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues files to sync. Never blocks on the disk.
    pub fn enqueue(&self, files: Vec<UnsyncedFile>, flush: Option<u64>) {
        let mut pending = self.lock();
        pending.add(files);
        pending.flush = pending.flush.max(flush);
        self.wake.notify_one();
    }

    /// Stops the thread after a final attempt to sync the queued files.
    pub fn stop(&self) {
        self.lock().is_stopping = true;
        self.wake.notify_one();
    }

    /// Runs the sync thread's loop. After each request, calls `on_synced` with the flush it completes, if any, and
    /// whether a sync failed.
    ///
    /// Failed syncs are not retried: Linux reports a write error once per handle and doesn't write the affected pages
    /// again, so a second sync would succeed even though the lines never reached the disk.
    pub fn run(&self, sync: &SyncFn, on_synced: impl Fn(Option<u64>, bool)) {
        let mut is_failing = false;
        loop {
            let request = self.wait_for_request();
            let mut has_failed = false;
            for unsynced in &request.files {
                let Err(error) = sync(&unsynced.file) else { continue };
                has_failed = true;
                if !is_failing {
                    let path = unsynced.path.display();
                    tracing::error!(%path, %error, "cannot sync log file; newest lines may not be on disk");
                }
            }
            if !request.files.is_empty() {
                if is_failing && !has_failed {
                    tracing::info!("records can be synced again");
                }
                is_failing = has_failed;
            }
            on_synced(request.flush, has_failed);
            if request.is_stopping {
                return;
            }
        }
    }

    fn wait_for_request(&self) -> SyncRequest {
        let is_idle = |request: &mut SyncRequest| {
            request.files.is_empty() && request.flush.is_none() && !request.is_stopping
        };
        let mut request = self.wake.wait_while(self.lock(), is_idle).unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *request)
    }
}
