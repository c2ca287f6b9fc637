//! Decides whether a process may start with its platform keys.
//!
//! A process is rejected if it lacks a key that stored secrets still need, or if it and another running process could
//! not read each other's secrets. Otherwise some of its work would fail later: machines could not register, or a router
//! would lack a signing key.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::PLATFORM_KEYS_LOCK;
use super::dependents::KeyDependents;
use crate::db::platform_keys::{self, ProcessKeys};
use crate::db::{self, Db, DbError};
use crate::keys::{self, KeyError, Seal};
use crate::tokens::TokenMint;

const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// The reason a process may not start.
#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    #[error(transparent)]
    Db(#[from] DbError),
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error(
        "PLATFORM_KEY is not sufficient: another key is needed by {0}. Set PLATFORM_KEY_PREVIOUS to that key (the earlier \
         PLATFORM_KEY), and remove it once `svcctl doctor platform` reports that it can be dropped"
    )]
    Needed(KeyDependents),
    #[error(
        "a platform process with different keys is running ({processes}): each must have the PLATFORM_KEY of every other as \
         PLATFORM_KEY or PLATFORM_KEY_PREVIOUS. First restart the running processes with the new key as \
         PLATFORM_KEY_PREVIOUS; docs/operating/keys.md gives the order"
    )]
    Incompatible { processes: String },
}

/// Records this process as running. If a process with incompatible keys is recorded, waits until that process ends or,
/// if it was killed, its row expires.
///
/// # Errors
/// [`AdmissionError`]: `Needed` if the process has no previous key and something still needs a key other than its
/// current one; `Key` if it has two keys, and an active signing key, or the key of a slot's file backups, cannot be
/// opened with either of them; `Incompatible` if a process with incompatible keys is still running after a row's
/// lifetime; `Db` if the database fails.
pub async fn admit(
    db: &Db,
    this_process: &ProcessKeys,
    mint: &TokenMint,
    seal: &Seal,
    max_heartbeat_gap: Duration,
) -> Result<(), AdmissionError> {
    let deadline = Instant::now() + this_process.ttl + MIN_RETRY_INTERVAL;
    loop {
        let mut session = db.session().await?;
        let tx = db::begin(&mut session).await?;
        db::lock(&tx, PLATFORM_KEYS_LOCK).await?;
        let is_first = !platform_keys::has_any(&tx).await?;
        if this_process.ids.previous.is_none() {
            refuse_if_other_key_needed(&tx, this_process, mint, seal, max_heartbeat_gap, is_first).await?;
        } else {
            // The keys are checked before their use is recorded, because a wrong key must not affect the key rotation.
            keys::ensure_keys_can_be_opened(&tx, &this_process.ids, seal).await?;
        }
        let incompatible = this_process.list_incompatible(&tx).await?;
        if incompatible.is_empty() {
            this_process.renew(&tx).await?;
            if is_first && this_process.ids.previous.is_none() {
                platform_keys::insert_first(&tx, &this_process.ids.current).await?;
            } else {
                platform_keys::record_use(&tx, &this_process.ids.current).await?;
            }
            return Ok(db::commit(tx).await?);
        }
        drop(tx);
        drop(session);
        let processes: Vec<String> = incompatible.iter().map(|other| other.process.to_string()).collect();
        let processes = processes.join(", ");
        if Instant::now() >= deadline {
            return Err(AdmissionError::Incompatible { processes });
        }
        tracing::warn!(processes, "waiting for platform processes with different keys to end");
        sleep((this_process.ttl / 8).max(MIN_RETRY_INTERVAL)).await;
    }
}

/// Rejects a process without a previous key if anything still needs a key other than its current one. `is_first` means
/// that no process has recorded a key in the database yet.
async fn refuse_if_other_key_needed(
    tx: &deadpool_postgres::Transaction<'_>,
    this_process: &ProcessKeys,
    mint: &TokenMint,
    seal: &Seal,
    max_heartbeat_gap: Duration,
    is_first: bool,
) -> Result<(), AdmissionError> {
    let key = &this_process.ids.current;
    let dependents = if is_first {
        // In a database from an earlier release, only the signing keys show which key was used.
        KeyDependents::find_signing_key_dependents(tx, seal).await?
    } else if platform_keys::load_progress(tx, key).await?.is_rotation_complete {
        return Ok(());
    } else {
        KeyDependents::find(tx, key, mint, seal, max_heartbeat_gap, this_process.ttl).await?
    };
    if dependents.is_empty() { Ok(()) } else { Err(AdmissionError::Needed(dependents)) }
}
