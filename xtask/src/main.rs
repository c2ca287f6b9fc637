//! `cargo xtask`: the project's own commands. Argument parsing; what they do is in the kit, or is cargo's.

mod bench;
mod browser;
mod bundle;
mod cargo;
mod ci;
mod dist;
mod fuzz;
mod test;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use kit::pg::PgBinaries;
use kit::story::{self, Breakage};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The project's own commands")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Fetch what demo and tests need and this machine lacks
    Setup,
    /// Build a host bundle: archive, digest, and manifest with its signature
    Bundle(bundle::Args),
    /// Look at shell, apps and code-server in Chromium; screenshots in target/browser
    Browser(browser::Args),
    /// Play the whole main job on real parts; writes target/demo/report.json
    Demo {
        /// Break one thing, backup|restore|pin|fence: the demo must then fail
        #[arg(long = "break", value_name = "WHAT", value_parser = Breakage::from_str)]
        breakage: Option<Breakage>,
        /// The binary to play with; built when not given
        #[arg(long, value_name = "PATH")]
        svc: Option<PathBuf>,
        /// Keep the directory with disks and logs
        #[arg(long)]
        keep: bool,
    },
    /// Keep the demo's parts running for a developer, with a machine in use; writes target/dev/dev.json
    Dev {
        /// The binary to run; built when not given
        #[arg(long, value_name = "PATH")]
        svc: Option<PathBuf>,
        /// Where dev.json and the operator's credential go; another directory for another one beside the first
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
        /// The machine's bundle, as `cargo xtask bundle --out DIR` left it; else the smallest one
        #[arg(long, value_name = "DIR")]
        bundle: Option<PathBuf>,
    },
    /// Play the main job on virtual machines, then what only a machine shows; writes target/lab
    Lab {
        /// Provision, register, bridge, backup, reboot and recover alone
        #[arg(long)]
        quick: bool,
        /// These acts alone, on a machine that is provisioned first: `--only update,bad-update`
        #[arg(long, value_name = "ACT", value_delimiter = ',', conflicts_with = "quick")]
        only: Vec<String>,
        /// The binary to play with; `cargo xtask dist`'s when not given
        #[arg(long, value_name = "PATH")]
        svc: Option<PathBuf>,
    },
    /// Build the one static executable, target/dist/svc, and check that it is one
    Dist,
    /// Build the Debian packages and the bill of materials into target/deb
    Deb {
        /// Install, start, upgrade, remove and purge them in a fresh Debian root (needs root)
        #[arg(long)]
        check: bool,
        /// The binary that they carry; else target/dist/svc, built where it is not of these sources
        #[arg(long, value_name = "PATH")]
        svc: Option<PathBuf>,
    },
    /// Measure the static executable beside its peers; writes target/bench/AREA.json
    Bench(bench::Args),
    /// Set up, build, and run all tests
    Test {
        /// The long ones too
        #[arg(long)]
        long: bool,
        #[arg(value_name = "FILTER")]
        filters: Vec<String>,
    },
    /// Search the parsers by libFuzzer, a minute each; needs a C++ compiler, writes target/libfuzzer
    Fuzz(fuzz::Args),
    /// The checks for each edit: format, clippy of the product, unit tests, the house's rules
    Check,
    /// All other checks: format, clippy, documentation, dependencies
    Ci {
        #[arg(long, required = true)]
        rest: bool,
    },
}

