//! Rollouts of a release over many machines: what is to be done is decided by [`plan`], written in one transaction, and
//! only then are hosts told.
//!
//! Any process may take the next step of a rollout, one at a time. A host that did not hear of it hears at its next
//! heartbeat, so that telling it once is enough. Both tell it the request that the rollout was made by: what came to
//! nothing for that request is not tried again, and a later rollout of the same release is.

pub mod plan;

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use serde_json::json;

use self::plan::{Effect, Pace, Stand};
use super::context::Platform;
use super::db::rollouts::{self, Patience, RolloutRow, State};
use super::db::{self, audit};
use super::operations::ask_host;
use crate::failpoint;
use crate::http::problem::chain;
use crate::http::request_id;
use crate::machine::id::MachineId;
use crate::metrics::{ROLLOUT_MACHINES, ROLLOUTS};

/// The places of a step that does something where a test can stop it.
pub const POINTS: &[&str] = &["rollouts.decided", "rollouts.written", "rollouts.committed"];

/// Hosts that are told at one time.
const AT_ONCE: usize = 8;
const LEAST_PAUSE: Duration = Duration::from_millis(200);
/// A host that says that it is at an update is waited for this often as long as one that says nothing.
const LONGEST: u32 = 6;

/// Takes rollouts on until `stop`.
pub async fn run(platform: Arc<Platform>) {
    let pause = platform.config.timing.poll.max(LEAST_PAUSE);
    loop {
        tokio::select! {
            () = platform.stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        if let Err(error) = pass(&platform).await {
            tracing::warn!(error = %chain(error.as_ref()), "rollouts cannot be taken on");
        }
    }
}

async fn pass(platform: &Arc<Platform>) -> anyhow::Result<()> {
    let session = platform.db.session().await?;
    let moving = rollouts::moving(&session).await?;
    drop(session);
    for rollout in moving {
        request_id::run_with_id(rollout.request_id.clone(), take_on(platform, &rollout)).await?;
    }
    Ok(())
}

async fn take_on(platform: &Arc<Platform>, rollout: &RolloutRow) -> anyhow::Result<()> {
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    // Another process is at it.
    let Some(rollout) = rollouts::held(&tx, rollout.id).await? else { return Ok(()) };
    rollouts::hear(&tx, rollout.id).await?;
    let silence = platform.config.timing.rollout_silence;
    let patience = Patience { silence, whole: silence.saturating_mul(LONGEST) };
    let members = rollouts::members(&tx, &rollout, patience).await?;
    let pace = if rollout.state == State::Running { Pace::Goes } else { Pace::Stands };
    let most = usize::try_from(rollout.max_failures).unwrap_or(usize::MAX);
    let effects = plan::next(pace, most, &members);
    let acts = !effects.is_empty();
    if acts {
        failpoint::pass("rollouts.decided")?;
    }
    let mut counted = Vec::new();
    for effect in &effects {
        match effect {
            Effect::Settle { machine, stand, error } => {
                rollouts::settle(&tx, rollout.id, *machine, *stand, error.as_deref()).await?;
                if *stand == Stand::Updated {
                    db::slots::set_release_of(&tx, *machine, &rollout.image_version).await?;
                }
                counted.push(*stand);
                tracing::info!(rollout = %rollout.id, %machine, stand = stand.as_str(), error, "a machine of a rollout");
            }
            Effect::Ask { machine } => rollouts::ask(&tx, rollout.id, *machine).await?,
            Effect::Stop { why } => end(&tx, &rollout, State::Stopped, Some(why)).await?,
            Effect::Succeed => end(&tx, &rollout, State::Succeeded, None).await?,
        }
    }
    let unheard = rollouts::take_unheard(&tx, rollout.id).await?;
    if acts {
        failpoint::pass("rollouts.written")?;
    }
    db::commit(tx).await?;
    if acts {
        failpoint::pass("rollouts.committed")?;
    }
    drop(session);
    for stand in counted {
        ROLLOUT_MACHINES.add_one([stand.as_str()]);
    }
    if !unheard.is_empty() {
        // Hosts that do not answer hold nobody up.
        let (platform, id) = (Arc::clone(platform), request_id::current());
        tokio::spawn(request_id::run_with_id(id, async move { tell(&platform, &rollout, unheard).await }));
    }
    Ok(())
}

async fn end(
    tx: &deadpool_postgres::Transaction<'_>,
    rollout: &RolloutRow,
    state: State,
    why: Option<&String>,
) -> anyhow::Result<()> {
    rollouts::set_state(tx, rollout.id, state, why.map(String::as_str)).await?;
    let (target, after) = (rollout.id.to_string(), json!({"state": state.as_str(), "why": why}));
    let entry = audit::Entry {
        actor: "platform",
        action: "deploy.ended",
        target: &target,
        before: None,
        after: Some(&after),
        request_id: &request_id::current(),
    };
    audit::write(tx, &entry).await?;
    ROLLOUTS.add_one([state.as_str()]);
    tracing::info!(rollout = %rollout.id, state = state.as_str(), why, "a rollout has ended");
    Ok(())
}

/// Tells hosts what is asked of them.
async fn tell(platform: &Platform, rollout: &RolloutRow, machines: Vec<MachineId>) {
    let calls = machines.into_iter().map(|id| async move {
        let told = async {
            let session = platform.db.session().await?;
            let machine = db::machines::get(&session, id).await?;
            drop(session);
            match machine {
                Some(machine) => ask_host::update(platform, &machine, &rollout.image_version).await,
                None => Ok(()),
            }
        };
        if let Err(error) = told.await {
            tracing::info!(machine = %id, error = format!("{error:#}"), "a host hears of its update at its next heartbeat");
        }
    });
    futures_util::stream::iter(calls).buffer_unordered(AT_ONCE).collect::<Vec<()>>().await;
}

/// How many machines of a rollout stand where.
pub fn totals(stands: impl IntoIterator<Item = (Stand, u64)>) -> serde_json::Value {
    let mut totals = json!({"waiting": 0, "asked": 0, "updated": 0, "failed": 0, "skipped": 0});
    for (stand, machines) in stands {
        let now = totals[stand.as_str()].as_u64().unwrap_or(0);
        totals[stand.as_str()] = (now + machines).into();
    }
    totals
}
