//! What a slot's subscription pays for: whether it is active, and which server types its plan contains.

use deadpool_postgres::GenericClient;
use jiff::Timestamp;

use crate::config::Flag;
use crate::http::problem::{Code, Problem};
use crate::machine::name::{IdpUserId, ServerType, Slot};
use crate::machine::plan::Plan;
use crate::platform::context::Platform;
use crate::platform::db;
use crate::platform::db::machine_row::{MachineKind, MachineRow};

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

/// Passes a type that this machine may have: what its slot's plan contains, or what a preview may have.
///
/// # Errors
/// As [`entitled`] and [`contained`].
pub async fn of_machine(
    platform: &Platform,
    client: &impl GenericClient,
    machine: &MachineRow,
    server_type: &ServerType,
) -> Result<(), Problem> {
    match machine.kind {
        MachineKind::Preview => contained(Plan::Max, server_type),
        MachineKind::Customer if platform.config.provisioning.billing_enforcement == Flag::On => {
            entitled(client, &machine.user, &machine.slot, server_type).await
        }
        MachineKind::Customer => Ok(()),
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
