//! The commands for machines out of service: `undelete`, `resume` and `discard`.

use std::time::Duration;

use anyhow::anyhow;
use http::Method;
use serde_json::json;

use super::machine::{active_id, finish};
use super::risk;
use crate::api::{ApiClient, ApiResponse};
use crate::args::{Discard, Resume, Target, Undelete};
use crate::confirm;
use crate::out::Out;
use crate::show::View;
use crate::show::copies::is_being_deleted;
use crate::show::machine as shown;
use crate::wait;
use svc_base::applet::{Exit, Failure};
use svc_machine::id::OperationId;
use svc_wire::change::UndeletedMachine;
use svc_wire::copies::KeptServer;
use svc_wire::machine::{DiscardedMachine, MachineDetail, MachinePage};
use svc_wire::text::Text;

/// Maximum wait for the id of a removal.
const FILING_TIMEOUT: Duration = Duration::from_secs(5);

pub async fn undelete(api: &ApiClient, args: Undelete, out: &Out) -> Result<(), Failure> {
    let matches = |server: &KeptServer| server.reason == "deleted" && server.missing_since.is_none();
    let response = match kept_id(api, &args.machine, matches).await {
        Ok(id) => send_undelete(api, &id).await?,
        Err(failure) => undelete_active(api, &args.machine).await?.ok_or(failure)?,
    };
    finish::<UndeletedMachine>(api, response, args.wait, out).await
}

async fn send_undelete(api: &ApiClient, id: &str) -> Result<ApiResponse, Failure> {
    Ok(api.send(Method::POST, &["vps", id, "undelete"], None).await?)
}

/// Undeletes the active machine if no deleted machine has a server: its deletion may already have been undone.
async fn undelete_active(api: &ApiClient, target: &Target) -> Result<Option<ApiResponse>, Failure> {
    let kept = kept_of(api, target).await?;
    if kept.iter().any(|server| server.reason == "deleted") {
        return Ok(None);
    }
    let Ok(Some(id)) = active_id(api, target).await else { return Ok(None) };
    Ok(send_undelete(api, &id).await.ok())
}

pub async fn resume(api: &ApiClient, args: Resume, out: &Out) -> Result<(), Failure> {
    let machine = super::machine::find(api, &args.machine).await?;
    let response = api.send(Method::POST, &["vps", &machine.machine_id, "resume"], None).await?;
    out.print_response(&response, |view| Ok(shown::details(view, &response.read()?)))
}

pub async fn discard(api: &ApiClient, args: Discard, out: &Out) -> Result<(), Failure> {
    let what = risk::discard_risk(&args);
    let must_confirm = confirm::is_required(&what, args.yes)?;
    let id = match kept_id(api, &args.machine, |_| true).await {
        Ok(id) => id,
        Err(failure) => removed_id(api, &args.machine).await?.ok_or(failure)?,
    };
    let machine: MachineDetail = api.get(&["vps", &id], &[]).await?.read()?;
    // Without the option the platform refuses a server with unsaved changes, so there is nothing to confirm.
    if must_confirm && (args.accept_loss || machine.unsaved_since.is_none()) {
        confirm::prompt(&format!("{what}\n{}", data_at_risk(&machine)), &machine.handle)?;
    }
    let body = json!({"acceptLoss": args.accept_loss});
    let response = api.send(Method::POST, &["vps", &id, "discard"], Some(&body)).await?;
    let mut discarded: DiscardedMachine = response.read()?;
    if discarded.operation_id.is_none() && !out.json {
        discarded.operation_id = filed_removal(api, &id).await;
    }
    out.print_response(&response, |view| Ok(shown::discarded(view, &discarded)))
}

/// The operation that deletes the server. The platform creates it shortly after the request.
async fn filed_removal(api: &ApiClient, id: &str) -> Option<Text<OperationId>> {
    let removal = wait::poll_until(FILING_TIMEOUT, async || {
        let Ok((_, machine)) = wait::poll_machine(api, id).await? else { return Ok(None) };
        let mut operations = machine.operations.into_iter();
        Ok(operations.find(|operation| {
            operation.kind == "remove_server" && matches!(operation.state.as_str(), "running" | "succeeded")
        }))
    });
    removal.await.ok()?.map(|removal| removal.operation_id)
}

