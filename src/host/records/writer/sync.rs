//! Syncs written files on a separate thread, so that writing continues during a sync of several seconds.

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
    /// The flush that ends once `files`, and all files queued earlier, have been synced or have failed to sync.
    flush: Option<u64>,
    is_stopping: bool,
}

impl SyncRequest {
    /// Keeps the oldest handle to each file, because a handle only reports errors since it was opened.
    fn add(&mut self, files: Vec<UnsyncedFile>) {
        for file in files {
            if self.files.iter().all(|queued| queued.inode != file.inode) {
                self.files.push(file);
            }
        }
    }
}

/// The queue from the writing thread to the syncing thread.
#[derive(Default)]
pub struct Syncer {
    pending: Mutex<SyncRequest>,
    wake: Condvar,
}

impl Syncer {
    fn lock(&self) -> MutexGuard<'_, SyncRequest> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues files for a sync. Never waits for the disk.
    pub fn enqueue(&self, files: Vec<UnsyncedFile>, flush: Option<u64>) {
        let mut pending = self.lock();
        pending.add(files);
        pending.flush = pending.flush.max(flush);
        self.wake.notify_one();
    }

    /// Stops the thread after it has tried to sync the queued files.
    pub fn stop(&self) {
        self.lock().is_stopping = true;
        self.wake.notify_one();
    }

    /// Runs the syncing thread's loop. After each request, calls `on_synced` with the flush that it ends, and whether a
    /// sync failed.
    ///
    /// A failed sync is not retried. Linux reports a write error once for each handle, and does not write the affected
    /// pages again: a second sync would succeed although the lines never reached the disk.
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
                    tracing::error!(%path, %error, "cannot sync a log file; its newest lines may not be on disk");
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
