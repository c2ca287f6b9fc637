//! SQLite databases that programs write meanwhile: what is saved of them must open again.
//!
//! In WAL mode, commits append to `X-wal`, and only a checkpoint changes `X`. While the lock of a reader that reads no
//! frames is held (`WAL_READ_LOCK(0)` in `X-shm`), no checkpoint can do so: `X`, and then a prefix of `X-wal`, are the
//! state after some commit. Readers and writers do not wait for this lock, except behind a checkpoint that waits for it.
//! The last connection checkpoints without that lock when it closes, but only if it gets `X` exclusively.
//!
//! In the other modes, a commit changes `X` after `X-journal` has the old pages. A database that changed while it was read
//! is read once more under the lock of a reader, for which writers wait.
//!
//! Locks are released after [`MAX_LOCK_TIME`]. Without one, a copy counts only if the database did not change while it was
//! read.
//!
//! Source: <https://www.sqlite.org/walformat.html>, <https://www.sqlite.org/lockingv3.html>.

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

/// The first bytes of a database.
const MAGIC: &[u8] = b"SQLite format 3\0";
const WAL_SUFFIX: &[u8] = b"-wal";
const JOURNAL_SUFFIX: &[u8] = b"-journal";
/// `WAL_READ_LOCK(0)`: its byte in the shared memory file.
const WAL_READ_LOCK: Range = (123, 1);
/// A writer takes this byte before it waits for readers to end.
const PENDING_LOCK: Range = (0x4000_0000, 1);
/// The bytes that each reader locks, and a writer while it changes the database.
const SHARED_LOCK: Range = (0x4000_0002, 510);
/// Writers of larger databases would wait too long.
const MAX_LOCKED_BYTES: u64 = 256 << 20;
/// Shorter than usual busy timeouts, which are 5 s.
const MAX_LOCK_TIME: Duration = Duration::from_secs(3);
/// The smallest page.
const MIN_DATABASE_BYTES: u64 = 512;
const LOCK_ATTEMPTS: u32 = 50;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// The files of one database in a directory.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct DatabaseFiles {
    /// In the order in which they are saved: the database first.
    pub(super) names: Vec<OsString>,
    has_wal: bool,
}

/// Locks that are released when this is dropped, and after [`MAX_LOCK_TIME`]: the save may be waiting for the store.
pub(super) struct ReadLock {
    held: Arc<HeldLocks>,
    /// Dropping it ends the thread that releases the locks in time.
    _end: mpsc::Sender<()>,
}

struct HeldLocks {
    locks: Vec<(OwnedFd, Range)>,
    is_released: AtomicBool,
}

/// The first byte of a lock, and the number of bytes.
type Range = (i64, i64);

impl HeldLocks {
    fn release(&self) {
        if !self.is_released.swap(true, Ordering::AcqRel) {
            for (file, range) in &self.locks {
                set_lock(file, *range, libc::F_UNLCK);
            }
        }
    }
}

impl ReadLock {
    fn new(locks: Vec<(OwnedFd, Range)>) -> Self {
        let held = Arc::new(HeldLocks { locks, is_released: AtomicBool::new(false) });
        let (end, ended) = mpsc::channel();
        let timed = Arc::clone(&held);
        let release = move || {
            if ended.recv_timeout(MAX_LOCK_TIME) == Err(mpsc::RecvTimeoutError::Timeout) {
                timed.release();
            }
        };
        // Without the thread, nothing is held.
        if std::thread::Builder::new().name("files-lock".to_owned()).spawn(release).is_err() {
            held.release();
        }
        Self { held, _end: end }
    }

    /// Whether the locks have been held until now.
    pub(super) fn is_held(&self) -> bool {
        !self.held.is_released.load(Ordering::Acquire)
    }
}

impl Drop for ReadLock {
    fn drop(&mut self) {
        self.held.release();
    }
}

impl DatabaseFiles {
    /// Takes the names of databases that are being written, and of the files beside them, out of a directory's names.
    pub(super) fn take_from(names: &mut Vec<OsString>) -> Vec<Self> {
        let all: HashSet<&OsStr> = names.iter().map(OsString::as_os_str).collect();
        let mut found = Vec::new();
        for name in names.iter() {
            for suffix in [WAL_SUFFIX, JOURNAL_SUFFIX] {
                let base = name.as_bytes().strip_suffix(suffix).map(OsStr::from_bytes);
                let Some(base) = base.filter(|base| all.contains(base)) else { continue };
                let files = [base.to_owned(), name.clone(), with_suffix(base, b"-shm")];
                let present = files.into_iter().filter(|file| all.contains(file.as_os_str())).collect();
                found.push(Self { names: present, has_wal: suffix == WAL_SUFFIX });
            }
        }
        // A database has one of the two; if it has both, the files belong to the first.
        let mut taken: HashSet<OsString> = HashSet::new();
        found.retain(|files| {
            files.names.iter().all(|name| !taken.contains(name)) && {
                taken.extend(files.names.iter().cloned());
                true
            }
        });
        names.retain(|name| !taken.contains(name));
        found
    }

