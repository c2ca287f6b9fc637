//! Rotation of signing keys with overlap: an old key gets a successor.
//!
//! Heartbeats deliver a new proof key, which signs for a host once the host has acknowledged it. The old one is
//! retired when every routable host that sends heartbeats has a newer one. A host that has been silent for longer
//! does not block the others: the retired key that it acknowledged still signs for it, and only for it, until it
//! acknowledges another. A new app key signs after the overlap, when every router has read it; the old one is retired
//! when all of its tokens have expired.
//!
//! Owns the schedule. The invariant: a signature is only made with a key that every verifier has.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::config::KeyTiming;
use super::db::keys::{APP, Acknowledged, KeyDistribution, PROOF, UnacknowledgedHosts};
use super::db::{self, Db};
use super::keys::{self, KeyError, LOCK, Seal, SigningSet};
use super::signed_lifetimes::MAX_SIGNED_LIFETIME;
use svc_http::problem::chain;

const MAX_INTERVAL: Duration = Duration::from_secs(10);
/// A silent host must not make the number of keys grow beyond this; hosts keep at least as many.
const MAX_KEYS: usize = 8;

/// Rotates the keys, and refreshes the process's view of them, until `stop`. If they cannot be read, the last view
/// stays.
pub async fn run(
    db: Db,
    seal: Seal,
    timing: KeyTiming,
    view: watch::Sender<Arc<SigningSet>>,
    stop: CancellationToken,
) {
    let pause = (timing.overlap.min(timing.rotate) / 4).clamp(Duration::from_millis(200), MAX_INTERVAL);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        for purpose in [PROOF, APP] {
            if let Err(error) = rotate_if_due(&db, &seal, timing, purpose).await {
                tracing::warn!(purpose, error = %chain(&error), "cannot rotate the signing keys");
            }
        }
        match keys::load(&db, &seal, timing.overlap).await {
            Ok(fresh) if !keys::is_same(&fresh, &view.borrow()) => {
                view.send_replace(Arc::new(fresh));
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(error = %chain(&error), "cannot refresh the signing keys"),
        }
    }
}

/// The next step of the rotation.
#[derive(Debug, PartialEq, Eq)]
enum RotationStep {
    Nothing,
    Successor,
    Acknowledged(Acknowledged),
    Retirement,
}

/// For keys that only platform processes read.
fn next_app_step(distribution: &[KeyDistribution], timing: KeyTiming) -> RotationStep {
    let Some(newest) = distribution.last() else { return RotationStep::Nothing };
    if distribution.len() > 1 && newest.age >= timing.overlap + MAX_SIGNED_LIFETIME {
        return RotationStep::Retirement;
    }
    if newest.age >= timing.rotate && distribution.len() < MAX_KEYS {
        RotationStep::Successor
    } else {
        RotationStep::Nothing
    }
}

/// For keys that hosts read. `without` is the number of hosts that send heartbeats and lack the newest key.
fn next_proof_step(distribution: &[KeyDistribution], without: i64, timing: KeyTiming) -> RotationStep {
    let Some(newest) = distribution.last() else { return RotationStep::Nothing };
    if distribution.len() > 1 {
        match newest.acknowledged_for {
            None if without == 0 => return RotationStep::Acknowledged(Acknowledged::ByAll),
            Some(_) if without > 0 => return RotationStep::Acknowledged(Acknowledged::NotByAll),
            Some(time) if time >= timing.overlap => return RotationStep::Retirement,
            Some(_) | None => {}
        }
    }
    if newest.age >= timing.rotate && distribution.len() < MAX_KEYS {
        RotationStep::Successor
    } else {
        RotationStep::Nothing
    }
}

