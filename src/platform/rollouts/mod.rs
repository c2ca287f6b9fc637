//! Rolls out releases to many machines: [`crate::rollout_plan`] decides the next effects, one transaction writes them,
//! and only then are hosts notified.
//!
//! Any process may advance a rollout, but only one process at a time. One notification per host is enough, because the
//! response to its next heartbeat contains the same request. The notification and the response contain the id of the
//! request that created the rollout: a host never retries a failed request, but a later rollout of the same release is
//! a new request.

mod verification;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::StreamExt;
use serde_json::json;

use super::context::Platform;
use super::db::rollouts::{self, RolloutRow, UpdateTimeouts};
use super::db::{self, audit};
use super::operations::host_call;
use crate::rollout_plan::{self, RolloutEffect, RolloutLimits, RolloutPace};
use svc_base::failpoint;
use svc_base::metrics::{ROLLOUT_MACHINES, ROLLOUTS};
use svc_http::problem::format_chain;
use svc_http::request_id;
use svc_machine::id::MachineId;
use svc_wire::rollout::{MemberState, RolloutState};

/// The fail points in one step of a rollout.
pub const FAILPOINTS: &[&str] = &["rollouts.decided", "rollouts.written", "rollouts.committed"];

/// Maximum number of hosts notified at once.
const MAX_CONCURRENT_CALLS: usize = 8;
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(200);
/// The total timeout for a requested update is this multiple of the progress timeout.
const TOTAL_TIMEOUT_FACTOR: u32 = 6;

/// Advances rollouts until the platform stops.
pub async fn run(platform: Arc<Platform>) {
    let interval = platform.config.timing.poll_interval.max(MIN_POLL_INTERVAL);
    loop {
        tokio::select! {
            () = platform.stop.cancelled() => return,
            () = tokio::time::sleep(interval) => {}
        }
        if let Err(error) = run_pass(&platform).await {
            tracing::warn!(error = %format_chain(error.as_ref()), "cannot advance rollouts");
        }
    }
}

async fn run_pass(platform: &Arc<Platform>) -> anyhow::Result<()> {
    let session = platform.db.session().await?;
    let unfinished = rollouts::list_unfinished(&session).await?;
    drop(session);
    // A rollout that cannot be advanced does not delay the others.
    for rollout in unfinished {
        let advanced =
            request_id::run_with_id(rollout.request_id.clone(), advance_rollout(platform, &rollout)).await;
        if let Err(error) = advanced.with_context(|| format!("cannot advance the rollout {}", rollout.id)) {
            tracing::warn!(error = format!("{error:#}"), "a rollout could not be advanced; retrying");
        }
    }
    Ok(())
}

