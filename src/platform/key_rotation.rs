//! Signing keys change with overlap: a successor is made when a key is old.
//!
//! A new proof key is delivered by heartbeats and signed with where a host has acknowledged it; the old one is retired
//! when every host that may be routed to and that sends heartbeats has a newer one. A host that has been silent for
//! longer does not hold up the others: the retired key that it acknowledged still signs for it alone, until it
//! acknowledges another. A new app key signs after the overlap, when every router has read it;
//! the old one goes when no token of it can be good any more.
//!
//! Owns the schedule. The invariant: at every moment whoever has to accept a signature has the key of it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::config::KeyTiming;
use super::db::keys::{APP, Acknowledged, Laggards, PROOF, Standing};
use super::db::{self, Db};
use super::keys::{self, KeyError, LOCK, Seal, SigningSet};
use super::router::MAX_SIGNED_LIFETIME;
use crate::http::problem::chain;

const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Hosts keep so many at least; a host that never answers must not make them more.
const MOST_KEYS: usize = 8;

/// Keeps the keys as they should be, and the process's view of them fresh, until `stop`; what cannot be read leaves
/// the last view.
pub async fn run(
    db: Db,
    seal: Seal,
    timing: KeyTiming,
    view: watch::Sender<Arc<SigningSet>>,
    stop: CancellationToken,
) {
    let pause = (timing.overlap.min(timing.rotate) / 4).clamp(Duration::from_millis(200), LONGEST_PAUSE);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        for purpose in [PROOF, APP] {
            if let Err(error) = turn(&db, &seal, timing, purpose).await {
                tracing::warn!(purpose, error = %chain(&error), "the signing keys could not be seen to");
            }
        }
        match keys::load(&db, &seal, timing.overlap).await {
            Ok(fresh) if !keys::same(&fresh, &view.borrow()) => {
                view.send_replace(Arc::new(fresh));
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(error = %chain(&error), "the signing keys could not be refreshed"),
        }
    }
}

/// What is to be done about the keys.
#[derive(Debug, PartialEq, Eq)]
enum Due {
    Nothing,
    Successor,
    Acknowledged(Acknowledged),
    Retirement,
}

/// For keys that only platform processes read.
fn due_app(standing: &[Standing], timing: KeyTiming) -> Due {
    let Some(newest) = standing.last() else { return Due::Nothing };
    if standing.len() > 1 && newest.age >= timing.overlap + MAX_SIGNED_LIFETIME {
        return Due::Retirement;
    }
    if newest.age >= timing.rotate && standing.len() < MOST_KEYS { Due::Successor } else { Due::Nothing }
}

/// For keys that hosts read. `without`: how many hosts that send heartbeats do not have the newest key.
fn due_proof(standing: &[Standing], without: i64, timing: KeyTiming) -> Due {
    let Some(newest) = standing.last() else { return Due::Nothing };
    if standing.len() > 1 {
        match newest.acknowledged_for {
            None if without == 0 => return Due::Acknowledged(Acknowledged::ByAll),
            Some(_) if without > 0 => return Due::Acknowledged(Acknowledged::NotByAll),
            Some(time) if time >= timing.overlap => return Due::Retirement,
            Some(_) | None => {}
        }
    }
    if newest.age >= timing.rotate && standing.len() < MOST_KEYS { Due::Successor } else { Due::Nothing }
}

async fn turn(db: &Db, seal: &Seal, timing: KeyTiming, purpose: &'static str) -> Result<(), KeyError> {
    let mut session = db.session().await?;
    let seen = db::keys::standing(&session, purpose).await?;
    if seen.len() < 2 && seen.last().is_none_or(|key| key.age < timing.rotate) {
        return Ok(());
    }
    let tx = db::begin(&mut session).await?;
    db::lock(&tx, LOCK).await?;
    let standing = db::keys::standing(&tx, purpose).await?;
    let Some(newest) = standing.last().map(|key| key.kid.clone()) else { return Ok(()) };
    let laggards = match purpose {
        PROOF => db::keys::without(&tx, &newest, timing.max_silence).await?,
        _ => Laggards::default(),
    };
    let due = match purpose {
        PROOF => due_proof(&standing, laggards.speaking, timing),
        _ => due_app(&standing, timing),
    };
    match due {
        Due::Nothing => return Ok(()),
        Due::Successor => {
            let key = keys::generate(&tx, seal, purpose).await?;
            tracing::info!(kid = key.kid, "a new signing key");
        }
        Due::Acknowledged(by_all) => db::keys::acknowledge(&tx, &newest, by_all).await?,
        Due::Retirement => {
            let retired = db::keys::retire_all_but(&tx, purpose, &newest).await?;
            tracing::info!(kid = newest, retired, "older signing keys are retired");
            if laggards.silent > 0 {
                let hosts = laggards.silent;
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

    fn key(age: u64, acknowledged_for: Option<u64>) -> Standing {
        Standing {
            kid: format!("k{age}"),
            age: Duration::from_secs(age),
            acknowledged_for: acknowledged_for.map(Duration::from_secs),
        }
    }

    #[test]
    fn an_old_key_gets_a_successor_and_goes_when_nobody_has_needed_it_for_a_while() {
        use Acknowledged::{ByAll, NotByAll};
        assert_eq!(due_proof(&[], 0, TIMING), Due::Nothing);
        assert_eq!(due_proof(&[key(999, None)], 5, TIMING), Due::Nothing);
        assert_eq!(due_proof(&[key(1000, None)], 5, TIMING), Due::Successor);
        let fresh = |acknowledged| [key(1010, None), key(10, acknowledged)];
        assert_eq!(due_proof(&fresh(None), 1, TIMING), Due::Nothing);
        assert_eq!(due_proof(&fresh(None), 0, TIMING), Due::Acknowledged(ByAll));
        assert_eq!(due_proof(&fresh(Some(99)), 0, TIMING), Due::Nothing);
        assert_eq!(due_proof(&fresh(Some(99)), 1, TIMING), Due::Acknowledged(NotByAll));
        assert_eq!(due_proof(&fresh(Some(100)), 0, TIMING), Due::Retirement);
        assert_eq!(due_proof(&fresh(Some(500)), 1, TIMING), Due::Acknowledged(NotByAll));
    }

    #[test]
    fn an_app_key_goes_when_its_last_token_has_ended() {
        let life = MAX_SIGNED_LIFETIME.as_secs();
        let short = KeyTiming { rotate: Duration::from_secs(life * 2), ..TIMING };
        let due = |ages: &[u64]| {
            let standing: Vec<Standing> = ages.iter().map(|age| key(*age, None)).collect();
            due_app(&standing, short)
        };
        assert_eq!(due(&[]), Due::Nothing);
        assert_eq!(due(&[life * 2 - 1]), Due::Nothing);
        assert_eq!(due(&[life * 2]), Due::Successor);
        assert_eq!(
            due(&[life * 3, life + 99]),
            Due::Nothing,
            "a token of the first may have been made until 100"
        );
        assert_eq!(due(&[life * 3, life + 100]), Due::Retirement);
    }

    #[test]
    fn a_host_that_never_answers_holds_up_neither_the_others_nor_more_than_a_few_keys() {
        let held_up = [key(3000, None), key(2000, None), key(1000, None)];
        assert_eq!(due_proof(&held_up, 1, TIMING), Due::Successor);
        let full: Vec<Standing> = (1..=MOST_KEYS as u64).rev().map(|nth| key(nth * 1000, None)).collect();
        assert_eq!(due_proof(&full, 1, TIMING), Due::Nothing);
    }
}
