//! What a slot's subscription pays for: whether it is active, and which server types its plan contains.

use deadpool_postgres::GenericClient;
use jiff::Timestamp;

use crate::http::problem::{Code, Problem};
use crate::machine::name::{IdpUserId, ServerType, Slot};
use crate::machine::plan::Plan;
use crate::platform::db;

/// Passes a type that the slot's active subscription pays for.
///
/// # Errors
/// `subscription_required`, `server_type_not_allowed`.
pub async fn entitled(
    client: &impl GenericClient,
    user: &IdpUserId,
    slot: &Slot,
    server_type: &ServerType,
) -> Result<(), Problem> {
    let found = db::slots::get(client, user, slot).await?;
    match found.filter(|found| found.is_entitled(Timestamp::now())) {
        Some(found) => contained(found.plan, server_type),
        None => Err(Problem::new(
            Code::SubscriptionRequired,
            format!("The slot {slot} has no active subscription."),
        )),
    }
}

/// Passes a type that the plan contains.
///
/// # Errors
/// `server_type_not_allowed`.
pub fn contained(plan: Plan, server_type: &ServerType) -> Result<(), Problem> {
    if plan.contains(server_type) {
        return Ok(());
    }
    let types = plan.server_types().join(", ");
    Err(Problem::new(
        Code::ServerTypeNotAllowed,
        format!("The plan {plan} contains {types}, not {server_type}."),
    ))
}
