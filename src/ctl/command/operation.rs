//! `svcctl operation`: shows operations and submits operator decisions.

use std::time::Duration;

use anyhow::anyhow;
use http::Method;
use serde_json::json;

use crate::api::ApiClient;
use crate::args::{Operation as Args, OperationCommand, Wait};
use crate::output::Output;
use crate::show::machine;
use crate::show::operation;
use crate::wait::{self, Goal, TimeLimit};
use svc_base::applet::{Exit, Failure};
use svc_machine::id::OperationId;
use svc_wire::machine::MachineDetail;
use svc_wire::operation::Operation;

pub async fn run(api: &ApiClient, args: Args, out: &Output) -> Result<(), Failure> {
    match (args.command, args.operation) {
        (Some(OperationCommand::Show { operation, wait }), _) => show(api, operation, wait, out).await,
        (Some(OperationCommand::Continue { operation, accept_loss, snapshot, wait }), _) => {
            let mut body = if accept_loss { json!({"acceptLoss": true}) } else { json!({}) };
            if let Some(key) = snapshot {
                body["snapshotKey"] = key.into();
            }
            let path = ["vps", "operations", &operation.to_string(), "continue"];
            let response = api.send(Method::POST, &path, Some(&body)).await?;
            if wait.seconds.is_some() {
                return show(api, operation, wait, out).await;
            }
            out.print_response(&response, |view| Ok(operation::details(view, &response.parse()?)))
        }
        (Some(OperationCommand::Abandon { operation, wait }), _) => {
            // Ignore errors: the result is only used for a note.
            let machine_to_power_on = find_machine_to_power_on(api, operation).await.unwrap_or_default();
            let path = ["vps", "operations", &operation.to_string(), "abandon"];
            let response = api.send(Method::POST, &path, None).await?;
            if let Some(machine) = machine_to_power_on {
                eprintln!(
                    "note: machine {machine}, which `svcctl power off` had powered off, gets its slot back and \
                     is powered on; once it is running, run `svcctl power off {machine}` to power it off again"
                );
            }
            if let Some(seconds) = wait.seconds
                && let Some(subject) = find_machine_after_abandoning(api, &response.parse()?).await?
            {
                let limit = TimeLimit::from_now(Duration::from_secs(seconds));
                let in_progress = subject.operations.iter().find(|operation| operation.is_in_progress());
                let in_progress = in_progress.map(|operation| operation.operation_id.as_str());
                let (response, machine) = wait::wait_until_settled(
                    api,
                    &subject.machine_id,
                    in_progress,
                    Goal::MachineRunning,
                    limit,
                )
                .await?;
                return out.print_response(&response, |view| Ok(machine::details(view, &machine)));
            }
            out.print_response(&response, |view| Ok(operation::details(view, &response.parse()?)))
        }
        (None, Some(operation)) => show(api, operation, args.wait, out).await,
        (None, None) => Err(Failure::new(Exit::Usage, anyhow!("missing operation id"))),
    }
}

/// Finds the machine, if any, that returns to service once the operation is abandoned.
async fn find_machine_after_abandoning(
    api: &ApiClient,
    abandoned: &Operation,
) -> Result<Option<MachineDetail>, Failure> {
    let machine: MachineDetail = api.get(&["vps", &abandoned.machine_id], &[]).await?.parse()?;
    match abandoned.kind.as_str() {
        "provision" | "recover" => {
            let live = machine.copies.as_ref().and_then(|copies| copies.live.as_ref());
            let Some(live) = live.filter(|live| live.machine_id != machine.machine_id) else {
                return Ok(None);
            };
            Ok(Some(api.get(&["vps", &live.machine_id], &[]).await?.parse()?))
        }
        "delete" | "resize" => Ok(Some(machine).filter(|machine| machine.is_active())),
        _ => Ok(None),
    }
}

/// Finds the machine that will get its slot back, if it's powered off by an operator: abandoning the operation powers
/// its server on anyway.
async fn find_machine_to_power_on(api: &ApiClient, id: OperationId) -> Result<Option<String>, Failure> {
    let operation: Operation = api.get(&["vps", "operations", &id.to_string()], &[]).await?.parse()?;
    let machine: MachineDetail = api.get(&["vps", &operation.machine_id], &[]).await?.parse()?;
    let reinstated = match operation.kind.as_str() {
        "delete" => Some(machine),
        "provision" | "recover" => find_replaced_machine(api, &machine).await?,
        _ => None,
    };
    Ok(reinstated
        .filter(|machine| machine.powered_off_at.is_some())
        .map(|machine| machine.machine.machine_id.into()))
}

/// Finds the machine that this one replaces, among those with kept servers.
async fn find_replaced_machine(
    api: &ApiClient,
    machine: &MachineDetail,
) -> Result<Option<MachineDetail>, Failure> {
    for kept in machine.copies.iter().flat_map(|copies| &copies.kept) {
        let old: MachineDetail = api.get(&["vps", &kept.machine_id], &[]).await?.parse()?;
        if old.replaced_by.as_ref() == Some(&machine.machine_id) {
            return Ok(Some(old));
        }
    }
    Ok(None)
}

async fn show(api: &ApiClient, id: OperationId, wait: Wait, out: &Output) -> Result<(), Failure> {
    let path = ["vps", "operations", &id.to_string()];
    let mut response = api.get(&path, &[]).await?;
    let mut operation: Operation = response.parse()?;
    if let Some(seconds) = wait.seconds {
        let limit = TimeLimit::from_now(Duration::from_secs(seconds));
        wait::wait_until_settled(
            api,
            &operation.machine_id,
            Some(&operation.operation_id),
            Goal::Success,
            limit,
        )
        .await?;
        response = api.get(&path, &[]).await?;
        operation = response.parse()?;
    }
    out.print_response(&response, |view| Ok(operation::details(view, &operation)))
}
