//! The part of the provider's price list that the platform uses. The amounts are decimal strings; they are never parsed
//! as floating-point numbers, which would not be exact.

use std::collections::BTreeMap;

use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::super::price::{Amount, ServerPrices};
use svc_machine::name::ServerType;

#[derive(Deserialize)]
pub(super) struct PricingResponse {
    pricing: Pricing,
}

#[derive(Deserialize)]
struct Pricing {
    #[serde(deserialize_with = "deserialize_currency")]
    currency: String,
    server_types: Vec<TypePrices>,
    #[serde(default)]
    primary_ips: Vec<AddressPrices>,
}

#[derive(Deserialize)]
struct TypePrices {
    name: String,
    /// Parsed only for the requested type, so that an error in another type's prices does not matter.
    prices: Option<Value>,
}

#[derive(Deserialize)]
struct AddressPrices {
    #[serde(rename = "type")]
    kind: String,
    prices: Option<Value>,
}

#[derive(Deserialize)]
struct LocationPrice {
    location: String,
    price_monthly: Price,
}

#[derive(Deserialize)]
struct Price {
    #[serde(deserialize_with = "deserialize_micros")]
    net: u64,
    #[serde(deserialize_with = "deserialize_micros")]
    gross: u64,
}

impl PricingResponse {
    /// Extracts the prices of a server type and of a public IPv4 address. Either is empty if the provider does not list
    /// it.
    ///
    /// # Errors
    /// If one of these prices cannot be parsed.
    pub(super) fn into_prices(self, name: &ServerType) -> Result<ServerPrices, serde_json::Error> {
        let Pricing { currency, server_types, primary_ips } = self.pricing;
        let server = server_types.into_iter().find(|entry| entry.name == name.as_str());
        let public_ipv4 = primary_ips.into_iter().find(|entry| entry.kind == "ipv4");
        Ok(ServerPrices {
            currency,
            servers: parse_by_location(server.and_then(|entry| entry.prices))?,
            public_ipv4: parse_by_location(public_ipv4.and_then(|entry| entry.prices))?,
        })
    }
}

fn parse_by_location(prices: Option<Value>) -> Result<BTreeMap<String, Amount>, serde_json::Error> {
    let Some(prices) = prices else { return Ok(BTreeMap::new()) };
    let prices: Vec<LocationPrice> = serde_json::from_value(prices)?;
    let amount = |price: Price| Amount { net_micros: price.net, gross_micros: price.gross };
    Ok(prices.into_iter().map(|price| (price.location, amount(price.price_monthly))).collect())
}

fn deserialize_currency<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    let is_code = text.len() == 3 && text.bytes().all(|byte| byte.is_ascii_uppercase());
    if is_code { Ok(text) } else { Err(D::Error::custom("not a currency code")) }
}

fn deserialize_micros<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse_micros(&text).ok_or_else(|| D::Error::custom("not a decimal amount"))
}

/// Parses a decimal amount into millionths, rounded up, so that the displayed amount is never below the price.
fn parse_micros(text: &str) -> Option<u64> {
    const DIGITS: usize = 6;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !is_number(whole) || !is_number(fraction) {
        return None;
    }
    let (digits, rest) = fraction.split_at(fraction.len().min(DIGITS));
    let micros: u64 = format!("{digits:0<DIGITS$}").parse().ok()?;
    let rounded = micros + u64::from(rest.bytes().any(|digit| digit != b'0'));
    whole.parse::<u64>().ok()?.checked_mul(1_000_000)?.checked_add(rounded)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESPONSE: &str = r#"{"pricing": {"currency": "EUR", "vat_rate": "19.000000", "server_types": [
        {"id": 1, "name": "cpx12", "prices": []},
        {"id": 2, "name": "cpx22", "prices": [
            {"location": "nbg1", "price_hourly": {"net": "0.0128000000", "gross": "0.0152320000000000"},
             "price_monthly": {"net": "7.9900000000", "gross": "9.5081000000000000"}, "included_traffic": 1}]}],
        "primary_ips": [{"type": "ipv6", "prices": []}, {"type": "ipv4", "prices": [
            {"location": "nbg1", "price_monthly": {"net": "0.5000000000", "gross": "0.5950000000000000"}}]}],
        "volume": {"price_per_gb_month": {"net": "0.0440000000", "gross": "0.0523600000000000"}}}}"#;

    #[test]
    fn into_prices_returns_exact_amounts() {
        let response: PricingResponse = serde_json::from_str(RESPONSE).unwrap();
        let prices = response.into_prices(&"cpx22".parse().unwrap()).unwrap();
        assert_eq!(prices.currency, "EUR");
        let server = Amount { net_micros: 7_990_000, gross_micros: 9_508_100 };
        assert_eq!(prices.servers, BTreeMap::from([("nbg1".to_owned(), server)]));
        assert_eq!(prices.public_ipv4["nbg1"], Amount { net_micros: 500_000, gross_micros: 595_000 });
        let response: PricingResponse = serde_json::from_str(RESPONSE).unwrap();
        assert!(response.into_prices(&"cpx52".parse().unwrap()).unwrap().servers.is_empty());
    }

    #[test]
    fn into_prices_is_empty_without_price_list() {
        for prices in ["", r#", "prices": null"#] {
            let text = format!(
                r#"{{"pricing": {{"currency": "EUR", "server_types": [{{"name": "cpx22"{prices}}}],
                    "primary_ips": [{{"type": "ipv4"{prices}}}]}}}}"#
            );
            let response: PricingResponse = serde_json::from_str(&text).unwrap();
            let parsed = response.into_prices(&"cpx22".parse().unwrap()).unwrap();
            assert!(parsed.servers.is_empty() && parsed.public_ipv4.is_empty(), "{text}");
        }
    }

    #[test]
    fn parse_micros_rounds_up() {
        for (text, micros) in [
            ("0", Some(0)),
            ("7.99", Some(7_990_000)),
            ("0.0000010000", Some(1)),
            ("0.0000010001", Some(2)),
            ("9.9999999", Some(10_000_000)),
            ("", None),
            (".5", None),
            ("-1", None),
            ("1e3", None),
            ("1,5", None),
            ("99999999999999999999", None),
        ] {
            assert_eq!(parse_micros(text), micros, "{text}");
        }
    }

    #[test]
    fn into_prices_rejects_invalid_amount_of_requested_type() {
        let parse_prices = |text: &str, name: &str| {
            let response: PricingResponse = serde_json::from_str(text)?;
            response.into_prices(&name.parse().unwrap())
        };
        for (valid, invalid) in [("9.5081000000000000", "free"), ("\"EUR\"", "\"euro\"")] {
            assert!(parse_prices(&RESPONSE.replace(valid, invalid), "cpx22").is_err());
        }
        let broken =
            r#""cpx12", "prices": [{"location": "nbg1", "price_monthly": {"net": "free", "gross": 1}}]"#;
        let response = RESPONSE.replace(r#""cpx12", "prices": []"#, broken);
        assert!(parse_prices(&response, "cpx12").is_err());
        assert_eq!(parse_prices(&response, "cpx22").unwrap().servers.len(), 1);
    }
}
