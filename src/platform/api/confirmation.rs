//! What an operator confirms before a customer is added: the monthly cost, and the customer's consent.

use serde_json::{Value, json};

use crate::server_cost::ServerCost;
use svc_base::config::Flag;
use svc_http::fields::Fields;
use svc_http::problem::{Code, Problem};
use svc_wire::quote::Price;

const COST: &str = "confirmedMonthlyCost";
const OPT_IN: &str = "confirmedOptIn";

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
    /// `confirmation_required` if the platform requires both, and one is missing.
    pub fn check_complete(&self, required: Flag) -> Result<(), Problem> {
        let missing: Vec<_> = [(COST, self.monthly_cost.is_some()), (OPT_IN, self.opt_in)]
            .into_iter()
            .filter_map(|(name, is_given)| (!is_given).then_some(name))
            .collect();
        if !required.is_on() || missing.is_empty() {
            return Ok(());
        }
        let detail = format!(
            "A new customer's cost and consent must be confirmed: {} is missing. POST /vps/provision/quote returns \
             the cost.",
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
        for (monthly_cost, opt_in, is_complete) in [
            (None, false, false),
            (Some(cost.clone()), false, false),
            (None, true, false),
            (Some(cost), true, true),
        ] {
            let confirmation = Confirmation { monthly_cost, opt_in };
            assert!(confirmation.check_complete(Flag::Off).is_ok());
            assert_eq!(confirmation.check_complete(Flag::On).is_ok(), is_complete, "{confirmation:?}");
        }
    }
}
