//! Checks a slot's entitlements: whether its subscription is active, and whether its plan includes the server type.

use deadpool_postgres::GenericClient;
use jiff::Timestamp;

use crate::context::Platform;
use crate::db;
use crate::db::machine_row::MachineRow;
use svc_base::config::Flag;
use svc_http::problem::{Code, Problem};
use svc_machine::name::{IdpUserId, ServerType, Slot};
use svc_machine::plan::Plan;
use svc_wire::machine::MachineKind;

/// Ensures that the slot has an active subscription whose plan includes the server type.
///
/// # Errors
/// `subscription_required` without an active subscription; `server_type_not_allowed` if the plan does not include the
/// server type; `database_unavailable` if the database is unreachable.
pub async fn ensure_entitled(
    client: &impl GenericClient,
    user: &IdpUserId,
    slot: &Slot,
    server_type: &ServerType,
) -> Result<(), Problem> {
    let subscription = db::slots::find_subscription(client, user, slot).await?;
    match subscription.filter(|subscription| subscription.is_entitled(Timestamp::now())) {
        Some(subscription) => ensure_plan_includes(subscription.plan, server_type),
        None => Err(Problem::new(
            Code::SubscriptionRequired,
            format!("The slot {slot} of user {user} has no active subscription."),
        )),
    }
}

/// Ensures that this machine may have the server type: a customer's machine under its slot's plan, if billing is
/// enforced; a preview under the plan `max`.
///
/// # Errors
/// Same as [`ensure_entitled`] and [`ensure_plan_includes`].
pub async fn ensure_machine_entitled(
    platform: &Platform,
    client: &impl GenericClient,
    machine: &MachineRow,
    server_type: &ServerType,
) -> Result<(), Problem> {
    match machine.kind {
        MachineKind::Preview => ensure_plan_includes(Plan::Max, server_type),
        MachineKind::Customer if platform.config.provisioning.billing_enforcement == Flag::On => {
            ensure_entitled(client, &machine.user, &machine.slot, server_type).await
        }
        MachineKind::Customer => Ok(()),
    }
}

/// Ensures that the plan includes the server type.
///
/// # Errors
/// `server_type_not_allowed` if it does not.
pub fn ensure_plan_includes(plan: Plan, server_type: &ServerType) -> Result<(), Problem> {
    if plan.contains(server_type) {
        return Ok(());
    }
    let types = plan.server_types().join(", ");
    Err(Problem::new(
        Code::ServerTypeNotAllowed,
        format!("The plan {plan} includes {types}, but not {server_type}."),
    ))
}
