//! Free loopback ports.

use std::fs::{File, TryLockError};
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

const MAX_ATTEMPTS: usize = 2000;

/// Returns a free loopback TCP port. It is reserved until this process ends: other callers, in any process, do not get
/// it, even while no server listens on it.
///
/// The port lies below the ephemeral range, so that outgoing connections cannot occupy it while a server is down.
pub fn free_port() -> io::Result<u16> {
    /// Locked files for this process's ports.
    static RESERVED: Mutex<Vec<File>> = Mutex::new(Vec::new());
    let dir = reservation_dir()?;
    let range = range_below_ephemeral();
    for _ in 0..MAX_ATTEMPTS {
        let port =
            range.start + u16::try_from(uuid::Uuid::new_v4().as_u128() % range.len() as u128).unwrap_or(0);
        let Some(reservation) = reserve(&dir, port)? else { continue };
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            RESERVED.lock().unwrap_or_else(PoisonError::into_inner).push(reservation);
            return Ok(port);
        }
    }
    Err(io::Error::new(io::ErrorKind::AddrInUse, format!("no free port found in {range:?}")))
}

/// Returns the directory with an empty file for each port that this user has ever reserved.
fn reservation_dir() -> io::Result<PathBuf> {
    let dir = std::env::temp_dir().join(format!("svc-kit-ports-{}", nix::unistd::geteuid()));
    std::fs::create_dir_all(&dir)?;
    Ok(dir)
}

/// Locks the file for `port`; returns `None` if another caller, in any process, holds the lock. The lock is held until
/// the returned file is dropped.
///
/// Programs started by a test do not inherit the file descriptor, so they hold no lock.
fn reserve(dir: &Path, port: u16) -> io::Result<Option<File>> {
    let file = File::options().create(true).truncate(false).write(true).open(dir.join(port.to_string()))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

fn range_below_ephemeral() -> Range<u16> {
    const FIRST: u16 = 10_000;
    let system = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let first_ephemeral =
        system.split_whitespace().next().and_then(|port| port.parse().ok()).unwrap_or(32_768);
    // If too few ports lie below the ephemeral range, the returned range overlaps it.
    FIRST..if first_ephemeral > FIRST + 2000 { first_ephemeral } else { 32_768 }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn free_ports_are_unique_and_bindable() {
        let ports: HashSet<u16> = (0..300).map(|_| free_port().expect("a port is free")).collect();
        assert_eq!(ports.len(), 300);
        for port in ports {
            TcpListener::bind((Ipv4Addr::LOCALHOST, port)).expect("the port is free");
        }
    }

    #[test]
    fn port_is_reserved_until_its_lock_is_released() {
        let dir = tempfile::tempdir().expect("the directory is created");
        let first =
            reserve(dir.path(), 10_000).expect("the lock file is opened").expect("the port is not reserved");
        assert!(reserve(dir.path(), 10_000).expect("the lock file is opened").is_none());
        assert!(reserve(dir.path(), 10_001).expect("the lock file is opened").is_some());
        drop(first);
        assert!(reserve(dir.path(), 10_000).expect("the lock file is opened").is_some());
    }
}
