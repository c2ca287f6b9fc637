//! Commands that list, show, recover, resize, fail and delete machines, and rotate their tokens.

use std::time::Duration;

use anyhow::anyhow;
use http::Method;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::risk;
use crate::api::{ApiClient, ApiResponse};
use crate::args::{Delete, Fail, List, MachineCommand, MachineTarget, Recover, Resize, Wait};
use crate::output::Output;
use crate::show::View;
use crate::show::accepted_change::{self, AcceptedChange};
use crate::show::copies::SlotExitTimes;
use crate::show::failure;
use crate::show::machine;
use crate::show::token;
use crate::wait::{Goal, TimeLimit};
use crate::{confirm, wait};
use svc_base::applet::{Exit, Failure};
use svc_machine::name::{IdpUserId, Location, Slot};
use svc_wire::change::{self, DeletedMachine, RecoveredMachine};
use svc_wire::copies::{KeptServer, UnsavedData};
use svc_wire::machine::{MachineDetail, MachinePage};

pub async fn recover(api: &ApiClient, args: Recover, out: &Output) -> Result<(), Failure> {
    let effect = risk::recovery_risk(&args);
    if confirm::is_required(&effect, args.yes)? {
        let at_risk = slot_data_at_risk(api, &args.user, &args.slot).await?;
        confirm::prompt(&format!("{effect}{at_risk}"), args.user.as_str())?;
    }
    let mut body = into_object(json!({"idpUserId": args.user, "slot": args.slot}));
    insert_if_some(&mut body, "snapshotKey", args.snapshot);
    insert_if_some(&mut body, "serverType", args.server_type);
    insert_if_some(&mut body, "location", args.location);
    insert_list(&mut body, "fallbackLocations", &args.fallback_locations);
    insert_if_some(&mut body, "imageVersion", args.image_version);
    insert_flag(&mut body, "allowEmpty", args.allow_empty);
    insert_flag(&mut body, "acceptLoss", args.accept_loss);
    insert_flag(&mut body, "replaceFirst", args.replace_first);
    insert_flag(&mut body, "withoutFiles", args.without_files);
    let response = api.send(Method::POST, &["vps", "recover"], Some(&body.into())).await?;
    print_outcome::<RecoveredMachine>(api, response, args.wait, out).await
}

/// Describes the data at risk if the slot's machine is replaced. Empty if there's no active machine.
pub async fn slot_data_at_risk(api: &ApiClient, user: &IdpUserId, slot: &Slot) -> Result<String, Failure> {
    let query = [("idpUserId", user.to_string()), ("slot", slot.to_string())];
    let page: MachinePage = api.get(&["vps"], &query).await?.parse()?;
    let Some(active) = page.machines.iter().find(|machine| machine.is_active()) else {
        return Ok(String::new());
    };
    let machine: MachineDetail = api.get(&["vps", &active.machine_id], &[]).await?.parse()?;
    Ok(format!("\n{}", machine::data_at_risk(&View::for_stdout(), &machine)))
}

pub async fn resize(api: &ApiClient, args: Resize, out: &Output) -> Result<(), Failure> {
    let effect = format!(
        "This powers machine {} off for a few minutes, to change its server type to {}.",
        args.machine, args.server_type
    );
    let must_confirm = confirm::is_required(&effect, args.yes)?;
    let machine = find_machine(api, &args.machine).await?;
    if must_confirm {
        confirm::prompt(&effect, &machine.handle)?;
    }
    let body = json!({"serverType": args.server_type});
    let response = api.send(Method::POST, &["vps", &machine.machine_id, "resize"], Some(&body)).await?;
    print_outcome::<change::Resize>(api, response, args.wait, out).await
}

pub async fn fail(api: &ApiClient, args: Fail, out: &Output) -> Result<(), Failure> {
    let effect = risk::failure_risk(&args);
    let must_confirm = confirm::is_required(&effect, args.yes)?;
    let machine = find_machine(api, &args.machine).await?;
    if must_confirm {
        let at_risk = machine::data_at_risk(&View::for_stdout(), &machine);
        confirm::prompt(&format!("{effect}\n{at_risk}"), &machine.handle)?;
    }
    let body = json!({"reason": args.reason});
    let response = api.send(Method::POST, &["vps", &machine.machine_id, "fail"], Some(&body)).await?;
    out.print_response(&response, |view| Ok(machine::details(view, &response.parse()?)))
}

