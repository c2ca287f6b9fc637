//! Computes the monthly cost of a new machine's server from the provider's price list.
//!
//! A server is ordered with a public IPv4 address, but without volumes and without the provider's backups
//! (`svc_provider::hetzner`), so only the prices of the server and of the address apply.

use std::time::Duration;

use crate::alarms;
use crate::context::Platform;
use svc_http::problem::{Code, Problem, format_chain};
use svc_machine::name::{Location, ServerType};
use svc_provider::{Amount, ServerPrices};
use svc_wire::quote::{LocationCost, Price};

/// Timeout for reading the prices, including retries. An operator waits for the result.
const PRICE_TIMEOUT: Duration = Duration::from_secs(15);

/// The cost of a server in each location in which it may be created.
#[derive(Debug, Clone)]
pub struct ServerCost {
    pub by_location: Vec<LocationCost>,
    /// The highest total of all locations: the provider may lack capacity in the cheaper ones.
    pub highest: Price,
}

/// Where a server may be created: in `location`, or in a fallback location in which the provider sells the server type.
#[derive(Debug, Clone, Copy)]
pub struct ServerLocations<'a> {
    pub location: &'a Location,
    pub fallback: &'a [Location],
}

/// Reads the current cost of a server from the provider, and caches the prices for quotes.
///
/// # Errors
/// `invalid_request` if the provider does not sell the type in the location, `unavailable` if its prices cannot be
/// read.
pub async fn read_cost(
    platform: &Platform,
    server_type: &ServerType,
    locations: ServerLocations<'_>,
) -> Result<ServerCost, Problem> {
    let prices = read_prices(platform, server_type).await?;
    platform.quotes.record_prices(server_type, &prices);
    compute_cost_if_sold(&prices, server_type, locations)
}

/// Returns the cost of a server for a quote, from prices that may have been cached for a few minutes.
///
/// # Errors
/// Same as [`read_cost`].
pub async fn read_quoted_cost(
    platform: &Platform,
    server_type: &ServerType,
    locations: ServerLocations<'_>,
) -> Result<ServerCost, Problem> {
    let prices = platform.quotes.get_prices(server_type, read_prices(platform, server_type)).await?;
    compute_cost_if_sold(&prices, server_type, locations)
}

async fn read_prices(platform: &Platform, server_type: &ServerType) -> Result<ServerPrices, Problem> {
    let unavailable = || {
        let detail = "The provider's prices cannot be read, so no cost can be confirmed; try again.";
        Problem::new(Code::Unavailable, detail).retry_after(5)
    };
    match tokio::time::timeout(PRICE_TIMEOUT, platform.provider.get_prices(server_type)).await {
        Ok(Ok(prices)) => Ok(prices),
        Ok(Err(error)) => {
            tracing::warn!(error = %format_chain(&error), "cannot read the provider's prices");
            alarms::raise_for_provider_error(platform, &error).await;
            Err(unavailable())
        }
        Err(_) => {
            tracing::warn!("the provider's prices were not read within {} s", PRICE_TIMEOUT.as_secs());
            Err(unavailable())
        }
    }
}

fn compute_cost_if_sold(
    prices: &ServerPrices,
    server_type: &ServerType,
    ServerLocations { location, fallback }: ServerLocations<'_>,
) -> Result<ServerCost, Problem> {
    compute_cost(prices, location, fallback).ok_or_else(|| {
        let detail = format!("the provider does not sell {server_type} in {location}");
        Problem::field("/location", detail)
    })
}

/// Computes the cost; `None` if the provider does not sell the server type in `location`.
fn compute_cost(prices: &ServerPrices, location: &Location, fallback: &[Location]) -> Option<ServerCost> {
    let mut highest = 0;
    let mut by_location = Vec::new();
    for (location, is_fallback) in
        [(location, false)].into_iter().chain(fallback.iter().map(|location| (location, true)))
    {
        let Some(server) = prices.servers.get(location.as_str()) else {
            if is_fallback {
                continue;
            }
            return None;
        };
        let address = prices.public_ipv4.get(location.as_str()).copied();
        let Amount { net_micros, gross_micros } = address.unwrap_or_default();
        let total = server.gross_micros.saturating_add(gross_micros);
        highest = highest.max(total);
        let price = |micros: u64| Price { micros, currency: prices.currency.clone() };
        by_location.push(LocationCost {
            location: location.into(),
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
    fn highest_cost_covers_every_location_that_sells_type() {
        let amount = |net_micros, gross_micros| Amount { net_micros, gross_micros };
        let prices = ServerPrices {
            currency: "EUR".to_owned(),
            servers: BTreeMap::from([
                ("nbg1".to_owned(), amount(8_000_000, 9_520_000)),
                ("ash".to_owned(), amount(10_000_000, 11_900_000)),
            ]),
            public_ipv4: BTreeMap::from([("nbg1".to_owned(), amount(500_000, 595_000))]),
        };
        let location = |name: &str| -> Location { name.parse().unwrap() };
        let cost = compute_cost(&prices, &location("nbg1"), &[location("ash"), location("sin")]).unwrap();
        assert_eq!(cost.highest.to_string(), "11.90 EUR");
        let nbg1 = &cost.by_location[0];
        assert_eq!((nbg1.total.as_str(), nbg1.total_net.as_str()), ("10.115 EUR", "8.50 EUR"));
        assert_eq!(cost.by_location.len(), 2, "the type is not sold in sin");
        assert!(cost.by_location[1].public_ipv4.is_none());
        assert!(compute_cost(&prices, &location("sin"), &[location("nbg1")]).is_none());
    }
}
