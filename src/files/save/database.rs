//! Consistent copies of live SQLite databases: the saved files must form a database that opens.
//!
//! In WAL mode, commits append to `X-wal`, and only checkpoints modify `X`. `WAL_READ_LOCK(0)` in `X-shm` is held by
//! readers that don't read any WAL frames. It blocks checkpoints, so `X` plus a prefix of `X-wal` read afterwards is
//! the state after some commit. Readers and writers don't block on this lock, except behind a checkpoint waiting for
//! it. The last connection to close runs a checkpoint without this lock, but only if it can lock `X` exclusively.
//!
//! In the other modes, a commit writes the original pages to `X-journal` before modifying `X`. If a database changes
//! while we read it, we retry, the last time under a reader's lock, which blocks writers. Large databases are locked
//! only if the previous read was fast enough: their chunks are known by then, so the next read takes no longer.
//!
//! Locks are released after [`MAX_LOCK_TIME`]. A copy made without a lock is considered consistent only if the database
//! didn't change during the read.
//!
//! Sources: <https://www.sqlite.org/walformat.html>, <https://www.sqlite.org/lockingv3.html>.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::fs::OFlags;

use super::entry_stat::{open_in, stat_in, stat_open};

/// Magic bytes at the start of a database file.
const MAGIC: &[u8] = b"SQLite format 3\0";
const WAL_SUFFIX: &[u8] = b"-wal";
const JOURNAL_SUFFIX: &[u8] = b"-journal";
/// `WAL_READ_LOCK(0)` in the shared-memory file.
const WAL_READ_LOCK: LockRange = (123, 1);
/// Locked by a writer before it waits for readers to finish.
const PENDING_LOCK: LockRange = (0x4000_0000, 1);
/// Locked by every reader, and by a writer while it modifies the database.
const SHARED_LOCK: LockRange = (0x4000_0002, 510);
/// Databases up to this size are locked regardless of how long the last read took.
const MAX_ALWAYS_LOCKED_BYTES: u64 = 256 << 20;
/// Larger databases are locked only if the last read took at most this long. A slower read would probably outlast
/// [`MAX_LOCK_TIME`], so the lock would only delay writers.
const MAX_LOCKED_READ_TIME: Duration = Duration::from_secs(2);
/// Maximum time to hold locks: less than the usual 5 s busy timeout of SQLite clients.
const MAX_LOCK_TIME: Duration = Duration::from_secs(3);
/// SQLite's minimum page size.
const MIN_DATABASE_BYTES: u64 = 512;
/// Maximum number of attempts to acquire a lock, one per [`LOCK_RETRY_INTERVAL`].
const MAX_LOCK_ATTEMPTS: u32 = 50;
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Files of one database.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct DatabaseFiles {
    /// In save order: the main file first.
    pub(super) names: Vec<OsString>,
    has_wal: bool,
}

/// Releases its locks on drop, and after [`MAX_LOCK_TIME`] at the latest, since the save may block on the store.
pub(super) struct ReadLock {
    lock_set: Arc<LockSet>,
    /// Dropping it cancels the release after [`MAX_LOCK_TIME`].
    _cancel: mpsc::Sender<()>,
}

struct LockSet {
    locks: Vec<(OwnedFd, LockRange)>,
    is_released: AtomicBool,
}

/// Offset and length, in bytes.
type LockRange = (i64, i64);

impl LockSet {
    fn release(&self) {
        if !self.is_released.swap(true, Ordering::AcqRel) {
            for (file, range) in &self.locks {
                set_lock(file, *range, libc::F_UNLCK);
            }
        }
    }
}

