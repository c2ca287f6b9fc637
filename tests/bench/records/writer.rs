//! The real writer: event throughput, call latency, and memory use.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use jiff::civil::Date;
use svc::host::records::entry::Interaction;
use svc::host::records::writer::{LogFile, Records, Writer};

use crate::{EVENT_BYTES, elapsed_nanos, event, events, print_figure, quantile};

const DAY: Date = Date::constant(2026, 11, 22);
const EVENT_COUNT: usize = 1_200_000;
/// Interval between calls in a paced load.
const CALL_INTERVAL: Duration = Duration::from_micros(100);

/// Runs a load on a new writer. After the writer has stopped, checks that the file is long enough for the accepted
/// events.
fn with_writer<T>(dir: &Path, run: impl FnOnce(&Records) -> Result<(T, usize)>) -> Result<T> {
    let logs = dir.join("logs");
    let writer = Writer::start(logs.clone())?;
    let (result, accepted) = run(&writer.records())?;
    drop(writer);
    let length = fs::metadata(logs.join(format!("interactions-{DAY}.jsonl")))?.len();
    ensure!(length >= (accepted * EVENT_BYTES) as u64, "{length} bytes cannot hold {accepted} events");
    fs::remove_dir_all(logs)?;
    Ok(result)
}

pub fn measure(dir: &Path, load_duration: Duration) -> Result<()> {
    let events = events();
    for (threads, side) in [(1, "svc"), (2, "svc, two callers")] {
        let rate = with_writer(dir, |records| run_full_load(records, &events, threads))?;
        print_figure("events", side, rate);
    }
    for (threads, name) in [(1, "a caller at full load, p99"), (2, "one of two callers at full load, p99")] {
        let (mut samples, peak) = with_writer(dir, |records| run_timed_load(records, &events, threads))?;
        print_figure(name, "svc", quantile(&mut samples, 0.99) / 1000.0);
        if threads == 1 {
            print_figure("accepted but unwritten, peak", "svc", peak as f64 / f64::from(1 << 20));
        }
    }
    let mut samples = with_writer(dir, |records| run_paced_load(records, &events, load_duration))?;
    print_figure("a caller at 10,000 a second, p50", "svc", quantile(&mut samples, 0.5) / 1000.0);
    print_figure("a caller at 10,000 a second, p99", "svc", quantile(&mut samples, 0.99) / 1000.0);
    let mut samples = with_writer(dir, run_wake_ups)?;
    print_figure("a call that wakes the writer, p50", "svc", quantile(&mut samples, 0.5) / 1000.0);
    let mut samples: Vec<u64> = (0..200_000).map(|_| elapsed_nanos(Instant::now())).collect();
    print_figure("clock overhead, p99", "svc", quantile(&mut samples, 0.99) / 1000.0);
    Ok(())
}

/// Appends an event; retries while the buffer is full.
fn append_with_retry(records: &Records, event: &Interaction) {
    while records.append(LogFile::Interactions(DAY), event).is_err() {
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Returns the throughput, measured until all events are written, and the number of accepted events.
fn run_full_load(records: &Records, events: &[Interaction], threads: usize) -> Result<(f64, usize)> {
    let started = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                for event in events.iter().cycle().take(EVENT_COUNT / threads) {
                    append_with_retry(records, event);
                }
            });
        }
    });
    while records.unwritten_bytes() > 0 {
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok((EVENT_COUNT as f64 / started.elapsed().as_secs_f64(), EVENT_COUNT))
}

/// Returns the latencies of all calls, including rejected ones, the peak of unwritten bytes, and the number of accepted
/// events.
fn run_timed_load(
    records: &Records,
    events: &[Interaction],
    threads: usize,
) -> Result<((Vec<u64>, usize), usize)> {
    let run_caller = || {
        let (mut samples, mut accepted, mut peak) = (Vec::with_capacity(EVENT_COUNT), 0, 0);
        for (n, event) in events.iter().cycle().take(EVENT_COUNT / threads).enumerate() {
            let started = Instant::now();
            let is_accepted = records.append(LogFile::Interactions(DAY), event).is_ok();
            samples.push(elapsed_nanos(started));
            accepted += usize::from(is_accepted);
            if !is_accepted {
                std::thread::sleep(Duration::from_micros(50));
            }
            if n % 4096 == 0 {
                peak = peak.max(records.unwritten_bytes());
            }
        }
        (samples, accepted, peak)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(run_caller)).collect();
        let (mut all, mut accepted, mut peak) = (Vec::new(), 0, 0);
        for thread in threads {
            let (samples, thread_accepted, thread_peak) =
                thread.join().ok().context("a caller thread panicked")?;
            all.extend(samples);
            accepted += thread_accepted;
            peak = peak.max(thread_peak);
        }
        Ok(((all, peak), accepted))
    })
}

fn run_paced_load(
    records: &Records,
    events: &[Interaction],
    load_duration: Duration,
) -> Result<(Vec<u64>, usize)> {
    let (mut samples, started) = (Vec::new(), Instant::now());
    for (n, event) in (1_u32..).zip(events.iter().cycle()) {
        let due = CALL_INTERVAL * n;
        if due > load_duration {
            break;
        }
        while started.elapsed() < due {
            std::hint::spin_loop();
        }
        let call_started = Instant::now();
        append_with_retry(records, event);
        samples.push(elapsed_nanos(call_started));
    }
    let accepted = samples.len();
    Ok((samples, accepted))
}

fn run_wake_ups(records: &Records) -> Result<(Vec<u64>, usize)> {
    let event = event(7);
    let mut samples = Vec::new();
    for _ in 0..3 {
        // The writer thread goes to sleep after one second without events.
        std::thread::sleep(Duration::from_millis(1300));
        let call_started = Instant::now();
        append_with_retry(records, &event);
        samples.push(elapsed_nanos(call_started));
    }
    let accepted = samples.len();
    Ok((samples, accepted))
}
