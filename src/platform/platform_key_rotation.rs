//! Rotates `PLATFORM_KEY` while two keys are active: replaces secrets made with the previous key until nothing needs
//! that key.
//!
//! This module reseals signing keys and file keys, and re-signs fences; host tokens rotate through heartbeats. None of
//! this starts until every running process is using the current key: processes with different current keys would undo
//! each other's work.
//!
//! Invariant: at any time, each running process can read what every other process has written. A process that would
//! violate this is rejected at startup ([`admission`]). The object store names the current key as well ([`marker`]),
//! because a database and settings that are restored from before a rotation contain no record of it.

pub mod admission;
pub mod dependents;
mod fences;
pub mod marker;

use std::sync::Arc;
use std::time::Duration;

use super::config::Timing;
use super::context::Platform;
use super::db::platform_keys::{self, ProcessKeys};
use super::db::{self, Db, DbError};
use super::files_keys;
use super::keys::{KeyError, SIGNING_KEYS_LOCK, Seal};
use super::platform_key::KeyIds;
use svc_base::failpoint::{self, InjectedFailure};
use svc_http::problem::format_chain;
use svc_store::StoreError;

/// Fail points in the key rotation, in the order in which they are reached.
pub const FAILPOINTS: &[&str] = &[
    "platform-key-before-reseal",
    "platform-key-after-reseal",
    "platform-key-before-fence",
    "platform-key-after-fence",
    "platform-key-before-single-key",
    "platform-key-after-single-key",
];

/// Advisory lock that prevents processes from starting while a rotation is being completed.
const PLATFORM_KEYS_LOCK: &str = "platform keys";
/// The lifetime of a process's row is this multiple of the lease TTL.
const ROW_TTL_FACTOR: u32 = 4;
/// Maximum interval between rotation passes.
const MAX_INTERVAL: Duration = Duration::from_secs(5);
/// Task name under which processes claim their turn to run a pass. It says "change", an earlier term for a rotation,
/// because it is stored in the database.
const TASK_NAME: &str = "platform key change";
const BATCH_SIZE: i64 = 100;

