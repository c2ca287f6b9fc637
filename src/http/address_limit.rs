//! Limits the number of connections per address, so that one address cannot use up all connections.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::networks::Networks;

/// Counts the connections from each client address.
#[derive(Debug)]
pub struct AddressLimiter {
    max_per_address: usize,
    /// Proxies, whose connections carry requests from many clients.
    exempt: Networks,
    counts: Mutex<HashMap<IpAddr, usize>>,
}

/// A permit for one connection. If the connection is counted, dropping the permit decrements the count.
#[derive(Debug)]
pub struct AddressPermit {
    /// `None` for an exempt address, which is not counted.
    counted: Option<(Arc<AddressLimiter>, IpAddr)>,
}

impl AddressLimiter {
    /// Creates a limiter. Addresses in `exempt` and loopback addresses have no limit.
    pub fn new(max_per_address: usize, exempt: Networks) -> Arc<Self> {
        Arc::new(Self { max_per_address, exempt, counts: Mutex::default() })
    }

    /// Counts a connection from an address; `None` if the address has reached its limit.
    pub fn admit(self: &Arc<Self>, address: IpAddr) -> Option<AddressPermit> {
        if address.to_canonical().is_loopback() || self.exempt.contains(address) {
            return Some(AddressPermit { counted: None });
        }
        let address = client_network(address);
        let mut counts = self.lock_counts();
        let count = counts.entry(address).or_insert(0);
        if *count >= self.max_per_address {
            return None;
        }
        *count += 1;
        Some(AddressPermit { counted: Some((self.clone(), address)) })
    }

    fn lock_counts(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for AddressPermit {
    fn drop(&mut self) {
        let Some((limiter, address)) = &self.counted else { return };
        let mut counts = limiter.lock_counts();
        if let Some(count) = counts.get_mut(address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(address);
            }
        }
    }
}

/// Returns the network that counts as one client: a single IPv4 address, or an IPv6 /64.
pub fn client_network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64)).into(),
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn admit_limits_each_address_and_releases_on_drop() {
        let limiter = AddressLimiter::new(2, Networks::default());
        let first = limiter.admit(address("192.0.2.1")).unwrap();
        let _second = limiter.admit(address("::ffff:192.0.2.1")).unwrap();
        assert!(limiter.admit(address("192.0.2.1")).is_none());
        assert!(limiter.admit(address("192.0.2.2")).is_some());
        drop(first);
        assert!(limiter.admit(address("192.0.2.1")).is_some());
    }

    #[test]
    fn admit_exempts_proxies_and_loopback() {
        let limiter = AddressLimiter::new(1, "192.0.2.0/24,2001:db8::/32".parse().unwrap());
        for exempt in ["192.0.2.1", "::ffff:192.0.2.1", "2001:db8::1", "127.0.0.1", "::1"] {
            let permits: Vec<_> = (0..5).map(|_| limiter.admit(address(exempt)).unwrap()).collect();
            assert!(limiter.lock_counts().is_empty(), "{exempt} was counted");
            drop(permits);
        }
        let _other = limiter.admit(address("198.51.100.1")).unwrap();
        assert!(limiter.admit(address("198.51.100.1")).is_none());
    }

    #[test]
    fn admit_counts_an_ipv6_network_as_one_address() {
        let limiter = AddressLimiter::new(1, Networks::default());
        let first = limiter.admit(address("2001:db8::1")).unwrap();
        assert!(limiter.admit(address("2001:db8::2:3")).is_none());
        assert!(limiter.admit(address("2001:db8:0:1::1")).is_some());
        drop(first);
        assert!(limiter.lock_counts().is_empty(), "a closed connection still has an entry");
    }
}