fn main() -> ExitCode {
    let end = match Args::parse().command {
        Command::Setup => setup().map(|()| ExitCode::SUCCESS),
        Command::Bundle(args) => bundle::run(args),
        Command::Browser(args) => browser::run(args),
        Command::Demo { breakage, svc, keep } => demo(breakage, svc, keep),
        Command::Dev { svc, dir, bundle } => dev(svc, dir, bundle.as_deref()),
        Command::Lab { quick, only, svc } => lab(quick, only, svc),
        Command::Test { long, filters } => setup().and_then(|()| test::run(long, &filters)),
        Command::Bench(args) => bench::run(args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Dist => dist::build().map(|_| ExitCode::SUCCESS),
        Command::Deb { check, svc } => deb(check, svc),
        Command::Check => ci::check(),
        Command::Ci { .. } => ci::rest(),
    };
    end.unwrap_or_else(|error| {
        eprintln!("xtask: {error:#}");
        ExitCode::FAILURE
    })
}

fn setup() -> Result<()> {
    let target = kit::fetch::target_dir();
    let binaries = PgBinaries::locate_or_fetch(&target)?;
    println!("setup: PostgreSQL 16 at {}", binaries.dir().display());
    println!("setup: moto at {}", kit::moto::fetched(&target)?.display());
    // The tests that need it say that they are skipped.
    match kit::seaweed::fetched(&target) {
        Ok(place) => println!("setup: SeaweedFS at {}", place.display()),
        Err(error) => println!("setup: no SeaweedFS, its tests are skipped: {error:#}"),
    }
    Ok(())
}

fn deb(check: bool, svc: Option<PathBuf>) -> Result<ExitCode> {
    let svc = match svc {
        Some(svc) => svc.canonicalize().with_context(|| format!("find {}", svc.display()))?,
        None => dist::of_this_tree()?,
    };
    let out = kit::fetch::target_dir().join("deb");
    let options = kit::deb::Options::new(svc, cargo::root(), out);
    if check {
        let runtime = tokio::runtime::Runtime::new().context("start a runtime")?;
        runtime.block_on(kit::deb::check::check(&options))?;
        return Ok(ExitCode::SUCCESS);
    }
    for package in kit::deb::build(&options)? {
        println!("{}, sha256 {}", package.display(), kit::fetch::sha256(&package)?);
    }
    Ok(ExitCode::SUCCESS)
}

fn demo(breakage: Option<Breakage>, svc: Option<PathBuf>, keep: bool) -> Result<ExitCode> {
    let svc = svc_or_built(svc)?;
    let report = kit::fetch::target_dir().join("demo/report.json");
    let runtime = tokio::runtime::Runtime::new().context("start a runtime")?;
    let options = story::Options { svc, breakage, keep, report: Some(report) };
    let told = runtime.block_on(story::play(options))?;
    Ok(if told.ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn dev(svc: Option<PathBuf>, dir: Option<PathBuf>, bundle: Option<&Path>) -> Result<ExitCode> {
    let dir = dir.unwrap_or_else(kit::dev::default_dir);
    // Before the build: one that runs already keeps its binary.
    let claim = kit::dev::Claim::of(&dir)?;
    let svc = svc_or_built(svc)?;
    let runtime = tokio::runtime::Runtime::new().context("start a runtime")?;
    runtime.block_on(kit::dev::run(claim, &svc, bundle))?;
    Ok(ExitCode::SUCCESS)
}

fn lab(quick: bool, only: Vec<String>, svc: Option<PathBuf>) -> Result<ExitCode> {
    let acts = match (quick, only.is_empty()) {
        (true, _) => kit::lab::Acts::Quick,
        (false, true) => kit::lab::Acts::Whole,
        (false, false) => kit::lab::Acts::only(only)?,
    };
    let svc = match svc {
        Some(path) => path.canonicalize().with_context(|| format!("find {}", path.display()))?,
        None => dist::of_this_tree()?,
    };
    let runtime = tokio::runtime::Runtime::new().context("start a runtime")?;
    let told = runtime.block_on(kit::lab::play(kit::lab::Options { svc, acts }))?;
    Ok(if told.ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn svc_or_built(svc: Option<PathBuf>) -> Result<PathBuf> {
    let path = match svc {
        Some(path) => path,
        None => {
            // As the tests build it: another selection of packages would build the dependencies anew.
            cargo::run(&["build", "--workspace"])?;
            kit::fetch::target_dir().join("debug/svc")
        }
    };
    path.canonicalize().with_context(|| format!("find {}", path.display()))
}
