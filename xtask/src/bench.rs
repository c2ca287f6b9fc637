//! `cargo xtask bench`: which binary is measured, and how the end is told.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use kit::bench::{self, Area, Options};
use kit::fetch;

#[derive(clap::Args)]
pub struct Args {
    /// footprint, router, bridge, bundle, backup or restore
    #[arg(value_name = "AREA")]
    area: Area,
    /// How often each side is measured
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=50))]
    rounds: u32,
    /// How long one load takes
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=60))]
    seconds: u32,
    /// The binary to measure; target/dist/svc when not given
    #[arg(long, value_name = "PATH")]
    svc: Option<PathBuf>,
    /// Fail when a target does not hold
    #[arg(long)]
    strict: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let target = fetch::target_dir();
    let options = Options {
        svc: binary(args.svc)?,
        rounds: args.rounds,
        seconds: args.seconds,
        out: target.join("bench"),
    };
    let runtime = tokio::runtime::Runtime::new().context("start a runtime")?;
    let report = runtime.block_on(bench::run(args.area, &options))?;
    Ok(if args.strict && !report.all_hold() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Never a dev build by accident: its figures are nobody's.
fn binary(given: Option<PathBuf>) -> Result<PathBuf> {
    let path = given.unwrap_or_else(|| fetch::target_dir().join("dist/svc"));
    ensure!(
        path.exists(),
        "{} is not there: `cargo xtask dist` builds the binary that is measured",
        path.display()
    );
    path.canonicalize().with_context(|| format!("find {}", path.display()))
}
