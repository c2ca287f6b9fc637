//! Router benchmark: the product, nginx and HAProxy, with TLS to the client and to a common upstream, and keep-alive.
//!
//! The product's figures include session lookup, cookie filtering, proof signing and upstream key pinning.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;

use super::connections::{Connection, measure_messages_per_second, open_connections};
use super::figures::{PRODUCT, Spec, Tally, Target};
use super::peers::haproxy::HaProxy;
use super::peers::nginx::{Nginx, Pem, RunningPeer, Upstreams};
use super::peers::wrk::{LoadResult, Request, Wrk};
use super::process::{cpu_time, memory_mib};
use super::site::{Identity, Site};
use super::{Options, create_temp_dir, echo, print_round};

const RATE_1: &str = "requests/s, 1 connection";
const ADDED_LATENCY: &str = "added to the median latency, 1 connection";
const RATE_32: &str = "requests/s, 32 connections";
const RATE_128: &str = "requests/s, 128 connections";
const CPU_32: &str = "CPU per request, 32 connections";
const CPU_128: &str = "CPU per request, 128 connections";
const LARGE_BODIES: &str = "bodies of 10 MiB, 4 connections";
const MESSAGES: &str = "WebSocket messages/s, 32 connections";
const HANDSHAKES: &str = "TLS handshakes/s, one request each";
const IDLE_MEMORY: &str = "idle memory";
const HTTPS_MEMORY: &str = "memory of 1,000 idle HTTPS connections";
const WEBSOCKET_MEMORY: &str = "memory of 1,000 idle WebSockets";

const NGINX: &str = "nginx";
const HAPROXY: &str = "HAProxy";
/// wrk directly against the upstream: the upper bound for client and upstream.
const DIRECT: &str = "no router";

pub const ROWS: [Spec; 20] = [
    Spec { name: RATE_1, unit: "1/s", against: Some(NGINX), target: Target::RatioAtLeast(0.9) },
    Spec { name: RATE_1, unit: "1/s", against: Some(HAPROXY), target: Target::None },
    Spec { name: ADDED_LATENCY, unit: "µs", against: Some(NGINX), target: Target::None },
    Spec { name: ADDED_LATENCY, unit: "µs", against: Some(HAPROXY), target: Target::None },
    Spec { name: RATE_32, unit: "1/s", against: Some(NGINX), target: Target::RatioAtLeast(1.0) },
    Spec { name: RATE_32, unit: "1/s", against: Some(HAPROXY), target: Target::None },
    Spec { name: RATE_32, unit: "1/s", against: Some(DIRECT), target: Target::None },
    Spec { name: RATE_128, unit: "1/s", against: Some(NGINX), target: Target::RatioAtLeast(1.1) },
    Spec { name: RATE_128, unit: "1/s", against: Some(HAPROXY), target: Target::None },
    Spec { name: CPU_32, unit: "µs", against: Some(NGINX), target: Target::RatioAtMost(1.0) },
    Spec { name: CPU_32, unit: "µs", against: Some(HAPROXY), target: Target::None },
    Spec { name: CPU_128, unit: "µs", against: Some(NGINX), target: Target::RatioAtMost(1.0) },
    Spec { name: CPU_128, unit: "µs", against: Some(HAPROXY), target: Target::None },
    Spec { name: LARGE_BODIES, unit: "MiB/s", against: Some(NGINX), target: Target::RatioAtLeast(1.1) },
    Spec { name: LARGE_BODIES, unit: "MiB/s", against: Some(HAPROXY), target: Target::None },
    Spec { name: MESSAGES, unit: "1/s", against: Some(NGINX), target: Target::RatioAtLeast(1.0) },
    Spec { name: HANDSHAKES, unit: "1/s", against: Some(NGINX), target: Target::RatioAtLeast(0.9) },
    Spec { name: IDLE_MEMORY, unit: "MiB", against: Some(NGINX), target: Target::AtMost(20.0) },
    Spec { name: HTTPS_MEMORY, unit: "MiB", against: Some(NGINX), target: Target::AtMost(16.0) },
    Spec { name: WEBSOCKET_MEMORY, unit: "MiB", against: Some(NGINX), target: Target::AtMost(35.0) },
];

