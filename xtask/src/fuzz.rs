//! `cargo xtask fuzz`: runs the parsers in tests/fuzz under libFuzzer, one after another, with limits on time, memory
//! and input size. One executable contains all targets. Only `svc` and the `svc-*` crates, except `svc-libfuzzer`, are
//! instrumented for coverage (`tests/libfuzzer/rustc.sh`); the dependencies are those of every other development build.
//! A stable Rust compiler suffices, but a C++ compiler is also needed.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::cargo;

const DEFAULT_SECONDS: u64 = 60;
const LONG_SECONDS: u64 = 600;
const MAX_INPUT_BYTES: u32 = 64 * 1024;
const MAX_RSS_MIB: u32 = 1024;
/// Timeout per input.
const INPUT_TIMEOUT_SECONDS: u32 = 10;
/// Time for reading the corpus, in addition to the fuzzing time. Also the timeout for writing samples and for
/// minimizing the corpus.
const CORPUS_TIMEOUT: Duration = Duration::from_secs(300);

#[derive(clap::Args)]
pub struct Args {
    /// Targets to run (default: all)
    #[arg(value_name = "TARGET")]
    targets: Vec<String>,
    /// Seconds per target (default: 60)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: Option<u64>,
    /// Fuzz each target for ten minutes
    #[arg(long, conflicts_with = "seconds")]
    long: bool,
}

impl Args {
    fn seconds(&self) -> u64 {
        self.seconds.unwrap_or(if self.long { LONG_SECONDS } else { DEFAULT_SECONDS })
    }
}

