//! Makes what was written durable, on a thread of its own: a disk may take seconds for that, and lines are written meanwhile.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How a file is made durable.
pub type Durably = Box<dyn Fn(&File) -> io::Result<()> + Send>;

/// A disk that refused is asked again after this.
const AGAIN: Duration = Duration::from_millis(500);

/// A file, or a directory, with something that may be lost where the power goes.
pub struct Unsynced {
    path: PathBuf,
    inode: u64,
    file: Arc<File>,
    /// That it cannot be made durable was said.
    is_told: bool,
}

impl Unsynced {
    pub fn new(path: PathBuf, inode: u64, file: Arc<File>) -> Self {
        Self { path, inode, file, is_told: false }
    }

    fn is_durable(&mut self, durably: &Durably) -> bool {
        let Err(error) = durably(&self.file) else { return true };
        if !std::mem::replace(&mut self.is_told, true) {
            tracing::warn!(path = %self.path.display(), %error, "could not sync a record; trying again");
        }
        false
    }
}

#[derive(Default)]
struct Due {
    files: Vec<Unsynced>,
    /// The flush that is done once all files are durable that were handed over before.
    flush: Option<u64>,
    stop: bool,
}

impl Due {
    /// Of a file that is there already, the handle that was there first is kept: it hears of what went wrong since.
    fn add(&mut self, files: Vec<Unsynced>) {
        for file in files {
            if self.files.iter().all(|known| known.inode != file.inode) {
                self.files.push(file);
            }
        }
    }
}

/// What is handed from the thread that writes to the one that syncs.
#[derive(Default)]
pub struct Syncer {
    due: Mutex<Due>,
    wake: Condvar,
}

impl Syncer {
    fn lock(&self) -> MutexGuard<'_, Due> {
        self.due.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Never waits for the disk.
    pub fn hand(&self, files: Vec<Unsynced>, flush: Option<u64>) {
        let mut due = self.lock();
        due.add(files);
        due.flush = due.flush.max(flush);
        self.wake.notify_one();
    }

    /// Nothing more comes: what there is is tried once more.
    pub fn stop(&self) {
        self.lock().stop = true;
        self.wake.notify_one();
    }

    /// The thread's work. `done` hears of each flush that is durable.
    pub fn work(&self, durably: &Durably, done: impl Fn(u64)) {
        let mut failed = Due::default();
        loop {
            let mut due = self.next(!failed.files.is_empty());
            failed.add(std::mem::take(&mut due.files));
            failed.flush = failed.flush.max(due.flush);
            failed.files.retain_mut(|unsynced| !unsynced.is_durable(durably));
            if failed.files.is_empty()
                && let Some(flush) = failed.flush.take()
            {
                done(flush);
            }
            if due.stop {
                return;
            }
        }
    }

    fn next(&self, has_failed: bool) -> Due {
        let idle = |due: &mut Due| due.files.is_empty() && due.flush.is_none() && !due.stop;
        let due = self.lock();
        let mut due = if has_failed {
            // What the disk refuses is not tried without a pause, whatever comes.
            let waited = self.wake.wait_timeout_while(due, AGAIN, |due| !due.stop);
            waited.unwrap_or_else(PoisonError::into_inner).0
        } else {
            self.wake.wait_while(due, idle).unwrap_or_else(PoisonError::into_inner)
        };
        let stop = due.stop;
        Due { stop, ..std::mem::take(&mut *due) }
    }
}
