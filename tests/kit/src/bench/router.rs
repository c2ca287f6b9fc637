//! The router beside nginx and HAProxy: TLS in, TLS on to one upstream that is the same for all, keep-alive.
//!
//! Ours looks up the session, strips cookies, signs the proof and pins the upstream's key within these figures.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;

use super::figures::{OURS, Spec, Tally, Target};
use super::peers::haproxy::HaProxy;
use super::peers::nginx::{Nginx, Onward, Pem, Served};
use super::peers::wrk::{Outcome, Request, Wrk};
use super::process::{cpu, memory};
use super::site::{Identity, Site};
use super::wire::{Line, messages_per_second, open};
use super::{Options, echo, said, workplace};

const C1: &str = "requests/s, 1 connection";
const ADDED: &str = "added to the median latency, 1 connection";
const C32: &str = "requests/s, 32 connections";
const C128: &str = "requests/s, 128 connections";
const CPU32: &str = "CPU per request, 32 connections";
const CPU128: &str = "CPU per request, 128 connections";
const BODIES: &str = "bodies of 10 MiB, 4 connections";
const MESSAGES: &str = "WebSocket messages/s, 32 connections";
const HANDSHAKES: &str = "TLS handshakes/s, a request each";
const IDLE: &str = "idle memory";
const HTTPS: &str = "memory of 1,000 idle HTTPS connections";
const SOCKETS: &str = "memory of 1,000 idle WebSockets";

const NGINX: &str = "nginx";
const HAPROXY: &str = "HAProxy";
/// wrk straight at the upstream: what client and upstream alone can do here.
const ALONE: &str = "no router";

pub const ROWS: [Spec; 20] = [
    Spec { name: C1, unit: "1/s", against: Some(NGINX), target: Target::RatioAtLeast(0.9) },
    Spec { name: C1, unit: "1/s", against: Some(HAPROXY), target: Target::None },
    Spec { name: ADDED, unit: "µs", against: Some(NGINX), target: Target::None },
    Spec { name: ADDED, unit: "µs", against: Some(HAPROXY), target: Target::None },
    Spec { name: C32, unit: "1/s", against: Some(NGINX), target: Target::RatioAtLeast(1.0) },
    Spec { name: C32, unit: "1/s", against: Some(HAPROXY), target: Target::None },
    Spec { name: C32, unit: "1/s", against: Some(ALONE), target: Target::None },
    Spec { name: C128, unit: "1/s", against: Some(NGINX), target: Target::RatioAtLeast(1.1) },
    Spec { name: C128, unit: "1/s", against: Some(HAPROXY), target: Target::None },
    Spec { name: CPU32, unit: "µs", against: Some(NGINX), target: Target::RatioAtMost(1.0) },
    Spec { name: CPU32, unit: "µs", against: Some(HAPROXY), target: Target::None },
    Spec { name: CPU128, unit: "µs", against: Some(NGINX), target: Target::RatioAtMost(1.0) },
    Spec { name: CPU128, unit: "µs", against: Some(HAPROXY), target: Target::None },
    Spec { name: BODIES, unit: "MiB/s", against: Some(NGINX), target: Target::RatioAtLeast(1.1) },
    Spec { name: BODIES, unit: "MiB/s", against: Some(HAPROXY), target: Target::None },
    Spec { name: MESSAGES, unit: "1/s", against: Some(NGINX), target: Target::RatioAtLeast(1.0) },
    Spec { name: HANDSHAKES, unit: "1/s", against: Some(NGINX), target: Target::RatioAtLeast(0.9) },
    Spec { name: IDLE, unit: "MiB", against: Some(NGINX), target: Target::AtMost(20.0) },
    Spec { name: HTTPS, unit: "MiB", against: Some(NGINX), target: Target::AtMost(20.0) },
    Spec { name: SOCKETS, unit: "MiB", against: Some(NGINX), target: Target::AtMost(35.0) },
];

const BODY: usize = 10 << 20;
const IDLE_CONNECTIONS: usize = 1000;
const SETTLE: Duration = Duration::from_millis(300);
/// Whose machine is nginx, and whose is the echo.
const READER: &str = "user-reader";
const TALKER: &str = "user-talker";

/// All that stands still between rounds.
struct Stage {
    site: Site,
    dir: tempfile::TempDir,
    wrk: Wrk,
    nginx: Nginx,
    haproxy: HaProxy,
    upstream: Served,
    echo: SocketAddr,
    trusted: PathBuf,
    reader: String,
    talker: String,
}

/// A router under load: where it is, and whose processor time counts.
#[derive(Clone, Copy)]
struct Front {
    whose: &'static str,
    address: SocketAddr,
    pid: u32,
}

pub async fn measure(options: &Options) -> Result<Tally> {
    let mut stage = Stage::set(options).await?;
    let mut tally = Tally::default();
    for round in 0..options.rounds {
        said(round, options.rounds);
        stage.idle(&mut tally).await?;
        let (nginx, haproxy) = (stage.nginx_router()?, stage.haproxy_router()?);
        let fronts = [
            Front { whose: OURS, address: stage.site.router()?, pid: stage.site.pid()? },
            Front { whose: NGINX, address: nginx.address, pid: nginx.process.pid() },
            Front { whose: HAPROXY, address: haproxy.address, pid: haproxy.process.pid() },
        ];
        stage.loads(&mut tally, &fronts, options.seconds)?;
    }
    stage.site.stop().await?;
    Ok(tally)
}

