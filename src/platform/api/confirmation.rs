//! What an operator confirms before a customer is added: the monthly cost, and the customer's consent. A machine that
//! replaces one of another server type has another cost, which is confirmed, too.

use serde_json::{Value, json};

use crate::server_cost::ServerCost;
use svc_base::config::Flag;
use svc_http::fields::Fields;
use svc_http::problem::{Code, Problem};
use svc_wire::quote::Price;

const COST: &str = "confirmedMonthlyCost";
const OPT_IN: &str = "confirmedOptIn";

/// What a provision has to confirm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Confirmed {
    Nothing,
    /// A known customer gets another server type.
    Cost,
    /// A customer is added.
    CostAndConsent,
}

/// The confirmations of a request.
#[derive(Debug, Clone, Default)]
pub struct Confirmation {
    /// The monthly cost that the operator was shown.
    monthly_cost: Option<Price>,
    /// The customer has opted in.
    opt_in: bool,
}

impl Confirmation {
    pub fn read(fields: &mut Fields) -> Self {
        Self { monthly_cost: fields.optional(COST), opt_in: fields.boolean(OPT_IN).unwrap_or(false) }
    }

    /// Whether there is a cost to compare with the provider's prices.
    pub fn has_cost(&self) -> bool {
        self.monthly_cost.is_some()
    }

    /// # Errors
    /// `confirmation_required` if the platform requires them, and one is missing.
    pub fn check_complete(&self, confirmed: Confirmed, required: Flag) -> Result<(), Problem> {
        let lacks_cost = confirmed != Confirmed::Nothing && self.monthly_cost.is_none();
        let lacks_consent = confirmed == Confirmed::CostAndConsent && !self.opt_in;
        let missing: Vec<_> = [(COST, lacks_cost), (OPT_IN, lacks_consent)]
            .into_iter()
            .filter_map(|(name, is_missing)| is_missing.then_some(name))
            .collect();
        if !required.is_on() || missing.is_empty() {
            return Ok(());
        }
        let what = match confirmed {
            Confirmed::Cost => "The cost of another server type than that of the replaced machine",
            Confirmed::Nothing | Confirmed::CostAndConsent => "A new customer's cost and consent",
        };
        let detail = format!(
            "{what} must be confirmed: {} is missing. POST /vps/provision/quote returns the cost.",
            missing.join(" and ")
        );
        Err(Problem::new(Code::ConfirmationRequired, detail).with("missing", json!(missing)))
    }

    /// # Errors
    /// `price_changed` if the confirmed cost is not the current one.
    pub fn check_cost(&self, cost: &ServerCost) -> Result<(), Problem> {
        let current = &cost.highest;
        match &self.monthly_cost {
            Some(confirmed) if confirmed != current => {
                let detail = format!("The server costs {current} a month, and {confirmed} was confirmed.");
                Err(Problem::new(Code::PriceChanged, detail).with("monthlyCost", json!(current.to_string())))
            }
            _ => Ok(()),
        }
    }

    /// The confirmations in the audit, which has the operator and the time.
    pub fn record(&self) -> Value {
        json!({ "monthlyCost": self.monthly_cost.as_ref().map(Price::to_string), "optIn": self.opt_in })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incomplete_confirmation_is_refused_only_where_required() {
        let cost: Price = "9.50 EUR".parse().unwrap();
        for (monthly_cost, opt_in, adds, replaces) in [
            (None, false, false, false),
            (Some(cost.clone()), false, false, true),
            (None, true, false, false),
            (Some(cost), true, true, true),
        ] {
            let confirmation = Confirmation { monthly_cost, opt_in };
            for (confirmed, is_complete) in
                [(Confirmed::CostAndConsent, adds), (Confirmed::Cost, replaces), (Confirmed::Nothing, true)]
            {
                assert!(confirmation.check_complete(confirmed, Flag::Off).is_ok());
                let checked = confirmation.check_complete(confirmed, Flag::On);
                assert_eq!(checked.is_ok(), is_complete, "{confirmed:?} {confirmation:?}");
            }
        }
    }
}
