//! The server inventory: compares the provider's servers with the known machines, and finds servers that were created
//! late, are missing, or belong to no machine.
//!
//! Invariant: a server that is missing from the provider's list is not yet proven to be gone. A machine fails only
//! after two lookups by id find no server, while its host is sending no heartbeats; a server is deleted only if its
//! machine has ended. If more than a few machines would fail at once, an alarm blocks the failures until an operator
//! decides. A server with this installation's label but without a machine is not garbage: each machine is stored before
//! its server is ordered, so the database has lost the row. An operator decides what to do with each such server.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use deadpool_postgres::Object;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::create::{EPOCH_LABEL, INSTALLATION_LABEL, MACHINE_LABEL, SLOT_LABEL};
use super::reconcile::{Failures, InventoryStatus};
use crate::alarms::{self, Alarm, WorkPermission};
use crate::context::Platform;
use crate::db;
use crate::db::servers::TrackedServer;
use crate::lifecycle::{self, Change, EventContext, LifecycleError};
use svc_http::request_id;
use svc_machine::event::Event;
use svc_machine::id::MachineId;
use svc_provider::{Server, ServerId};

/// Minimum time between the two lookups of a server that seems to be missing, unless reconciler passes are closer
/// together.
const CONFIRM_INTERVAL: Duration = Duration::from_secs(10);
/// Losses within this window are counted together.
const LOSS_WINDOW: Duration = Duration::from_secs(3600);
/// Maximum number of lookups by id per pass for unlisted servers that are only monitored.
const MAX_MONITORED_LOOKUPS: usize = 20;
/// After this many consecutive failed lookups, the remaining ones are skipped.
const MAX_CONSECUTIVE_FAILURES: usize = 3;
/// Maximum number of unknown servers that the alarm names.
const MAX_SHOWN_SERVERS: usize = 20;
/// If the provider lists none of at least this many servers, it was probably called with a different project's token.
const MIN_SERVERS_TO_SUSPECT_TOKEN: usize = 4;

/// Compares the provider's servers with the database. Returns whether unknown servers were recorded, and the failures
/// in this pass, which the next pass retries.
pub(super) async fn take_inventory(platform: &Platform) -> (InventoryStatus, anyhow::Result<()>) {
    let mut failures = Failures::default();
    match record_inventory(platform, &mut failures).await {
        Ok(inventory) => (inventory, failures.into_result()),
        Err(error) => (InventoryStatus::NotRecorded, Err(error)),
    }
}

async fn record_inventory(platform: &Platform, failures: &mut Failures) -> anyhow::Result<InventoryStatus> {
    let session = platform.db.session().await?;
    let started_at = db::servers::now(&session).await?;
    drop(session);
    let listed = match platform.provider.list_by_label(MACHINE_LABEL).await {
        Ok(listed) => listed,
        Err(error) => {
            alarms::raise_for_provider_error(platform, &error).await;
            return Err(error.into());
        }
    };
    let outcome = record_late_servers(platform, &listed, started_at).await;
    failures.record("servers that were created late", outcome);
    let outcome = fail_machines_with_missing_servers(platform, &listed, failures).await;
    failures.record("missing servers", outcome);
    let outcome = record_missing_servers_with_data(platform, &listed, failures).await;
    failures.record("missing servers that may hold data", outcome);
    let outcome = handle_unknown_servers(platform, &listed, failures).await;
    let inventory = if outcome.is_ok() { InventoryStatus::Recorded } else { InventoryStatus::NotRecorded };
    failures.record("unknown servers", outcome);
    Ok(inventory)
}

fn parse_machine_label(server: &Server) -> Option<MachineId> {
    server.labels.get(MACHINE_LABEL)?.parse().ok()
}

/// Records the listed servers of ended machines that were recorded as having none: the servers were created late.
async fn record_late_servers(
    platform: &Platform,
    listed: &[Server],
    listed_at: Timestamp,
) -> anyhow::Result<()> {
    let servers: HashMap<MachineId, i64> =
        listed.iter().filter_map(|server| Some((parse_machine_label(server)?, server.id.0))).collect();
    let session = platform.db.session().await?;
    for (machine, server) in db::servers::record_late_servers(&session, &servers, listed_at).await? {
        tracing::warn!(%machine, server, "the provider has the server of a machine that was recorded as having none");
    }
    Ok(())
}

