//! Parses network lists in settings: CIDRs (RFC 4632) and single addresses, separated by commas.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// A list of networks; empty by default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Networks(Arc<[IpNet]>);

/// An invalid entry in a list. Networks are not secret, so the error quotes the entry.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NetworksError {
    #[error(
        "{0:?} is neither an address nor a CIDR: write a list such as 203.0.113.7, 10.0.0.0/8, 2001:db8::/32"
    )]
    Malformed(String),
    #[error("{network} has bits set after its prefix: write {corrected}, or only the address")]
    HostBits { network: IpNet, corrected: IpNet },
    #[error("{0} contains every address: list specific networks")]
    AllAddresses(IpNet),
}

impl Networks {
    /// Returns whether any of the networks contains this address. An IPv4-mapped IPv6 address counts as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.0.iter().any(|network| network.contains(&address))
    }

    /// Returns the networks from which no other machine can connect: loopback, multicast and unspecified.
    pub fn unroutable(&self) -> impl Iterator<Item = IpNet> {
        let is_unroutable = |network: &IpNet| {
            let address = network.addr();
            address.is_loopback() || address.is_multicast() || address.is_unspecified()
        };
        self.0.iter().copied().filter(is_unroutable)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the IPv4 and IPv6 networks, sorted and without overlaps.
    pub fn by_family(&self) -> (Vec<Ipv4Net>, Vec<Ipv6Net>) {
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for network in IpNet::aggregate(&self.0.to_vec()) {
            match network {
                IpNet::V4(network) => v4.push(network),
                IpNet::V6(network) => v6.push(network),
            }
        }
        (v4, v6)
    }
}

impl fmt::Display for Networks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let networks: Vec<_> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&networks.join(", "))
    }
}

impl FromIterator<Self> for Networks {
    fn from_iter<I: IntoIterator<Item = Self>>(lists: I) -> Self {
        Self(lists.into_iter().flat_map(|list| list.0.to_vec()).collect())
    }
}

impl FromStr for Networks {
    type Err = NetworksError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let entries = text.split(',').map(str::trim).filter(|entry| !entry.is_empty());
        entries.map(parse_network).collect::<Result<_, _>>().map(Self)
    }
}

fn parse_network(entry: &str) -> Result<IpNet, NetworksError> {
    if let Ok(address) = entry.parse::<IpAddr>() {
        return Ok(IpNet::from(address.to_canonical()));
    }
    let network: IpNet = entry.parse().map_err(|_| NetworksError::Malformed(entry.to_owned()))?;
    let network = to_canonical(network);
    let corrected = network.trunc();
    if network.prefix_len() == 0 {
        Err(NetworksError::AllAddresses(corrected))
    } else if corrected != network {
        Err(NetworksError::HostBits { network, corrected })
    } else {
        Ok(network)
    }
}

/// Converts an IPv4-mapped IPv6 network to IPv4, as [`Networks::contains`] does with addresses.
fn to_canonical(network: IpNet) -> IpNet {
    let mapped = match network {
        IpNet::V6(v6) => v6.addr().to_ipv4_mapped().zip(v6.prefix_len().checked_sub(96)),
        IpNet::V4(_) => None,
    };
    mapped.and_then(|(address, prefix_len)| Ipv4Net::new(address, prefix_len).ok()).map_or(network, IpNet::V4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_contain_only_their_addresses() {
        let networks: Networks = "10.1.0.0/16, 203.0.113.7,2001:db8::/32,".parse().unwrap();
        for inside in ["10.1.255.255", "203.0.113.7", "2001:db8:1::1", "::ffff:10.1.2.3"] {
            assert!(networks.contains(inside.parse().unwrap()), "{inside}");
        }
        for outside in ["10.2.0.0", "203.0.113.8", "2001:db9::1", "::ffff:10.2.0.0", "::a01:203"] {
            assert!(!networks.contains(outside.parse().unwrap()), "{outside}");
        }
        let mapped: Networks = "::ffff:10.1.0.0/112".parse().unwrap();
        assert!(mapped.contains("10.1.2.3".parse().unwrap()));
        assert!(!Networks::default().contains("127.0.0.1".parse().unwrap()));
    }

    #[test]
    fn by_family_merges_overlapping_networks() {
        let networks: Networks =
            "10.1.0.0/16,10.0.0.0/8,2001:db8::/33,2001:db8:8000::/33,10.2.3.4".parse().unwrap();
        let (v4, v6) = networks.by_family();
        assert_eq!(v4, ["10.0.0.0/8".parse().unwrap()]);
        assert_eq!(v6, ["2001:db8::/32".parse().unwrap()]);
    }

    #[test]
    fn malformed_networks_are_rejected_with_a_correction() {
        for (text, expected) in [
            ("10.0.0.0/8,load-balancer", "\"load-balancer\" is neither an address"),
            ("10.0.0.0/33", "write a list such as"),
            ("10.0.0.5/8", "write 10.0.0.0/8"),
            ("0.0.0.0/0", "every address"),
            ("::/0", "every address"),
            ("::ffff:0:0/96", "every address"),
        ] {
            let error = text.parse::<Networks>().unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
