//! The step `create_server`: creates at most one server per machine, even if a response is lost.
//!
//! The machine's row records a create request before the request is sent. While a request is recorded, the server is
//! looked up before another request is sent. All requests for a machine use the same name, and the provider keeps names
//! unique.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::leased::LeasedOperation;
use super::step::{StepError, StepOutcome, StepRecord};
use super::{OperationKind, Step, StepPoint};
use crate::alarms;
use crate::context::Platform;
use crate::db::machine_row::MachineRow;
use crate::db::{self, machine_server};
use crate::store_access_issuer::SessionGrant;
use crate::userdata;
use svc_http::problem::format_chain;
use svc_http::proof::ProofKeys;
use svc_machine::event::RestoreMode;
use svc_machine::id::MachineId;
use svc_provider::{ActionId, ActionStatus, Cause, ErrorKind, ProviderError, Server, ServerOrder};

/// The label that names a server's machine.
pub const MACHINE_LABEL: &str = "svc-machine";

/// The label that names the installation that created a server.
pub const INSTALLATION_LABEL: &str = "svc-installation";

/// The label that identifies a server's slot by a prefix of the SHA-256 of `user/slot`, because `user/slot` itself can
/// be too long for a label.
pub const SLOT_LABEL: &str = "svc-slot";

/// The label with the epoch of a server's machine.
pub const EPOCH_LABEL: &str = "svc-epoch";

/// Key in an operation's facts for the number of locations without capacity.
const LOCATIONS_TRIED: &str = "locationsTried";
/// Interval between lookups of a server whose create request has an unknown outcome, and minimum interval between
/// checks of the provider's create actions.
const LOOKUP_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum interval between checks of the provider's create actions.
const MAX_ACTION_CHECK_INTERVAL: Duration = Duration::from_secs(15);
/// Timeout for a create request. It exceeds the longest time that the provider client can take: the retry window plus
/// one exchange, including the wait for the rate budget. A shorter timeout would discard the client's error, which
/// usually proves that nothing was created.
const CREATE_TIMEOUT: Duration = Duration::from_secs(50);

pub async fn create_server(leased: &LeasedOperation<'_>) -> Result<StepOutcome, StepError> {
    let machine = leased.machine().await?;
    let platform = leased.platform;
    if machine.create_requested_at.is_some() {
        if let Some(server) = find_server(platform, &machine).await? {
            return Ok(adopt(&server));
        }
        let session = platform.db.session().await?;
        let request_age = db::machines::load_create_request_age(&session, machine.id).await?;
        let remaining = platform.config.provider.unconfirmed_create_timeout.saturating_sub(request_age);
        if !remaining.is_zero() {
            return Ok(StepOutcome::wait(remaining.min(LOOKUP_INTERVAL)));
        }
    }
    let session = platform.db.session().await?;
    let keys = db::keys::list_public_keys(&session, db::keys::PROOF_PURPOSE).await?;
    drop(session);
    let order = build_order(leased, &machine, &keys).await?;
    leased.record_create_request().await?;
    leased.hit_fail_point(Step::CreateServer, StepPoint::RequestRecorded)?;
    let result = tokio::time::timeout(CREATE_TIMEOUT, platform.provider.create(&order)).await;
    let Ok(response) = result else {
        tracing::warn!(machine = %machine.id, timeout_s = CREATE_TIMEOUT.as_secs(),
            "a create request has timed out, and its outcome is unknown");
        return Ok(StepOutcome::wait(LOOKUP_INTERVAL));
    };
    match response {
        Ok(created) => {
            alarms::clear_provider_limit(platform).await;
            Ok(finish_with_server("created", &created.server, &created.actions))
        }
        Err(error) => handle_create_error(leased, &machine, error).await,
    }
}

/// Handles a failed create request. If its outcome is unknown, the request stays recorded, so that the next poll looks
/// up the server. If the name is taken, the server with this name is adopted. After any other error, no server exists.
async fn handle_create_error(
    leased: &LeasedOperation<'_>,
    machine: &MachineRow,
    error: ProviderError,
) -> Result<StepOutcome, StepError> {
    match error.kind() {
        ErrorKind::Ambiguous => {
            tracing::warn!(machine = %machine.id, error = %format_chain(&error),
                "the outcome of a create request is unknown");
            Ok(StepOutcome::wait(Duration::ZERO))
        }
        ErrorKind::Conflict => match find_server(leased.platform, machine).await? {
            Some(server) => Ok(adopt(&server)),
            None => Err(StepError::from(error)),
        },
        ErrorKind::Account if error.is_capacity_error() => {
            continue_in_next_location(leased, machine, error).await
        }
        ErrorKind::Refused | ErrorKind::Account | ErrorKind::NotFound | ErrorKind::Transient => {
            leased.clear_create_request().await?;
            Err(StepError::from(error))
        }
    }
}

