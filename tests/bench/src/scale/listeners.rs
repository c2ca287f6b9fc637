//! Benchmarks ten thousand event streams, and almost as many WebSockets to the shell.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::super::connections::{MESSAGE_BYTES, build_message};
use super::super::figures::{Tally, median, quantile};
use super::super::gateway::{Gateway, Machine};
use super::super::process::{cpu_time, memory_mib};
use super::{Round, SETTLE_DELAY, add, client, upstream};

pub const STREAM_MEMORY: &str = "memory per idle event stream, 10,000 streams";
pub const STREAM_CPU: &str = "CPU of 10,000 idle event streams";
pub const EVENT_MEDIAN: &str = "insert to event with 10,000 streams, median of 500";
pub const EVENT_LAST: &str = "insert to event with 10,000 streams, last of 500";
pub const FIND_P99: &str = "find's p99, 8 connections alongside 10,000 streams";
pub const SOCKET_MEMORY: &str = "memory per idle WebSocket, 9,500 sockets";
pub const MESSAGE_P99: &str = "message round trip's p99 with 9,500 sockets";

const STREAMS: usize = 10_000;
/// Fewer than [`STREAMS`], because each WebSocket takes two of the gateway's open files, and the hard limit is often
/// 20,000.
pub const SOCKETS: usize = 9_500;
/// The streams are spread over this many apps; the measured event belongs to one of them.
const APPS: usize = 20;
/// Number of connections that are opened at the same time.
const MAX_CONCURRENT_OPENS: usize = 64;
/// Covers one heartbeat of each stream.
const IDLE_PERIOD: Duration = Duration::from_secs(16);
const EVENT_TIMEOUT: Duration = Duration::from_secs(30);
const MESSAGES: usize = 2000;

pub async fn measure_streams(round: &Round<'_>, tally: &mut Tally) -> Result<()> {
    let machine = round.new_machine("streams").await?;
    machine.install_apps(APPS)?;
    let gateway = machine.start(&round.options.svc)?;
    gateway.wait_until_ready(&machine, APPS).await?;
    let insert = json!({ "action": "insert", "app": "app0", "table": "items", "data": { "title": "a" } });
    gateway.query(&machine, &insert.to_string()).await?;

    let memory_before = memory_mib(gateway.process.pid())?;
    let (events, mut received) = mpsc::unbounded_channel();
    let mut streams = open_streams(&gateway, &machine, &events).await?;
    tokio::time::sleep(SETTLE_DELAY).await;
    add(tally, STREAM_MEMORY, memory_kib_per_listener(&gateway, memory_before, STREAMS)?);

    let cpu_before = cpu_time(gateway.process.pid())?;
    tokio::time::sleep(IDLE_PERIOD).await;
    let cpu_spent = cpu_time(gateway.process.pid())? - cpu_before;
    add(tally, STREAM_CPU, cpu_spent.as_secs_f64() * 1000.0 / IDLE_PERIOD.as_secs_f64());

    let started = Instant::now();
    gateway.query(&machine, &insert.to_string()).await?;
    let mut delays: Vec<f64> = Vec::new();
    while delays.len() < STREAMS / APPS {
        let received_at: Instant = tokio::time::timeout(EVENT_TIMEOUT, received.recv())
            .await
            .with_context(|| format!("only {} streams received the event", delays.len()))?
            .context("all streams have ended")?;
        delays.push(received_at.duration_since(started).as_secs_f64() * 1000.0);
    }
    add(tally, EVENT_LAST, delays.iter().copied().fold(0.0, f64::max));
    add(tally, EVENT_MEDIAN, median(&delays).context("no event")?);

    let find = json!({ "action": "find", "app": "app1", "table": "items", "limit": 20 });
    let request = gateway.bridge_request(&machine, find.to_string());
    let load = round.wrk.run_load(&request, 8, round.options.seconds)?;
    add(tally, FIND_P99, load.p99 / 1000.0);
    ensure!(streams.try_join_next().is_none(), "a stream has ended");
    Ok(())
}

/// Returns the growth of the gateway's memory per listener, in KiB.
fn memory_kib_per_listener(gateway: &Gateway, before_mib: f64, listeners: usize) -> Result<f64> {
    Ok((memory_mib(gateway.process.pid())? - before_mib) * 1024.0 / listeners as f64)
}

