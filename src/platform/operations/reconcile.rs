//! The reconciler: sees to what no operation sees to — registrations and previews that ran out, servers that nobody
//! is deleting, answers that nobody will ask for again.
//!
//! It takes no input and can run at any time, in any number of processes.

use std::collections::HashMap;
use std::sync::Arc;

use super::OperationKind;
use super::create::MACHINE_LABEL;
use super::held;
use crate::http::problem::chain;
use crate::machine::event::Event;
use crate::machine::id::MachineId;
use crate::platform::context::Platform;
use crate::platform::db;
use crate::platform::lifecycle::{self, Circumstances};

/// Runs every so often until `stop`.
pub async fn run(platform: Arc<Platform>) {
    loop {
        tokio::select! {
            () = platform.stop.cancelled() => return,
            () = tokio::time::sleep(platform.config.timing.reconcile) => {}
        }
        report("registrations", registrations(&platform).await);
        report("previews", previews(&platform).await);
        report("strays", strays(&platform).await);
        report("leftovers", leftovers(&platform).await);
        report("idempotency keys", idempotency(&platform).await);
    }
}

fn report(what: &str, end: anyhow::Result<()>) {
    if let Err(error) = end {
        tracing::warn!(error = %chain(error.as_ref()), "the reconciler could not see to {what}");
    }
}

async fn registrations(platform: &Platform) -> anyhow::Result<()> {
    let session = platform.db.session().await?;
    let expired = db::machines::expired(&session).await?;
    drop(session);
    for machine in expired {
        tracing::warn!(%machine, "the registration ran out");
        held::expire(platform, machine).await?;
    }
    Ok(())
}

async fn previews(platform: &Platform) -> anyhow::Result<()> {
    let mut session = platform.db.session().await?;
    for machine in db::machines::expired_previews(&session).await? {
        let tx = db::begin(&mut session).await?;
        let Some(row) = db::machines::locked(&tx, machine).await? else { continue };
        let with = Circumstances::default();
        lifecycle::apply(&tx, &platform.mint, &row, &Event::DeleteRequested, with).await?;
        let target = machine.to_string();
        let entry = db::audit::Entry {
            actor: "platform",
            action: "preview.expired",
            target: &target,
            before: Some(&row.record()),
            after: None,
            request_id: "",
        };
        db::audit::write(&tx, &entry).await?;
        db::commit(tx).await?;
        tracing::info!(%machine, "a preview ran out and is deleted");
    }
    Ok(())
}

/// Servers at the provider whose machines are thought to have none: they came up late.
async fn strays(platform: &Platform) -> anyhow::Result<()> {
    let servers = platform.provider.find_by_label(MACHINE_LABEL).await?;
    let named: HashMap<MachineId, i64> = servers
        .iter()
        .filter_map(|server| Some((server.labels.get(MACHINE_LABEL)?.parse().ok()?, server.id.0)))
        .collect();
    let session = platform.db.session().await?;
    for (machine, server) in named {
        if db::machine_changes::server_came_back(&session, machine, server).await? {
            tracing::warn!(%machine, server, "a server of a machine without one is at the provider");
        }
    }
    Ok(())
}

async fn leftovers(platform: &Platform) -> anyhow::Result<()> {
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    db::lock(&tx, "leftover servers").await?;
    let kind = OperationKind::Delete;
    for machine in db::machines::leftovers(&tx).await? {
        db::operations::file(&tx, machine.id, kind.as_str(), kind.first_step().as_str()).await?;
        tracing::info!(machine = %machine.id, "its server is deleted");
    }
    db::commit(tx).await?;
    platform.nudge.notify_one();
    Ok(())
}

async fn idempotency(platform: &Platform) -> anyhow::Result<()> {
    let session = platform.db.session().await?;
    db::idempotency::prune(&session).await?;
    Ok(())
}
