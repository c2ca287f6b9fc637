//! `kill -9` of the real applets after a random part of the time that they take, again and again, and what holds then.

mod backup;
mod register;
mod restore;
mod update;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use nix::sys::signal::Signal;

use super::super::machine::{Ended, Running};
use crate::sim::rng::Rng;

/// For every change.
const FEW: u64 = 8;
const MANY: u64 = 200;
/// Kills in a row at most, before a run is let through. Fewer than after which an update is given up.
const ROW: usize = 3;

/// What a write that was killed left is gone after a run that was not.
fn no_torn_file(dir: &Path) -> Result<()> {
    let names =
        std::fs::read_dir(dir)?.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let torn: Vec<String> = names.filter(|name| name.starts_with('.') && name.ends_with(".tmp")).collect();
    ensure!(torn.is_empty(), "{} holds {torn:?}", dir.display());
    Ok(())
}

/// A run that was killed in the moment in which it started a program: until that has begun, it holds the lock in its place.
fn is_locked_out(ended: &Ended) -> bool {
    ended.code == Some(75) && ended.stderr.contains("is under way")
}

/// Kills runs at random moments and counts.
struct Killer {
    rng: Rng,
    /// What a run takes that nobody kills.
    span: Duration,
    kills: u64,
}

impl Killer {
    fn new(what: &str, seed: u64) -> Self {
        let given = std::env::var("SVC_FAULT_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = given.unwrap_or(seed);
        println!("{what}: SVC_FAULT_SEED={seed}");
        Self { rng: Rng::new(seed), span: Duration::ZERO, kills: 0 }
    }

    /// A seed that no run before had, for a long campaign.
    fn fresh() -> u64 {
        uuid::Uuid::new_v4().as_u64_pair().0
    }

    /// Lets a run end by itself, and learns how long that takes: with other load, it changes.
    async fn spare(&mut self, spawn: impl Fn() -> Result<Running>) -> Result<Ended> {
        let patience = Instant::now() + Duration::from_secs(10);
        loop {
            let (begun, running) = (Instant::now(), spawn()?);
            let ended = tokio::task::spawn_blocking(move || running.end()).await??;
            if is_locked_out(&ended) && begun < patience {
                continue;
            }
            let took = begun.elapsed();
            self.span = if self.span.is_zero() { took } else { (self.span * 3 + took) / 4 };
            return Ok(ended.expect(0));
        }
    }

    /// Kills a run at a moment that is anywhere in it, or finds that it had ended well.
    async fn strike(&mut self, running: Running) -> Result<()> {
        let part = self.rng.below(1050) as u32;
        tokio::time::sleep(self.span * part / 1000).await;
        running.signal(Signal::SIGKILL)?;
        let ended = tokio::task::spawn_blocking(move || running.end()).await??;
        match (ended.signal, ended.code) {
            (Some(9), _) => self.kills += 1,
            (_, Some(0)) => {}
            _ if is_locked_out(&ended) => {}
            _ => bail!("it ended by itself with {:?}:\n{}", ended.code, ended.stderr),
        }
        Ok(())
    }

    /// How many strikes come before a run is let through.
    fn row(&mut self) -> usize {
        1 + self.rng.below(ROW)
    }
}