/// The reason a rotation pass failed. The next pass resumes the rotation.
#[derive(Debug, thiserror::Error)]
pub enum PlatformKeyRotationError {
    #[error(transparent)]
    Db(#[from] DbError),
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("cannot re-sign the fence of slot {slot}")]
    Fence {
        slot: String,
        #[source]
        source: StoreError,
    },
    #[error("too many concurrent changes to the fence of slot {0}")]
    Contended(String),
    #[error(transparent)]
    Marker(#[from] marker::MarkerError),
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

/// Creates the id by which other processes identify this process, and returns it with the process's key fingerprints.
pub fn create_process_keys(ids: KeyIds, timing: &Timing) -> ProcessKeys {
    ProcessKeys { process: uuid::Uuid::now_v7(), ids, ttl: row_ttl(timing) }
}

/// Returns how long a process counts as running after its row was last renewed.
pub fn row_ttl(timing: &Timing) -> Duration {
    timing.lease_ttl * ROW_TTL_FACTOR
}

/// Returns the interval between renewals of a process's row, and between rotation passes.
fn pass_interval(this_process: &ProcessKeys) -> Duration {
    (this_process.ttl / 12).clamp(Duration::from_millis(100), MAX_INTERVAL)
}

/// Renews this process's row until the task is aborted. It is aborted only after the drain, during which the process is
/// still writing.
pub async fn renew_process_row(db: Db, this_process: ProcessKeys) {
    let period = pass_interval(&this_process);
    loop {
        tokio::time::sleep(period).await;
        let renew = async { this_process.renew(&db.session().await?).await };
        if let Err(error) = renew.await {
            tracing::warn!(error = %format_chain(&error), "cannot renew this process's row; retrying");
        }
    }
}

/// Runs rotation passes until the platform stops. Without a previous key, there are no passes, and this only waits.
pub async fn run_key_rotation(platform: Arc<Platform>, seal: Seal) {
    let this_process = &platform.process;
    if this_process.ids.previous.is_none() {
        return platform.stop.cancelled().await;
    }
    let period = pass_interval(this_process);
    loop {
        tokio::select! {
            () = platform.stop.cancelled() => return,
            () = tokio::time::sleep(period) => {}
        }
        if let Err(error) = run_pass(&platform, &seal).await {
            tracing::warn!(error = %format_chain(&error), "a key rotation pass failed; retrying");
        }
    }
}

async fn run_pass(platform: &Platform, seal: &Seal) -> Result<(), PlatformKeyRotationError> {
    let this_process = &platform.process;
    let session = platform.db.session().await?;
    let is_done =
        platform_keys::load_progress(&session, &this_process.ids.current).await?.is_rotation_complete;
    if is_done || !this_process.is_settled(&session).await? {
        return Ok(());
    }
    // At most one pass per half interval in the whole installation, because each pass reads all remaining work.
    if !db::tasks::claim_turn(&session, TASK_NAME, pass_interval(this_process) / 2).await? {
        return Ok(());
    }
    drop(session);
    reseal_signing_keys(platform, seal).await?;
    if !reseal_file_keys(platform, seal).await? {
        return Ok(());
    }
    if fences::re_sign_batch(platform).await? == fences::FenceProgress::Done {
        finish_rotation(platform, seal).await?;
    }
    Ok(())
}

/// Reseals all signing keys that only the previous key decrypts, in one transaction.
async fn reseal_signing_keys(platform: &Platform, seal: &Seal) -> Result<(), PlatformKeyRotationError> {
    if list_sealed_with_previous(&platform.db.session().await?, seal).await?.is_empty() {
        return Ok(());
    }
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    db::lock(&tx, SIGNING_KEYS_LOCK).await?;
    let sealed = list_sealed_with_previous(&tx, seal).await?;
    for key in &sealed {
        if let Some(resealed) = seal.reseal(&key.kid, &key.sealed)? {
            db::keys::reseal(&tx, &key.kid, &resealed).await?;
        }
    }
    failpoint::trigger("platform-key-before-reseal")?;
    db::commit(tx).await?;
    failpoint::trigger("platform-key-after-reseal")?;
    tracing::info!(keys = sealed.len(), "resealed signing keys with the current platform key");
    Ok(())
}

/// Reseals a batch of file keys. Returns whether that was the last batch.
async fn reseal_file_keys(platform: &Platform, seal: &Seal) -> Result<bool, PlatformKeyRotationError> {
    let mut session = platform.db.session().await?;
    let tx = db::begin(&mut session).await?;
    let is_last = files_keys::reseal_batch(&tx, seal).await?;
    db::commit(tx).await?;
    Ok(is_last)
}

async fn list_sealed_with_previous(
    client: &impl deadpool_postgres::GenericClient,
    seal: &Seal,
) -> Result<Vec<db::keys::StoredKey>, DbError> {
    let mut keys = dependents::list_signing_keys(client).await?;
    keys.retain(|key| seal.find_opening_key(&key.kid, &key.sealed) == super::keys::OpeningKey::Previous);
    Ok(keys)
}

/// Ends the rotation if nothing needs the previous key any longer.
async fn finish_rotation(platform: &Platform, seal: &Seal) -> Result<(), PlatformKeyRotationError> {
    let (this_process, mut session) = (&platform.process, platform.db.session().await?);
    let max_gap = platform.config.timing.keys.max_heartbeat_gap;
    // The first check takes no lock, because starting processes wait for the lock. Every pass ends here until the
    // tokens of all machines that send heartbeats have rotated and all processes use the current key.
    let dependents = dependents::KeyDependents::find(
        &session,
        &this_process.ids.current,
        &platform.mint,
        seal,
        max_gap,
        this_process.ttl,
    )
    .await?;
    if !dependents.is_empty() {
        return Ok(());
    }
    // The marker must name the current key before the previous one may be removed: otherwise a process with only the
    // current key would be rejected.
    marker::write(&platform.bucket, &this_process.ids).await?;
    let tx = db::begin(&mut session).await?;
    // No process can start until the transaction ends.
    db::lock(&tx, PLATFORM_KEYS_LOCK).await?;
    let dependents = dependents::KeyDependents::find(
        &tx,
        &this_process.ids.current,
        &platform.mint,
        seal,
        max_gap,
        this_process.ttl,
    )
    .await?;
    if !dependents.is_empty() || !this_process.is_settled(&tx).await? {
        return Ok(());
    }
    platform_keys::record_rotation_complete(&tx, &this_process.ids).await?;
    failpoint::trigger("platform-key-before-single-key")?;
    db::commit(tx).await?;
    failpoint::trigger("platform-key-after-single-key")?;
    tracing::info!(key = %this_process.ids.current, "PLATFORM_KEY_PREVIOUS is no longer needed: remove it");
    Ok(())
}
