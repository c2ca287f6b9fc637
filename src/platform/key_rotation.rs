//! Rotates the signing keys, with an overlap between the old key and the new one.
//!
//! Heartbeat responses deliver a new proof key, which signs for a host once that host has acknowledged it. All older
//! proof keys are retired once every routable host that is sending heartbeats has had the newest key for the overlap.
//! Silent hosts do not block this: a recently retired key still signs for the silent hosts that have acknowledged no
//! newer key, until they acknowledge one. A new app key starts signing after the overlap, by which time every router
//! has read it; the old key is retired when all of its tokens have expired.
//!
//! Invariant: a signature is made only with a key that every verifier has.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::config::KeyTiming;
use super::db::keys::{APP_PURPOSE, Acknowledgement, KeyDistribution, PROOF_PURPOSE, UnacknowledgedHosts};
use super::db::{self, Db};
use super::keys::{self, KeyError, SIGNING_KEYS_LOCK, Seal};
use svc_http::problem::format_chain;
use svc_router::signed_lifetimes::MAX_SIGNED_LIFETIME;
use svc_router::signing_set::SigningSet;

const MAX_CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of active keys per purpose. A heartbeat can acknowledge all of them (`MAX_PROOF_KIDS`).
const MAX_KEYS: usize = 8;

/// Rotates the keys, and refreshes the process's view of them, until `stop`. If the keys cannot be read, the process
/// keeps its last view.
pub async fn run(
    db: Db,
    seal: Seal,
    timing: KeyTiming,
    view: watch::Sender<Arc<SigningSet>>,
    stop: CancellationToken,
) {
    let interval =
        (timing.overlap.min(timing.rotation_age) / 4).clamp(Duration::from_millis(200), MAX_CHECK_INTERVAL);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(interval) => {}
        }
        for purpose in [PROOF_PURPOSE, APP_PURPOSE] {
            if let Err(error) = rotate_if_due(&db, &seal, timing, purpose).await {
                tracing::warn!(purpose, error = %format_chain(&error), "cannot rotate the signing keys");
            }
        }
        match keys::load(&db, &seal, timing.overlap).await {
            Ok(fresh) if !keys::has_same_keys(&fresh, &view.borrow()) => {
                view.send_replace(Arc::new(fresh));
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(error = %format_chain(&error), "cannot refresh the signing keys"),
        }
    }
}

/// The next rotation step.
#[derive(Debug, PartialEq, Eq)]
enum RotationStep {
    Nothing,
    Successor,
    Acknowledgement(Acknowledgement),
    Retirement,
}

/// Returns the next step for keys that only platform processes read.
fn next_app_step(distribution: &[KeyDistribution], timing: KeyTiming) -> RotationStep {
    let Some(newest) = distribution.last() else { return RotationStep::Nothing };
    if distribution.len() > 1 && newest.age >= timing.overlap + MAX_SIGNED_LIFETIME {
        return RotationStep::Retirement;
    }
    if newest.age >= timing.rotation_age && distribution.len() < MAX_KEYS {
        RotationStep::Successor
    } else {
        RotationStep::Nothing
    }
}

