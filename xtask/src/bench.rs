//! `cargo xtask bench`: selects the binary, runs the measurement and sets the exit code. The records are measured by a
//! program that links the product; it is built here.

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
    /// Rounds per side
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=50))]
    rounds: u32,
    /// Seconds per load
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=60))]
    seconds: u32,
    /// The binary to measure (default: target/dist/svc); for records, the program of tests/bench (default: built)
    #[arg(long, value_name = "PATH")]
    svc: Option<PathBuf>,
    /// Fail if a target is missed
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

/// Finds the binary. The default is never a dev build: its figures would be meaningless.
fn binary(area: Area, given: Option<PathBuf>) -> Result<PathBuf> {
    let path = match (given, area) {
        (Some(given), _) => given,
        (None, Area::Records) => build_bench_program("records")?,
        (None, _) => fetch::target_dir().join("dist/svc"),
    };
    ensure!(path.exists(), "{} does not exist: build it with `cargo xtask dist`", path.display());
    path.canonicalize().with_context(|| format!("find {}", path.display()))
}

/// Builds a program of `tests/bench` with the shipped profile.
fn build_bench_program(name: &str) -> Result<PathBuf> {
    let args = ["build", "--release", "--no-default-features", "--package", "svc", "--bench", name];
    let mut build = cargo::command(&args);
    build.arg("--message-format=json-render-diagnostics").stderr(Stdio::inherit());
    let output = build.output().with_context(|| format!("build {name}"))?;
    ensure!(output.status.success(), "building {name} failed: {}", output.status);
    let messages = String::from_utf8_lossy(&output.stdout);
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let program = |message: Value| {
        let is_match = message["reason"] == "compiler-artifact" && message["target"]["name"] == name;
        is_match.then(|| message["executable"].as_str().map(PathBuf::from)).flatten()
    };
    messages.filter_map(program).next_back().with_context(|| format!("cargo reported no executable {name}"))
}
