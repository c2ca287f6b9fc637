//! Counts how many of several concurrent conditional writes succeed on each store.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures_util::future::join_all;
use kit::stores::StoreKind;
use object_store::path::Path;
use serde_json::json;
use svc::store::bucket::{Condition, StoreError};

use super::StoreFixture;

const WRITERS: u64 = 6;

/// The number of rounds, by the number of winners in a round.
type RoundsByWinners = BTreeMap<usize, usize>;

/// Starts all writers within `spread`. Returns the number of winners.
async fn race(fixture: &StoreFixture, key: &Path, condition: &Condition, spread: Duration) -> Result<usize> {
    let writers = (0..WRITERS).map(|writer| async move {
        let delay = u32::try_from(writer).unwrap_or_default() * spread / WRITERS as u32;
        tokio::time::sleep(delay).await;
        let value = json!({"writer": writer, "nonce": uuid::Uuid::new_v4()});
        fixture.bucket.put_json_if(key, &value, condition.clone()).await
    });
    let mut winners = 0;
    for result in join_all(writers).await {
        match result {
            Ok(()) => winners += 1,
            Err(StoreError::Precondition { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(winners)
}

/// Checks that every round has at least one winner, and exactly one if the conditional write is atomic. `If-None-Match`
/// must be atomic on all stores, and `If-Match` on all but SeaweedFS.
async fn check_winners(kind: StoreKind, rounds: usize) -> Result<()> {
    let Some(fixture) = StoreFixture::start(kind).await? else { return Ok(()) };
    let (mut created, mut replaced) = (RoundsByWinners::new(), RoundsByWinners::new());
    let start = Instant::now();
    for round in 0..rounds {
        let spread = Duration::from_millis([0, 0, 2, 10][round % 4]);
        let key = Path::from(format!("race/{round}.json"));
        *created.entry(race(&fixture, &key, &Condition::Absent, spread).await?).or_default() += 1;
        let read = fixture.bucket.get_json::<serde_json::Value>(&key).await?.context("no object")?;
        let unchanged = Condition::Unchanged(read.version);
        *replaced.entry(race(&fixture, &key, &unchanged, spread).await?).or_default() += 1;
    }
    println!(
        "{}: {rounds} races of {WRITERS} writers in {:.1?}; rounds by winners: If-None-Match {created:?}, If-Match {replaced:?}",
        kind.name(),
        start.elapsed()
    );
    assert_eq!(created, RoundsByWinners::from([(1, rounds)]), "If-None-Match on {}", kind.name());
    assert!(!replaced.contains_key(&0), "no writer won: {replaced:?}");
    if kind != StoreKind::Seaweedfs {
        assert_eq!(replaced, RoundsByWinners::from([(1, rounds)]), "If-Match on {}", kind.name());
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn conditional_writes_have_one_winner_on_each_store() -> Result<()> {
    for kind in StoreKind::ALL {
        check_winners(kind, 4).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a long campaign: cargo xtask test --long"]
async fn conditional_writes_have_one_winner_in_hundreds_of_races() -> Result<()> {
    for kind in StoreKind::ALL {
        // SeaweedFS 4.48 took about a second for puts that collide on a condition.
        check_winners(kind, if kind == StoreKind::Seaweedfs { 120 } else { 400 }).await?;
    }
    Ok(())
}