pub async fn delete(api: &ApiClient, args: Delete, out: &Output) -> Result<(), Failure> {
    let must_confirm = confirm::is_required(&risk::deletion_risk(&args, None), args.yes)?;
    let machine = find_machine(api, &args.machine).await?;
    if must_confirm {
        let effect = risk::successor_deletion_risk(&machine, args.accept_loss)
            .unwrap_or_else(|| risk::deletion_risk(&args, Some(&machine)));
        let owner = format!("It belongs to {} (slot {}).", machine.idp_user_id, machine.slot);
        let at_risk = machine::data_at_risk(&View::for_stdout(), &machine);
        confirm::prompt(&format!("{effect}\n{owner} {at_risk}"), &machine.handle)?;
    }
    let parameters = [("now", args.now), ("acceptLoss", args.accept_loss)];
    let query: Vec<_> = parameters
        .into_iter()
        .filter(|(_, is_set)| *is_set)
        .map(|(name, _)| (name, "true".to_owned()))
        .collect();
    let response = api.send_with_query(Method::DELETE, &["vps", &machine.machine_id], &query).await?;
    let mut accepted = AcceptedChange::from(response.parse::<DeletedMachine>()?);
    accepted.was_server_gone = machine.failure.as_ref().is_some_and(failure::is_server_gone);
    print_accepted_change(api, &response, &accepted, args.wait, out).await
}

pub async fn run(api: &ApiClient, command: MachineCommand, out: &Output) -> Result<(), Failure> {
    let MachineCommand::RotateToken { machine, all: _ } = command;
    let Some(target) = machine else {
        let path = ["vps", "fleet", "rotate-tokens"];
        let response = api.send(Method::POST, &path, Some(&json!({}))).await?;
        return out.print_response(&response, |_| Ok(token::rotations(response.parse()?)));
    };
    let machine = find_machine(api, &target).await?;
    let path = ["vps", machine.machine_id.as_str(), "rotate-token"];
    let response = api.send(Method::POST, &path, Some(&json!({}))).await?;
    out.print_response(&response, |view| Ok(machine::details(view, &response.parse()?)))
}

/// Prints the accepted change or, with `--wait`, its result.
pub async fn print_outcome<T: DeserializeOwned + Into<AcceptedChange>>(
    api: &ApiClient,
    response: ApiResponse,
    wait: Wait,
    out: &Output,
) -> Result<(), Failure> {
    let accepted: AcceptedChange = response.parse::<T>()?.into();
    print_accepted_change(api, &response, &accepted, wait, out).await
}

async fn print_accepted_change(
    api: &ApiClient,
    response: &ApiResponse,
    accepted: &AcceptedChange,
    wait: Wait,
    out: &Output,
) -> Result<(), Failure> {
    let Some(seconds) = wait.seconds else {
        return out.print_response(response, |view| Ok(accepted_change::show(view, accepted)));
    };
    if let Some(note) = accepted.note() {
        eprintln!("note: {note}");
    }
    if accepted.was_already_off() {
        let response = api.get(&["vps", &accepted.machine_id], &[]).await?;
        return out.print_response(&response, |view| Ok(machine::details(view, &response.parse()?)));
    }
    let limit = TimeLimit::from_now(Duration::from_secs(seconds));
    let operation = accepted.operation_id.as_deref();
    let (response, machine) =
        wait::wait_until_settled(api, &accepted.machine_id, operation, Goal::Success, limit).await?;
    // Also wait for the machine being replaced: it holds the data, and deleting it may need an operator decision.
    if let Some(replaced) = &accepted.also_deleted {
        let operation = Some(replaced.operation_id.as_str());
        wait::wait_until_settled(api, &replaced.machine_id, operation, Goal::Success, limit).await?;
    }
    out.print_response(&response, |view| Ok(machine::details(view, &machine)))
}

pub async fn list(api: &ApiClient, args: List, out: &Output) -> Result<(), Failure> {
    let parameters = [
        ("status", args.status.map(|status| status.to_string())),
        ("idpUserId", args.user.map(String::from)),
        ("slot", args.slot.map(String::from)),
        ("handle", args.handle.map(String::from)),
        ("deleted", args.deleted.then(|| "true".to_owned())),
        ("limit", args.limit.map(|limit| limit.to_string())),
        ("cursor", args.cursor),
    ];
    let query: Vec<_> = parameters.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
    let response = api.get(&["vps"], &query).await?;
    out.print_response(&response, |view| Ok(machine::list(view, &response.parse::<MachinePage>()?)))
}

