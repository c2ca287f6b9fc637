//! Lists of networks in settings: CIDRs (RFC 4632) and single addresses, separated by commas.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// A list of networks; empty by default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Networks(Arc<[IpNet]>);

/// An invalid entry of a list. Networks are not secret, so the error quotes the entry.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NetworksError {
    #[error("{0:?} is neither an address nor a CIDR: list them as 203.0.113.7, 10.0.0.0/8, 2001:db8::/32")]
    Malformed(String),
    #[error("{given} has bits set after its prefix: write {meant}, or only the address")]
    HostBits { given: IpNet, meant: IpNet },
    #[error("{0} contains every address: list specific networks")]
    Everything(IpNet),
}

impl Networks {
    /// Whether a network contains this address. An IPv4-mapped IPv6 address counts as IPv4.
    pub fn contain(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.0.iter().any(|network| network.contains(&address))
    }

    /// The networks that are never a source address between machines: loopback, multicast, unspecified.
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

    /// The IPv4 and the IPv6 networks, sorted and without overlaps.
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
    fn from_iter<I: IntoIterator<Item = Self>>(several: I) -> Self {
        Self(several.into_iter().flat_map(|one| one.0.to_vec()).collect())
    }
}

impl FromStr for Networks {
    type Err = NetworksError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let entries = text.split(',').map(str::trim).filter(|entry| !entry.is_empty());
        entries.map(network).collect::<Result<_, _>>().map(Self)
    }
}

fn network(entry: &str) -> Result<IpNet, NetworksError> {
    if let Ok(address) = entry.parse::<IpAddr>() {
        return Ok(IpNet::from(address.to_canonical()));
    }
    let given: IpNet = entry.parse().map_err(|_| NetworksError::Malformed(entry.to_owned()))?;
    let meant = given.trunc();
    match () {
        () if given.prefix_len() == 0 => Err(NetworksError::Everything(meant)),
        () if meant != given => Err(NetworksError::HostBits { given, meant }),
        () => Ok(given),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_contain_only_their_addresses() {
        let networks: Networks = "10.1.0.0/16, 203.0.113.7,2001:db8::/32,".parse().unwrap();
        for inside in ["10.1.255.255", "203.0.113.7", "2001:db8:1::1", "::ffff:10.1.2.3"] {
            assert!(networks.contain(inside.parse().unwrap()), "{inside}");
        }
        for outside in ["10.2.0.0", "203.0.113.8", "2001:db9::1", "::ffff:10.2.0.0", "::a01:203"] {
            assert!(!networks.contain(outside.parse().unwrap()), "{outside}");
        }
        assert!(!Networks::default().contain("127.0.0.1".parse().unwrap()));
    }

    #[test]
    fn networks_by_family_do_not_overlap() {
        let networks: Networks =
            "10.1.0.0/16,10.0.0.0/8,2001:db8::/33,2001:db8:8000::/33,10.2.3.4".parse().unwrap();
        let (v4, v6) = networks.by_family();
        assert_eq!(v4, ["10.0.0.0/8".parse().unwrap()]);
        assert_eq!(v6, ["2001:db8::/32".parse().unwrap()]);
    }

    #[test]
    fn malformed_networks_are_refused_with_the_correction() {
        for (text, expected) in [
            ("10.0.0.0/8,load-balancer", "\"load-balancer\" is neither an address"),
            ("10.0.0.0/33", "list them as"),
            ("10.0.0.5/8", "write 10.0.0.0/8"),
            ("0.0.0.0/0", "every address"),
            ("::/0", "every address"),
        ] {
            let why = text.parse::<Networks>().unwrap_err().to_string();
            assert!(why.contains(expected), "{text}: {why}");
        }
    }
}