async fn advance_rollout(platform: &Arc<Platform>, rollout: &RolloutRow) -> anyhow::Result<()> {
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    // `None`: another process is advancing this rollout.
    let Some(rollout) = rollouts::try_lock(&tx, rollout.id).await? else { return Ok(()) };
    rollouts::record_progress(&tx, rollout.id).await?;
    let progress = platform.config.timing.rollout_progress_timeout;
    let timeouts = UpdateTimeouts { progress, total: progress.saturating_mul(TOTAL_TIMEOUT_FACTOR) };
    let members = rollouts::list_members(&tx, &rollout, timeouts).await?;
    let pace =
        if rollout.state == RolloutState::Running { RolloutPace::Running } else { RolloutPace::Halted };
    let to_usize = |number: i32| usize::try_from(number).unwrap_or(usize::MAX);
    let limits =
        RolloutLimits { canary: to_usize(rollout.canary), max_failures: to_usize(rollout.max_failures) };
    let effects = rollout_plan::next_effects(pace, limits, rollout.verification_state(), &members);
    let has_effects = !effects.is_empty();
    if has_effects {
        failpoint::trigger("rollouts.decided")?;
    }
    let mut ended_members = Vec::new();
    let mut ended_rollout = None;
    let mut to_verify = None;
    for effect in &effects {
        match effect {
            RolloutEffect::EndUpdate { machine, state, error } => {
                rollouts::end_member(&tx, rollout.id, *machine, *state, error.as_deref()).await?;
                if *state == MemberState::Updated {
                    db::slots::set_release_for_machine(&tx, *machine, &rollout.image_version).await?;
                }
                ended_members.push((machine, state, error));
            }
            RolloutEffect::RequestUpdate { machine } => {
                rollouts::request_update(&tx, rollout.id, *machine).await?;
            }
            RolloutEffect::Verify => {
                to_verify = rollouts::claim_verification(&tx, rollout.id, verification::CLAIM_TTL).await?;
            }
            RolloutEffect::Stop { reason } => {
                end_rollout(&tx, &rollout, RolloutState::Stopped, Some(reason)).await?;
                ended_rollout = Some((RolloutState::Stopped, Some(reason)));
            }
            RolloutEffect::Succeed => {
                end_rollout(&tx, &rollout, RolloutState::Succeeded, None).await?;
                ended_rollout = Some((RolloutState::Succeeded, None));
            }
        }
    }
    let unnotified = rollouts::claim_unnotified(&tx, rollout.id).await?;
    if has_effects {
        failpoint::trigger("rollouts.written")?;
    }
    db::commit(tx).await?;
    if has_effects {
        failpoint::trigger("rollouts.committed")?;
    }
    drop(session);
    for (machine, state, error) in ended_members {
        ROLLOUT_MACHINES.add_one([state.as_str()]);
        tracing::info!(rollout = %rollout.id, %machine, state = state.as_str(), error, "the update of a rollout machine ended");
    }
    if let Some((state, reason)) = ended_rollout {
        ROLLOUTS.add_one([state.as_str()]);
        tracing::info!(rollout = %rollout.id, state = state.as_str(), reason, "rollout ended");
    }
    if let Some(claimed) = to_verify {
        let (platform, id) = (Arc::clone(platform), request_id::current());
        tokio::spawn(request_id::run_with_id(id, async move {
            let rollout = claimed.id;
            if let Err(error) = verification::run(&platform, claimed).await {
                tracing::warn!(%rollout, error = %format_chain(error.as_ref()), "cannot verify a rollout's release");
            }
        }));
    }
    if !unnotified.is_empty() {
        // A separate task, so that slow hosts do not delay the rollout.
        let (platform, id) = (Arc::clone(platform), request_id::current());
        tokio::spawn(request_id::run_with_id(id, async move {
            notify_hosts(&platform, &rollout, unnotified).await;
        }));
    }
    Ok(())
}

async fn end_rollout(
    tx: &deadpool_postgres::Transaction<'_>,
    rollout: &RolloutRow,
    state: RolloutState,
    reason: Option<&String>,
) -> anyhow::Result<()> {
    rollouts::set_state(tx, rollout.id, state, reason.map(String::as_str)).await?;
    let (target, after) = (rollout.id.to_string(), json!({"state": state.as_str(), "why": reason}));
    let entry = audit::AuditEntry {
        actor: "platform",
        action: "deploy.ended",
        target: &target,
        before: None,
        after: Some(&after),
        request_id: &request_id::current(),
    };
    Ok(audit::write(tx, &entry).await?)
}

/// Notifies hosts of their requested updates.
async fn notify_hosts(platform: &Platform, rollout: &RolloutRow, machines: Vec<MachineId>) {
    let calls = machines.into_iter().map(|id| async move {
        let call = async {
            let session = platform.db.session().await?;
            let machine = db::machines::get(&session, id).await?;
            drop(session);
            match machine {
                Some(machine) => {
                    Ok(host_call::request_update(platform, &machine, &rollout.image_version).await?)
                }
                None => Ok::<_, anyhow::Error>(()),
            }
        };
        if let Err(error) = call.await {
            tracing::info!(machine = %id, error = format!("{error:#}"), "cannot notify a host of its update");
        }
    });
    futures_util::stream::iter(calls).buffer_unordered(MAX_CONCURRENT_CALLS).collect::<Vec<()>>().await;
}
