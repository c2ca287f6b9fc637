//! Records benchmark: a separate program links the product and measures the real writer and usage store, and upper
//! bounds for the writer.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::figures::{PRODUCT, Spec, Tally, Target};
use super::{Options, print_round};
use kit::child;

const EVENTS: &str = "events";
const TWO_CALLERS: &str = "svc, two callers";

pub const ROWS: [Spec; 23] = [
    spec(EVENTS, "1/s", Target::AtLeast(1_500_000.0)),
    events_against("block writes"),
    events_against("buffered, prepared"),
    events_against("one write(2) per event"),
    events_against("write and fdatasync per event"),
    events_against(TWO_CALLERS),
    spec("a caller at 10,000 a second, p50", "µs", Target::None),
    spec("a caller at 10,000 a second, p99", "µs", Target::AtMost(2.0)),
    spec("a caller at full load, p99", "µs", Target::AtMost(2.0)),
    spec("one of two callers at full load, p99", "µs", Target::None),
    spec("clock overhead, p99", "µs", Target::None),
    spec("a call that wakes the writer, p50", "µs", Target::None),
    spec("accepted but unwritten, peak", "MiB", Target::AtMost(16.0)),
    spec("age of the oldest event lost to kill -9", "ms", Target::AtMost(200.0)),
    spec("3 years of usage: open", "ms", Target::None),
    spec("3 years of usage: memory", "MiB", Target::None),
    spec("3 years of usage: by day, p99", "ms", Target::AtMost(50.0)),
    spec("3 years of usage: by week, p99", "ms", Target::AtMost(50.0)),
    spec("3 years of usage: by month, p99", "ms", Target::AtMost(50.0)),
    spec("3 years of usage: by model, p99", "ms", Target::AtMost(50.0)),
    spec("3 years of usage: by user, p99", "ms", Target::AtMost(50.0)),
    spec("3 years of usage: for one user, p99", "ms", Target::AtMost(50.0)),
    spec("3 years of usage: compaction", "ms", Target::None),
];

const TIMEOUT: Duration = Duration::from_secs(180);

const fn spec(name: &'static str, unit: &'static str, target: Target) -> Spec {
    Spec { name, unit, against: None, target }
}

const fn events_against(peer: &'static str) -> Spec {
    Spec { name: EVENTS, unit: "1/s", against: Some(peer), target: Target::None }
}

#[derive(Deserialize)]
struct Sample {
    name: String,
    #[serde(rename = "whose")]
    side: String,
    value: f64,
}

pub async fn measure(options: &Options) -> Result<Tally> {
    let options = options.clone();
    tokio::task::spawn_blocking(move || run_rounds(&options)).await?
}

fn run_rounds(options: &Options) -> Result<Tally> {
    std::fs::create_dir_all(&options.out)?;
    let mut tally = Tally::default();
    for round in 0..options.rounds {
        print_round(round, options.rounds);
        let dir = tempfile::Builder::new().prefix("records-").tempdir_in(&options.out)?;
        child::remove_on_exit(dir.path());
        for sample in run_round(&options.svc, dir.path(), options.seconds)? {
            add(&mut tally, &sample);
        }
    }
    Ok(tally)
}

fn run_round(program: &Path, dir: &Path, seconds: u32) -> Result<Vec<Sample>> {
    let mut command = Command::new(program);
    command.arg("round").arg(dir).arg(seconds.to_string());
    let text = child::run(command, TIMEOUT)?;
    text.lines().map(|line| serde_json::from_str(line).with_context(|| line.to_owned())).collect()
}

/// Adds a sample to its row; ignores a sample without a row.
fn add(tally: &mut Tally, sample: &Sample) {
    let Some(spec) = ROWS.iter().find(|spec| spec.name == sample.name) else { return };
    let side = ROWS.iter().filter_map(|spec| spec.against).find(|peer| *peer == sample.side);
    tally.add(spec.name, side.unwrap_or(PRODUCT), sample.value);
}
