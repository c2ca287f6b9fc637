//! Free loopback ports.

use std::fs::{File, TryLockError};
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

const TRIES: usize = 2000;

/// A loopback TCP port that nobody listens on, reserved for this process until it ends: no other process that asks
/// here is given it, even before the caller listens or while its server is down.
///
/// It lies below the range that the system takes the ports of outgoing connections from: a server that is down for a
/// moment, and comes back on its port, does not find it taken by somebody's connection.
pub fn free_port() -> io::Result<u16> {
    /// The locked files of the ports that this process has.
    static RESERVED: Mutex<Vec<File>> = Mutex::new(Vec::new());
    let folder = reservations()?;
    let range = range_below_ephemeral();
    for _ in 0..TRIES {
        let port =
            range.start + u16::try_from(uuid::Uuid::new_v4().as_u128() % range.len() as u128).unwrap_or(0);
        let Some(reservation) = reserve(&folder, port)? else { continue };
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            RESERVED.lock().unwrap_or_else(PoisonError::into_inner).push(reservation);
            return Ok(port);
        }
    }
    Err(io::Error::new(io::ErrorKind::AddrInUse, format!("no free port found in {range:?}")))
}

/// The folder with one empty file for each port that was ever given to a process of this user.
fn reservations() -> io::Result<PathBuf> {
    let folder = std::env::temp_dir().join(format!("svc-kit-ports-{}", nix::unistd::geteuid()));
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// The file of `port` with its lock, which ends with the process, however it ends; `None` if somebody has it.
///
/// The file descriptor is not inherited by the programs that a test starts, so that those hold no lock.
fn reserve(folder: &Path, port: u16) -> io::Result<Option<File>> {
    let file =
        File::options().create(true).truncate(false).write(true).open(folder.join(port.to_string()))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

fn range_below_ephemeral() -> Range<u16> {
    const FIRST: u16 = 10_000;
    let system = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let lowest = system.split_whitespace().next().and_then(|port| port.parse().ok()).unwrap_or(32_768);
    // A system that takes nearly all ports for outgoing connections leaves no better choice than this.
    FIRST..if lowest > FIRST + 2000 { lowest } else { 32_768 }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_port_is_given_twice_and_each_can_be_bound() {
        let ports: HashSet<u16> = (0..300).map(|_| free_port().expect("a port")).collect();
        assert_eq!(ports.len(), 300);
        for port in ports {
            TcpListener::bind((Ipv4Addr::LOCALHOST, port)).expect("free");
        }
    }

    #[test]
    fn reserved_port_is_given_to_nobody_else_until_its_holder_ends() {
        let folder = tempfile::tempdir().expect("a folder");
        let first = reserve(folder.path(), 10_000).expect("a file").expect("nobody has it");
        assert!(reserve(folder.path(), 10_000).expect("a file").is_none());
        assert!(reserve(folder.path(), 10_001).expect("a file").is_some());
        drop(first);
        assert!(reserve(folder.path(), 10_000).expect("a file").is_some());
    }
}
