//! `cargo xtask fuzz`: the parsers of tests/fuzz under libFuzzer, one after the other, each within bounds of time, memory and
//! input. It needs a nightly compiler, cargo-fuzz and a C++ compiler.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::cargo;

const CRATE_DIR: &str = "tests/libfuzzer";
const MAX_INPUT_BYTES: u32 = 64 * 1024;
const MAX_RSS_MIB: u32 = 2048;
/// Of one allocation: the largest that a parser makes is a frame of 16 MiB.
const MAX_ALLOCATION_MIB: u32 = 64;
/// Of one input.
const INPUT_TIMEOUT_SECONDS: u32 = 10;
/// Beyond the time of the search: to read the corpus before it, and to minimise what was found after it.
const MARGIN: Duration = Duration::from_secs(300);

#[derive(clap::Args)]
pub struct Args {
    /// These targets alone; all without one
    #[arg(value_name = "TARGET")]
    targets: Vec<String>,
    /// How long each target is searched
    #[arg(long, value_name = "N", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
}

/// Searches each target, beginning with `tests/corpus`, valid samples, and what earlier runs found. A summary is kept in
/// `target/libfuzzer/report.json`; fails where a rule was broken.
pub fn run(args: &Args) -> Result<ExitCode> {
    let known = known_targets()?;
    let targets = if args.targets.is_empty() { known.clone() } else { args.targets.clone() };
    for target in &targets {
        ensure!(known.contains(target), "{target} is no target: choose from {}", known.join(", "));
    }
    let place = kit::fetch::target_dir().join("libfuzzer");
    let mut rows = Vec::new();
    for target in &targets {
        let program = build(&place, target)?;
        let row = Search { program: &program, place: &place, target }.run(args.seconds)?;
        println!("{row}");
        rows.push(row);
    }
    let report = place.join("report.json");
    fs::write(&report, serde_json::to_vec_pretty(&json!({ "targets": rows }))?)
        .with_context(|| format!("write {}", report.display()))?;
    println!("kept in {}", report.display());
    let is_whole = rows.iter().all(|row| row["crashes"] == json!([]));
    Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The executables of the crate, as its manifest lists them.
fn known_targets() -> Result<Vec<String>> {
    let manifest = cargo::root().join(CRATE_DIR).join("Cargo.toml");
    let text = fs::read_to_string(&manifest).with_context(|| format!("read {}", manifest.display()))?;
    Ok(targets_in(&text))
}

fn targets_in(manifest: &str) -> Vec<String> {
    let binaries = manifest.split("[[bin]]").skip(1);
    let name = |part: &str| {
        Some(part.lines().find_map(|line| line.strip_prefix("name = "))?.trim_matches('"').to_owned())
    };
    binaries.filter_map(name).collect()
}

/// Without the variables by which one cargo tells another which compiler it is.
fn nightly(args: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo"]).args(args).current_dir(cargo::root());
    for name in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(name);
    }
    command
}

fn build(place: &Path, target: &str) -> Result<PathBuf> {
    let has = nightly(&["fuzz", "--version"]).output().is_ok_and(|output| output.status.success());
    if !has {
        bail!("libFuzzer needs `rustup toolchain install nightly` and `cargo install cargo-fuzz --locked`");
    }
    let dir = place.to_str().context("the target folder's path is not UTF-8")?;
    let status = nightly(&["fuzz", "build", "--fuzz-dir", CRATE_DIR, "--target-dir", dir, target]).status();
    ensure!(status.context("start cargo fuzz")?.success(), "{target} could not be built");
    Ok(place.join(format!("{}-unknown-linux-gnu/release/{target}", std::env::consts::ARCH)))
}

struct Search<'a> {
    program: &'a Path,
    place: &'a Path,
    target: &'a str,
}