impl ReadLock {
    fn new(locks: Vec<(OwnedFd, LockRange)>) -> Self {
        let lock_set = Arc::new(LockSet { locks, is_released: AtomicBool::new(false) });
        let (cancel, cancelled) = mpsc::channel();
        let timed_lock_set = Arc::clone(&lock_set);
        let release = move || {
            if cancelled.recv_timeout(MAX_LOCK_TIME) == Err(mpsc::RecvTimeoutError::Timeout) {
                timed_lock_set.release();
            }
        };
        // Without the thread, the locks could be held too long.
        if std::thread::Builder::new().name("files-lock".to_owned()).spawn(release).is_err() {
            lock_set.release();
        }
        Self { lock_set, _cancel: cancel }
    }

    /// Whether the locks are still held.
    pub(super) fn is_held(&self) -> bool {
        !self.lock_set.is_released.load(Ordering::Acquire)
    }
}

impl Drop for ReadLock {
    fn drop(&mut self) {
        self.lock_set.release();
    }
}

impl DatabaseFiles {
    /// Extracts the files of databases with a WAL or journal, which may be in use, from the names in a directory.
    /// Returns them grouped by database.
    pub(super) fn extract_from(names: &mut Vec<OsString>) -> Vec<Self> {
        let all: HashSet<&OsStr> = names.iter().map(OsString::as_os_str).collect();
        let mut databases = Vec::new();
        for name in names.iter() {
            for suffix in [WAL_SUFFIX, JOURNAL_SUFFIX] {
                let base = name.as_bytes().strip_suffix(suffix).map(OsStr::from_bytes);
                let Some(base) = base.filter(|base| all.contains(base)) else { continue };
                let files = [base.to_owned(), name.clone(), with_suffix(base, b"-shm")];
                let present = files.into_iter().filter(|file| all.contains(file.as_os_str())).collect();
                databases.push(Self { names: present, has_wal: suffix == WAL_SUFFIX });
            }
        }
        // A database has a WAL or a journal. If it has both, the first one found wins.
        let mut taken: HashSet<OsString> = HashSet::new();
        databases.retain(|files| {
            files.names.iter().all(|name| !taken.contains(name)) && {
                taken.extend(files.names.iter().cloned());
                true
            }
        });
        names.retain(|name| !taken.contains(name));
        databases
    }

    /// Blocks checkpoints. Returns `None` if no program has the database open in WAL mode, if one has it open
    /// exclusively, or if a checkpoint still holds its lock after [`MAX_LOCK_ATTEMPTS`].
    pub(super) fn lock(&self, directory: &OwnedFd) -> Option<ReadLock> {
        let base = self.names.first().filter(|_| self.has_wal)?;
        let open = |name: &OsStr| open_in(directory, name, OFlags::NONBLOCK | OFlags::NOCTTY).ok();
        let (database, shared_name) = (open(base)?, with_suffix(base, b"-shm"));
        let shared = open(&shared_name)?;
        // Every connection holds this lock as well. While we hold it, the last connection to close leaves the WAL in
        // place.
        if !lock(&database, SHARED_LOCK) {
            return None;
        }
        let is_locked = lock(&shared, WAL_READ_LOCK);
        let read_lock =
            ReadLock::new(vec![(database, SHARED_LOCK), (shared.try_clone().ok()?, WAL_READ_LOCK)]);
        // The last connection may have closed before we took the lock, and a later one may have created a new
        // shared-memory file.
        let inode = stat_open(&shared).ok()?.stx_ino;
        let is_current = stat_in(directory, &shared_name).is_ok_and(|stat| stat.stx_ino == inode);
        (is_locked && is_current).then_some(read_lock)
    }

    /// Opens the main file.
    pub(super) fn open(&self, directory: &OwnedFd) -> Option<File> {
        open_in(directory, self.main_file_name()?, OFlags::NONBLOCK | OFlags::NOCTTY).ok().map(File::from)
    }

    /// Name of the main file, which contains the database itself and must not change during the save.
    pub(super) fn main_file_name(&self) -> Option<&OsStr> {
        self.names.first().map(OsString::as_os_str)
    }
}

fn with_suffix(base: &OsStr, suffix: &[u8]) -> OsString {
    let mut name = base.to_owned();
    name.push(OsStr::from_bytes(suffix));
    name
}

