//! `cargo xtask bench`: selects the binary and replaces itself with the program in `tests/bench`, which measures it.
//! The `records` area is measured by a separate program, which links the product; this module builds that program.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, ensure};
use kit::fetch;
use serde_json::Value;

use crate::cargo;

/// The area that a separate program measures, and the name of that program.
const RECORDS: &str = "records";

#[derive(clap::Args)]
pub struct Args {
    /// Area to measure: footprint, router, bridge, bundle, backup, restore, records, hook, scale or files
    #[arg(value_name = "AREA")]
    area: String,
    /// Rounds for the product and for each peer (default: 5)
    #[arg(long, value_name = "N")]
    rounds: Option<u32>,
    /// Seconds per load (default: 2)
    #[arg(long, value_name = "N")]
    seconds: Option<u32>,
    /// For files: the number of files (default: 200,000)
    #[arg(long, value_name = "N")]
    files: Option<u32>,
    /// For files: the average size of a file, in bytes (default: 50,000)
    #[arg(long, value_name = "N")]
    file_bytes: Option<u32>,
    /// For files: leave out rclone, which takes far longer than the others for many small files
    #[arg(long)]
    without_rclone: bool,
    /// The binary to measure (default: target/dist/svc); for records, the program in tests/bench (default: build it)
    #[arg(long, value_name = "PATH")]
    svc: Option<PathBuf>,
    /// Fail if a target is missed
    #[arg(long)]
    strict: bool,
    /// Also build and measure this revision, in alternation with the binary, and fail if a figure of the binary is
    /// worse; the build is kept in target/compare
    #[arg(long, value_name = "REVISION", conflicts_with = "strict")]
    compare: Option<String>,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let mut bench = cargo::program_command("bench");
    bench.arg(&args.area).arg("--svc").arg(resolve_binary(&args.area, args.svc)?);
    bench.arg("--out").arg(fetch::target_dir().join("bench"));
    for (name, number) in [
        ("--rounds", args.rounds),
        ("--seconds", args.seconds),
        ("--files", args.files),
        ("--file-bytes", args.file_bytes),
    ] {
        bench.args(number.map(|number| [name.to_owned(), number.to_string()]).into_iter().flatten());
    }
    bench.args(args.strict.then_some("--strict"));
    bench.args(args.without_rclone.then_some("--without-rclone"));
    if let Some(revision) = &args.compare {
        bench.arg("--baseline").arg(build_revision(revision, &args.area)?);
    }
    cargo::exec(bench)
}

/// Returns the path of the binary to measure; builds the program for `records` unless a path is given. The default is
/// never a dev build: its figures would be meaningless.
fn resolve_binary(area: &str, path: Option<PathBuf>) -> Result<PathBuf> {
    let path = match (path, area) {
        (Some(path), _) => path,
        (None, RECORDS) => build_records_bench(&cargo::root(), &fetch::target_dir())?,
        (None, _) => {
            let built = fetch::target_dir().join("dist/svc");
            ensure!(built.exists(), "{} does not exist: build it with `cargo xtask dist`", built.display());
            built
        }
    };
    path.canonicalize().with_context(|| format!("cannot find {}", path.display()))
}

/// Builds the program to measure for the area at the given revision, or returns an existing build of the same commit.
fn build_revision(revision: &str, area: &str) -> Result<PathBuf> {
    let root = cargo::root();
    let commit =
        git(&root, &["rev-parse", "--verify", "--end-of-options", &format!("{revision}^{{commit}}")])?;
    let dir = fetch::target_dir().join("compare");
    let program = if area == RECORDS { RECORDS } else { "svc" };
    let cached_build = dir.join(format!("{program}-{commit}"));
    if cached_build.exists() {
        return Ok(cached_build);
    }
    println!("bench: building {program} at {revision} in {}", dir.display());
    let (tree, target_dir) = (dir.join("tree"), dir.join("target"));
    let tree_arg = tree.to_str().context("the target directory is not UTF-8")?;
    if tree.join(".git").exists() {
        git(&tree, &["checkout", "--quiet", "--force", "--detach", &commit])?;
    } else {
        git(&root, &["worktree", "add", "--quiet", "--force", "--detach", tree_arg, &commit])?;
    }
    let built = if area == RECORDS {
        build_records_bench(&tree, &target_dir)?
    } else {
        let mut dist = cargo::command(&["xtask", "dist"]);
        dist.current_dir(&tree).env("CARGO_TARGET_DIR", &target_dir);
        cargo::run_checked(dist)?;
        target_dir.join("dist/svc")
    };
    // Renamed into place, so that an interrupted copy is not mistaken for a build.
    let staged = dir.join(".staged");
    std::fs::copy(&built, &staged).with_context(|| format!("cannot copy {}", built.display()))?;
    std::fs::rename(&staged, &cached_build)?;
    Ok(cached_build)
}

fn git(dir: &Path, args: &[&str]) -> Result<String> {
    let output = Command::new("git").args(args).current_dir(dir).output().context("cannot start git")?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`git {}` failed: {}", args.join(" "), error.trim());
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Builds the program in `tests/bench/records` with the release profile.
fn build_records_bench(tree: &Path, target_dir: &Path) -> Result<PathBuf> {
    let name = RECORDS;
    let args = ["build", "--release", "--no-default-features", "--package", "svc", "--bench", name];
    let mut build = cargo::command(&args);
    build.current_dir(tree).env("CARGO_TARGET_DIR", target_dir);
    build.arg("--message-format=json-render-diagnostics").stderr(Stdio::inherit());
    let output = build.output().with_context(|| format!("cannot start the build of {name}"))?;
    ensure!(output.status.success(), "building {name} failed: {}", output.status);
    let messages = String::from_utf8_lossy(&output.stdout);
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let executable_path = |message: Value| {
        let is_match = message["reason"] == "compiler-artifact" && message["target"]["name"] == name;
        is_match.then(|| message["executable"].as_str().map(PathBuf::from)).flatten()
    };
    let executable = messages.filter_map(executable_path).next_back();
    executable.with_context(|| format!("cargo reported no executable {name}"))
}
