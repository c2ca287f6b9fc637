//! Runs some seeds for every change, and a larger set in long mode.

use anyhow::Result;
use kit::long_tests::Figures;

use super::run::{Backends, assert_seeds_find_no_violation};
use super::simulation::Counts;

const CONCURRENT_SEEDS: usize = 5;
/// Maximum number of seed ranges in one test.
const MAX_SEED_RANGES: u64 = 3;

/// Runs `count` seeds from `first`, and more if they reach too few states, because runs make less progress on an
/// overloaded computer. With `SVC_SIM_SEED` or `SVC_SIM_FROM`, stops after the first range in which a seed was run.
async fn run_in_process(first: u64, count: u64) -> Counts {
    let is_partial = ["SVC_SIM_SEED", "SVC_SIM_FROM"].iter().any(|name| std::env::var_os(name).is_some());
    let mut total = Counts::default();
    for range_index in 0..MAX_SEED_RANGES {
        let first = first + range_index * count;
        let seeds = first..first + count;
        let counts = assert_seeds_find_no_violation(seeds, Backends::InProcess, CONCURRENT_SEEDS).await;
        println!("{count} seeds from {first}: {counts:?}");
        total.add(counts);
        let is_done =
            if is_partial { total != Counts::default() } else { reached_enough_states(&total, count) };
        if is_done {
            return total;
        }
    }
    if is_partial {
        return total;
    }
    panic!("{MAX_SEED_RANGES} ranges of {count} seeds reached too few states to be meaningful: {total:?}");
}

/// Returns whether the runs so far reached as many states as a meaningful range of `count` seeds.
fn reached_enough_states(counts: &Counts, count: u64) -> bool {
    u64::from(counts.running_machines) > count / 2
        && u64::from(counts.routed_requests) > count / 2
        // Resizes are rare.
        && u64::from(counts.successful_resizes) > count / 150
        && u64::from(counts.planned_crashes) > count / 4
        && u64::from(counts.started_backups) > count / 2
        && u64::from(counts.acknowledged_rows) > count / 5
        && u64::from(counts.database_restores) > count / 50
}

/// Records the planned crashes as injected faults.
fn record_figures(test: &str, counts: &Counts) -> Result<()> {
    Figures { faults_injected: u64::from(counts.planned_crashes), ..Figures::new(test) }.record()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn seeds_find_no_violation() {
    run_in_process(0, 100).await;
}

/// Runs plans through the production adapter and store client, over HTTP.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plans_over_http_find_no_violation() {
    let counts = assert_seeds_find_no_violation(10_000..10_012, Backends::Http, 3).await;
    println!("12 seeds over HTTP: {counts:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "long: 10,000 runs"]
async fn long_first_half_of_seeds_finds_no_violation() -> Result<()> {
    record_figures("simulated fleets, first half", &run_in_process(100_000, 10_000).await)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "long: 10,000 runs"]
async fn long_second_half_of_seeds_finds_no_violation() -> Result<()> {
    record_figures("simulated fleets, second half", &run_in_process(200_000, 10_000).await)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "long: 200 runs over HTTP"]
async fn long_plans_over_http_find_no_violation() -> Result<()> {
    let counts = assert_seeds_find_no_violation(300_000..300_200, Backends::Http, 3).await;
    println!("200 seeds over HTTP: {counts:?}");
    record_figures("simulated fleets over HTTP", &counts)
}