pub async fn status(api: &ApiClient, machine: &MachineTarget, out: &Output) -> Result<(), Failure> {
    let id = find_id(api, machine).await?;
    let response = api.get(&["vps", &id], &[]).await?;
    if out.is_json {
        return out.print_response(&response, |_| Ok(String::new()));
    }
    let machine: MachineDetail = response.parse()?;
    let slot_exit_times = fetch_slot_exit_times(api, &machine).await?;
    out.print_response(&response, |view| {
        Ok(machine::details_with_slot_exit_times(view, &machine, &slot_exit_times))
    })
}

/// Fetches when former machines left the slot, for kept servers with unsaved changes. That time determines how much is
/// unsaved.
async fn fetch_slot_exit_times(api: &ApiClient, machine: &MachineDetail) -> Result<SlotExitTimes, Failure> {
    let mut times = SlotExitTimes::new();
    let kept = machine.copies.iter().flat_map(|copies| &copies.kept);
    let needs_exit_time = |kept: &&KeptServer| {
        kept.unsaved_since.is_some()
            && !kept.unsaved_data.as_ref().is_some_and(|data| data.is(UnsavedData::Files))
            && kept.machine_id != machine.machine_id
    };
    for server in kept.filter(needs_exit_time) {
        let former: MachineDetail = api.get(&["vps", &server.machine_id], &[]).await?.parse()?;
        times.extend(former.left_slot_at().map(|at| (server.machine_id.to_string(), at.clone())));
    }
    Ok(times)
}

/// Fetches the operator-specified machine: any machine by id, otherwise an active one.
pub async fn find_machine(api: &ApiClient, target: &MachineTarget) -> Result<MachineDetail, Failure> {
    let id = find_id(api, target).await?;
    Ok(api.get(&["vps", &id], &[]).await?.parse()?)
}

/// Finds the id of the target's only active machine. Id targets are returned as is.
///
/// # Errors
/// [`Exit::Refused`] if no slot or several slots have an active machine; or the error of a failed call.
pub async fn find_id(api: &ApiClient, target: &MachineTarget) -> Result<String, Failure> {
    match find_active_id(api, target).await? {
        Some(id) => Ok(id),
        None => {
            let next = format!(
                "run `svcctl list` to see active machines or {} to see former ones; while a deleted machine's \
                 server is kept, run `svcctl undelete {target}` to restore the machine",
                target.list_ended_command()
            );
            Err(Failure::new(Exit::Refused, anyhow!("{target} has no active machine\n  next: {next}")))
        }
    }
}

/// Like [`find_id`], but returns `None` if there's no active machine.
///
/// # Errors
/// [`Exit::Refused`] if several slots have one, or the error of a failed call.
pub async fn find_active_id(api: &ApiClient, target: &MachineTarget) -> Result<Option<String>, Failure> {
    if let MachineTarget::Id(id) = target {
        return Ok(Some(id.to_string()));
    }
    let page: MachinePage = api.get(&["vps"], &target.query()).await?.parse()?;
    let mut active = page.machines.iter().filter(|machine| machine.is_active());
    match (active.next(), active.next()) {
        (machine, None) => Ok(machine.map(|machine| machine.machine_id.to_string())),
        (_, Some(_)) => {
            let next = format!("run `svcctl list --handle {target}`, then specify one machine by its id");
            let error = anyhow!("{target} has machines in several slots\n  next: {next}");
            Err(Failure::new(Exit::Refused, error))
        }
    }
}

/// Inserts a flag only if set, so that older platforms accept the request.
pub fn insert_flag(body: &mut Map<String, Value>, name: &str, is_set: bool) {
    if is_set {
        body.insert(name.to_owned(), true.into());
    }
}

pub fn into_object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(members) => members,
        _ => Map::new(),
    }
}

/// Inserts a list unless it's empty, in which case the platform uses its default.
pub fn insert_list(body: &mut Map<String, Value>, name: &str, values: &[Location]) {
    if !values.is_empty() {
        body.insert(name.to_owned(), json!(values));
    }
}

pub fn insert_if_some(body: &mut Map<String, Value>, name: &str, value: Option<impl Into<String>>) {
    if let Some(value) = value {
        body.insert(name.to_owned(), Value::String(value.into()));
    }
}
