//! Single-instance lock, implemented as an exclusive flock(2) on a file. The kernel releases it however the process
//! exits.

use std::fs::{File, TryLockError};
use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

use svc_base::fsx::FileError;

/// Interval between attempts to acquire a lock held by another run.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// A held lock, released on drop.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// Errors from acquiring a lock.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    #[error("another instance is running")]
    Held,
    #[error(transparent)]
    File(#[from] FileError),
}

impl Lock {
    /// # Errors
    /// `Held` if another run holds the lock; `File` if the file cannot be created, opened or locked.
    pub fn acquire(path: &Path) -> Result<Self, LockError> {
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir).map_err(FileError::wrap("create directory", dir))?;
        }
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path)
            .map_err(FileError::wrap("open", path))?;
        match file.try_lock() {
            Ok(()) => Ok(Self { _file: file }),
            Err(TryLockError::WouldBlock) => Err(LockError::Held),
            Err(TryLockError::Error(source)) => Err(FileError::wrap("lock", path)(source).into()),
        }
    }

    /// Returns whether the lock is held. The check itself briefly takes a shared lock, so programs that need the lock
    /// should use [`Self::wait`] instead of [`Self::acquire`].
    ///
    /// # Errors
    /// [`LockError::File`] if the file exists but cannot be opened or locked.
    pub fn is_held(path: &Path) -> Result<bool, LockError> {
        let file = match File::open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            opened => opened.map_err(FileError::wrap("open", path))?,
        };
        match file.try_lock_shared() {
            Ok(()) => Ok(false),
            Err(TryLockError::WouldBlock) => Ok(true),
            Err(TryLockError::Error(source)) => Err(FileError::wrap("lock", path)(source).into()),
        }
    }

    /// Waits for the lock.
    ///
    /// # Errors
    /// `Held` if another run still holds the lock when the timeout expires; `File` if the file cannot be created,
    /// opened or locked.
    pub async fn wait(path: &Path, timeout: Duration) -> Result<Self, LockError> {
        let deadline = Instant::now() + timeout;
        loop {
            match Self::acquire(path) {
                Err(LockError::Held) if Instant::now() < deadline => {
                    tokio::time::sleep(RETRY_INTERVAL).await;
                }
                result => return result,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acquire_rejects_second_holder() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state/x.lock");
        let first = Lock::acquire(&path).unwrap();
        assert!(matches!(Lock::acquire(&path), Err(LockError::Held)));
        drop(first);
        Lock::acquire(&path).unwrap();
    }

    #[test]
    fn is_held_reports_holder_and_leaves_lock_free() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.lock");
        assert!(!Lock::is_held(&path).unwrap(), "there is no such file yet");
        let held = Lock::acquire(&path).unwrap();
        assert!(Lock::is_held(&path).unwrap());
        drop(held);
        assert!(!Lock::is_held(&path).unwrap());
        Lock::acquire(&path).unwrap();
    }
}
