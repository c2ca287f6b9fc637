//! The real writer: how many events a second, how long a caller is kept, how much memory that takes.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use jiff::civil::Date;
use svc::host::records::entry::Interaction;
use svc::host::records::writer::{Record, Records, Writer};

use crate::{BYTES, event, events, nanos, quantile, tell};

const DAY: Date = Date::constant(2026, 11, 22);
const EVENTS: usize = 1_200_000;
/// Between two calls of a paced load.
const PACE: Duration = Duration::from_micros(100);

/// A writer in a place of its own, and what was written when it has ended.
fn with_writer<T>(dir: &Path, run: impl FnOnce(&Records) -> Result<(T, usize)>) -> Result<T> {
    let place = dir.join("logs");
    let writer = Writer::start(place.clone())?;
    let (told, accepted) = run(&writer.records())?;
    drop(writer);
    let length = fs::metadata(place.join(format!("interactions-{DAY}.jsonl")))?.len();
    ensure!(length >= (accepted * BYTES) as u64, "{length} bytes are not {accepted} events");
    fs::remove_dir_all(place)?;
    Ok(told)
}

pub fn measure(dir: &Path, load: Duration) -> Result<()> {
    let events = events();
    for (threads, whose) in [(1, "svc"), (2, "svc, two callers")] {
        let rate = with_writer(dir, |records| full(records, &events, threads))?;
        tell("events", whose, rate);
    }
    for (threads, name) in [(1, "a caller at full load, p99"), (2, "one of two callers at full load, p99")] {
        let (mut samples, most) = with_writer(dir, |records| timed(records, &events, threads))?;
        tell(name, "svc", quantile(&mut samples, 0.99) / 1000.0);
        if threads == 1 {
            tell("accepted and not written, most", "svc", most as f64 / f64::from(1 << 20));
        }
    }
    let mut samples = with_writer(dir, |records| paced(records, &events, load))?;
    tell("a caller at 10,000 a second, p50", "svc", quantile(&mut samples, 0.5) / 1000.0);
    tell("a caller at 10,000 a second, p99", "svc", quantile(&mut samples, 0.99) / 1000.0);
    let mut samples = with_writer(dir, waking)?;
    tell("a call that wakes the writer, p50", "svc", quantile(&mut samples, 0.5) / 1000.0);
    let mut clock: Vec<u64> = (0..200_000).map(|_| nanos(Instant::now())).collect();
    tell("the clock's own part of it, p99", "svc", quantile(&mut clock, 0.99) / 1000.0);
    Ok(())
}

/// Accepted, however often there was no room.
fn append(records: &Records, event: &Interaction) {
    while records.append(Record::Interactions(DAY), event).is_err() {
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// As many as can be, until all of it is written.
fn full(records: &Records, events: &[Interaction], threads: usize) -> Result<(f64, usize)> {
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                for event in events.iter().cycle().take(EVENTS / threads) {
                    append(records, event);
                }
            });
        }
    });
    while records.waiting_bytes() > 0 {
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok((EVENTS as f64 / begun.elapsed().as_secs_f64(), EVENTS))
}

/// How long each call of such a load took, those that found no room, too; and the most that waited.
fn timed(records: &Records, events: &[Interaction], threads: usize) -> Result<((Vec<u64>, usize), usize)> {
    let of_one = || {
        let (mut samples, mut accepted, mut most) = (Vec::with_capacity(EVENTS), 0, 0);
        for (n, event) in events.iter().cycle().take(EVENTS / threads).enumerate() {
            let begun = Instant::now();
            let is_accepted = records.append(Record::Interactions(DAY), event).is_ok();
            samples.push(nanos(begun));
            accepted += usize::from(is_accepted);
            if !is_accepted {
                std::thread::sleep(Duration::from_micros(50));
            }
            if n % 4096 == 0 {
                most = most.max(records.waiting_bytes());
            }
        }
        (samples, accepted, most)
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(of_one)).collect();
        let (mut all, mut accepted, mut most) = (Vec::new(), 0, 0);
        for thread in running {
            let (samples, of_thread, waited) = thread.join().ok().context("a caller has panicked")?;
            all.extend(samples);
            accepted += of_thread;
            most = most.max(waited);
        }
        Ok(((all, most), accepted))
    })
}

fn paced(records: &Records, events: &[Interaction], load: Duration) -> Result<(Vec<u64>, usize)> {
    let (mut samples, begun) = (Vec::new(), Instant::now());
    for (n, event) in (1_u32..).zip(events.iter().cycle()) {
        let due = PACE * n;
        if due > load {
            break;
        }
        while begun.elapsed() < due {
            std::hint::spin_loop();
        }
        let call = Instant::now();
        append(records, event);
        samples.push(nanos(call));
    }
    let accepted = samples.len();
    Ok((samples, accepted))
}

fn waking(records: &Records) -> Result<(Vec<u64>, usize)> {
    let event = event(7);
    let mut samples = Vec::new();
    for _ in 0..3 {
        // Longer than the writer looks by itself.
        std::thread::sleep(Duration::from_millis(1300));
        let call = Instant::now();
        append(records, &event);
        samples.push(nanos(call));
    }
    let accepted = samples.len();
    Ok((samples, accepted))
}
