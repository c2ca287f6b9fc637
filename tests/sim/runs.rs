//! The seeds that are played for every change, and the many more of the long mode.

use anyhow::Result;
use kit::long::Figures;

use super::run::{Parts, hold};
use super::world::Tally;

const AT_ONCE: usize = 5;

async fn near(first: u64, count: u64) -> Tally {
    let tally = hold(first..first + count, Parts::Near, AT_ONCE).await;
    println!("{count} seeds from {first}: {tally:?}");
    // Where all is played, enough has to be reached for the rest to mean anything.
    if ["SVC_SIM_SEED", "SVC_SIM_FROM"].iter().all(|variable| std::env::var_os(variable).is_none()) {
        assert!(u64::from(tally.running) > count / 2, "{tally:?}");
        assert!(u64::from(tally.routed) > count / 2, "{tally:?}");
        // Seldom, and fewer get through on a busy machine: four of 125 have been seen.
        assert!(u64::from(tally.resized) > count / 125, "{tally:?}");
        assert!(u64::from(tally.crashes) > count / 4, "{tally:?}");
        assert!(u64::from(tally.snapshots) > count / 2, "{tally:?}");
        assert!(u64::from(tally.rows) > count / 5, "{tally:?}");
        assert!(u64::from(tally.restored) > count / 50, "{tally:?}");
    }
    tally
}

/// A crash of a process that is simulated is a fault like those of its world.
fn told(test: &str, tally: &Tally) -> Result<()> {
    Figures { faults_tried: u64::from(tally.crashes), ..Figures::new(test) }.record()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_quarter_holds() {
    near(0, 125).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_second_quarter_holds() {
    near(125, 125).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_third_quarter_holds() {
    near(250, 125).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_fourth_quarter_holds() {
    near(375, 125).await;
}

/// The same plans through the production adapter and the store's client, over HTTP.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plans_hold_over_the_wire() {
    let tally = hold(10_000..10_012, Parts::Wire, 3).await;
    println!("12 seeds over the wire: {tally:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "long: 10,000 runs"]
async fn long_the_first_half_holds() -> Result<()> {
    told("simulated fleets, first half", &near(100_000, 10_000).await)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "long: 10,000 runs"]
async fn long_the_second_half_holds() -> Result<()> {
    told("simulated fleets, second half", &near(200_000, 10_000).await)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "long: 200 runs over HTTP"]
async fn long_over_the_wire() -> Result<()> {
    let tally = hold(300_000..300_200, Parts::Wire, 3).await;
    println!("200 seeds over the wire: {tally:?}");
    told("simulated fleets over the wire", &tally)
}