/// Returns the next step for keys that hosts read. `hosts_without_newest` is the number of hosts that are sending
/// heartbeats but have not acknowledged the newest key.
fn next_proof_step(
    distribution: &[KeyDistribution],
    hosts_without_newest: i64,
    timing: KeyTiming,
) -> RotationStep {
    let Some(newest) = distribution.last() else { return RotationStep::Nothing };
    if distribution.len() > 1 {
        match newest.acknowledged_for {
            None if hosts_without_newest == 0 => {
                return RotationStep::Acknowledgement(Acknowledgement::Complete);
            }
            Some(_) if hosts_without_newest > 0 => {
                return RotationStep::Acknowledgement(Acknowledgement::Incomplete);
            }
            Some(duration) if duration >= timing.overlap => return RotationStep::Retirement,
            Some(_) | None => {}
        }
    }
    if newest.age >= timing.rotation_age && distribution.len() < MAX_KEYS {
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
    // The first read takes no lock, because usually nothing is due.
    let unlocked = db::keys::list_distribution(&session, purpose).await?;
    if unlocked.len() < 2 && unlocked.last().is_none_or(|key| key.age < timing.rotation_age) {
        return Ok(());
    }
    let tx = db::begin(&mut session).await?;
    db::lock(&tx, SIGNING_KEYS_LOCK).await?;
    let distribution = db::keys::list_distribution(&tx, purpose).await?;
    let Some(newest) = distribution.last().map(|key| key.kid.clone()) else { return Ok(()) };
    let unacknowledged = match purpose {
        PROOF_PURPOSE => db::keys::count_unacknowledged(&tx, &newest, timing.max_heartbeat_gap).await?,
        _ => UnacknowledgedHosts::default(),
    };
    let due = match purpose {
        PROOF_PURPOSE => next_proof_step(&distribution, unacknowledged.reporting, timing),
        _ => next_app_step(&distribution, timing),
    };
    match due {
        RotationStep::Nothing => return Ok(()),
        RotationStep::Successor => {
            let key = keys::create_signing_key(&tx, seal, purpose).await?;
            tracing::info!(kid = key.kid, "created a signing key");
        }
        RotationStep::Acknowledgement(acknowledgement) => {
            db::keys::record_acknowledged(&tx, &newest, acknowledgement).await?;
        }
        RotationStep::Retirement => {
            let retired = db::keys::retire_all_but(&tx, purpose, &newest).await?;
            tracing::info!(kid = newest, retired, "retired older signing keys");
            if unacknowledged.silent > 0 {
                let hosts = unacknowledged.silent;
                tracing::warn!(hosts, "silent hosts use a retired proof key until their next heartbeat");
            }
        }
    }
    Ok(db::commit(tx).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMING: KeyTiming = KeyTiming {
        rotation_age: Duration::from_secs(1000),
        overlap: Duration::from_secs(100),
        max_heartbeat_gap: Duration::from_secs(10_000),
    };

    fn key(age: u64, acknowledged_for: Option<u64>) -> KeyDistribution {
        KeyDistribution {
            kid: format!("k{age}"),
            age: Duration::from_secs(age),
            acknowledged_for: acknowledged_for.map(Duration::from_secs),
        }
    }

    #[test]
    fn proof_key_is_retired_after_acknowledgement_and_overlap() {
        use Acknowledgement::{Complete, Incomplete};
        assert_eq!(next_proof_step(&[], 0, TIMING), RotationStep::Nothing);
        assert_eq!(next_proof_step(&[key(999, None)], 5, TIMING), RotationStep::Nothing);
        assert_eq!(next_proof_step(&[key(1000, None)], 5, TIMING), RotationStep::Successor);
        let fresh = |acknowledged| [key(1010, None), key(10, acknowledged)];
        assert_eq!(next_proof_step(&fresh(None), 1, TIMING), RotationStep::Nothing);
        assert_eq!(next_proof_step(&fresh(None), 0, TIMING), RotationStep::Acknowledgement(Complete));
        assert_eq!(next_proof_step(&fresh(Some(99)), 0, TIMING), RotationStep::Nothing);
        assert_eq!(next_proof_step(&fresh(Some(99)), 1, TIMING), RotationStep::Acknowledgement(Incomplete));
        assert_eq!(next_proof_step(&fresh(Some(100)), 0, TIMING), RotationStep::Retirement);
        assert_eq!(next_proof_step(&fresh(Some(500)), 1, TIMING), RotationStep::Acknowledgement(Incomplete));
    }

    #[test]
    fn app_key_is_retired_after_its_last_token_expires() {
        let lifetime = MAX_SIGNED_LIFETIME.as_secs();
        let timing = KeyTiming { rotation_age: Duration::from_secs(lifetime * 2), ..TIMING };
        let next_step = |ages: &[u64]| {
            let distribution: Vec<KeyDistribution> = ages.iter().map(|age| key(*age, None)).collect();
            next_app_step(&distribution, timing)
        };
        assert_eq!(next_step(&[]), RotationStep::Nothing);
        assert_eq!(next_step(&[lifetime * 2 - 1]), RotationStep::Nothing);
        assert_eq!(next_step(&[lifetime * 2]), RotationStep::Successor);
        assert_eq!(
            next_step(&[lifetime * 3, lifetime + 99]),
            RotationStep::Nothing,
            "the old key may have signed a token until the new key was 100 s old"
        );
        assert_eq!(next_step(&[lifetime * 3, lifetime + 100]), RotationStep::Retirement);
    }

    #[test]
    fn unacknowledged_keys_get_successors_up_to_maximum() {
        let unacknowledged = [key(3000, None), key(2000, None), key(1000, None)];
        assert_eq!(next_proof_step(&unacknowledged, 1, TIMING), RotationStep::Successor);
        let full: Vec<KeyDistribution> =
            (1..=MAX_KEYS as u64).rev().map(|nth| key(nth * 1000, None)).collect();
        assert_eq!(next_proof_step(&full, 1, TIMING), RotationStep::Nothing);
    }
}