const BODY_BYTES: usize = 10 << 20;
const IDLE_CONNECTIONS: usize = 1000;
const SETTLE_DELAY: Duration = Duration::from_millis(300);
/// Users whose machines are nginx and the echo server, respectively.
const READER: &str = "user-reader";
const ECHO_USER: &str = "user-echo";

/// State shared by all rounds.
struct Testbed {
    site: Site,
    dir: tempfile::TempDir,
    wrk: Wrk,
    nginx: Nginx,
    haproxy: HaProxy,
    upstream: RunningPeer,
    echo_address: SocketAddr,
    trusted_cert: PathBuf,
    reader_cookie: String,
    echo_cookie: String,
}

/// A router under load, with its process.
#[derive(Clone, Copy)]
struct RouterSide {
    side: &'static str,
    address: SocketAddr,
    pid: u32,
}

pub async fn measure(options: &Options) -> Result<Tally> {
    let mut testbed = Testbed::prepare(options).await?;
    let mut tally = Tally::default();
    for round in 0..options.rounds {
        print_round(round, options.rounds);
        testbed.measure_idle_memory(&mut tally).await?;
        let (nginx, haproxy) = (testbed.start_nginx_router()?, testbed.start_haproxy_router()?);
        let routers = [
            RouterSide { side: PRODUCT, address: testbed.site.router_address()?, pid: testbed.site.pid()? },
            RouterSide { side: NGINX, address: nginx.address, pid: nginx.process.pid() },
            RouterSide { side: HAPROXY, address: haproxy.address, pid: haproxy.process.pid() },
        ];
        testbed.run_loads(&mut tally, &routers, options.seconds)?;
    }
    testbed.site.stop().await?;
    Ok(tally)
}

impl Testbed {
    async fn prepare(options: &Options) -> Result<Self> {
        let dir = create_temp_dir()?;
        let (wrk, nginx, haproxy) = (Wrk::fetch()?, Nginx::fetch()?, HaProxy::fetch()?);
        let identity = Identity::generate()?;
        let pem = Pem::write(dir.path(), "upstream", &identity.cert_pem, &identity.key_pem)?;
        let large = dir.path().join("large");
        std::fs::write(&large, vec![7; BODY_BYTES])?;
        let upstream = nginx.start_upstream(dir.path(), &pem, &large)?;
        let echo_address = echo::serve(&identity.cert_pem, &identity.key_pem)?;
        let mut site = Site::prepare(&options.svc, dir.path()).await?;
        site.start().await?;
        site.register_machine(READER, upstream.address, &identity).await?;
        site.register_machine(ECHO_USER, echo_address, &identity).await?;
        let reader_cookie = site.open_session(READER).await?;
        let echo_cookie = site.open_session(ECHO_USER).await?;
        Ok(Self {
            site,
            dir,
            wrk,
            nginx,
            haproxy,
            upstream,
            echo_address,
            trusted_cert: pem.cert,
            reader_cookie,
            echo_cookie,
        })
    }

