//! Footprint benchmark: idle memory, binary size, and startup time.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::figures::{PRODUCT, Spec, Tally, Target, median};
use super::gateway::Machine;
use super::peers::nginx::{Nginx, Upstreams};
use super::process;
use super::site::{Identity, Site};
use super::{Options, create_temp_dir, file_size_mib, print_round};
use kit::fetch::target_dir;
use kit::net;
use kit::pg::{PgBinaries, PgOptions, PgServer};

const STARTUP_TIME: &str = "gateway: exec to listening, without its database";
const IDLE_NO_APP: &str = "gateway: idle memory, no app";
const IDLE_TWO_APPS: &str = "gateway: idle memory, two apps";
const IDLE_TEN_APPS: &str = "gateway: idle memory, ten apps";
const IDLE_PLATFORM: &str = "platform: idle memory";
const BINARY_SIZE: &str = "size of the binary";
const NGINX: &str = "nginx";

pub const ROWS: [Spec; 7] = [
    Spec { name: STARTUP_TIME, unit: "ms", against: Some(NGINX), target: Target::AtMost(10.0) },
    Spec { name: STARTUP_TIME, unit: "ms", against: Some(NGINX), target: Target::RatioAtMost(1.0) },
    Spec { name: IDLE_NO_APP, unit: "MiB", against: Some(NGINX), target: Target::AtMost(12.0) },
    Spec { name: IDLE_TWO_APPS, unit: "MiB", against: None, target: Target::AtMost(20.0) },
    Spec { name: IDLE_TEN_APPS, unit: "MiB", against: None, target: Target::AtMost(20.0) },
    Spec { name: IDLE_PLATFORM, unit: "MiB", against: Some(NGINX), target: Target::AtMost(20.0) },
    Spec { name: BINARY_SIZE, unit: "MiB", against: None, target: Target::AtMost(25.0) },
];

/// Several starts are measured, because one takes only milliseconds.
const STARTS_PER_ROUND: u32 = 7;
/// Delay between the last request and the memory reading.
const SETTLE_DELAY: Duration = Duration::from_millis(1500);

pub async fn measure(options: &Options) -> Result<Tally> {
    let dir = create_temp_dir()?;
    let nginx = Nginx::fetch()?;
    let pg = PgBinaries::locate_or_fetch(&target_dir())?;
    let server = PgServer::start(&pg, PgOptions::default()).await?;
    let mut site = Site::prepare(&options.svc, dir.path()).await?;
    let upstream = Identity::generate()?;
    std::fs::write(dir.path().join("upstream.pem"), &upstream.cert_pem)?;
    let unreachable_url = format!("postgres://svc:none@127.0.0.1:{}/svc", net::free_port()?);
    let without_database = Machine::new(&unreachable_url)?;
    // A machine's first start creates its certificate.
    drop(without_database.start(&options.svc)?);
    let mut tally = Tally::default();
    for round in 0..options.rounds {
        print_round(round, options.rounds);
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..STARTS_PER_ROUND {
            ours.push(millis(without_database.start(&options.svc)?.startup_time));
            theirs.push(millis(start_nginx(&nginx, dir.path(), &site)?.startup_time));
        }
        tally.add(STARTUP_TIME, PRODUCT, median(&ours).unwrap_or_default());
        tally.add(STARTUP_TIME, NGINX, median(&theirs).unwrap_or_default());

        for (name, apps) in [(IDLE_NO_APP, 0), (IDLE_TWO_APPS, 2), (IDLE_TEN_APPS, 10)] {
            let database = format!("svc_{round}_{apps}");
            server.create_database(&database).await?;
            tally.add(name, PRODUCT, measure_idle_memory(&options.svc, &server.url(&database), apps).await?);
            server.connection_info().drop_database(&database).await?;
        }
        site.start().await?;
        let peer = start_nginx(&nginx, dir.path(), &site)?;
        tokio::time::sleep(SETTLE_DELAY).await;
        tally.add(IDLE_PLATFORM, PRODUCT, process::memory_mib(site.pid()?)?);
        let theirs = process::memory_mib(peer.process.pid())?;
        tally.add(IDLE_PLATFORM, NGINX, theirs);
        tally.add(IDLE_NO_APP, NGINX, theirs);
        site.stop().await?;
        tally.add(BINARY_SIZE, PRODUCT, file_size_mib(&options.svc)?);
    }
    Ok(tally)
}

/// Starts nginx with TLS on both sides and an unreachable upstream.
fn start_nginx(nginx: &Nginx, dir: &Path, site: &Site) -> Result<super::peers::nginx::RunningPeer> {
    let unreachable = ([127, 0, 0, 1], 1).into();
    let trusted_cert = dir.join("upstream.pem");
    nginx.start_router(
        dir,
        &site.router_pem,
        &Upstreams { upstream: unreachable, websocket: unreachable, trusted_cert: &trusted_cert },
    )
}

async fn measure_idle_memory(svc: &Path, database_url: &str, apps: usize) -> Result<f64> {
    let machine = Machine::new(database_url)?;
    machine.install_apps(apps)?;
    let gateway = machine.start(svc)?;
    gateway.wait_until_ready(&machine, apps).await?;
    for app in 0..apps {
        let find = json!({ "action": "find", "app": format!("app{app}"), "table": "items" });
        gateway.query(&machine, &find.to_string()).await?;
    }
    tokio::time::sleep(SETTLE_DELAY).await;
    process::memory_mib(gateway.process.pid())
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
