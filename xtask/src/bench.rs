//! `cargo xtask bench`: selects the binary and replaces itself with the program of `tests/bench`, which measures it.
//! The area `records` is measured by a separate program, which links the product; this module builds it.

use std::path::PathBuf;
use std::process::{ExitCode, Stdio};

use anyhow::{Context, Result, ensure};
use kit::fetch;
use serde_json::Value;

use crate::cargo;

#[derive(clap::Args)]
pub struct Args {
    /// Area to measure: footprint, router, bridge, bundle, backup, restore, records or hook
    #[arg(value_name = "AREA")]
    area: String,
    /// Rounds for the product and for each peer (default: 5)
    #[arg(long, value_name = "N")]
    rounds: Option<u32>,
    /// Seconds per load (default: 2)
    #[arg(long, value_name = "N")]
    seconds: Option<u32>,
    /// The binary to measure (default: target/dist/svc); for records, the program of tests/bench (default: built)
    #[arg(long, value_name = "PATH")]
    svc: Option<PathBuf>,
    /// Fail if a target is missed
    #[arg(long)]
    strict: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let mut bench = cargo::program("bench");
    bench.arg(&args.area).arg("--svc").arg(find_binary(&args.area, args.svc)?);
    bench.arg("--out").arg(fetch::target_dir().join("bench"));
    for (name, number) in [("--rounds", args.rounds), ("--seconds", args.seconds)] {
        bench.args(number.map(|number| [name.to_owned(), number.to_string()]).into_iter().flatten());
    }
    bench.args(args.strict.then_some("--strict"));
    cargo::become_program(bench)
}

/// Finds the binary. The default is never a dev build: its figures would be meaningless.
fn find_binary(area: &str, given: Option<PathBuf>) -> Result<PathBuf> {
    let path = match (given, area) {
        (Some(given), _) => given,
        (None, "records") => build_bench_program("records")?,
        (None, _) => {
            let built = fetch::target_dir().join("dist/svc");
            ensure!(built.exists(), "{} does not exist: build it with `cargo xtask dist`", built.display());
            built
        }
    };
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