/// Describes the data that only the machine's server has, and whether the provider still has the server.
fn data_at_risk(machine: &MachineDetail) -> String {
    let view = View::of_stdout();
    let mut message = format!("It is {} of {} (slot {})", machine.handle, machine.idp_user_id, machine.slot);
    if let Some(held) = shown::unsaved_changes(&view, machine) {
        message.push_str(&format!(", and its server holds {held}"));
    }
    let mut kept = machine.copies.iter().flat_map(|copies| &copies.kept);
    if kept.any(|kept| kept.machine_id == machine.machine_id && kept.missing_since.is_some()) {
        message.push_str(". The provider no longer has that server: there is nothing to delete");
    }
    message + "."
}

/// The id of the machine that the operator names; for a handle or slot, the only one with a kept server.
async fn kept_id(
    api: &ApiClient,
    target: &Target,
    matches: fn(&KeptServer) -> bool,
) -> Result<String, Failure> {
    if let Target::Id(id) = target {
        return Ok(id.to_string());
    }
    let (all, view) = (kept_of(api, target).await?, View::of_stdout());
    let (being_deleted, kept): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|server| is_being_deleted(&view, server));
    let (meant, others): (Vec<_>, Vec<_>) = kept.into_iter().partition(matches);
    let meant: Vec<_> = meant.into_iter().map(|server| server.machine_id.to_string()).collect();
    match meant.as_slice() {
        [one] => Ok(one.clone()),
        [] => Err(Failure::new(Exit::Refused, no_match_error(target, &being_deleted, &others))),
        several => {
            let next = format!("name one by its id: {}", several.join(", "));
            Err(Failure::new(Exit::Refused, anyhow!("{target} has several kept servers\n  next: {next}")))
        }
    }
}

/// The only machine whose server is being deleted, if no server is kept: for a repeated discard.
async fn removed_id(api: &ApiClient, target: &Target) -> Result<Option<String>, Failure> {
    let (all, view) = (kept_of(api, target).await?, View::of_stdout());
    let (mut being_deleted, kept): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|server| is_being_deleted(&view, server));
    Ok(being_deleted
        .pop()
        .filter(|_| kept.is_empty() && being_deleted.is_empty())
        .map(|server| server.machine_id.into()))
}

/// The error if the command applies to none of a slot's kept servers.
fn no_match_error(target: &Target, being_deleted: &[KeptServer], others: &[KeptServer]) -> anyhow::Error {
    if let Some(server) = being_deleted.first() {
        let id = &server.machine_id;
        return anyhow!(
            "the server of machine {id} is being deleted\n  next: `svcctl status {id}` names the operation; `svcctl \
             operation abandon OPERATION` keeps the server if the provider still has it"
        );
    }
    let ended = format!("{} shows its deleted and replaced machines", target.list_of_ended());
    match others.first() {
        Some(server) if server.missing_since.is_some() => {
            anyhow!("the provider no longer has the server of machine {}\n  next: {ended}", server.machine_id)
        }
        Some(server) => anyhow!(
            "the kept server of {target} belongs to {} machine {}, not to a deleted one\n  next: {ended}",
            server.reason,
            server.machine_id
        ),
        None => anyhow!("{target} has no kept server\n  next: {ended}"),
    }
}

/// The kept servers of all slots that `target` may name. The record of each machine lists the copies of its slot.
pub async fn kept_of(api: &ApiClient, target: &Target) -> Result<Vec<KeptServer>, Failure> {
    let mut query = target.query();
    query.push(("deleted", "true".to_owned()));
    let page: MachinePage = api.get(&["vps"], &query).await?.read()?;
    let (mut slots, mut kept) = (Vec::new(), Vec::new());
    for ended in page.machines {
        if slots.contains(&ended.slot) {
            continue;
        }
        let machine: MachineDetail = api.get(&["vps", &ended.machine_id], &[]).await?.read()?;
        kept.extend(machine.copies.into_iter().flat_map(|copies| copies.kept));
        slots.push(ended.slot);
    }
    Ok(kept)
}
