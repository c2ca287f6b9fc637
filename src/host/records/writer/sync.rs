//! Syncs written files on a separate thread, so that writing continues during a sync of several seconds.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A function that syncs a file.
pub type SyncFn = Box<dyn Fn(&File) -> io::Result<()> + Send>;

/// Retry interval after a failed sync.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// A file or directory with unsynced changes.
pub struct UnsyncedFile {
    path: PathBuf,
    inode: u64,
    file: Arc<File>,
    /// Whether a failure has been logged.
    is_logged: bool,
}

impl UnsyncedFile {
    pub fn new(path: PathBuf, inode: u64, file: Arc<File>) -> Self {
        Self { path, inode, file, is_logged: false }
    }

    fn try_sync(&mut self, sync: &SyncFn) -> bool {
        let Err(error) = sync(&self.file) else { return true };
        if !std::mem::replace(&mut self.is_logged, true) {
            tracing::warn!(path = %self.path.display(), %error, "cannot sync a record; retrying");
        }
        false
    }
}

#[derive(Default)]
struct SyncRequest {
    files: Vec<UnsyncedFile>,
    /// The flush that is complete once `files`, and all files queued earlier, have been synced.
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

    /// Stops the thread after a final attempt.
    pub fn stop(&self) {
        self.lock().is_stopping = true;
        self.wake.notify_one();
    }

    /// Runs the syncing thread's loop. Calls `on_durable` once a flush is durable.
    pub fn run(&self, sync: &SyncFn, on_durable: impl Fn(u64)) {
        let mut unfinished = SyncRequest::default();
        loop {
            let mut request = self.wait_for_request(!unfinished.files.is_empty());
            unfinished.add(std::mem::take(&mut request.files));
            unfinished.flush = unfinished.flush.max(request.flush);
            unfinished.files.retain_mut(|unsynced| !unsynced.try_sync(sync));
            if unfinished.files.is_empty()
                && let Some(flush) = unfinished.flush.take()
            {
                on_durable(flush);
            }
            if request.is_stopping {
                return;
            }
        }
    }

    fn wait_for_request(&self, has_failed: bool) -> SyncRequest {
        let is_idle = |request: &mut SyncRequest| {
            request.files.is_empty() && request.flush.is_none() && !request.is_stopping
        };
        let request = self.lock();
        let mut request = if has_failed {
            // Pause between retries, even if new requests arrive.
            let waited =
                self.wake.wait_timeout_while(request, RETRY_INTERVAL, |request| !request.is_stopping);
            waited.unwrap_or_else(PoisonError::into_inner).0
        } else {
            self.wake.wait_while(request, is_idle).unwrap_or_else(PoisonError::into_inner)
        };
        let is_stopping = request.is_stopping;
        SyncRequest { is_stopping, ..std::mem::take(&mut *request) }
    }
}
