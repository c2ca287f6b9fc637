//! Repeated `kill -9` of the real applets after a random part of their run time, and the invariants after each kill.

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

/// Kills in the short form.
const SHORT_KILLS: u64 = 8;
const LONG_KILLS: u64 = 200;
/// Maximum consecutive kills before a complete run; fewer than the number after which an update is abandoned.
const MAX_KILLS_IN_A_ROW: usize = 3;

/// Temporary files of a killed write are removed by the next complete run.
fn assert_no_torn_file(dir: &Path) -> Result<()> {
    let names =
        std::fs::read_dir(dir)?.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let torn: Vec<String> = names.filter(|name| name.starts_with('.') && name.ends_with(".tmp")).collect();
    ensure!(torn.is_empty(), "{} holds {torn:?}", dir.display());
    Ok(())
}

/// A run killed while it started a program: until that program has started, it holds the lock.
fn is_locked_out(ended: &Ended) -> bool {
    ended.code == Some(75) && ended.stderr.contains("is under way")
}

/// Kills runs at random moments and counts.
struct Killer {
    rng: Rng,
    /// Duration of an undisturbed run.
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

    /// A new seed, for a long campaign.
    fn fresh() -> u64 {
        uuid::Uuid::new_v4().as_u64_pair().0
    }

    /// Completes a run and measures its duration, which changes with the load.
    async fn complete_run(&mut self, spawn: impl Fn() -> Result<Running>) -> Result<Ended> {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let (begun, running) = (Instant::now(), spawn()?);
            let ended = tokio::task::spawn_blocking(move || running.wait()).await??;
            if is_locked_out(&ended) && begun < deadline {
                continue;
            }
            let took = begun.elapsed();
            self.span = if self.span.is_zero() { took } else { (self.span * 3 + took) / 4 };
            return Ok(ended.expect(0));
        }
    }

    /// Kills a run at a random point, unless it has already succeeded.
    async fn kill_run(&mut self, running: Running) -> Result<()> {
        let part = self.rng.below(1050) as u32;
        tokio::time::sleep(self.span * part / 1000).await;
        running.signal(Signal::SIGKILL)?;
        let ended = tokio::task::spawn_blocking(move || running.wait()).await??;
        match (ended.signal, ended.code) {
            (Some(9), _) => self.kills += 1,
            (_, Some(0)) => {}
            _ if is_locked_out(&ended) => {}
            _ => bail!("the run ended with {:?}:\n{}", ended.code, ended.stderr),
        }
        Ok(())
    }

    /// The number of kills before the next complete run.
    fn row(&mut self) -> usize {
        1 + self.rng.below(MAX_KILLS_IN_A_ROW)
    }
}
