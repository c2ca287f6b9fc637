//! Measures a 1 GiB download of an app's file, and a 1 GiB upload to a stand-in for the shell.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::super::figures::Tally;
use super::super::process::{memory_mib, peak_memory_mib, reset_peak_memory};
use super::{Round, add, client, upstream};

pub const DOWNLOAD: &str = "download of 1 GiB";
pub const DOWNLOAD_MEMORY: &str = "download of 1 GiB: memory";
pub const UPLOAD: &str = "upload of 1 GiB";
pub const UPLOAD_MEMORY: &str = "upload of 1 GiB: memory";

const BODY_BYTES: u64 = 1 << 30;
const CHUNK_BYTES: usize = 64 << 10;
const TIMEOUT: Duration = Duration::from_secs(120);

pub async fn measure(round: &Round<'_>, tally: &mut Tally) -> Result<()> {
    let machine = round.new_machine("bodies").await?;
    machine.install_app("large", &json!({}))?;
    let file = std::fs::File::create(machine.create_output_dir("large")?.join("file.bin"))?;
    file.set_len(BODY_BYTES)?;
    upstream::serve(&machine.owner_socket_path("shell.sock")?)?;
    let gateway = machine.start(&round.options.svc)?;
    gateway.wait_until_ready(&machine, 1).await?;
    let client = client()?;
    // The first request opens the connection that later ones reuse.
    let warm_up = client.get(format!("https://{}/apps/large/", gateway.address));
    warm_up.header("x-svc-proof", machine.sign_proof()).send().await?;

    let pid = gateway.process.pid();
    reset_peak_memory(pid)?;
    let (before, started) = (memory_mib(pid)?, Instant::now());
    let url = format!("https://{}/apps/large/file.bin", gateway.address);
    let request = client.get(url).header("x-svc-proof", machine.sign_proof()).timeout(TIMEOUT);
    let mut response = request.send().await?.error_for_status()?;
    let mut received = 0;
    while let Some(chunk) = response.chunk().await? {
        received += chunk.len() as u64;
    }
    ensure!(received == BODY_BYTES, "received {received} bytes");
    add(tally, DOWNLOAD, mib_per_second(started));
    add(tally, DOWNLOAD_MEMORY, peak_memory_mib(pid)? - before);

    reset_peak_memory(pid)?;
    let (before, started) = (memory_mib(pid)?, Instant::now());
    let body = vec![0_u8; CHUNK_BYTES];
    let chunks = (0..BODY_BYTES / CHUNK_BYTES as u64).map(move |_| Ok::<_, std::io::Error>(body.clone()));
    let request = client.post(format!("https://{}/upload", gateway.address));
    let request = request.header("x-svc-proof", machine.sign_proof()).header("content-length", BODY_BYTES);
    let body = reqwest::Body::wrap_stream(futures_util::stream::iter(chunks));
    let response = request.timeout(TIMEOUT).body(body).send().await?;
    ensure!(
        response.status() == 204,
        "POST /upload: {}",
        response.text().await.context("cannot read the error")?
    );
    add(tally, UPLOAD, mib_per_second(started));
    add(tally, UPLOAD_MEMORY, peak_memory_mib(pid)? - before);
    Ok(())
}

fn mib_per_second(started: Instant) -> f64 {
    BODY_BYTES as f64 / f64::from(1 << 20) / started.elapsed().as_secs_f64()
}
