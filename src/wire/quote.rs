//! The effect, cost and quota usage of provisioning a machine, for the operator who confirms it.

use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, json_schema};
use serde::{Deserialize, Serialize};

use crate::fleet::Exercises;
use crate::machine::MachineKind;
use crate::slot::Subscription;
use crate::text::{WireFormat, WireString};
use svc_machine::id::MachineId;
use svc_machine::name::{Handle, IdpUserId, ImageVersion, Location, ServerType, Slot};
use svc_machine::state::Status;

const MICROS_PER_UNIT: u64 = 1_000_000;

/// An exact price, such as `9.5081 EUR`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Price {
    /// Millionths of the currency.
    pub micros: u64,
    pub currency: String,
}

impl Price {
    pub const PATTERN: &'static str = "^[0-9]{1,9}\\.[0-9]{2,6} [A-Z]{3}$";
}

/// The error for text that is not a price.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be an amount with 2 to 6 decimals and a currency, such as 9.50 EUR")]
pub struct InvalidPrice;

impl FromStr for Price {
    type Err = InvalidPrice;

    fn from_str(text: &str) -> Result<Self, InvalidPrice> {
        let is_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        let (amount, currency) = text.split_once(' ').ok_or(InvalidPrice)?;
        let (whole, decimals) = amount.split_once('.').ok_or(InvalidPrice)?;
        let is_currency = currency.len() == 3 && currency.bytes().all(|byte| byte.is_ascii_uppercase());
        let is_amount = (1..=9).contains(&whole.len()) && (2..=6).contains(&decimals.len());
        if !is_currency || !is_amount || !is_digits(whole) || !is_digits(decimals) {
            return Err(InvalidPrice);
        }
        let whole: u64 = whole.parse().map_err(|_| InvalidPrice)?;
        let micros: u64 = format!("{decimals:0<6}").parse().map_err(|_| InvalidPrice)?;
        Ok(Self { micros: whole * MICROS_PER_UNIT + micros, currency: currency.to_owned() })
    }
}

impl fmt::Display for Price {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let decimals = format!("{:06}", self.micros % MICROS_PER_UNIT);
        let decimals = format!("{:0<2}", decimals.trim_end_matches('0'));
        write!(f, "{}.{decimals} {}", self.micros / MICROS_PER_UNIT, self.currency)
    }
}

impl WireFormat for Price {
    fn to_text(&self) -> String {
        self.to_string()
    }

    fn text_schema() -> Schema {
        json_schema!({ "type": "string", "pattern": Price::PATTERN })
    }
}

/// The effect, cost and quota usage of provisioning a machine.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct ProvisionQuote {
    /// `PLATFORM_ENVIRONMENT`.
    pub environment: Option<String>,
    #[serde(default)]
    pub platform_url: String,
    /// The host of the provider's API.
    #[serde(default)]
    pub provider: String,
    /// `PROVIDER_PROJECT`.
    pub provider_project: Option<String>,
    #[serde(default)]
    pub idp_user_id: WireString<IdpUserId>,
    #[serde(default)]
    pub slot: WireString<Slot>,
    #[serde(default)]
    pub handle: WireString<Handle>,
    #[serde(default)]
    pub kind: WireString<MachineKind>,
    #[serde(default)]
    pub server_type: WireString<ServerType>,
    #[serde(default)]
    pub location: WireString<Location>,
    /// `null` if no machine would be created.
    pub image_version: Option<WireString<ImageVersion>>,
    pub subscription: Option<Subscription>,
    /// `BILLING_ENFORCEMENT`.
    #[serde(default)]
    pub billing_enforced: bool,
    /// The slot's machine. Provisioning replaces it if it has failed, and otherwise returns it.
    pub existing: Option<ExistingMachine>,
    /// Whether provisioning would add a customer, whose cost and consent an operator must confirm.
    #[serde(default)]
    pub adds_customer: bool,
    /// Whether an operator must confirm `monthlyCost`, because provisioning would add a customer, or replace a
    /// customer's machine with one of a different server type. Older platforms omit it.
    #[serde(default)]
    pub needs_cost_confirmation: bool,
    /// The cost including value-added tax, in the most expensive of the possible locations. To confirm it, send it as
    /// `confirmedMonthlyCost`. `null` if no server would be created, or if its price cannot be read and need not be
    /// confirmed.
    pub monthly_cost: Option<WireString<Price>>,
    #[serde(default)]
    pub costs: Vec<LocationCost>,
    /// Number of servers in the provider's project, including ordered ones. `null` if no server would be created.
    pub servers: Option<u64>,
    /// `PROVIDER_SERVER_LIMIT`.
    pub server_limit: Option<u64>,
    pub exercises: Exercises,
}

/// A slot's machine.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct ExistingMachine {
    pub machine_id: WireString<MachineId>,
    pub status: WireString<Status>,
}

/// The monthly cost of the server in one location.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(inline)]
pub struct LocationCost {
    pub location: WireString<Location>,
    /// Including value-added tax.
    pub server: WireString<Price>,
    /// Including value-added tax; `null` if the provider has no price for it.
    pub public_ipv4: Option<WireString<Price>>,
    /// The sum, including value-added tax.
    pub total: WireString<Price>,
    /// The sum, excluding value-added tax.
    pub total_net: WireString<Price>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn price_round_trips_with_two_to_six_decimals() {
        for (micros, text) in
            [(0, "0.00 EUR"), (9_500_000, "9.50 EUR"), (9_508_100, "9.5081 EUR"), (1, "0.000001 EUR")]
        {
            let price = Price { micros, currency: "EUR".to_owned() };
            assert_eq!(price.to_string(), text);
            assert_eq!(text.parse(), Ok(price));
        }
        for text in
            ["9.5 EUR", "9 EUR", "9.50", "9.50 eur", "-9.50 EUR", "9.5081000 EUR", "9.50  EUR", "9.5x EUR"]
        {
            assert_eq!(text.parse::<Price>(), Err(InvalidPrice), "{text}");
        }
    }
}