impl Stage {
    async fn set(options: &Options) -> Result<Self> {
        let dir = workplace()?;
        let (wrk, nginx, haproxy) = (Wrk::fetch()?, Nginx::fetch()?, HaProxy::fetch()?);
        let identity = Identity::fresh()?;
        let pem = Pem::write(dir.path(), "upstream", &identity.cert_pem, &identity.key_pem)?;
        let large = dir.path().join("large");
        std::fs::write(&large, vec![7; BODY])?;
        let upstream = nginx.upstream(dir.path(), &pem, &large)?;
        let echo = echo::serve(&identity.cert_pem, &identity.key_pem)?;
        let mut site = Site::prepare(&options.svc, dir.path()).await?;
        site.start().await?;
        site.machine(READER, upstream.address, &identity).await?;
        site.machine(TALKER, echo, &identity).await?;
        let (reader, talker) = (site.session(READER).await?, site.session(TALKER).await?);
        Ok(Self { site, dir, wrk, nginx, haproxy, upstream, echo, trusted: pem.cert, reader, talker })
    }

    fn onward(&self) -> Onward<'_> {
        Onward { upstream: self.upstream.address, websocket: self.echo, trusted: &self.trusted }
    }

    fn nginx_router(&self) -> Result<Served> {
        self.nginx.router(self.dir.path(), &self.site.front, &self.onward())
    }

    fn haproxy_router(&self) -> Result<Served> {
        self.haproxy.router(self.dir.path(), &self.site.front, &self.onward())
    }

    /// Memory, of processes that have just been started: what an allocator keeps would hide the next growth.
    async fn idle(&mut self, tally: &mut Tally) -> Result<()> {
        self.site.start().await?;
        // Until the router has read the machines; a session is found in the database.
        self.site.session(READER).await?;
        let pid = self.site.pid()?;
        tally.add(IDLE, OURS, memory(pid)?);
        self.grows(tally, HTTPS, OURS, pid, self.site.router()?)?;
        self.site.start().await?;
        self.site.session(TALKER).await?;
        self.grows(tally, SOCKETS, OURS, self.site.pid()?, self.site.router()?)?;
        for name in [HTTPS, SOCKETS] {
            let nginx = self.nginx_router()?;
            let pid = nginx.process.pid();
            if name == HTTPS {
                std::thread::sleep(SETTLE);
                tally.add(IDLE, NGINX, memory(pid)?);
            }
            self.grows(tally, name, NGINX, pid, nginx.address)?;
        }
        self.site.start().await?;
        self.site.session(READER).await.map(|_| ())
    }

    fn grows(
        &self,
        tally: &mut Tally,
        name: &'static str,
        whose: &'static str,
        pid: u32,
        address: SocketAddr,
    ) -> Result<()> {
        let before = memory(pid)?;
        let cookie = if name == SOCKETS { &self.talker } else { &self.reader };
        let door = self.site.door(address, cookie)?;
        let line = || -> Result<Line> { if name == SOCKETS { door.websocket() } else { door.https() } };
        let lines = open(IDLE_CONNECTIONS, line)?;
        std::thread::sleep(SETTLE);
        tally.add(name, whose, memory(pid)? - before);
        drop(lines);
        Ok(())
    }

    fn loads(&self, tally: &mut Tally, fronts: &[Front; 3], seconds: u32) -> Result<()> {
        let alone = self.load(self.upstream.address, "/", false, 1, seconds)?;
        for front in fronts {
            let outcome = self.load(front.address, "/", false, 1, seconds)?;
            tally.add(C1, front.whose, outcome.per_second());
            tally.add(ADDED, front.whose, outcome.p50 - alone.p50);
        }
        tally.add(C32, ALONE, self.load(self.upstream.address, "/", false, 32, seconds)?.per_second());
        for (connections, rate, cost) in [(32, C32, CPU32), (128, C128, CPU128)] {
            for front in fronts {
                let before = cpu(front.pid)?;
                let outcome = self.load(front.address, "/", false, connections, seconds)?;
                tally.add(rate, front.whose, outcome.per_second());
                tally.add(cost, front.whose, outcome.cpu_micros(cpu(front.pid)? - before));
            }
        }
        for front in fronts {
            let outcome = self.load(front.address, "/large", false, 4, seconds)?;
            tally.add(BODIES, front.whose, outcome.mib_per_second());
        }
        for front in &fronts[..2] {
            let door = self.site.door(front.address, &self.talker)?;
            tally.add(MESSAGES, front.whose, messages_per_second(&door, 32, seconds)?);
        }
        for front in &fronts[..2] {
            let outcome = self.load(front.address, "/", true, 32, seconds)?;
            tally.add(HANDSHAKES, front.whose, outcome.per_second());
        }
        Ok(())
    }

    fn load(
        &self,
        address: SocketAddr,
        path: &str,
        close: bool,
        connections: u32,
        seconds: u32,
    ) -> Result<Outcome> {
        let mut headers = vec![
            ("Host".to_owned(), self.site.host().to_owned()),
            ("Cookie".to_owned(), format!("theme=dark; {}", self.reader)),
        ];
        if close {
            headers.push(("Connection".to_owned(), "close".to_owned()));
        }
        let request = Request { url: format!("https://{address}{path}"), headers, body: None };
        self.wrk.load(&request, connections, seconds)
    }
}
