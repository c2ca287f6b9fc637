//! What lies there while nobody asks: memory, size, and how soon a program listens.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::figures::{OURS, Spec, Tally, Target, median};
use super::gateway::Machine;
use super::peers::nginx::{Nginx, Onward};
use super::process;
use super::site::{Identity, Site};
use super::{Options, mib, said, workplace};
use crate::fetch::target_dir;
use crate::net;
use crate::pg::{PgBinaries, PgOptions, PgServer};

const START: &str = "gateway: exec to listening, without its database";
const BARE: &str = "gateway: idle memory, no app";
const TWO: &str = "gateway: idle memory, two apps";
const TEN: &str = "gateway: idle memory, ten apps";
const PLATFORM: &str = "platform: idle memory";
const SIZE: &str = "size of the binary";
const NGINX: &str = "nginx";

pub const ROWS: [Spec; 7] = [
    Spec { name: START, unit: "ms", against: Some(NGINX), target: Target::AtMost(10.0) },
    Spec { name: START, unit: "ms", against: Some(NGINX), target: Target::RatioAtMost(1.0) },
    Spec { name: BARE, unit: "MiB", against: Some(NGINX), target: Target::AtMost(12.0) },
    Spec { name: TWO, unit: "MiB", against: None, target: Target::AtMost(20.0) },
    Spec { name: TEN, unit: "MiB", against: None, target: Target::AtMost(20.0) },
    Spec { name: PLATFORM, unit: "MiB", against: Some(NGINX), target: Target::AtMost(20.0) },
    Spec { name: SIZE, unit: "MiB", against: None, target: Target::AtMost(25.0) },
];

/// Starts in a round: each takes milliseconds.
const STARTS: u32 = 7;
/// After the last request, until memory is read.
const SETTLE: Duration = Duration::from_millis(1500);

pub async fn measure(options: &Options) -> Result<Tally> {
    let dir = workplace()?;
    let nginx = Nginx::fetch()?;
    let pg = PgBinaries::locate_or_fetch(&target_dir())?;
    let server = PgServer::start(&pg, PgOptions::default()).await?;
    let mut site = Site::prepare(&options.svc, dir.path()).await?;
    let upstream = Identity::fresh()?;
    std::fs::write(dir.path().join("upstream.pem"), &upstream.cert_pem)?;
    let nowhere = format!("postgres://svc:none@127.0.0.1:{}/svc", net::free_port()?);
    let cold = Machine::new(&nowhere)?;
    // The first start of a machine makes its certificate.
    drop(cold.start(&options.svc)?);
    let mut tally = Tally::default();
    for round in 0..options.rounds {
        said(round, options.rounds);
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..STARTS {
            ours.push(millis(cold.start(&options.svc)?.started_in));
            theirs.push(millis(route(&nginx, dir.path(), &site)?.started_in));
        }
        tally.add(START, OURS, median(&ours).unwrap_or_default());
        tally.add(START, NGINX, median(&theirs).unwrap_or_default());

        for (name, apps) in [(BARE, 0), (TWO, 2), (TEN, 10)] {
            let database = format!("svc_{round}_{apps}");
            server.create_database(&database).await?;
            tally.add(name, OURS, idle_gateway(&options.svc, &server.url(&database), apps).await?);
            server.drop_database(&database).await?;
        }
        site.start().await?;
        let peer = route(&nginx, dir.path(), &site)?;
        tokio::time::sleep(SETTLE).await;
        tally.add(PLATFORM, OURS, process::memory(site.pid()?)?);
        let theirs = process::memory(peer.process.pid())?;
        tally.add(PLATFORM, NGINX, theirs);
        tally.add(BARE, NGINX, theirs);
        site.stop().await?;
        tally.add(SIZE, OURS, mib(&options.svc)?);
    }
    Ok(tally)
}

/// nginx with TLS on both sides, though nobody is behind it.
fn route(nginx: &Nginx, dir: &Path, site: &Site) -> Result<super::peers::nginx::Served> {
    let nobody = ([127, 0, 0, 1], 1).into();
    let trusted = dir.join("upstream.pem");
    nginx.router(dir, &site.front, &Onward { upstream: nobody, websocket: nobody, trusted: &trusted })
}

async fn idle_gateway(svc: &Path, database_url: &str, apps: usize) -> Result<f64> {
    let machine = Machine::new(database_url)?;
    for app in 0..apps {
        let columns =
            json!({ "title": "text", "body": "text", "done": "boolean", "rank": "bigint", "extra": "jsonb" });
        let tables = json!({ "items": { "columns": columns.clone() }, "notes": { "columns": columns } });
        machine.app(&format!("app{app}"), &tables)?;
    }
    let gateway = machine.start(svc)?;
    gateway.until_ready(&machine, apps).await?;
    for app in 0..apps {
        let find = json!({ "action": "find", "app": format!("app{app}"), "table": "items" });
        gateway.query(&machine, &find.to_string()).await?;
    }
    tokio::time::sleep(SETTLE).await;
    process::memory(gateway.process.pid())
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
