//! The provider's prices, exact to a millionth of its currency.

use std::collections::BTreeMap;

/// A monthly amount, in millionths of the currency.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Amount {
    pub net_micros: u64,
    /// Including value-added tax.
    pub gross_micros: u64,
}

/// The monthly prices of a server type by location, and those of a server's public IPv4 address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerPrices {
    /// Three letters, such as `EUR`.
    pub currency: String,
    /// The prices of a server, by location; the type is not sold in other locations.
    pub servers: BTreeMap<String, Amount>,
    /// The prices of a public IPv4 address, by location.
    pub public_ipv4: BTreeMap<String, Amount>,
}