/// Takes a reader's lock on a database to block writers. Returns `None` if the file isn't a database, if reading it
/// would take too long, or if a writer still holds its lock after [`MAX_LOCK_ATTEMPTS`]. `read_duration` is how long
/// the previous read took.
pub(super) fn lock_as_reader(file: &File, size: u64, read_duration: Duration) -> Option<ReadLock> {
    if !should_lock(size, read_duration) || !is_database(file, size) {
        return None;
    }
    // OFD locks are released only when all descriptors of the open file description are closed.
    let file = file.as_fd().try_clone_to_owned().ok()?;
    let has_pending_lock = lock(&file, PENDING_LOCK);
    let has_shared_lock = has_pending_lock && lock(&file, SHARED_LOCK);
    if has_pending_lock {
        set_lock(&file, PENDING_LOCK, libc::F_UNLCK);
    }
    has_shared_lock.then(|| ReadLock::new(vec![(file, SHARED_LOCK)]))
}

/// Whether a database is small or will likely be read before its lock is released.
fn should_lock(size: u64, read_duration: Duration) -> bool {
    size <= MAX_ALWAYS_LOCKED_BYTES || read_duration <= MAX_LOCKED_READ_TIME
}

/// Whether a file starts with the SQLite magic bytes.
pub(super) fn is_database(file: &File, size: u64) -> bool {
    let mut start = [0; MAGIC.len()];
    size >= MIN_DATABASE_BYTES && file.read_exact_at(&mut start, 0).is_ok() && start == MAGIC
}

/// Takes a read lock, retrying because a writer may briefly hold a conflicting one. Returns whether it succeeded.
fn lock(file: &OwnedFd, range: LockRange) -> bool {
    (0..MAX_LOCK_ATTEMPTS).any(|attempt| {
        if attempt > 0 {
            std::thread::sleep(LOCK_RETRY_INTERVAL);
        }
        set_lock(file, range, libc::F_RDLCK)
    })
}

/// Sets or releases an open file description (OFD) lock without blocking. Returns whether it succeeded. OFD locks
/// conflict with SQLite's own locks, but closing another descriptor of the file doesn't drop them. Read locks don't
/// conflict with each other.
fn set_lock(file: &OwnedFd, (start, length): LockRange, kind: i32) -> bool {
    let lock = libc::flock {
        l_type: i16::try_from(kind).unwrap_or_default(),
        l_whence: i16::try_from(libc::SEEK_SET).unwrap_or_default(),
        l_start: start,
        l_len: length,
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_SETLK(&lock)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extract_from_groups_files_by_database() {
        let mut names: Vec<OsString> =
            ["a", "a-journal", "b", "b-shm", "b-wal", "b-wal-notes", "c-wal", "d"].map(OsString::from).into();
        let found = DatabaseFiles::extract_from(&mut names);
        let names_of = |files: &DatabaseFiles| -> Vec<String> {
            files.names.iter().map(|name| name.to_string_lossy().into_owned()).collect()
        };
        assert_eq!(
            found.iter().map(names_of).collect::<Vec<_>>(),
            [vec!["a", "a-journal"], vec!["b", "b-wal", "b-shm"]]
        );
        assert_eq!((found[0].has_wal, found[1].has_wal), (false, true));
        assert_eq!(names, ["b-wal-notes", "c-wal", "d"].map(OsString::from));
    }

    #[test]
    fn large_database_is_locked_only_after_fast_read() {
        let slow = MAX_LOCKED_READ_TIME + Duration::from_millis(1);
        assert!(should_lock(MAX_ALWAYS_LOCKED_BYTES, slow));
        assert!(should_lock(MAX_ALWAYS_LOCKED_BYTES + 1, MAX_LOCKED_READ_TIME));
        assert!(!should_lock(MAX_ALWAYS_LOCKED_BYTES + 1, slow));
        assert!(MAX_LOCKED_READ_TIME < MAX_LOCK_TIME);
    }
}
