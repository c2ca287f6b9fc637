//! `cargo xtask ci --rest`: the checks beside demo and tests; `cargo xtask check`: the quick ones, for each edit. Every part
//! runs, also after one that failed.

use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::cargo;

/// What of cargo-deny's advisory check means that its database could not be had, and nothing about us.
const NO_DATABASE: [&str; 3] =
    ["failed to fetch advisory database", "failed to load advisory database", "failed to open advisory"];

enum End {
    Passed,
    Skipped(String),
}

type Part = (&'static str, fn() -> Result<End>);

const FORMAT: Part = ("fmt", || checked(&["fmt", "--all", "--check"]));

const REST: [Part; 5] = [
    FORMAT,
    ("clippy", || checked(&["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"])),
    ("doc", doc),
    ("deny", deny),
    ("advisories", advisories),
];

/// Of the product's own package, so that neither the kit nor the integration tests are compiled.
const CHECK: [Part; 4] = [
    FORMAT,
    ("clippy", || {
        checked(&["clippy", "--package", "svc", "--lib", "--bins", "--quiet", "--", "-D", "warnings"])
    }),
    ("unit tests", || tests(&["--lib"])),
    ("house", || tests(&["--test", "house"])),
];

pub fn rest() -> Result<ExitCode> {
    run("ci --rest", &REST)
}

pub fn check() -> Result<ExitCode> {
    run("check", &CHECK)
}

/// Tests of the package `svc`, by nextest where it is installed.
fn tests(which: &[&str]) -> Result<End> {
    let runner: &[&str] = if cargo::has("nextest") { &["nextest", "run"] } else { &["test"] };
    let quiet: &[&str] =
        if cargo::has("nextest") { &["--status-level", "fail", "--cargo-quiet"] } else { &["--quiet"] };
    checked(&[runner, &["--package", "svc"], which, quiet].concat())
}

fn run(command: &str, parts: &[Part]) -> Result<ExitCode> {
    let mut lines = Vec::new();
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for (name, part) in parts {
        println!("{command}: {name}");
        let started = Instant::now();
        let end = part();
        let word = match end {
            Ok(End::Passed) => {
                passed += 1;
                "ok".to_owned()
            }
            Ok(End::Skipped(why)) => {
                skipped += 1;
                format!("SKIPPED: {why}")
            }
            Err(error) => {
                failed += 1;
                format!("FAILED: {error:#}")
            }
        };
        lines.push(format!("  {name:<11} {:>6.1} s  {word}", started.elapsed().as_secs_f64()));
    }
    println!("{command}:\n{}", lines.join("\n"));
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn checked(args: &[&str]) -> Result<End> {
    cargo::run(args)?;
    Ok(End::Passed)
}

fn doc() -> Result<End> {
    let mut doc = cargo::command(&["doc", "--workspace", "--no-deps", "--quiet"]);
    doc.env("RUSTDOCFLAGS", "-D warnings");
    cargo::succeed(doc)?;
    Ok(End::Passed)
}

fn deny() -> Result<End> {
    let mut deny = cargo_deny()?;
    deny.args(["--log-level", "error", "check", "bans", "licenses", "sources"]);
    cargo::succeed(deny)?;
    Ok(End::Passed)
}

fn advisories() -> Result<End> {
    let mut deny = cargo_deny()?;
    deny.args(["check", "advisories"]);
    let output = deny.output().context("start cargo-deny")?;
    if output.status.success() {
        return Ok(End::Passed);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    if NO_DATABASE.iter().any(|sign| said.contains(sign)) {
        return Ok(End::Skipped("the advisory database cannot be reached".to_owned()));
    }
    eprint!("{said}");
    bail!("cargo deny check advisories: {}", output.status)
}

/// cargo-deny, from the path, else installed once into `target/tools`.
fn cargo_deny() -> Result<Command> {
    if cargo::has("deny") {
        return Ok(cargo::command(&["deny", "--workspace"]));
    }
    let tools = kit::fetch::target_dir().join("tools");
    let program = tools.join("bin/cargo-deny");
    if !program.exists() {
        let mut install = cargo::command(&["install", "cargo-deny", "--locked", "--debug", "--root"]);
        install.arg(&tools).env_remove("CARGO_TARGET_DIR");
        cargo::succeed(install)?;
    }
    let mut deny = Command::new(program);
    deny.arg("--workspace").current_dir(cargo::root());
    Ok(deny)
}
