//! `cargo xtask test`: runs the tests with nextest where it is installed, otherwise with cargo's own runner.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result};
use kit::long_tests::{self, Totals};
use kit::pg::RunServer;
use kit::{child, disk, skip};
use tempfile::TempDir;

use crate::cargo;

/// Free memory required for the temporary files of all tests: several times the usage of a run.
const MIN_FREE_MEMORY_BYTES: u64 = 8 << 30;

/// Environment variables for the tests: the files for skipped tests and figures, the directory for temporary files, and
/// the address of the database server.
type Variables = Vec<(&'static str, OsString)>;

/// Runs the tests whose names contain a filter (default: all), and lists those that were skipped. `long` adds the
/// ignored ones and writes the totals of their figures to `target/long/report.json`.
pub fn run(long: bool, filters: &[String]) -> Result<ExitCode> {
    // Built first, because compiling during the tests would use up their timeouts.
    cargo::run(&["build", "--workspace"])?;
    let runtime = tokio::runtime::Runtime::new().context("cannot start a runtime")?;
    let server = runtime.block_on(RunServer::start())?;
    let skipped = kit::fetch::target_dir().join("skipped-tests.txt");
    std::fs::write(&skipped, "").with_context(|| format!("cannot empty {}", skipped.display()))?;
    let mut variables: Variables =
        vec![(skip::SKIP_REPORT_VAR, std::path::absolute(&skipped)?.into_os_string())];
    let temporary = create_temp_dir()?;
    variables.push(("TMPDIR", temporary.path().into()));
    let (name, address) = server.variable();
    variables.push((name, address.into()));
    let result = if long { run_long(filters, variables) } else { run_tests(false, filters, variables) };
    drop(server);
    let skipped = std::fs::read_to_string(&skipped)?;
    skipped.lines().for_each(|line| println!("skipped: {line}"));
    result
}

/// Creates the directory for the temporary files of all tests, in memory if `TMPDIR` is not set and enough memory is
/// free. It is removed at the end, with any files that killed tests left behind. Its name is short, because the length
/// of Unix socket paths is limited.
fn create_temp_dir() -> Result<TempDir> {
    let chosen = std::env::var_os("TMPDIR").map(PathBuf::from);
    let parent = chosen.or_else(|| disk::in_memory_dir(MIN_FREE_MEMORY_BYTES).map(Path::to_owned));
    let parent = parent.unwrap_or_else(std::env::temp_dir);
    let temporary = tempfile::Builder::new().prefix("t").rand_bytes(5).tempdir_in(&parent);
    let temporary =
        temporary.with_context(|| format!("cannot create a directory in {}", parent.display()))?;
    child::remove_on_exit(temporary.path());
    Ok(temporary)
}

fn run_long(filters: &[String], mut variables: Variables) -> Result<ExitCode> {
    let dir = kit::fetch::target_dir().join("long");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let (figures, report) = (dir.join("figures.jsonl"), dir.join("report.json"));
    std::fs::write(&figures, "").with_context(|| format!("cannot empty {}", figures.display()))?;
    variables.push((long_tests::LONG_REPORT_VAR, std::path::absolute(&figures)?.into_os_string()));
    let exit_code = run_tests(true, filters, variables)?;
    let totals = Totals::collect(&figures, &report)?;
    println!("{}\nwritten to {}", totals.summary(), report.display());
    Ok(if totals.lost == 0 { exit_code } else { ExitCode::FAILURE })
}

/// Runs the tests with the available runner.
fn run_tests(long: bool, filters: &[String], variables: Variables) -> Result<ExitCode> {
    if cargo::has_subcommand("nextest") {
        let mut nextest = cargo::command(&["nextest", "run", "--workspace", "--no-fail-fast"]);
        if long {
            nextest.args(["--run-ignored", "all"]);
        }
        nextest.args(filters).envs(variables);
        return Ok(run_command(&mut nextest)?.0);
    }
    let mut plain = cargo::command(&["test", "--workspace", "--no-fail-fast", "--"]);
    if long {
        plain.arg("--include-ignored");
    }
    plain.args(filters).envs(variables).stdout(Stdio::piped());
    let (exit_code, summary) = run_command(&mut plain)?;
    println!("{summary}");
    Ok(exit_code)
}

/// Runs the command, forwards its output, and adds up the counts in the result lines of cargo's runner.
fn run_command(command: &mut Command) -> Result<(ExitCode, String)> {
    use std::io::{BufRead, BufReader};
    // If the log is truncated, backtraces would displace the messages of failed tests.
    command.env("RUST_BACKTRACE", "0");
    let mut child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
    let (mut passed, mut failed) = (0, 0);
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            let line = line?;
            println!("{line}");
            passed += parse_count(&line, " passed");
            failed += parse_count(&line, " failed");
        }
    }
    let exit_code = if child.wait()?.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    Ok((exit_code, format!("{passed} passed, {failed} failed")))
}

/// Returns the number before ` passed` or ` failed` in `test result: ok. 3 passed; 0 failed; …`.
fn parse_count(line: &str, label: &str) -> u64 {
    let Some(result) = line.strip_prefix("test result: ") else { return 0 };
    let before = result.split_once(label).map(|(before, _)| before);
    before.and_then(|before| before.rsplit(' ').next()?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::parse_count;

    #[test]
    fn parse_count_reads_result_lines_only() {
        let line = "test result: FAILED. 31 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out";
        assert_eq!((parse_count(line, " passed"), parse_count(line, " failed")), (31, 2));
        assert_eq!(parse_count("a test printed 7 passed; 1 failed", " passed"), 0);
    }
}
