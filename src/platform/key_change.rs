//! The change of `PLATFORM_KEY` with two keys in force: what the previous key made is made again with the current one, until
//! nothing needs the previous one.
//!
//! Signing keys are sealed again and fences signed again, here; hosts' tokens rotate by heartbeats. None of it begins before
//! every process that runs makes everything with the current key: processes with different current keys would undo each
//! other's work for as long as they run side by side.
//!
//! The invariant: at every moment each running process opens what every other one has written. A process that would not is
//! refused at its start ([`admission`]). The store names the current key as well ([`mark`]): a database that is restored together with
//! the settings of its day says nothing of a later change.

pub mod admission;
mod fences;
pub mod mark;
pub mod need;

use std::sync::Arc;
use std::time::Duration;

use super::config::Timing;
use super::context::Platform;
use super::db::platform_keys::{self, ProcessKeys};
use super::db::{self, Db, DbError};
use super::keys::{KeyError, LOCK, Seal};
use super::platform_key::KeyIds;
use crate::failpoint::{self, Injected};
use crate::http::problem::chain;
use crate::store::StoreError;

/// Places where a test may stop the process, in the order they are reached.
pub const POINTS: &[&str] = &[
    "platform-key-before-reseal",
    "platform-key-after-reseal",
    "platform-key-before-fence",
    "platform-key-after-fence",
    "platform-key-before-sole",
    "platform-key-after-sole",
];

/// Serializes the starts of processes with the end of a change.
const KEYS_LOCK: &str = "platform keys";
/// A process whose row has not been renewed for this many leases counts as gone.
const LEASES_UNTIL_GONE: u32 = 4;
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// By which processes take turns.
const TASK: &str = "platform key change";
const BATCH: i64 = 100;
/// Signing keys of one pass.
const MAX_SIGNING_KEYS: usize = 10_000;

/// Why a part of the change was not made; the next pass resumes.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    #[error(transparent)]
    Db(#[from] DbError),
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("the fence of slot {slot} was not signed again")]
    Fence {
        slot: String,
        #[source]
        source: StoreError,
    },
    #[error("the fence of slot {0} was changed by others too often")]
    Contended(String),
    #[error(transparent)]
    Mark(#[from] mark::MarkError),
    #[error(transparent)]
    Injected(#[from] Injected),
}

/// This process among those of the platform.
pub fn process(ids: KeyIds, timing: &Timing) -> ProcessKeys {
    ProcessKeys { process: uuid::Uuid::now_v7(), ids, ttl: row_ttl(timing) }
}

/// How long the row of a process counts.
pub fn row_ttl(timing: &Timing) -> Duration {
    timing.lease * LEASES_UNTIL_GONE
}

/// Between two renewals of a process's row, and two passes of the change.
fn interval(own: &ProcessKeys) -> Duration {
    (own.ttl / 12).clamp(Duration::from_millis(100), MAX_PAUSE)
}

/// Renews this process's row until the task is aborted: also while the process drains, since it still writes.
pub async fn renew(db: Db, own: ProcessKeys) {
    let pause = interval(&own);
    loop {
        tokio::time::sleep(pause).await;
        let renewed = async { own.renew(&db.session().await?).await };
        if let Err(error) = renewed.await {
            tracing::warn!(error = %chain(&error), "the row of this process was not renewed");
        }
    }
}

/// Makes the change, until `stop`. Without a previous key there is nothing to do.
pub async fn run(platform: Arc<Platform>, seal: Seal) {
    let own = &platform.process;
    if own.ids.previous.is_none() {
        return platform.stop.cancelled().await;
    }
    let pause = interval(own);
    loop {
        tokio::select! {
            () = platform.stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        if let Err(error) = turn(&platform, &seal).await {
            tracing::warn!(error = %chain(&error), "the change of PLATFORM_KEY was interrupted; it resumes");
        }
    }
}

async fn turn(platform: &Platform, seal: &Seal) -> Result<(), ChangeError> {
    let own = &platform.process;
    let session = platform.db.session().await?;
    let is_done = platform_keys::state(&session, &own.ids.current).await?.is_sole;
    if is_done || !own.is_settled(&session).await? {
        return Ok(());
    }
    // One process at a time: each pass reads all that is left, and all of them together would read it for each.
    if !db::tasks::take_turn(&session, TASK, interval(own) / 2).await? {
        return Ok(());
    }
    drop(session);
    reseal(platform, seal).await?;
    if fences::sign_again(platform).await? == fences::Progress::Done {
        finish(platform, seal).await?;
    }
    Ok(())
}

/// Seals with the current key all signing keys that only the previous one opens, in one transaction.
async fn reseal(platform: &Platform, seal: &Seal) -> Result<(), ChangeError> {
    if sealed_with_previous(&platform.db.session().await?, seal).await?.is_empty() {
        return Ok(());
    }
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    db::lock(&tx, LOCK).await?;
    let sealed = sealed_with_previous(&tx, seal).await?;
    for key in &sealed {
        if let Some(again) = seal.rewrapped(&key.kid, &key.sealed)? {
            db::keys::reseal(&tx, &key.kid, &again).await?;
        }
    }
    failpoint::pass("platform-key-before-reseal")?;
    db::commit(tx).await?;
    failpoint::pass("platform-key-after-reseal")?;
    tracing::info!(keys = sealed.len(), "signing keys are sealed with the current platform key");
    Ok(())
}

async fn sealed_with_previous(
    client: &impl deadpool_postgres::GenericClient,
    seal: &Seal,
) -> Result<Vec<db::keys::StoredKey>, DbError> {
    let mut found = need::signing_keys(client).await?;
    found.retain(|key| seal.sealed_with(&key.kid, &key.sealed) == super::keys::SealedWith::Previous);
    Ok(found)
}

/// Notes that nothing needs the previous key, if that is so.
async fn finish(platform: &Platform, seal: &Seal) -> Result<(), ChangeError> {
    let (own, mut session) = (&platform.process, platform.db.session().await?);
    let silence = platform.config.timing.keys.max_silence;
    // Without the lock first: the starts of processes wait for it, and the answer is no for as long as a token is old.
    let need = need::Need::find(&session, &own.ids.current, &platform.mint, seal, silence, own.ttl).await?;
    if !need.is_empty() {
        return Ok(());
    }
    // Without it, a process that has the current key alone would be refused.
    mark::write(&platform.bucket, &own.ids).await?;
    let tx = db::begin(&mut session).await?;
    // No process with another current key starts before this ends.
    db::lock(&tx, KEYS_LOCK).await?;
    let need = need::Need::find(&tx, &own.ids.current, &platform.mint, seal, silence, own.ttl).await?;
    if !need.is_empty() || !own.is_settled(&tx).await? {
        return Ok(());
    }
    platform_keys::note_sole(&tx, &own.ids).await?;
    failpoint::pass("platform-key-before-sole")?;
    db::commit(tx).await?;
    failpoint::pass("platform-key-after-sole")?;
    tracing::info!(key = %own.ids.current, "nothing needs PLATFORM_KEY_PREVIOUS any more: it can be removed");
    Ok(())
}