impl Search<'_> {
    fn run(&self, seconds: u64) -> Result<Value> {
        let kept = cargo::root().join("tests/corpus").join(self.target);
        let [found, samples, crashes, minimised] =
            ["corpus", "samples", "crashes", "minimised"].map(|name| self.place.join(name).join(self.target));
        for dir in [&found, &samples, &crashes, &minimised] {
            fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
        }
        self.write_samples(&samples)?;

        let log = self.place.join(format!("{}.log", self.target));
        let mut search = self.program(&log)?;
        search.args([&found, &kept, &samples]).arg(format!("-max_total_time={seconds}"));
        search.arg(format!("-artifact_prefix={}/", crashes.display())).arg("-print_final_stats=1");
        let status = ended(search.spawn()?, Duration::from_secs(seconds) + MARGIN)?;
        let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        let crashes = files(&crashes)?;
        if !status.success() && crashes.is_empty() {
            bail!("{} ended with {status}: see {}", self.target, log.display());
        }

        // Only what adds coverage is begun with next time.
        fs::remove_dir_all(&minimised).and_then(|()| fs::create_dir(&minimised))?;
        let mut merge = self.program(&self.place.join(format!("{}.merge.log", self.target)))?;
        merge.arg("-merge=1").args([&minimised, &found]);
        if ended(merge.spawn()?, MARGIN)?.success() {
            fs::remove_dir_all(&found).and_then(|()| fs::rename(&minimised, &found))?;
        }
        Ok(json!({
            "target": self.target,
            "seconds": seconds,
            "executions": figure(&text, "stat::number_of_executed_units:"),
            "coverage": figure(&text, "cov:"),
            "features": figure(&text, "ft:"),
            "peakRssMib": figure(&text, "stat::peak_rss_mb:"),
            "corpus": files(&found)?.len(),
            "crashes": crashes,
        }))
    }

    /// Valid documents, by the target itself.
    fn write_samples(&self, dir: &Path) -> Result<()> {
        let input = dir.join("empty");
        File::create(&input).with_context(|| format!("make {}", input.display()))?;
        let log = self.place.join(format!("{}.samples.log", self.target));
        let mut write = self.program(&log)?;
        write.arg(&input).env("SVC_FUZZ_SAMPLES", dir);
        let status = ended(write.spawn()?, MARGIN)?;
        ensure!(status.success(), "{} wrote no samples: see {}", self.target, log.display());
        Ok(())
    }

    fn program(&self, log: &Path) -> Result<Command> {
        let log = File::create(log).with_context(|| format!("make {}", log.display()))?;
        let mut command = Command::new(self.program);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).args([
            format!("-max_len={MAX_INPUT_BYTES}"),
            format!("-timeout={INPUT_TIMEOUT_SECONDS}"),
            format!("-rss_limit_mb={MAX_RSS_MIB}"),
            format!("-malloc_limit_mb={MAX_ALLOCATION_MIB}"),
        ]);
        Ok(command)
    }
}

/// Waits, and ends the program where it takes longer.
fn ended(mut child: Child, timeout: Duration) -> Result<ExitStatus> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            bail!("the program did not end within {} s", timeout.as_secs());
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| format!("read {}", dir.display()))? {
        all.push(entry?.path());
    }
    all.sort();
    Ok(all)
}

/// The number after the last mention of a figure.
fn figure(log: &str, name: &str) -> Option<u64> {
    let (_, after) = log.rsplit_once(&format!("{name} "))?;
    after.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_the_last_of_a_log() {
        let log = "#2\tINITED cov: 10 ft: 11 corp: 1/1b\n#9\tDONE   cov: 20 ft: 21 corp: 2/9b\n\
            stat::number_of_executed_units: 4242\nstat::peak_rss_mb:              97\n";
        assert_eq!(figure(log, "cov:"), Some(20));
        assert_eq!(figure(log, "stat::number_of_executed_units:"), Some(4242));
        assert_eq!(figure(log, "stat::peak_rss_mb:"), Some(97));
        assert_eq!(figure(log, "stat::absent:"), None);
    }

    #[test]
    fn targets_are_the_binaries_of_the_manifest() {
        let manifest =
            "[package]\nname = \"p\"\n[[bin]]\nname = \"one\"\npath = \"x\"\n\n[[bin]]\nname = \"two\"\n";
        assert_eq!(targets_in(manifest), ["one", "two"]);
    }
}
