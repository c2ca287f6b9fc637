//! Scale benchmark: one machine's gateway with ten thousand listeners, fifty apps, ten million rows, 1 GiB bodies,
//! and twenty apps that are busy at the same time.

mod apps;
mod bodies;
mod listeners;
mod rows;
mod upstream;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::figures::{PRODUCT, Spec, Tally, Target, median};
use super::gateway::{Gateway, Machine};
use super::peers::wrk::Wrk;
use super::{Options, print_round};
use kit::fetch::target_dir;
use kit::pg::{PgBinaries, PgOptions, PgServer};

/// Required limit on open files: each WebSocket uses two in the gateway, and two in this process.
const MIN_OPEN_FILES: u64 = 2 * listeners::SOCKETS as u64 + 500;
/// How long to wait after the last connection before measuring memory.
const SETTLE_DELAY: Duration = Duration::from_secs(2);

const DIRECT_SQL: &str = "direct SQL";

pub const ROWS: [Spec; 21] = [
    row(listeners::STREAM_MEMORY, "KiB", Target::AtMost(40.0)),
    row(listeners::STREAM_CPU, "ms/s", Target::AtMost(50.0)),
    row(listeners::EVENT_MEDIAN, "ms", Target::AtMost(500.0)),
    row(listeners::EVENT_LAST, "ms", Target::AtMost(1000.0)),
    row(listeners::FIND_P99, "ms", Target::AtMost(20.0)),
    row(listeners::SOCKET_MEMORY, "KiB", Target::AtMost(60.0)),
    row(listeners::MESSAGE_P99, "ms", Target::AtMost(5.0)),
    row(apps::STARTUP_TIME, "ms", Target::AtMost(10_000.0)),
    row(apps::MEMORY, "MiB", Target::AtMost(40.0)),
    row(apps::TOTAL_RATE, "1/s", Target::None),
    row(apps::FAIRNESS, "ratio", Target::AtLeast(0.8)),
    row(apps::BUSY_P99, "ms", Target::AtMost(100.0)),
    row(apps::QUIET_P99, "ms", Target::AtMost(20.0)),
    versus_sql(rows::FIND, Target::RatioAtMost(4.0)),
    versus_sql(rows::PAGE, Target::RatioAtMost(2.0)),
    versus_sql(rows::COUNT_KIND, Target::RatioAtMost(1.1)),
    versus_sql(rows::COUNT_ALL, Target::RatioAtMost(1.1)),
    row(bodies::DOWNLOAD, "MiB/s", Target::AtLeast(200.0)),
    row(bodies::DOWNLOAD_MEMORY, "MiB", Target::AtMost(8.0)),
    row(bodies::UPLOAD, "MiB/s", Target::AtLeast(200.0)),
    row(bodies::UPLOAD_MEMORY, "MiB", Target::AtMost(8.0)),
];

const fn row(name: &'static str, unit: &'static str, target: Target) -> Spec {
    Spec { name, unit, against: None, target }
}

const fn versus_sql(name: &'static str, target: Target) -> Spec {
    Spec { name, unit: "ms", against: Some(DIRECT_SQL), target }
}

pub async fn measure(options: &Options) -> Result<Tally> {
    raise_open_files_limit()?;
    let wrk = Wrk::fetch()?;
    let pg = PgBinaries::locate_or_fetch(&target_dir())?;
    let settings = vec![("shared_buffers".to_owned(), "256MB".to_owned())];
    let server = PgServer::start(&pg, PgOptions { settings, ..PgOptions::default() }).await?;
    let table = rows::LargeTable::create(&server, options).await?;
    let mut tally = Tally::default();
    for number in 0..options.rounds {
        print_round(number, options.rounds);
        let round = Round { options, server: &server, wrk: &wrk, number };
        table.measure(&mut tally).await?;
        listeners::measure_streams(&round, &mut tally).await?;
        listeners::measure_sockets(&round, &mut tally).await?;
        apps::measure(&round, &mut tally).await?;
        bodies::measure(&round, &mut tally).await?;
    }
    Ok(tally)
}

/// State shared by the measurements of one round.
struct Round<'a> {
    options: &'a Options,
    server: &'a PgServer,
    wrk: &'a Wrk,
    number: u32,
}

impl Round<'_> {
    /// Creates a machine with its own database.
    async fn new_machine(&self, name: &str) -> Result<Machine> {
        new_machine(self.server, &format!("svc_{name}_{}", self.number)).await
    }
}

/// Raises the limit on open files, for this process and the servers that it starts, to the permitted maximum.
fn raise_open_files_limit() -> Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    ensure!(
        hard >= MIN_OPEN_FILES,
        "{hard} open files are allowed, but {MIN_OPEN_FILES} are needed: see `ulimit -Hn`"
    );
    Ok(setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?)
}

async fn new_machine(server: &PgServer, database: &str) -> Result<Machine> {
    server.create_database(database).await?;
    Machine::new(&server.url(database))
}

/// A client that accepts any certificate, because the router benchmark measures pinning.
fn client() -> Result<reqwest::Client> {
    let builder = reqwest::Client::builder().tls_danger_accept_invalid_certs(true).http1_only().no_proxy();
    Ok(builder.connect_timeout(Duration::from_secs(30)).build()?)
}

/// Sends a query repeatedly; returns the median response time in milliseconds.
async fn median_query_ms(gateway: &Gateway, machine: &Machine, body: &str, repeats: usize) -> Result<f64> {
    let mut times = Vec::with_capacity(repeats);
    for _ in 0..repeats {
        let started = Instant::now();
        gateway.query(machine, body).await?;
        times.push(started.elapsed().as_secs_f64() * 1000.0);
    }
    median(&times).context("no query was sent")
}

fn add(tally: &mut Tally, name: &'static str, value: f64) {
    tally.add(name, PRODUCT, value);
}