    /// Keeps checkpoints from changing the database; `None` if no program has it open in WAL mode, or one has it open
    /// exclusively.
    pub(super) fn lock(&self, directory: &OwnedFd) -> Option<ReadLock> {
        let base = self.names.first().filter(|_| self.has_wal)?;
        let open = |name: &OsStr| open_in(directory, name, OFlags::NONBLOCK | OFlags::NOCTTY).ok();
        let (database, shared_name) = (open(base)?, with_suffix(base, b"-shm"));
        let shared = open(&shared_name)?;
        // Every connection holds this lock, too. The last one to close the database then leaves its log in place.
        if !lock(&database, SHARED_LOCK) {
            return None;
        }
        let is_locked = lock(&shared, WAL_READ_LOCK);
        let held = ReadLock::new(vec![(database, SHARED_LOCK), (shared.try_clone().ok()?, WAL_READ_LOCK)]);
        // The last connection may have closed the database before, and another one may have created a new file.
        let inode = stat_open(&shared).ok()?.stx_ino;
        let is_current = stat_in(directory, &shared_name).is_ok_and(|stat| stat.stx_ino == inode);
        (is_locked && is_current).then_some(held)
    }

    /// Locks the database as a reader does, so that no writer changes it; `None` if it is large, or a writer does not let
    /// go of it.
    pub(super) fn lock_as_reader(&self, directory: &OwnedFd) -> Option<ReadLock> {
        let opened = open_in(directory, self.database()?, OFlags::NONBLOCK | OFlags::NOCTTY).ok()?;
        let file = File::from(opened);
        let size = file.metadata().ok()?.len();
        lock_as_reader(&file, size)
    }

    /// The database, whose state at the end must be that at the beginning, unless it was locked.
    pub(super) fn database(&self) -> Option<&OsStr> {
        self.names.first().map(OsString::as_os_str)
    }
}

fn with_suffix(base: &OsStr, suffix: &[u8]) -> OsString {
    let mut name = base.to_owned();
    name.push(OsStr::from_bytes(suffix));
    name
}

/// Locks a small database as a reader does, so that no writer changes it; `None` for other files, or if a writer
/// keeps its lock.
pub(super) fn lock_as_reader(file: &File, size: u64) -> Option<ReadLock> {
    if size > MAX_LOCKED_BYTES || !is_database(file, size) {
        return None;
    }
    // Closing a duplicate keeps the locks of an open file description.
    let file = file.as_fd().try_clone_to_owned().ok()?;
    let pending = lock(&file, PENDING_LOCK);
    let shared = pending && lock(&file, SHARED_LOCK);
    if pending {
        set_lock(&file, PENDING_LOCK, libc::F_UNLCK);
    }
    shared.then(|| ReadLock::new(vec![(file, SHARED_LOCK)]))
}

/// Whether a file begins as a database does.
pub(super) fn is_database(file: &File, size: u64) -> bool {
    let mut start = [0; MAGIC.len()];
    size >= MIN_DATABASE_BYTES && file.read_exact_at(&mut start, 0).is_ok() && start == MAGIC
}

/// Takes a read lock, which a writer may hold for a moment.
fn lock(file: &OwnedFd, range: Range) -> bool {
    (0..LOCK_ATTEMPTS).any(|attempt| {
        if attempt > 0 {
            std::thread::sleep(LOCK_PAUSE);
        }
        set_lock(file, range, libc::F_RDLCK)
    })
}

/// The locks of an open file description conflict with those that SQLite takes, and are not lost when another descriptor of
/// the file is closed. Read locks do not conflict with each other.
fn set_lock(file: &OwnedFd, (start, length): Range, kind: i32) -> bool {
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
    fn files_of_a_database_are_taken_together() {
        let mut names: Vec<OsString> =
            ["a", "a-journal", "b", "b-shm", "b-wal", "b-wal-notes", "c-wal", "d"].map(OsString::from).into();
        let found = DatabaseFiles::take_from(&mut names);
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
}
