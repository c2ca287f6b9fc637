//! Checks that an operator has confirmed the monthly cost and the customer's consent before a customer is added. The
//! cost must also be confirmed if a replacement has a different server type.

use serde_json::{Value, json};

use crate::server_cost::ServerCost;
use svc_base::config::Flag;
use svc_http::fields::Fields;
use svc_http::problem::{Code, Problem};
use svc_wire::quote::Price;

const COST: &str = "confirmedMonthlyCost";
const OPT_IN: &str = "confirmedOptIn";

/// The confirmations that provisioning requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequiredConfirmation {
    Nothing,
    /// An existing customer gets a different server type.
    Cost,
    /// A customer is added.
    CostAndConsent,
}

/// The confirmations in a request.
#[derive(Debug, Clone, Default)]
pub struct Confirmation {
    /// The monthly cost that the operator has confirmed.
    monthly_cost: Option<Price>,
    /// Whether the customer has opted in.
    has_opted_in: bool,
}

impl Confirmation {
    pub fn read(fields: &mut Fields) -> Self {
        let has_opted_in = fields.boolean(OPT_IN).unwrap_or(false);
        Self { monthly_cost: fields.optional(COST), has_opted_in }
    }

    /// Returns whether there is a cost to compare with the provider's prices.
    pub fn has_cost(&self) -> bool {
        self.monthly_cost.is_some()
    }

    /// Checks that the request has the required confirmations.
    ///
    /// # Errors
    /// `confirmation_required` if one of them is missing and the platform enforces confirmations.
    pub fn check_complete(&self, required: RequiredConfirmation, enforcement: Flag) -> Result<(), Problem> {
        let lacks_cost = required != RequiredConfirmation::Nothing && self.monthly_cost.is_none();
        let lacks_consent = required == RequiredConfirmation::CostAndConsent && !self.has_opted_in;
        let missing: Vec<_> = [(COST, lacks_cost), (OPT_IN, lacks_consent)]
            .into_iter()
            .filter_map(|(name, is_missing)| is_missing.then_some(name))
            .collect();
        if !enforcement.is_on() || missing.is_empty() {
            return Ok(());
        }
        let subject = match required {
            RequiredConfirmation::Cost => {
                "The cost of a server type that differs from the replaced machine's"
            }
            RequiredConfirmation::Nothing | RequiredConfirmation::CostAndConsent => {
                "A new customer's cost and consent"
            }
        };
        let detail = format!(
            "{subject} must be confirmed, but the request lacks {}. POST /vps/provision/quote returns the cost.",
            missing.join(" and ")
        );
        Err(Problem::new(Code::ConfirmationRequired, detail).with("missing", json!(missing)))
    }

    /// Compares the confirmed cost, if any, with the current one.
    ///
    /// # Errors
    /// `price_changed` if they differ.
    pub fn check_cost(&self, cost: &ServerCost) -> Result<(), Problem> {
        let current = &cost.highest;
        match &self.monthly_cost {
            Some(confirmed) if confirmed != current => {
                let detail = format!(
                    "The server costs {current} a month, but {confirmed} was confirmed. Confirm the current cost."
                );
                Err(Problem::new(Code::PriceChanged, detail).with("monthlyCost", json!(current.to_string())))
            }
            _ => Ok(()),
        }
    }

    /// Returns the confirmations for the audit entry, which also records the operator and the time.
    pub fn audit_record(&self) -> Value {
        json!({ "monthlyCost": self.monthly_cost.as_ref().map(Price::to_string), "optIn": self.has_opted_in })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_complete_rejects_missing_confirmation_if_enforced() {
        let cost: Price = "9.50 EUR".parse().unwrap();
        for (monthly_cost, has_opted_in, suffices_for_customer, suffices_for_cost) in [
            (None, false, false, false),
            (Some(cost.clone()), false, false, true),
            (None, true, false, false),
            (Some(cost), true, true, true),
        ] {
            let confirmation = Confirmation { monthly_cost, has_opted_in };
            for (required, is_complete) in [
                (RequiredConfirmation::CostAndConsent, suffices_for_customer),
                (RequiredConfirmation::Cost, suffices_for_cost),
                (RequiredConfirmation::Nothing, true),
            ] {
                assert!(confirmation.check_complete(required, Flag::Off).is_ok());
                let result = confirmation.check_complete(required, Flag::On);
                assert_eq!(result.is_ok(), is_complete, "{required:?} {confirmation:?}");
            }
        }
    }
}
