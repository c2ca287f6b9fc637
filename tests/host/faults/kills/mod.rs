//! Repeatedly kills the real applets with `kill -9` after a random fraction of their run time, and checks the
//! invariants after each kill.

mod backup;
mod register;
mod restore;
mod update;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use nix::sys::signal::Signal;

use super::super::machine::{RunResult, RunningApplet};
use crate::sim::rng::Rng;

const MIN_KILLS_SHORT_RUN: u64 = 8;
const MIN_KILLS_LONG_RUN: u64 = 200;
/// Maximum number of consecutive kills before a complete run; fewer than the number after which an update is abandoned.
const MAX_CONSECUTIVE_KILLS: usize = 3;

/// Asserts that the last complete run removed the temporary files left by killed runs.
fn assert_no_temporary_file(dir: &Path) -> Result<()> {
    let names =
        std::fs::read_dir(dir)?.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let remaining: Vec<String> =
        names.filter(|name| name.starts_with('.') && name.ends_with(".tmp")).collect();
    ensure!(remaining.is_empty(), "{} contains {remaining:?}", dir.display());
    Ok(())
}

/// Returns whether a run was refused because a program that a killed run was starting still holds the lock.
fn is_locked_out(result: &RunResult) -> bool {
    result.exit_code == Some(75) && result.stderr.contains("is running")
}

/// Kills runs at random moments, and counts the kills.
struct Killer {
    rng: Rng,
    /// Moving average of the duration of an uninterrupted run.
    run_duration: Duration,
    kills: u64,
}

impl Killer {
    fn new(name: &str, seed: u64) -> Self {
        let env_seed = std::env::var("SVC_FAULT_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = env_seed.unwrap_or(seed);
        println!("{name}: SVC_FAULT_SEED={seed}");
        Self { rng: Rng::new(seed), run_duration: Duration::ZERO, kills: 0 }
    }

    /// Returns a new seed, for a long run.
    fn new_seed() -> u64 {
        uuid::Uuid::new_v4().as_u64_pair().0
    }

    /// Completes a run and measures its duration, which changes with the load.
    async fn complete_run(&mut self, spawn: impl Fn() -> Result<RunningApplet>) -> Result<RunResult> {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let (start, running) = (Instant::now(), spawn()?);
            let result = tokio::task::spawn_blocking(move || running.wait()).await??;
            if is_locked_out(&result) && start < deadline {
                continue;
            }
            let duration = start.elapsed();
            self.run_duration =
                if self.run_duration.is_zero() { duration } else { (self.run_duration * 3 + duration) / 4 };
            return Ok(result.expect(0));
        }
    }

    /// Kills a run at a random moment, unless it has already ended, successfully or because of a held lock.
    async fn kill_run(&mut self, running: RunningApplet) -> Result<()> {
        let permille = self.rng.below(1050) as u32;
        tokio::time::sleep(self.run_duration * permille / 1000).await;
        running.signal(Signal::SIGKILL)?;
        let result = tokio::task::spawn_blocking(move || running.wait()).await??;
        match (result.signal, result.exit_code) {
            (Some(9), _) => self.kills += 1,
            (_, Some(0)) => {}
            _ if is_locked_out(&result) => {}
            _ => bail!("the run ended with {:?}:\n{}", result.exit_code, result.stderr),
        }
        Ok(())
    }

    /// Returns the number of kills before the next complete run.
    fn next_kill_count(&mut self) -> usize {
        1 + self.rng.below(MAX_CONSECUTIVE_KILLS)
    }
}
