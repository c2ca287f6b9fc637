//! `cargo xtask bench`: which binary is measured, and how the end is told. Records are measured from inside: the program
//! that links them is built here.

use std::path::PathBuf;
use std::process::{ExitCode, Stdio};

use anyhow::{Context, Result, ensure};
use kit::bench::{self, Area, Options};
use kit::fetch;
use serde_json::Value;

use crate::cargo;

#[derive(clap::Args)]
pub struct Args {
    /// footprint, router, bridge, bundle, backup, restore or records
    #[arg(value_name = "AREA")]
    area: Area,
    /// How often each side is measured
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=50))]
    rounds: u32,
    /// How long one load takes
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=60))]
    seconds: u32,
    /// The binary to measure; target/dist/svc when not given. For records the program of tests/bench, built when not given
    #[arg(long, value_name = "PATH")]
    svc: Option<PathBuf>,
    /// Fail when a target does not hold
    #[arg(long)]
    strict: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let target = fetch::target_dir();
    let options = Options {
        svc: binary(args.area, args.svc)?,
        rounds: args.rounds,
        seconds: args.seconds,
        out: target.join("bench"),
    };
    let runtime = tokio::runtime::Runtime::new().context("start a runtime")?;
    let report = runtime.block_on(bench::run(args.area, &options))?;
    Ok(if args.strict && !report.all_hold() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Never a dev build by accident: its figures are nobody's.
fn binary(area: Area, given: Option<PathBuf>) -> Result<PathBuf> {
    let path = match (given, area) {
        (Some(given), _) => given,
        (None, Area::Records) => built("records")?,
        (None, _) => fetch::target_dir().join("dist/svc"),
    };
    ensure!(
        path.exists(),
        "{} is not there: `cargo xtask dist` builds the binary that is measured",
        path.display()
    );
    path.canonicalize().with_context(|| format!("find {}", path.display()))
}

/// A program of `tests/bench`, built as what is shipped.
fn built(name: &str) -> Result<PathBuf> {
    let args = ["build", "--release", "--no-default-features", "--package", "svc", "--bench", name];
    let mut build = cargo::command(&args);
    build.arg("--message-format=json-render-diagnostics").stderr(Stdio::inherit());
    let output = build.output().with_context(|| format!("build {name}"))?;
    ensure!(output.status.success(), "{name} could not be built: {}", output.status);
    let messages = String::from_utf8_lossy(&output.stdout);
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let program = |message: Value| {
        let is_it = message["reason"] == "compiler-artifact" && message["target"]["name"] == name;
        is_it.then(|| message["executable"].as_str().map(PathBuf::from)).flatten()
    };
    messages.filter_map(program).next_back().with_context(|| format!("cargo names no program {name}"))
}
