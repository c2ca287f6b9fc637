//! Benchmarks fifty apps on one machine: all idle, twenty of them busy at the same time, and one that receives far more
//! requests than another.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde_json::json;

use super::super::figures::Tally;
use super::super::gateway::{Gateway, Machine};
use super::super::peers::wrk::{LoadResult, Wrk};
use super::super::process::memory_mib;
use super::{Round, SETTLE_DELAY, add};

pub const STARTUP_TIME: &str = "50 apps: exec to all ready";
pub const MEMORY: &str = "50 apps: idle memory";
pub const TOTAL_RATE: &str = "20 busy apps: finds/s in total";
pub const FAIRNESS: &str = "20 busy apps: slowest to fastest app";
pub const BUSY_P99: &str = "20 busy apps: p99 of the slowest";
pub const QUIET_P99: &str = "find's p99, 1 connection alongside 64 from another app";

const APPS: usize = 50;
const BUSY_APPS: usize = 20;
const CONNECTIONS_PER_BUSY_APP: u32 = 4;
/// Delay of the quiet app's load, so that the greedy app's load is already running.
const QUIET_LOAD_DELAY: Duration = Duration::from_millis(500);

pub async fn measure(round: &Round<'_>, tally: &mut Tally) -> Result<()> {
    let machine = round.new_machine("apps").await?;
    machine.install_apps(APPS)?;
    // The first start creates the schemas; the second one is an ordinary start.
    let first = machine.start(&round.options.svc)?;
    first.wait_until_ready(&machine, APPS).await?;
    drop(first);
    let started = Instant::now();
    let gateway = machine.start(&round.options.svc)?;
    gateway.wait_until_ready(&machine, APPS).await?;
    add(tally, STARTUP_TIME, started.elapsed().as_secs_f64() * 1000.0);
    for app in 0..APPS {
        gateway.query(&machine, &find_query(app)).await?;
    }
    tokio::time::sleep(SETTLE_DELAY).await;
    add(tally, MEMORY, memory_mib(gateway.process.pid())?);

    let seconds = round.options.seconds;
    let busy = |app| AppLoad { app, connections: CONNECTIONS_PER_BUSY_APP, delay: Duration::ZERO, seconds };
    let loads: Vec<_> = (0..BUSY_APPS).map(busy).collect();
    let results = run_concurrent_loads(round.wrk, &gateway, &machine, &loads)?;
    let rates: Vec<f64> = results.iter().map(LoadResult::requests_per_second).collect();
    let (slowest, fastest) =
        rates.iter().fold((f64::MAX, 0.0_f64), |(low, high), rate| (low.min(*rate), high.max(*rate)));
    add(tally, TOTAL_RATE, rates.iter().sum());
    add(tally, FAIRNESS, slowest / fastest);
    add(tally, BUSY_P99, results.iter().map(|result| result.p99 / 1000.0).fold(0.0, f64::max));

    let greedy = AppLoad { app: 0, connections: 64, delay: Duration::ZERO, seconds: seconds + 1 };
    let quiet = AppLoad { app: 1, connections: 1, delay: QUIET_LOAD_DELAY, seconds };
    let results = run_concurrent_loads(round.wrk, &gateway, &machine, &[greedy, quiet])?;
    add(tally, QUIET_P99, results.last().context("no result")?.p99 / 1000.0);
    Ok(())
}

fn find_query(app: usize) -> String {
    json!({ "action": "find", "app": format!("app{app}"), "table": "items", "limit": 20 }).to_string()
}

struct AppLoad {
    app: usize,
    connections: u32,
    delay: Duration,
    seconds: u32,
}

fn run_concurrent_loads(
    wrk: &Wrk,
    gateway: &Gateway,
    machine: &Machine,
    loads: &[AppLoad],
) -> Result<Vec<LoadResult>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = loads
            .iter()
            .map(|load| {
                let request = gateway.bridge_request(machine, find_query(load.app));
                scope.spawn(move || {
                    std::thread::sleep(load.delay);
                    wrk.run_load(&request, load.connections, load.seconds)
                })
            })
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<LoadResult>>| {
            thread.join().map_err(|_| anyhow!("a load generator's thread panicked"))?
        };
        threads.into_iter().map(join).collect()
    })
}
