//! The program that `cargo xtask bench records` runs once per round: it measures the real writer and usage store, and
//! upper bounds for the writer.
//!
//! It is a separate program because it links the product, which xtask and the kit never do. Each figure is printed as a
//! line of JSON with `name`, `whose` and `value`.

#![allow(clippy::print_stdout, reason = "figures go to standard output")]

mod loss;
mod upper_bounds;
mod usage;
mod writer;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;
use svc::host::records::entry::{Interaction, ResultStatus};
use svc::host::records::money::Dollars;

/// Length of an event's line, including the newline.
const EVENT_BYTES: usize = 246;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    let mode = args.next().context("missing mode: expected round or crash-child")?;
    let dir = PathBuf::from(args.next().context("missing directory for the measured files")?);
    match &*mode {
        "round" => {
            let seconds: u64 = args.next().context("missing duration of the load, in seconds")?.parse()?;
            let load_duration = Duration::from_secs(seconds);
            // Runs first, because the other measurements grow the heap.
            usage::measure(&dir)?;
            upper_bounds::measure(&dir)?;
            writer::measure(&dir, load_duration)?;
            loss::measure(&dir)
        }
        "crash-child" => loss::run_crash_child(&dir),
        other => bail!("unknown mode {other}: expected round or crash-child"),
    }
}

fn print_figure(name: &str, side: &str, value: f64) {
    println!("{}", json!({ "name": name, "whose": side, "value": value }));
}

/// Builds an event as written by a dispatch, [`EVENT_BYTES`] long.
fn event(n: u64) -> Interaction {
    let mut event = Interaction {
        version: Interaction::FORMAT_VERSION,
        id: format!("{n:012}"),
        timestamp: jiff::Timestamp::from_millisecond(
            1_795_000_000_000 + i64::try_from(n % 1_000_000).unwrap_or_default(),
        )
        .unwrap_or(jiff::Timestamp::UNIX_EPOCH),
        accepted_at: None,
        started_at: None,
        sender_id: "u".to_owned(),
        conversation_id: String::new(),
        model: "m".to_owned(),
        agent_name: "a".to_owned(),
        tokens_in: 1000 + n % 9000,
        tokens_out: 100 + n % 900,
        cost: Dollars::from_nanos(10_000_001 + n % 80_000_000),
        cost_estimated: false,
        duration_ms: 1000 + n % 9000,
        tools: Vec::new(),
        status: ResultStatus::Success,
        error: None,
        batch: false,
        batch_id: None,
        batch_size: None,
        fingerprint: None,
    };
    let length = serde_json::to_vec(&event).map_or(0, |line| line.len() + 1);
    event.conversation_id = "c".repeat(EVENT_BYTES.saturating_sub(length));
    event
}

/// Returns distinct events, few enough to fit in the CPU caches.
fn events() -> Vec<Interaction> {
    (0..256).map(event).collect()
}

fn quantile(samples: &mut [u64], q: f64) -> f64 {
    samples.sort_unstable();
    let last = samples.len().saturating_sub(1);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index")]
    let index = (q * last as f64).round() as usize;
    samples.get(index).copied().unwrap_or_default() as f64
}

fn elapsed_nanos(started: Instant) -> u64 {
    u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