    fn upstreams(&self) -> Upstreams<'_> {
        Upstreams {
            upstream: self.upstream.address,
            websocket: self.echo_address,
            trusted_cert: &self.trusted_cert,
        }
    }

    fn start_nginx_router(&self) -> Result<RunningPeer> {
        self.nginx.start_router(self.dir.path(), &self.site.router_pem, &self.upstreams())
    }

    fn start_haproxy_router(&self) -> Result<RunningPeer> {
        self.haproxy.start_router(self.dir.path(), &self.site.router_pem, &self.upstreams())
    }

    /// Measures the memory of freshly started processes, because pages that an allocator retains would hide growth.
    async fn measure_idle_memory(&mut self, tally: &mut Tally) -> Result<()> {
        self.site.start().await?;
        // Waits until the router has loaded the machines; the session itself is in the database.
        self.site.open_session(READER).await?;
        let pid = self.site.pid()?;
        tally.add(IDLE_MEMORY, PRODUCT, memory_mib(pid)?);
        self.measure_growth(tally, HTTPS_MEMORY, PRODUCT, pid, self.site.router_address()?)?;
        self.site.start().await?;
        self.site.open_session(ECHO_USER).await?;
        self.measure_growth(tally, WEBSOCKET_MEMORY, PRODUCT, self.site.pid()?, self.site.router_address()?)?;
        for name in [HTTPS_MEMORY, WEBSOCKET_MEMORY] {
            let nginx = self.start_nginx_router()?;
            let pid = nginx.process.pid();
            if name == HTTPS_MEMORY {
                std::thread::sleep(SETTLE_DELAY);
                tally.add(IDLE_MEMORY, NGINX, memory_mib(pid)?);
            }
            self.measure_growth(tally, name, NGINX, pid, nginx.address)?;
        }
        self.site.start().await?;
        self.site.open_session(READER).await.map(|_| ())
    }

    fn measure_growth(
        &self,
        tally: &mut Tally,
        name: &'static str,
        side: &'static str,
        pid: u32,
        address: SocketAddr,
    ) -> Result<()> {
        let before = memory_mib(pid)?;
        let cookie = if name == WEBSOCKET_MEMORY { &self.echo_cookie } else { &self.reader_cookie };
        let endpoint = self.site.endpoint(address, cookie)?;
        let connect = || -> Result<Connection> {
            if name == WEBSOCKET_MEMORY { endpoint.open_websocket() } else { endpoint.open_https() }
        };
        let connections = open_connections(IDLE_CONNECTIONS, connect)?;
        std::thread::sleep(SETTLE_DELAY);
        tally.add(name, side, memory_mib(pid)? - before);
        drop(connections);
        Ok(())
    }

    fn run_loads(&self, tally: &mut Tally, routers: &[RouterSide; 3], seconds: u32) -> Result<()> {
        let direct = self.run_load(self.upstream.address, "/", false, 1, seconds)?;
        for router in routers {
            let result = self.run_load(router.address, "/", false, 1, seconds)?;
            tally.add(RATE_1, router.side, result.requests_per_second());
            tally.add(ADDED_LATENCY, router.side, result.p50 - direct.p50);
        }
        tally.add(
            RATE_32,
            DIRECT,
            self.run_load(self.upstream.address, "/", false, 32, seconds)?.requests_per_second(),
        );
        for (connections, rate, cost) in [(32, RATE_32, CPU_32), (128, RATE_128, CPU_128)] {
            for router in routers {
                let before = cpu_time(router.pid)?;
                let result = self.run_load(router.address, "/", false, connections, seconds)?;
                tally.add(rate, router.side, result.requests_per_second());
                tally.add(cost, router.side, result.cpu_micros_per_request(cpu_time(router.pid)? - before));
            }
        }
        for router in routers {
            let result = self.run_load(router.address, "/large", false, 4, seconds)?;
            tally.add(LARGE_BODIES, router.side, result.mib_per_second());
        }
        for router in &routers[..2] {
            let endpoint = self.site.endpoint(router.address, &self.echo_cookie)?;
            tally.add(MESSAGES, router.side, measure_messages_per_second(&endpoint, 32, seconds)?);
        }
        for router in &routers[..2] {
            let result = self.run_load(router.address, "/", true, 32, seconds)?;
            tally.add(HANDSHAKES, router.side, result.requests_per_second());
        }
        Ok(())
    }

    fn run_load(
        &self,
        address: SocketAddr,
        path: &str,
        should_close: bool,
        connections: u32,
        seconds: u32,
    ) -> Result<LoadResult> {
        let mut headers = vec![
            ("Host".to_owned(), self.site.host().to_owned()),
            ("Cookie".to_owned(), format!("theme=dark; {}", self.reader_cookie)),
        ];
        if should_close {
            headers.push(("Connection".to_owned(), "close".to_owned()));
        }
        let request = Request { url: format!("https://{address}{path}"), headers, body: None };
        self.wrk.run_load(&request, connections, seconds)
    }
}
