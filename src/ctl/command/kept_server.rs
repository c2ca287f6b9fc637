//! Commands for out-of-service machines: `undelete`, `resume` and `discard`.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::anyhow;
use http::{Method, StatusCode};
use serde_json::json;

use super::machine::{find_active_id, print_outcome};
use super::risk;
use crate::api::{ApiClient, ApiResponse, CallError};
use crate::args::{Discard, MachineTarget, Resume, Undelete};
use crate::confirm;
use crate::output::Output;
use crate::show::View;
use crate::show::copies::is_being_deleted;
use crate::show::machine;
use crate::wait;
use svc_base::applet::{Exit, Failure};
use svc_machine::id::OperationId;
use svc_wire::change::UndeletedMachine;
use svc_wire::copies::KeptServer;
use svc_wire::machine::{DiscardedMachine, MachineDetail, MachinePage};
use svc_wire::text::WireString;

/// Maximum number of machines per page.
const MAX_PAGE_SIZE: &str = "500";
/// Maximum time to wait for the platform to create the server-removal operation.
const REMOVAL_CREATED_TIMEOUT: Duration = Duration::from_secs(5);

pub async fn undelete(api: &ApiClient, args: Undelete, out: &Output) -> Result<(), Failure> {
    let matches = |server: &KeptServer| server.reason == "deleted" && server.missing_since.is_none();
    let response = match find_kept_id(api, &args.machine, matches).await? {
        Selection::One(id) => send_undelete(api, &id).await?,
        Selection::None { failure, kept } => {
            undelete_active(api, &args.machine, &kept).await?.ok_or(failure)?
        }
    };
    print_outcome::<UndeletedMachine>(api, response, args.wait, out).await
}

async fn send_undelete(api: &ApiClient, id: &str) -> Result<ApiResponse, Failure> {
    Ok(api.send(Method::POST, &["vps", id, "undelete"], None).await?)
}

/// Retries the undelete on the active machine if no deleted machine has a kept server: an earlier undelete may have
/// reinstated it. Returns `None` if the machine wasn't undeleted.
async fn undelete_active(
    api: &ApiClient,
    target: &MachineTarget,
    kept: &KeptServers,
) -> Result<Option<ApiResponse>, Failure> {
    if kept.all().any(|server| server.reason == "deleted") {
        return Ok(None);
    }
    let Some(id) = find_active_id(api, target).await? else { return Ok(None) };
    match api.send(Method::POST, &["vps", &id, "undelete"], None).await {
        Ok(response) => Ok(Some(response)),
        // The machine wasn't deleted. The caller's "no kept server" error is clearer.
        Err(CallError::Problem(problem)) if problem.status == StatusCode::CONFLICT => Ok(None),
        Err(error) => Err(error.into()),
    }
}

pub async fn resume(api: &ApiClient, args: Resume, out: &Output) -> Result<(), Failure> {
    let machine = super::machine::find_machine(api, &args.machine).await?;
    let response = api.send(Method::POST, &["vps", &machine.machine_id, "resume"], None).await?;
    out.print_response(&response, |view| Ok(machine::details(view, &response.parse()?)))
}

pub async fn discard(api: &ApiClient, args: Discard, out: &Output) -> Result<(), Failure> {
    let effect = risk::discard_risk(&args);
    let must_confirm = confirm::is_required(&effect, args.yes)?;
    let id = match find_kept_id(api, &args.machine, |_| true).await? {
        Selection::One(id) => id,
        Selection::None { failure, kept } => kept.id_being_deleted().ok_or(failure)?,
    };
    let machine: MachineDetail = api.get(&["vps", &id], &[]).await?.parse()?;
    // Without `--accept-loss`, the platform refuses to discard a server with unsaved changes, so don't prompt.
    if must_confirm && (args.accept_loss || machine.unsaved_since.is_none()) {
        confirm::prompt(&format!("{effect}\n{}", data_at_risk(&machine)), &machine.handle)?;
    }
    let body = json!({"acceptLoss": args.accept_loss});
    let response = api.send(Method::POST, &["vps", &id, "discard"], Some(&body)).await?;
    let mut discarded: DiscardedMachine = response.parse()?;
    if discarded.operation_id.is_none() && !out.is_json {
        discarded.operation_id = wait_for_removal_operation(api, &id).await;
    }
    out.print_response(&response, |view| Ok(machine::discarded(view, &discarded)))
}

/// Waits for the platform to create the server-removal operation. Returns its id, or `None` after
/// [`REMOVAL_CREATED_TIMEOUT`] or an error.
async fn wait_for_removal_operation(api: &ApiClient, id: &str) -> Option<WireString<OperationId>> {
    let removal = wait::poll_until(REMOVAL_CREATED_TIMEOUT, async || {
        let Ok((_, machine)) = wait::poll_machine(api, id).await? else { return Ok(None) };
        let mut operations = machine.operations.into_iter();
        Ok(operations.find(|operation| {
            operation.kind == "remove_server" && matches!(operation.state.as_str(), "running" | "succeeded")
        }))
    });
    removal.await.ok()?.map(|removal| removal.operation_id)
}

