//! Proof keys change with overlap: a successor is made when a key is old, delivered by heartbeats, signed with where a
//! host has acknowledged it; the old one goes when no host that may be routed to needs it any more.
//!
//! Owns the schedule. The invariant: at every moment each such host accepts the key that it is signed for with.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::config::KeyTiming;
use super::db::keys::{Acknowledged, PROOF, Standing};
use super::db::{self, Db};
use super::keys::{self, KeyError, LOCK, Seal, SigningSet};
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
        if let Err(error) = turn(&db, &seal, timing).await {
            tracing::warn!(error = %chain(&error), "the signing keys could not be seen to");
        }
        match keys::load(&db, &seal).await {
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

/// `without`: how many hosts that matter do not have the newest key.
fn due(standing: &[Standing], without: i64, timing: KeyTiming) -> Due {
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

async fn turn(db: &Db, seal: &Seal, timing: KeyTiming) -> Result<(), KeyError> {
    let mut session = db.session().await?;
    let seen = db::keys::standing(&session, PROOF).await?;
    if seen.len() < 2 && seen.last().is_none_or(|key| key.age < timing.rotate) {
        return Ok(());
    }
    let tx = db::begin(&mut session).await?;
    db::lock(&tx, LOCK).await?;
    let standing = db::keys::standing(&tx, PROOF).await?;
    let Some(newest) = standing.last().map(|key| key.kid.clone()) else { return Ok(()) };
    let without = db::keys::without(&tx, &newest).await?;
    match due(&standing, without, timing) {
        Due::Nothing => return Ok(()),
        Due::Successor => {
            let key = keys::generate(&tx, seal, PROOF).await?;
            tracing::info!(kid = key.kid, "a new proof key");
        }
        Due::Acknowledged(by_all) => db::keys::acknowledge(&tx, &newest, by_all).await?,
        Due::Retirement => {
            let retired = db::keys::retire_all_but(&tx, PROOF, &newest).await?;
            tracing::info!(
                kid = newest,
                retired,
                "every host has the newest proof key; the older ones are retired"
            );
        }
    }
    Ok(db::commit(tx).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMING: KeyTiming =
        KeyTiming { rotate: Duration::from_secs(1000), overlap: Duration::from_secs(100) };

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
        assert_eq!(due(&[], 0, TIMING), Due::Nothing);
        assert_eq!(due(&[key(999, None)], 5, TIMING), Due::Nothing);
        assert_eq!(due(&[key(1000, None)], 5, TIMING), Due::Successor);
        let fresh = |acknowledged| [key(1010, None), key(10, acknowledged)];
        assert_eq!(due(&fresh(None), 1, TIMING), Due::Nothing);
        assert_eq!(due(&fresh(None), 0, TIMING), Due::Acknowledged(ByAll));
        assert_eq!(due(&fresh(Some(99)), 0, TIMING), Due::Nothing);
        assert_eq!(due(&fresh(Some(99)), 1, TIMING), Due::Acknowledged(NotByAll));
        assert_eq!(due(&fresh(Some(100)), 0, TIMING), Due::Retirement);
        assert_eq!(due(&fresh(Some(500)), 1, TIMING), Due::Acknowledged(NotByAll));
    }

    #[test]
    fn a_host_that_never_answers_holds_up_neither_the_others_nor_more_than_a_few_keys() {
        let held_up = [key(3000, None), key(2000, None), key(1000, None)];
        assert_eq!(due(&held_up, 1, TIMING), Due::Successor);
        let full: Vec<Standing> = (1..=MOST_KEYS as u64).rev().map(|nth| key(nth * 1000, None)).collect();
        assert_eq!(due(&full, 1, TIMING), Due::Nothing);
    }
}
