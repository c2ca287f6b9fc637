//! How many connections each address has, so that one address cannot take them all.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Connections by the address that they come from.
#[derive(Debug)]
pub struct Addresses {
    max_each: usize,
    counts: Mutex<HashMap<IpAddr, usize>>,
}

/// One connection of an address, until it is dropped.
#[derive(Debug)]
pub struct AddressPlace {
    addresses: Arc<Addresses>,
    address: IpAddr,
}

impl Addresses {
    pub fn new(max_each: usize) -> Arc<Self> {
        Arc::new(Self { max_each, counts: Mutex::default() })
    }

    /// Counts one more connection of an address; `None` where it has as many as it may have.
    pub fn admit(self: &Arc<Self>, address: IpAddr) -> Option<AddressPlace> {
        let address = network(address);
        let mut counts = self.counts();
        let count = counts.entry(address).or_insert(0);
        if *count >= self.max_each {
            return None;
        }
        *count += 1;
        Some(AddressPlace { addresses: self.clone(), address })
    }

    fn counts(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for AddressPlace {
    fn drop(&mut self) {
        let mut counts = self.addresses.counts();
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

/// What one customer has of addresses: one of IPv4, a network of 64 bits of IPv6.
pub fn network(address: IpAddr) -> IpAddr {
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
    fn an_address_has_its_share_and_gets_it_back() {
        let addresses = Addresses::new(2);
        let first = addresses.admit(address("192.0.2.1")).unwrap();
        let _second = addresses.admit(address("::ffff:192.0.2.1")).unwrap();
        assert!(addresses.admit(address("192.0.2.1")).is_none());
        assert!(addresses.admit(address("192.0.2.2")).is_some());
        drop(first);
        assert!(addresses.admit(address("192.0.2.1")).is_some());
    }

    #[test]
    fn a_network_of_ipv6_counts_as_one() {
        let addresses = Addresses::new(1);
        let one = addresses.admit(address("2001:db8::1")).unwrap();
        assert!(addresses.admit(address("2001:db8::2:3")).is_none());
        assert!(addresses.admit(address("2001:db8:0:1::1")).is_some());
        drop(one);
        assert!(addresses.counts().is_empty(), "nothing is kept of who has gone");
    }
}