/// Continues with the next location. After a full round, the locations are retried with backoff.
async fn continue_in_next_location(
    leased: &LeasedOperation<'_>,
    machine: &MachineRow,
    error: ProviderError,
) -> Result<StepOutcome, StepError> {
    let from = &machine.location;
    let what =
        format!("location {from} has no capacity for server type {} ({})", machine.server_type, error.code());
    let Some(next) = machine.fallback_locations.first() else {
        leased.clear_create_request().await?;
        return Err(StepError::transient(what, error));
    };
    tracing::warn!(machine = %machine.id, %from, to = %next, server_type = %machine.server_type, code = error.code(),
        "the provider has no capacity in a location");
    let mut facts = leased.facts();
    let tried = facts.get(LOCATIONS_TRIED).and_then(Value::as_u64).unwrap_or(0) + 1;
    if tried > machine.fallback_locations.len() as u64 {
        let what = format!("{what}, nor does any other location; {next} is next");
        leased.move_to_next_location(&what).await?;
        return Err(StepError::transient(what, error));
    }
    leased.move_to_next_location(&format!("{what}: trying {next} next")).await?;
    facts.insert(LOCATIONS_TRIED.to_owned(), json!(tried));
    Ok(StepOutcome::Wait { delay: Duration::ZERO, facts: Some(facts) })
}

fn adopt(server: &Server) -> StepOutcome {
    finish_with_server("adopted", server, &[])
}

fn finish_with_server(note: &'static str, server: &Server, actions: &[ActionId]) -> StepOutcome {
    let actions = actions.iter().map(|action| action.0).collect();
    let record = StepRecord::CreateAccepted { server: server.id.0, address: server.public_ipv4, actions };
    StepOutcome::Done { note: Some(note.into()), record }
}

/// Checks the provider's actions that create and start the server. Returns the delay until the next check, or `None`
/// if all have succeeded or there are none. An action that the provider no longer has counts as succeeded. An
/// unavailable provider does not end the wait for the registration.
///
/// # Errors
/// [`StepError`]; permanent if an action failed, because no host will register.
pub async fn check_actions(
    leased: &LeasedOperation<'_>,
    machine: MachineId,
) -> Result<Option<Duration>, StepError> {
    let session = leased.platform.db.session().await?;
    let actions = machine_server::list_pending_create_actions(&session, machine).await?;
    drop(session);
    let Some(action) = actions.first() else { return Ok(None) };
    let next_check = (leased.step_age().await? / 4).clamp(LOOKUP_INTERVAL, MAX_ACTION_CHECK_INTERVAL);
    match leased.platform.provider.get_action(ActionId(*action)).await.map(|action| action.status) {
        Ok(ActionStatus::Running) => Ok(Some(next_check)),
        Ok(ActionStatus::Error { code, message }) => {
            let what = "the provider could not start the machine's server";
            let cause = Cause::Response { status: 200, code, message };
            Err(StepError::permanent(what, ProviderError::new("create server", ErrorKind::Transient, cause)))
        }
        Err(error) if error.kind() != ErrorKind::NotFound => {
            tracing::debug!(%machine, error = %format_chain(&error), "cannot read the provider's create action");
            Ok(Some(next_check))
        }
        Ok(ActionStatus::Success) | Err(_) => {
            let session = leased.platform.db.session().await?;
            machine_server::record_create_action_end(&session, machine, *action).await?;
            Ok((actions.len() > 1).then_some(Duration::ZERO))
        }
    }
}

/// Looks up the machine's server by name, then by label.
pub async fn find_server(platform: &Platform, machine: &MachineRow) -> Result<Option<Server>, ProviderError> {
    if let Some(server) = platform.provider.find(&machine.server_name()).await? {
        return Ok(Some(server));
    }
    let labeled = platform.provider.list_by_label(&label_selector(machine.id)).await?;
    Ok(labeled.into_iter().next())
}

fn label_selector(machine: MachineId) -> String {
    format!("{MACHINE_LABEL}={machine}")
}

async fn build_order(
    leased: &LeasedOperation<'_>,
    machine: &MachineRow,
    keys: &ProofKeys,
) -> Result<ServerOrder, StepError> {
    let platform = leased.platform;
    let config = &platform.config;
    let store = platform.store_access.grant_access(machine, SessionGrant::WorkingOnly).await;
    let store =
        store.map_err(|error| StepError::transient("cannot get store credentials for the host", error))?;
    let has_saved_files = async {
        let session = platform.db.session().await?;
        db::machines::has_earlier_saved_files(&session, machine).await
    };
    let has_saved_files = has_saved_files
        .await
        .map_err(|error| StepError::transient("cannot read the slot's machines", error))?;
    // A machine that `svcctl provision` creates may start without files. A recovery's `--allow-empty` applies only to
    // the database.
    let must_have_files = machine.restore == RestoreMode::Required || leased.kind == OperationKind::Recover;
    let expects_files = must_have_files && has_saved_files;
    let user_data = userdata::render(machine, &config.hosts, &store, keys, &platform.mint, expects_files)
        .map_err(|error| StepError::permanent("cannot render user-data", error))?;
    let slot = Sha256::digest(format!("{}/{}", machine.user, machine.slot));
    let labels = BTreeMap::from([
        (MACHINE_LABEL.to_owned(), machine.id.to_string()),
        (INSTALLATION_LABEL.to_owned(), platform.installation.to_string()),
        (SLOT_LABEL.to_owned(), hex::encode(&slot[..16])),
        (EPOCH_LABEL.to_owned(), machine.epoch.to_string()),
    ]);
    Ok(ServerOrder {
        name: machine.server_name(),
        server_type: machine.server_type.clone(),
        image: config.provider.image.clone(),
        location: machine.location.clone(),
        labels,
        user_data,
    })
}
