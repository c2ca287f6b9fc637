//! `cargo xtask browser`: what a person sees, in Chromium, on real parts.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use kit::browser;

use crate::svc_or_built;

#[derive(Parser)]
pub struct Args {
    /// The binary to run; built when not given
    #[arg(long, value_name = "PATH")]
    svc: Option<PathBuf>,
    /// With code-server and its Node.js in the bundle, fetched from npm once (600 MB), and its tests
    #[arg(long)]
    code_server: bool,
    /// Only the tests whose names match
    #[arg(long, value_name = "PATTERN")]
    only: Option<String>,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let svc = svc_or_built(args.svc)?;
    let runtime = tokio::runtime::Runtime::new().context("start a runtime")?;
    let options = browser::Options { svc, code_server: args.code_server, only: args.only };
    runtime.block_on(browser::run(&options))?;
    Ok(ExitCode::SUCCESS)
}