/// Opens all streams; each stream sends the arrival time of every event to `events`.
async fn open_streams(
    gateway: &Gateway,
    machine: &Machine,
    events: &mpsc::UnboundedSender<Instant>,
) -> Result<JoinSet<()>> {
    let (client, mut streams) = (client()?, JoinSet::new());
    for first in (0..STREAMS).step_by(MAX_CONCURRENT_OPENS) {
        let proof = machine.sign_proof();
        let mut opening = JoinSet::new();
        for number in first..STREAMS.min(first + MAX_CONCURRENT_OPENS) {
            let url = format!("https://{}/api/bridge/changes?app=app{}", gateway.address, number % APPS);
            let request = client.get(url).header("x-svc-proof", &proof);
            opening.spawn(async move {
                let mut response = request.send().await?.error_for_status()?;
                let ready = response.chunk().await?.context("the stream has ended")?;
                ensure!(contains(&ready, b"event: ready"), "the first event is not `ready`");
                anyhow::Ok(response)
            });
        }
        while let Some(opened) = opening.join_next().await {
            let (mut response, events) = (opened??, events.clone());
            streams.spawn(async move {
                while let Ok(Some(chunk)) = response.chunk().await {
                    if contains(&chunk, b"\ndata: ") {
                        // Fails if the measurement has ended.
                        let _ = events.send(Instant::now());
                    }
                }
            });
        }
    }
    Ok(streams)
}

fn contains(chunk: &[u8], text: &[u8]) -> bool {
    chunk.windows(text.len()).any(|window| window == text)
}

pub async fn measure_sockets(round: &Round<'_>, tally: &mut Tally) -> Result<()> {
    let machine = round.new_machine("sockets").await?;
    upstream::serve(&machine.owner_socket_path("shell.sock")?)?;
    let gateway = machine.start(&round.options.svc)?;
    gateway.wait_until_ready(&machine, 0).await?;
    let memory_before = memory_mib(gateway.process.pid())?;
    let mut sockets = open_sockets(&gateway, &machine).await?;
    tokio::time::sleep(SETTLE_DELAY).await;
    add(tally, SOCKET_MEMORY, memory_kib_per_listener(&gateway, memory_before, SOCKETS)?);

    let (message, mut echo) = (build_message(), [0; MESSAGE_BYTES + 2]);
    let mut times = Vec::with_capacity(MESSAGES);
    for number in 0..MESSAGES {
        // A different socket each time, so that each one has been idle.
        let socket = &mut sockets[number * 7919 % SOCKETS];
        let started = Instant::now();
        socket.write_all(&message).await?;
        socket.read_exact(&mut echo).await?;
        times.push(started.elapsed().as_secs_f64() * 1000.0);
    }
    add(tally, MESSAGE_P99, quantile(&times, 0.99).context("no message")?);
    Ok(())
}

async fn open_sockets(gateway: &Gateway, machine: &Machine) -> Result<Vec<reqwest::Upgraded>> {
    let (client, mut sockets) = (client()?, Vec::with_capacity(SOCKETS));
    for first in (0..SOCKETS).step_by(MAX_CONCURRENT_OPENS) {
        let proof = machine.sign_proof();
        let mut opening = JoinSet::new();
        for _ in first..SOCKETS.min(first + MAX_CONCURRENT_OPENS) {
            let request = client.get(format!("https://{}/ws", gateway.address)).headers(
                [
                    ("x-svc-proof", proof.as_str()),
                    ("connection", "Upgrade"),
                    ("upgrade", "websocket"),
                    ("sec-websocket-version", "13"),
                    ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
                ]
                .into_iter()
                .map(|(name, value)| Ok((name.parse()?, value.parse()?)))
                .collect::<Result<_>>()?,
            );
            opening.spawn(async move {
                let response = request.send().await?;
                ensure!(response.status() == 101, "GET /ws: {}", response.status());
                Ok(response.upgrade().await?)
            });
        }
        while let Some(opened) = opening.join_next().await {
            sockets.push(opened??);
        }
    }
    Ok(sockets)
}
