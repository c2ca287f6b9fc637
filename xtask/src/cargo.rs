//! Runs cargo in the root of the workspace.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(PathBuf::new, Path::to_owned)
}

/// Returns a command of the cargo that started this process, in the workspace root, with the environment of a shell.
pub fn command(args: &[&str]) -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(args).current_dir(root());
    // Cargo describes the current package in these variables. Build scripts of dependencies that read them would run
    // again, and all dependent crates would be rebuilt, whenever cargo is started directly after xtask, or the reverse.
    for (name, _) in std::env::vars_os() {
        let package_prefixes = ["CARGO_MANIFEST_", "CARGO_PKG_", "CARGO_BIN_", "CARGO_CRATE_"];
        if name.to_str().is_some_and(|name| package_prefixes.iter().any(|prefix| name.starts_with(prefix))) {
            command.env_remove(&name);
        }
    }
    command
}

/// Returns the command that builds and runs the program of a package. Only one xtask command needs it, so the others do
/// not compile it.
pub fn program(package: &str) -> Command {
    command(&["run", "--quiet", "--package", package, "--"])
}

/// Replaces this process, so that signals reach the program.
pub fn become_program(mut program: Command) -> Result<ExitCode> {
    Err(program.exec()).with_context(|| format!("start {program:?}"))
}

pub fn run(args: &[&str]) -> Result<()> {
    run_checked(command(args))
}

/// Runs a cargo command, and fails unless it succeeds.
pub fn run_checked(mut command: Command) -> Result<()> {
    let status = command.status().with_context(|| format!("start {command:?}"))?;
    let args = command.get_args().map(|arg| arg.to_string_lossy().into_owned()).collect::<Vec<_>>();
    ensure!(status.success(), "`cargo {}`: {status}", args.join(" "));
    Ok(())
}

/// Returns whether a cargo subcommand is installed.
pub fn has_subcommand(subcommand: &str) -> bool {
    command(&[subcommand, "--version"]).output().is_ok_and(|output| output.status.success())
}
