//! The kernel's records: the real writer and book in a program of their own, which links the product; the limits beside them
//! are what the same program writes without it.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::figures::{OURS, Spec, Tally, Target};
use super::{Options, said};
use crate::child;

const EVENTS: &str = "events";
const TWO: &str = "svc, two callers";

pub const ROWS: [Spec; 22] = [
    alone(EVENTS, "1/s", Target::AtLeast(1_500_000.0)),
    beside("block writes"),
    beside("buffered, made before"),
    beside("one write(2) each"),
    beside("write and fdatasync each"),
    beside(TWO),
    alone("a caller at 10,000 a second, p50", "µs", Target::None),
    alone("a caller at 10,000 a second, p99", "µs", Target::AtMost(2.0)),
    alone("a caller at full load, p99", "µs", Target::AtMost(2.0)),
    alone("one of two callers at full load, p99", "µs", Target::None),
    alone("the clock's own part of it, p99", "µs", Target::None),
    alone("a call that wakes the writer, p50", "µs", Target::None),
    alone("accepted and not written, most", "MiB", Target::AtMost(16.0)),
    alone("lost with kill -9, age of the oldest", "ms", Target::AtMost(200.0)),
    alone("usage of 3 years: open", "ms", Target::None),
    alone("usage of 3 years: memory", "MiB", Target::None),
    alone("usage of 3 years: by day, p99", "ms", Target::AtMost(50.0)),
    alone("usage of 3 years: by week, p99", "ms", Target::AtMost(50.0)),
    alone("usage of 3 years: by month, p99", "ms", Target::AtMost(50.0)),
    alone("usage of 3 years: by model, p99", "ms", Target::AtMost(50.0)),
    alone("usage of 3 years: by user, p99", "ms", Target::AtMost(50.0)),
    alone("usage of 3 years: written anew", "ms", Target::None),
];

const DEADLINE: Duration = Duration::from_secs(180);

const fn alone(name: &'static str, unit: &'static str, target: Target) -> Spec {
    Spec { name, unit, against: None, target }
}

const fn beside(limit: &'static str) -> Spec {
    Spec { name: EVENTS, unit: "1/s", against: Some(limit), target: Target::None }
}

#[derive(Deserialize)]
struct Told {
    name: String,
    whose: String,
    value: f64,
}

pub async fn measure(options: &Options) -> Result<Tally> {
    let options = options.clone();
    tokio::task::spawn_blocking(move || rounds_of(&options)).await?
}

fn rounds_of(options: &Options) -> Result<Tally> {
    std::fs::create_dir_all(&options.out)?;
    let mut tally = Tally::default();
    for round in 0..options.rounds {
        said(round, options.rounds);
        let dir = tempfile::Builder::new().prefix("records-").tempdir_in(&options.out)?;
        child::remove_on_exit(dir.path());
        for told in told(&options.svc, dir.path(), options.seconds)? {
            add(&mut tally, &told);
        }
    }
    Ok(tally)
}

fn told(program: &Path, dir: &Path, seconds: u32) -> Result<Vec<Told>> {
    let mut command = Command::new(program);
    command.arg("round").arg(dir).arg(seconds.to_string());
    let text = child::run(command, DEADLINE)?;
    text.lines().map(|line| serde_json::from_str(line).with_context(|| line.to_owned())).collect()
}

/// A figure that no row shows is left out.
fn add(tally: &mut Tally, told: &Told) {
    let Some(spec) = ROWS.iter().find(|spec| spec.name == told.name) else { return };
    let whose = ROWS.iter().filter_map(|spec| spec.against).find(|limit| *limit == told.whose);
    tally.add(spec.name, whose.unwrap_or(OURS), told.value);
}