/// Describes the data that exists only on the machine's server, and notes if the provider no longer has the server.
fn data_at_risk(machine: &MachineDetail) -> String {
    let view = View::for_stdout();
    let mut message =
        format!("Machine {} belongs to {} (slot {})", machine.handle, machine.idp_user_id, machine.slot);
    if let Some(unsaved) = machine::unsaved_changes(&view, machine) {
        message.push_str(&format!(", and its server holds {unsaved}"));
    }
    let mut kept = machine.copies.iter().flat_map(|copies| &copies.kept);
    if kept.any(|kept| kept.machine_id == machine.machine_id && kept.missing_since.is_some()) {
        message.push_str(". The provider no longer has that server, so there is nothing to delete");
    }
    message + "."
}

/// Kept servers of all slots that a target may refer to.
struct KeptServers {
    being_deleted: Vec<KeptServer>,
    retained: Vec<KeptServer>,
}

impl KeptServers {
    fn all(&self) -> impl Iterator<Item = &KeptServer> {
        self.being_deleted.iter().chain(&self.retained)
    }

    /// Returns the id of the only machine whose server is being deleted, or `None` if other servers are kept. Lets the
    /// operator retry a discard.
    fn id_being_deleted(&self) -> Option<String> {
        match (self.being_deleted.as_slice(), self.retained.as_slice()) {
            ([server], []) => Some(server.machine_id.to_string()),
            _ => None,
        }
    }
}

/// Result of looking up the operator-specified machine.
enum Selection {
    One(String),
    /// No kept server matches.
    None {
        failure: Failure,
        kept: KeptServers,
    },
}

/// Finds the operator-specified machine. For a handle or slot, it's the only one whose kept server matches.
///
/// # Errors
/// [`Exit::Refused`] if several match, or the error of a failed call.
async fn find_kept_id(
    api: &ApiClient,
    target: &MachineTarget,
    matches: fn(&KeptServer) -> bool,
) -> Result<Selection, Failure> {
    if let MachineTarget::Id(id) = target {
        return Ok(Selection::One(id.to_string()));
    }
    let (all, view) = (list_kept_servers(api, target).await?, View::for_stdout());
    let (being_deleted, retained) = all.into_iter().partition(|server| is_being_deleted(&view, server));
    let kept = KeptServers { being_deleted, retained };
    let matching: Vec<_> = kept.retained.iter().filter(|server| matches(server)).collect();
    match matching.as_slice() {
        [server] => Ok(Selection::One(server.machine_id.to_string())),
        [] => {
            let error = no_match_error(target, &kept.being_deleted, &kept.retained);
            Ok(Selection::None { failure: Failure::new(Exit::Refused, error), kept })
        }
        ambiguous => {
            let ids: Vec<_> = ambiguous.iter().map(|server| server.machine_id.as_str()).collect();
            let next = format!("specify one machine by its id: {}", ids.join(", "));
            Err(Failure::new(Exit::Refused, anyhow!("{target} has several kept servers\n  next: {next}")))
        }
    }
}

/// Error for a command that doesn't apply to any of a slot's kept servers.
fn no_match_error(
    target: &MachineTarget,
    being_deleted: &[KeptServer],
    retained: &[KeptServer],
) -> anyhow::Error {
    if let Some(server) = being_deleted.first() {
        let id = &server.machine_id;
        return anyhow!(
            "the server of machine {id} is being deleted\n  next: run `svcctl status {id}` to find the operation, then \
             `svcctl operation abandon OPERATION` to keep the server if the provider still has it"
        );
    }
    let advice = format!("run {} to list deleted and replaced machines", target.list_ended_command());
    match retained.first() {
        Some(server) if server.missing_since.is_some() => {
            anyhow!(
                "the provider no longer has the server of machine {}\n  next: {advice}",
                server.machine_id
            )
        }
        Some(server) => anyhow!(
            "the kept server of {target} belongs to the {} machine {}, not to a deleted one\n  next: {advice}",
            server.reason,
            server.machine_id
        ),
        None => anyhow!("{target} has no kept server\n  next: {advice}"),
    }
}

/// Lists the kept servers of all slots that `target` may refer to. Each machine record lists all of its slot's kept
/// servers, so we only fetch one per slot.
pub async fn list_kept_servers(api: &ApiClient, target: &MachineTarget) -> Result<Vec<KeptServer>, Failure> {
    let mut query = target.query();
    query.extend([("deleted", "true".to_owned()), ("limit", MAX_PAGE_SIZE.to_owned())]);
    let mut machines: HashMap<_, String> = HashMap::new();
    let mut cursor: Option<String> = None;
    loop {
        let mut query = query.clone();
        query.extend(cursor.map(|cursor| ("cursor", cursor)));
        let page: MachinePage = api.get(&["vps"], &query).await?.parse()?;
        for former in page.machines {
            let slot = (former.idp_user_id.to_string(), former.slot.to_string());
            machines.entry(slot).or_insert_with(|| former.machine_id.to_string());
        }
        cursor = page.next_cursor;
        if cursor.is_none() {
            break;
        }
    }
    let mut kept = Vec::new();
    for id in machines.values() {
        let machine: MachineDetail = api.get(&["vps", id], &[]).await?.parse()?;
        kept.extend(machine.copies.into_iter().flat_map(|copies| copies.kept));
    }
    Ok(kept)
}