/// Marks machines whose servers are missing as failed. They are not replaced automatically.
async fn fail_machines_with_missing_servers(
    platform: &Platform,
    listed: &[Server],
    failures: &mut Failures,
) -> anyhow::Result<()> {
    let session = platform.db.session().await?;
    let live = db::servers::list_expected(&session).await?;
    let present: Vec<i64> = listed.iter().map(|server| server.id.0).collect();
    db::servers::record_seen(&session, &present).await?;
    let present: HashSet<i64> = present.into_iter().collect();
    let missing: Vec<&TrackedServer> =
        live.iter().filter(|tracked| !present.contains(&tracked.server)).collect();
    // If many servers are missing from the list, they are not looked up individually: that would exhaust the provider's
    // rate limit and prove nothing.
    if check_permission(&session, &live, missing.len()).await? == WorkPermission::Blocked {
        return Ok(());
    }
    drop(session);
    let (missing, unconfirmed) = confirm_missing(platform, missing, failures).await;
    let session = platform.db.session().await?;
    if check_permission(&session, &live, missing.len() + unconfirmed).await? == WorkPermission::Blocked {
        return Ok(());
    }
    let mut lost = Vec::new();
    for tracked in missing {
        let missing_for = db::servers::record_missing(&session, tracked).await?;
        let is_silent = tracked.silent_for >= platform.config.timing.heartbeat_timeout;
        if is_silent
            && missing_for >= platform.config.timing.reconcile_interval.min(CONFIRM_INTERVAL).mul_f64(0.9)
        {
            lost.push(tracked);
        }
    }
    drop(session);
    for tracked in lost {
        failures.record(tracked.machine, fail_machine(platform, tracked).await);
    }
    Ok(())
}

/// Records kept servers, and servers of failed machines, that the provider no longer has. The machines' states do not
/// change.
async fn record_missing_servers_with_data(
    platform: &Platform,
    listed: &[Server],
    failures: &mut Failures,
) -> anyhow::Result<()> {
    let present: HashSet<i64> = listed.iter().map(|server| server.id.0).collect();
    let session = platform.db.session().await?;
    let monitored = db::servers::list_holding_data(&session).await?;
    drop(session);
    let missing =
        monitored.iter().filter(|tracked| !present.contains(&tracked.server)).take(MAX_MONITORED_LOOKUPS);
    let (missing, _) = confirm_missing(platform, missing.collect(), failures).await;
    let session = platform.db.session().await?;
    for tracked in missing {
        db::servers::record_missing(&session, tracked).await?;
        tracing::warn!(machine = %tracked.machine, server = tracked.server, "the provider no longer has a server that may hold data");
    }
    Ok(())
}

/// Returns the servers that a lookup by id also fails to find, and the number of servers whose lookup failed or was
/// skipped. After several consecutive failures, the remaining lookups are left to the next pass.
async fn confirm_missing<'a>(
    platform: &Platform,
    missing: Vec<&'a TrackedServer>,
    failures: &mut Failures,
) -> (Vec<&'a TrackedServer>, usize) {
    let (mut confirmed, mut looked_up, mut consecutive_failures) = (Vec::new(), 0, 0);
    let total = missing.len();
    for tracked in missing {
        match is_missing(platform, tracked).await {
            Ok(is_missing) => {
                (looked_up, consecutive_failures) = (looked_up + 1, 0);
                confirmed.extend(is_missing.then_some(tracked));
            }
            Err(error) => {
                failures.record(tracked.machine, Err(error));
                consecutive_failures += 1;
            }
        }
        if consecutive_failures == MAX_CONSECUTIVE_FAILURES {
            break;
        }
    }
    (confirmed, total - looked_up)
}

/// Looks up a server by id, and records it as seen if it exists. Returns whether the provider no longer has it.
async fn is_missing(platform: &Platform, tracked: &TrackedServer) -> anyhow::Result<bool> {
    let exists = platform.provider.get(ServerId(tracked.server)).await?.is_some();
    if exists {
        // The server is not listed because its label was removed.
        db::servers::record_seen(&platform.db.session().await?, &[tracked.server]).await?;
    }
    Ok(!exists)
}

/// Checks whether the number of missing servers requires an operator's decision. The servers missing in this pass are
/// counted together with the losses in the last hour, because a slow mass loss is still a mass loss.
async fn check_permission(
    session: &Object,
    live: &[TrackedServer],
    missing: usize,
) -> anyhow::Result<WorkPermission> {
    let recent_losses = db::servers::count_recent_server_losses(session, LOSS_WINDOW).await?;
    let limit = alarms::max_missing_servers(live.len());
    let is_none_listed = missing == live.len() && missing >= MIN_SERVERS_TO_SUSPECT_TOKEN;
    let is_over_limit = missing.saturating_add(recent_losses) > limit || is_none_listed;
    let detail =
        json!({"missing": missing, "live": live.len(), "failedInLastHour": recent_losses, "limit": limit});
    let permission =
        alarms::check_blocking(session, Alarm::ServersMissing, missing, is_over_limit, &detail).await?;
    if permission == WorkPermission::Blocked && is_none_listed {
        tracing::error!(
            servers = missing,
            "the provider lists none of the servers: the token may belong to another project"
        );
    }
    Ok(permission)
}

