//! `cargo xtask browser`: tests the pages in Chromium, against the real services.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use kit::browser;

use crate::resolve_svc;

#[derive(Parser)]
pub struct Args {
    /// The binary to run (default: build it)
    #[arg(long, value_name = "PATH")]
    svc: Option<PathBuf>,
    /// Test only code-server, with its Node.js (both fetched from npm once, 600 MB)
    #[arg(long)]
    code_server: bool,
    /// Run only the tests whose names match
    #[arg(long, value_name = "PATTERN")]
    only: Option<String>,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let svc = resolve_svc(args.svc)?;
    let runtime = tokio::runtime::Runtime::new().context("cannot start a runtime")?;
    let options = browser::Options { svc, code_server: args.code_server, only: args.only };
    runtime.block_on(browser::run(&options))?;
    Ok(ExitCode::SUCCESS)
}
