//! The monthly cost of a new machine's server, from the provider's price list.
//!
//! A server is ordered with a public IPv4 address, and with neither volumes nor the provider's backups
//! (`provider::hetzner`), so that nothing else of the provider's price list applies.

use std::time::Duration;

use crate::alarms;
use crate::context::Platform;
use svc_http::problem::{Code, Problem, chain};
use svc_machine::name::{Location, ServerType};
use svc_provider::{Amount, ServerPrices};
use svc_wire::quote::{LocationCost, Price};

/// Maximum duration of the read of prices, with its retries: an operator waits for it.
const DEADLINE: Duration = Duration::from_secs(15);

/// The cost of a server by the locations in which it may be created.
#[derive(Debug, Clone)]
pub struct ServerCost {
    pub by_location: Vec<LocationCost>,
    /// The highest one: the provider may lack capacity in the cheaper locations.
    pub highest: Price,
}

/// Where a server may be created: `location`, and those of `fallback` where the provider sells its type.
#[derive(Debug, Clone, Copy)]
pub struct Places<'a> {
    pub location: &'a Location,
    pub fallback: &'a [Location],
}

/// Reads the current cost of a server.
///
/// # Errors
/// `invalid_request` if the provider does not sell the type in the location, `unavailable` if its prices cannot be read.
pub async fn read(
    platform: &Platform,
    server_type: &ServerType,
    places: Places<'_>,
) -> Result<ServerCost, Problem> {
    let prices = read_prices(platform, server_type).await?;
    platform.quotes.record_prices(server_type, &prices);
    require_sold(&prices, server_type, places)
}

/// The cost of a server by prices that a quote may show: they are at most a few minutes old.
///
/// # Errors
/// As [`read`].
pub async fn quote(
    platform: &Platform,
    server_type: &ServerType,
    places: Places<'_>,
) -> Result<ServerCost, Problem> {
    let prices = platform.quotes.get_prices(server_type, read_prices(platform, server_type)).await?;
    require_sold(&prices, server_type, places)
}

async fn read_prices(platform: &Platform, server_type: &ServerType) -> Result<ServerPrices, Problem> {
    let unavailable = || {
        let detail = "The provider's prices cannot be read, so no cost can be confirmed; try again.";
        Problem::new(Code::Unavailable, detail).retry_after(5)
    };
    match tokio::time::timeout(DEADLINE, platform.provider.prices(server_type)).await {
        Ok(Ok(prices)) => Ok(prices),
        Ok(Err(error)) => {
            tracing::warn!(error = %chain(&error), "cannot read the provider's prices");
            alarms::raise_for_provider_error(platform, &error).await;
            Err(unavailable())
        }
        Err(_) => {
            tracing::warn!("the provider's prices were not read within {} s", DEADLINE.as_secs());
            Err(unavailable())
        }
    }
}

fn require_sold(
    prices: &ServerPrices,
    server_type: &ServerType,
    Places { location, fallback }: Places<'_>,
) -> Result<ServerCost, Problem> {
    cost(prices, location, fallback).ok_or_else(|| {
        let detail = format!("the provider does not sell {server_type} in {location}");
        Problem::field("/location", detail)
    })
}

fn cost(prices: &ServerPrices, location: &Location, fallback: &[Location]) -> Option<ServerCost> {
    let mut highest = 0;
    let mut by_location = Vec::new();
    for (place, is_fallback) in
        [(location, false)].into_iter().chain(fallback.iter().map(|place| (place, true)))
    {
        let Some(server) = prices.servers.get(place.as_str()) else {
            if is_fallback {
                continue;
            }
            return None;
        };
        let address = prices.public_ipv4.get(place.as_str()).copied();
        let Amount { net_micros, gross_micros } = address.unwrap_or_default();
        let total = server.gross_micros.saturating_add(gross_micros);
        highest = highest.max(total);
        let price = |micros: u64| Price { micros, currency: prices.currency.clone() };
        by_location.push(LocationCost {
            location: place.into(),
            server: price(server.gross_micros).into(),
            public_ipv4: address.map(|address| price(address.gross_micros).into()),
            total: price(total).into(),
            total_net: price(server.net_micros.saturating_add(net_micros)).into(),
        });
    }
    Some(ServerCost { by_location, highest: Price { micros: highest, currency: prices.currency.clone() } })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn highest_cost_covers_every_location_that_sells_the_type() {
        let amount = |net_micros, gross_micros| Amount { net_micros, gross_micros };
        let prices = ServerPrices {
            currency: "EUR".to_owned(),
            servers: BTreeMap::from([
                ("nbg1".to_owned(), amount(8_000_000, 9_520_000)),
                ("ash".to_owned(), amount(10_000_000, 11_900_000)),
            ]),
            public_ipv4: BTreeMap::from([("nbg1".to_owned(), amount(500_000, 595_000))]),
        };
        let place = |name: &str| -> Location { name.parse().unwrap() };
        let found = cost(&prices, &place("nbg1"), &[place("ash"), place("sin")]).unwrap();
        assert_eq!(found.highest.to_string(), "11.90 EUR");
        let nbg1 = &found.by_location[0];
        assert_eq!((nbg1.total.as_str(), nbg1.total_net.as_str()), ("10.115 EUR", "8.50 EUR"));
        assert_eq!(found.by_location.len(), 2, "sin does not sell it");
        assert!(found.by_location[1].public_ipv4.is_none());
        assert!(cost(&prices, &place("sin"), &[place("nbg1")]).is_none());
    }
}
