//! The seeds that run for every change, and the larger set that runs in long mode.

use anyhow::Result;
use kit::long_tests::Figures;

use super::run::{Backends, assert_seeds_find_no_violation};
use super::simulation::Counts;

const CONCURRENT_SEEDS: usize = 5;

async fn run_in_process(first: u64, count: u64) -> Counts {
    let counts =
        assert_seeds_find_no_violation(first..first + count, Backends::InProcess, CONCURRENT_SEEDS).await;
    println!("{count} seeds from {first}: {counts:?}");
    // A complete range of seeds must reach enough states to be meaningful.
    if ["SVC_SIM_SEED", "SVC_SIM_FROM"].iter().all(|variable| std::env::var_os(variable).is_none()) {
        assert!(u64::from(counts.running) > count / 2, "{counts:?}");
        assert!(u64::from(counts.routed) > count / 2, "{counts:?}");
        // Resizes are rare, and even rarer on a busy machine: sometimes only four in 125 runs.
        assert!(u64::from(counts.resized) > count / 150, "{counts:?}");
        assert!(u64::from(counts.crashes) > count / 4, "{counts:?}");
        assert!(u64::from(counts.snapshots) > count / 2, "{counts:?}");
        assert!(u64::from(counts.rows) > count / 5, "{counts:?}");
        assert!(u64::from(counts.restored) > count / 50, "{counts:?}");
    }
    counts
}

/// Counts the simulated crashes as faults.
fn record_figures(test: &str, counts: &Counts) -> Result<()> {
    Figures { faults_tried: u64::from(counts.crashes), ..Figures::new(test) }.record()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn seeds_find_no_violation() {
    run_in_process(0, 100).await;
}

/// Runs plans through the production adapter and store client, over HTTP.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plans_over_http_find_no_violation() {
    let counts = assert_seeds_find_no_violation(10_000..10_012, Backends::Wire, 3).await;
    println!("12 seeds over the wire: {counts:?}");
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
    let counts = assert_seeds_find_no_violation(300_000..300_200, Backends::Wire, 3).await;
    println!("200 seeds over the wire: {counts:?}");
    record_figures("simulated fleets over the wire", &counts)
}
