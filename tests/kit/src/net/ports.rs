//! Free loopback ports.

use std::collections::HashSet;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::sync::{LazyLock, Mutex, PoisonError};

const TRIES: usize = 2000;

/// A loopback TCP port that nobody listens on, given to one caller of this process only.
///
/// It lies below the range that the system takes the ports of outgoing connections from: a server that is down for a
/// moment, and comes back on its port, does not find it taken by somebody's connection.
pub fn free_port() -> io::Result<u16> {
    static GIVEN: LazyLock<Mutex<HashSet<u16>>> = LazyLock::new(Mutex::default);
    let range = range_below_ephemeral();
    for _ in 0..TRIES {
        let port =
            range.start + u16::try_from(uuid::Uuid::new_v4().as_u128() % range.len() as u128).unwrap_or(0);
        let is_new = GIVEN.lock().unwrap_or_else(PoisonError::into_inner).insert(port);
        if is_new && TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return Ok(port);
        }
    }
    Err(io::Error::new(io::ErrorKind::AddrInUse, format!("no free port found in {range:?}")))
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
    use super::*;

    #[test]
    fn no_port_is_given_twice_and_each_can_be_bound() {
        let ports: HashSet<u16> = (0..300).map(|_| free_port().expect("a port")).collect();
        assert_eq!(ports.len(), 300);
        for port in ports {
            TcpListener::bind((Ipv4Addr::LOCALHOST, port)).expect("free");
        }
    }
}
