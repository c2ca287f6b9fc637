//! `cargo xtask ci --rest`: the static checks (format, clippy, documentation and dependencies); `cargo xtask check`:
//! quick checks for each edit. A failed check does not stop the others.

use std::panic::resume_unwind;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::cargo;

/// cargo-deny messages that mean that its advisory database is unreachable.
const ADVISORY_DATABASE_ERRORS: [&str; 3] =
    ["failed to fetch advisory database", "failed to load advisory database", "failed to open advisory"];

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

/// Selects the packages that make up the product.
const PRODUCT: &[&str] = &[
    "--workspace",
    "--exclude=bench",
    "--exclude=house",
    "--exclude=kit",
    "--exclude=lab",
    "--exclude=svc-libfuzzer",
    "--exclude=xtask",
];

/// Checks only the product's packages, so that neither the tools nor the integration tests are compiled. Clippy
/// and the tests each wait for a single compiler process most of the time, so they run in parallel.
const QUICK_CHECKS: [&[Check]; 3] = [
    &[FORMAT],
    &[("clippy", quick_clippy), ("unit tests", || run_tests(&[PRODUCT, &["--lib"]].concat()))],
    &[("house", || run_tests(&["--package", "house"]))],
];

pub fn run_static_checks() -> Result<ExitCode> {
    run("ci --rest", &STATIC_CHECKS)
}

pub fn run_quick() -> Result<ExitCode> {
    run("check", &QUICK_CHECKS)
}

/// Runs tests with nextest where it is installed.
fn run_tests(which: &[&str]) -> Result<Outcome> {
    let runner: &[&str] = if cargo::has_subcommand("nextest") { &["nextest", "run"] } else { &["test"] };
    let quiet: &[&str] = if cargo::has_subcommand("nextest") {
        &["--status-level", "fail", "--cargo-quiet"]
    } else {
        &["--quiet"]
    };
    run_cargo(&[runner, which, quiet].concat())
}

/// Uses its own target directory, because cargo runs only one build at a time in each.
fn quick_clippy() -> Result<Outcome> {
    let mut clippy = cargo::command(&[&["clippy"], PRODUCT, &["--lib", "--bins", "--quiet"]].concat());
    clippy.args(["--", "-D", "warnings"]).env("CARGO_TARGET_DIR", kit::fetch::target_dir().join("clippy"));
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
    let mut deny = cargo_deny()?;
    deny.args(["--log-level", "error", "check", "bans", "licenses", "sources"]);
    cargo::run_checked(deny)?;
    Ok(Outcome::Passed)
}

fn check_advisories() -> Result<Outcome> {
    let mut deny = cargo_deny()?;
    deny.args(["check", "advisories"]);
    let output = deny.output().context("start cargo-deny")?;
    if output.status.success() {
        return Ok(Outcome::Passed);
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    if ADVISORY_DATABASE_ERRORS.iter().any(|message| stderr.contains(message)) {
        return Ok(Outcome::Skipped("the advisory database is unreachable".to_owned()));
    }
    eprint!("{stderr}");
    bail!("cargo deny check advisories: {}", output.status)
}

/// Returns cargo-deny from `PATH`, or installs it into `target/tools`.
fn cargo_deny() -> Result<Command> {
    if cargo::has_subcommand("deny") {
        return Ok(cargo::command(&["deny", "--workspace"]));
    }
    let tools = kit::fetch::target_dir().join("tools");
    let program = tools.join("bin/cargo-deny");
    if !program.exists() {
        let mut install = cargo::command(&["install", "cargo-deny", "--locked", "--debug", "--root"]);
        install.arg(&tools).env_remove("CARGO_TARGET_DIR").env("CARGO_PROFILE_DEV_DEBUG", "0");
        cargo::run_checked(install)?;
    }
    let mut deny = Command::new(program);
    deny.arg("--workspace").current_dir(cargo::root());
    Ok(deny)
}