async fn fail_machine(platform: &Platform, tracked: &TrackedServer) -> anyhow::Result<()> {
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    let Some(row) = db::machines::lock(&tx, tracked.machine).await? else { return Ok(()) };
    if row.provider_server_id != Some(tracked.server) {
        return Ok(());
    }
    let context = EventContext {
        failure: Some(("provider", "the provider no longer has the server")),
        ..EventContext::default()
    };
    match lifecycle::apply(&tx, &platform.mint, &row, &Event::ServerGone, context).await {
        Ok(Change::Moved { .. }) => {}
        Ok(Change::Unchanged) | Err(LifecycleError::Refused(_)) => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    let after = db::machines::get(&tx, row.id).await?.map(|after| after.audit_record());
    let target = row.id.to_string();
    let entry = db::audit::AuditEntry {
        actor: "platform",
        action: "server.gone",
        target: &target,
        before: Some(&row.audit_record()),
        after: after.as_ref(),
        request_id: &request_id::current(),
    };
    db::audit::write(&tx, &entry).await?;
    db::commit(tx).await?;
    tracing::error!(machine = %row.id, server = tracked.server, "the provider no longer has the machine's server");
    Ok(())
}

/// Describes servers by their labels: the machine, its epoch, and the slot if the database has it.
async fn describe_servers(session: &Object, servers: &[&Server]) -> anyhow::Result<Vec<Value>> {
    let label = |server: &Server, name: &str| server.labels.get(name).cloned();
    let slots: Vec<String> = servers.iter().filter_map(|server| label(server, SLOT_LABEL)).collect();
    let slots_by_label = if slots.is_empty() {
        HashMap::new()
    } else {
        db::slots::find_slots_by_label(session, &slots).await?
    };
    let to_json = |server: &&Server| {
        let slot = label(server, SLOT_LABEL).and_then(|slot| slots_by_label.get(&slot).cloned());
        json!({
            "providerServerId": server.id.0.to_string(),
            "machineId": label(server, MACHINE_LABEL),
            "epoch": label(server, EPOCH_LABEL),
            "slot": slot,
        })
    };
    Ok(servers.iter().map(to_json).collect())
}

/// Handles servers that have this installation's label but belong to no known machine, for example after the database
/// was restored from an older copy: raises an alarm, and deletes those that an operator has released, once their grace
/// period has ended. Servers that belong to another platform in the same project are ignored.
async fn handle_unknown_servers(
    platform: &Platform,
    listed: &[Server],
    failures: &mut Failures,
) -> anyhow::Result<()> {
    let installation = platform.installation.to_string();
    let labeled = listed.iter().filter(|server| server.labels.get(INSTALLATION_LABEL) == Some(&installation));
    let claimed: Vec<(&Server, Option<MachineId>)> =
        labeled.map(|server| (server, parse_machine_label(server))).collect();
    let machines: Vec<MachineId> = claimed.iter().filter_map(|(_, machine)| *machine).collect();
    let session = platform.db.session().await?;
    let known = db::servers::filter_known(&session, &machines).await?;
    let unknown: Vec<&Server> = claimed
        .iter()
        .filter(|(_, machine)| machine.is_none_or(|machine| !known.contains(&machine)))
        .map(|(server, _)| *server)
        .collect();
    let ids: Vec<i64> = unknown.iter().map(|server| server.id.0).collect();
    db::unknown_servers::replace(&session, &ids).await?;
    let grace = platform.config.timing.orphan_grace;
    let counts = db::unknown_servers::count(&session, grace).await?;
    let descriptions = describe_servers(&session, &unknown[..unknown.len().min(MAX_SHOWN_SERVERS)]).await?;
    let detail = json!({"unknown": unknown.len(), "released": counts.released, "servers": descriptions});
    alarms::raise_or_clear(&session, Alarm::UnknownServers, unknown.len(), &detail).await?;
    let due = db::unknown_servers::list_due(&session, grace).await?;
    drop(session);
    for server in due {
        failures.record(format!("server {server}"), delete_unknown(platform, server).await);
    }
    Ok(())
}

async fn delete_unknown(platform: &Platform, server: i64) -> anyhow::Result<()> {
    platform.provider.delete(ServerId(server)).await?;
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    let target = server.to_string();
    let entry = db::audit::AuditEntry {
        actor: "platform",
        action: "orphan.deleted",
        target: &target,
        before: Some(&json!({"providerServerId": target})),
        after: None,
        request_id: &request_id::current(),
    };
    db::audit::write(&tx, &entry).await?;
    db::commit(tx).await?;
    tracing::warn!(server, "deleted a server without a machine");
    Ok(())
}