/// Fuzzes each target, seeded with `tests/corpus`, valid samples, and the corpus from earlier runs. Writes a summary to
/// `target/libfuzzer/report.json`. Fails if a target's `crashes` directory contains a file, from this run or an earlier
/// one.
pub fn run(args: &Args) -> Result<ExitCode> {
    let program = build()?;
    let available = list_targets(&program)?;
    let targets = if args.targets.is_empty() { available.clone() } else { args.targets.clone() };
    for target in &targets {
        ensure!(available.contains(target), "unknown target {target}: choose from {}", available.join(", "));
    }
    let dir = kit::fetch::target_dir().join("libfuzzer");
    let mut rows = Vec::new();
    for target in &targets {
        let row = FuzzRun { program: &program, dir: &dir, target }.run(args.seconds())?;
        println!("{row}");
        rows.push(row);
    }
    let report = dir.join("report.json");
    fs::write(&report, serde_json::to_vec_pretty(&json!({ "targets": rows }))?)
        .with_context(|| format!("cannot write {}", report.display()))?;
    println!("written to {}", report.display());
    let has_crashes = rows.iter().any(|row| row["crashes"] != json!([]));
    Ok(if has_crashes { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Builds the executable in the same target directory as the development builds; cargo keeps the output of a wrapped
/// compiler separate.
fn build() -> Result<PathBuf> {
    ensure!(has_cpp_compiler(), "libFuzzer needs a C++ compiler: install g++ or clang");
    // Builds all members, so that dependencies get the same features as in every other command.
    let args = ["build", "--workspace", "--bin", "svc-libfuzzer", "--features", "svc-libfuzzer/libfuzzer"];
    let mut build = cargo::command(&args);
    build.env("RUSTC_WORKSPACE_WRAPPER", cargo::root().join("tests/libfuzzer/rustc.sh"));
    // The executable is rarely rebuilt, and its incremental data would be larger than the executable.
    build.env("CARGO_INCREMENTAL", "0");
    cargo::run_checked(build)?;
    let program = kit::fetch::target_dir().join("debug/svc-libfuzzer");
    std::path::absolute(&program).with_context(|| format!("cannot find {}", program.display()))
}

fn has_cpp_compiler() -> bool {
    let from_env = std::env::var("CXX").ok();
    let compilers = from_env.iter().map(String::as_str).chain(["c++", "g++", "clang++"]);
    compilers.into_iter().any(|compiler| {
        let version = Command::new(compiler).arg("--version").output();
        version.is_ok_and(|output| output.status.success())
    })
}

/// Returns the names of all targets, which the executable prints.
fn list_targets(program: &Path) -> Result<Vec<String>> {
    let output = Command::new(program).env("SVC_FUZZ_LIST", "1").stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot start {}", program.display()))?;
    ensure!(output.status.success(), "{} failed to list its targets", program.display());
    let names = String::from_utf8(output.stdout).context("target names are not UTF-8")?;
    Ok(names.lines().map(str::to_owned).collect())
}

struct FuzzRun<'a> {
    program: &'a Path,
    dir: &'a Path,
    target: &'a str,
}

impl FuzzRun<'_> {
    fn run(&self, seconds: u64) -> Result<Value> {
        let checked_in = cargo::root().join("tests/corpus").join(self.target);
        let [corpus, samples, crashes, minimized] =
            ["corpus", "samples", "crashes", "minimized"].map(|name| self.dir.join(name).join(self.target));
        for dir in [&corpus, &samples, &crashes, &minimized] {
            fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        }
        self.write_samples(&samples)?;

        let log = self.dir.join(format!("{}.log", self.target));
        let mut fuzzer = self.command(&log)?;
        fuzzer.args([&corpus, &checked_in, &samples]).arg(format!("-max_total_time={seconds}"));
        fuzzer.arg(format!("-artifact_prefix={}/", crashes.display())).arg("-print_final_stats=1");
        let status = wait(fuzzer.spawn()?, Duration::from_secs(seconds) + CORPUS_TIMEOUT)?;
        let log_text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        let crashes = list_files(&crashes)?;
        if !status.success() && crashes.is_empty() {
            bail!("{} failed ({status}): see {}", self.target, log.display());
        }

        // Drops inputs that add no coverage, so that the corpus does not grow with each run.
        fs::remove_dir_all(&minimized).and_then(|()| fs::create_dir(&minimized))?;
        let mut merge = self.command(&self.dir.join(format!("{}.merge.log", self.target)))?;
        merge.arg("-merge=1").args([&minimized, &corpus]);
        if wait(merge.spawn()?, CORPUS_TIMEOUT)?.success() {
            fs::remove_dir_all(&corpus).and_then(|()| fs::rename(&minimized, &corpus))?;
        }
        Ok(json!({
            "target": self.target,
            "seconds": seconds,
            "executions": parse_figure(&log_text, "stat::number_of_executed_units:"),
            "coverage": parse_figure(&log_text, "cov:"),
            "features": parse_figure(&log_text, "ft:"),
            "peakRssMib": parse_figure(&log_text, "stat::peak_rss_mb:"),
            "corpus": list_files(&corpus)?.len(),
            "crashes": crashes,
        }))
    }

    /// Has the target write valid documents as samples.
    fn write_samples(&self, dir: &Path) -> Result<()> {
        let input = dir.join("empty");
        File::create(&input).with_context(|| format!("cannot create {}", input.display()))?;
        let log = self.dir.join(format!("{}.samples.log", self.target));
        let mut write = self.command(&log)?;
        write.arg(&input).env("SVC_FUZZ_SAMPLES", dir);
        let status = wait(write.spawn()?, CORPUS_TIMEOUT)?;
        ensure!(status.success(), "{} wrote no samples: see {}", self.target, log.display());
        Ok(())
    }

    fn command(&self, log: &Path) -> Result<Command> {
        let log = File::create(log).with_context(|| format!("cannot create {}", log.display()))?;
        let mut command = Command::new(self.program);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).args([
            format!("-max_len={MAX_INPUT_BYTES}"),
            format!("-timeout={INPUT_TIMEOUT_SECONDS}"),
            format!("-rss_limit_mb={MAX_RSS_MIB}"),
        ]);
        command.env("SVC_FUZZ_TARGET", self.target).env("RUST_BACKTRACE", "0");
        Ok(command)
    }
}

/// Waits for the program, and kills it after the timeout.
fn wait(mut child: Child, timeout: Duration) -> Result<ExitStatus> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            bail!("the program did not exit within {} s", timeout.as_secs());
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn list_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        files.push(entry?.path());
    }
    files.sort();
    Ok(files)
}

/// Returns the last value of a figure in the log.
fn parse_figure(log: &str, name: &str) -> Option<u64> {
    let (_, after) = log.rsplit_once(&format!("{name} "))?;
    after.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_figure_returns_last_value_in_log() {
        let log = "#2\tINITED cov: 10 ft: 11 corp: 1/1b\n#9\tDONE   cov: 20 ft: 21 corp: 2/9b\n\
            stat::number_of_executed_units: 4242\nstat::peak_rss_mb:              97\n";
        assert_eq!(parse_figure(log, "cov:"), Some(20));
        assert_eq!(parse_figure(log, "stat::number_of_executed_units:"), Some(4242));
        assert_eq!(parse_figure(log, "stat::peak_rss_mb:"), Some(97));
        assert_eq!(parse_figure(log, "stat::absent:"), None);
    }

    #[test]
    fn seconds_defaults_to_60_or_600_with_long() {
        let args = |seconds, long| Args { targets: Vec::new(), seconds, long };
        assert_eq!(args(None, false).seconds(), 60);
        assert_eq!(args(None, true).seconds(), 600);
        assert_eq!(args(Some(5), false).seconds(), 5);
    }
}
