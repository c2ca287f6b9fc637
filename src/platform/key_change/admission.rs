//! Whether a process may start with the platform keys that it has.
//!
//! Refused: one without a key that stored things still need, and one that another running process could not work with. Both
//! would break later, and in part: a machine that cannot register, a router that knows no key.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::KEYS_LOCK;
use super::need::Need;
use crate::platform::db::platform_keys::{self, ProcessKeys};
use crate::platform::db::{self, Db, DbError};
use crate::platform::keys::{self, KeyError, Seal};
use crate::platform::tokens::TokenMint;

const MIN_PAUSE: Duration = Duration::from_millis(200);

/// Why a process does not start.
#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    #[error(transparent)]
    Db(#[from] DbError),
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error(
        "PLATFORM_KEY is not the only key that is needed: another key made {0}. Set PLATFORM_KEY_PREVIOUS to that key (the \
         PLATFORM_KEY of before), and remove it when `svcctl doctor platform` says so"
    )]
    Needed(Need),
    #[error(
        "a platform process with other keys is running ({processes}): each must have the PLATFORM_KEY of every other as \
         PLATFORM_KEY or PLATFORM_KEY_PREVIOUS. Restart the processes that run with the new key as PLATFORM_KEY_PREVIOUS \
         first; docs/operating/keys.md has the order"
    )]
    Incompatible { processes: String },
}

/// Notes this process among those that run. Waits until the row of a killed process expires.
///
/// # Errors
/// [`AdmissionError`].
pub async fn admit(
    db: &Db,
    own: &ProcessKeys,
    mint: &TokenMint,
    seal: &Seal,
    max_silence: Duration,
) -> Result<(), AdmissionError> {
    let end = Instant::now() + own.ttl + MIN_PAUSE;
    loop {
        let mut session = db.session().await?;
        let tx = db::begin(&mut session).await?;
        db::lock(&tx, KEYS_LOCK).await?;
        let is_first = !platform_keys::has_any(&tx).await?;
        if own.ids.previous.is_none() {
            refuse_needed(&tx, own, mint, seal, max_silence, is_first).await?;
        } else {
            // Before its use is noted: a wrong key must leave the change as it is.
            keys::ensure_opened(&tx, seal).await?;
        }
        let incompatible = own.incompatible(&tx).await?;
        if incompatible.is_empty() {
            own.renew(&tx).await?;
            if is_first && own.ids.previous.is_none() {
                platform_keys::insert_first(&tx, &own.ids.current).await?;
            } else {
                platform_keys::note_use(&tx, &own.ids.current).await?;
            }
            return Ok(db::commit(tx).await?);
        }
        drop(tx);
        drop(session);
        let processes: Vec<String> = incompatible.iter().map(|other| other.process.to_string()).collect();
        let processes = processes.join(", ");
        if Instant::now() >= end {
            return Err(AdmissionError::Incompatible { processes });
        }
        tracing::warn!(processes, "waiting for platform processes with other keys to end");
        sleep((own.ttl / 8).max(MIN_PAUSE)).await;
    }
}

async fn refuse_needed(
    tx: &deadpool_postgres::Transaction<'_>,
    own: &ProcessKeys,
    mint: &TokenMint,
    seal: &Seal,
    max_silence: Duration,
    is_first: bool,
) -> Result<(), AdmissionError> {
    let key = &own.ids.current;
    let need = if is_first {
        // A database of an earlier release: the signing keys say which key it is of.
        Need::of_signing_keys(tx, seal).await?
    } else if platform_keys::state(tx, key).await?.is_sole {
        return Ok(());
    } else {
        Need::find(tx, key, mint, seal, max_silence, own.ttl).await?
    };
    if need.is_empty() { Ok(()) } else { Err(AdmissionError::Needed(need)) }
}