async fn rotate_if_due(
    db: &Db,
    seal: &Seal,
    timing: KeyTiming,
    purpose: &'static str,
) -> Result<(), KeyError> {
    let mut session = db.session().await?;
    let seen = db::keys::list_distribution(&session, purpose).await?;
    if seen.len() < 2 && seen.last().is_none_or(|key| key.age < timing.rotate) {
        return Ok(());
    }
    let tx = db::begin(&mut session).await?;
    db::lock(&tx, LOCK).await?;
    let distribution = db::keys::list_distribution(&tx, purpose).await?;
    let Some(newest) = distribution.last().map(|key| key.kid.clone()) else { return Ok(()) };
    let unacknowledged = match purpose {
        PROOF => db::keys::count_unacknowledged(&tx, &newest, timing.max_silence).await?,
        _ => UnacknowledgedHosts::default(),
    };
    let due = match purpose {
        PROOF => next_proof_step(&distribution, unacknowledged.reporting, timing),
        _ => next_app_step(&distribution, timing),
    };
    match due {
        RotationStep::Nothing => return Ok(()),
        RotationStep::Successor => {
            let key = keys::generate(&tx, seal, purpose).await?;
            tracing::info!(kid = key.kid, "created a signing key");
        }
        RotationStep::Acknowledged(by_all) => db::keys::acknowledge(&tx, &newest, by_all).await?,
        RotationStep::Retirement => {
            let retired = db::keys::retire_all_but(&tx, purpose, &newest).await?;
            tracing::info!(kid = newest, retired, "retired older signing keys");
            if unacknowledged.silent > 0 {
                let hosts = unacknowledged.silent;
                tracing::warn!(hosts, "silent hosts keep a retired proof key until their next heartbeat");
            }
        }
    }
    Ok(db::commit(tx).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMING: KeyTiming = KeyTiming {
        rotate: Duration::from_secs(1000),
        overlap: Duration::from_secs(100),
        max_silence: Duration::from_secs(10_000),
    };

    fn key(age: u64, acknowledged_for: Option<u64>) -> KeyDistribution {
        KeyDistribution {
            kid: format!("k{age}"),
            age: Duration::from_secs(age),
            acknowledged_for: acknowledged_for.map(Duration::from_secs),
        }
    }

    #[test]
    fn old_key_is_replaced_and_retired_after_overlap() {
        use Acknowledged::{ByAll, NotByAll};
        assert_eq!(next_proof_step(&[], 0, TIMING), RotationStep::Nothing);
        assert_eq!(next_proof_step(&[key(999, None)], 5, TIMING), RotationStep::Nothing);
        assert_eq!(next_proof_step(&[key(1000, None)], 5, TIMING), RotationStep::Successor);
        let fresh = |acknowledged| [key(1010, None), key(10, acknowledged)];
        assert_eq!(next_proof_step(&fresh(None), 1, TIMING), RotationStep::Nothing);
        assert_eq!(next_proof_step(&fresh(None), 0, TIMING), RotationStep::Acknowledged(ByAll));
        assert_eq!(next_proof_step(&fresh(Some(99)), 0, TIMING), RotationStep::Nothing);
        assert_eq!(next_proof_step(&fresh(Some(99)), 1, TIMING), RotationStep::Acknowledged(NotByAll));
        assert_eq!(next_proof_step(&fresh(Some(100)), 0, TIMING), RotationStep::Retirement);
        assert_eq!(next_proof_step(&fresh(Some(500)), 1, TIMING), RotationStep::Acknowledged(NotByAll));
    }

    #[test]
    fn app_key_is_retired_after_its_last_token() {
        let life = MAX_SIGNED_LIFETIME.as_secs();
        let short = KeyTiming { rotate: Duration::from_secs(life * 2), ..TIMING };
        let due = |ages: &[u64]| {
            let distribution: Vec<KeyDistribution> = ages.iter().map(|age| key(*age, None)).collect();
            next_app_step(&distribution, short)
        };
        assert_eq!(due(&[]), RotationStep::Nothing);
        assert_eq!(due(&[life * 2 - 1]), RotationStep::Nothing);
        assert_eq!(due(&[life * 2]), RotationStep::Successor);
        assert_eq!(
            due(&[life * 3, life + 99]),
            RotationStep::Nothing,
            "a token of the first may have been made until 100"
        );
        assert_eq!(due(&[life * 3, life + 100]), RotationStep::Retirement);
    }

    #[test]
    fn silent_host_does_not_block_rotation_and_few_keys_remain() {
        let held_up = [key(3000, None), key(2000, None), key(1000, None)];
        assert_eq!(next_proof_step(&held_up, 1, TIMING), RotationStep::Successor);
        let full: Vec<KeyDistribution> =
            (1..=MAX_KEYS as u64).rev().map(|nth| key(nth * 1000, None)).collect();
        assert_eq!(next_proof_step(&full, 1, TIMING), RotationStep::Nothing);
    }
}
