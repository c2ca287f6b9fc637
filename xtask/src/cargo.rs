//! Runs cargo in the workspace root.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(PathBuf::new, Path::to_owned)
}

/// Returns a command for the cargo that started this process, in the workspace root, without the variables that cargo
/// sets for the current package.
pub fn command(args: &[&str]) -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(args).current_dir(root());
    // Cargo describes the current package in these variables. If they were set, switching between plain cargo and xtask
    // would rerun the build scripts that read them, and rebuild all crates that depend on those scripts' packages.
    for (name, _) in std::env::vars_os() {
        let package_prefixes = ["CARGO_MANIFEST_", "CARGO_PKG_", "CARGO_BIN_", "CARGO_CRATE_"];
        if name.to_str().is_some_and(|name| package_prefixes.iter().any(|prefix| name.starts_with(prefix))) {
            command.env_remove(&name);
        }
    }
    command
}

/// Returns the command that builds and runs a program in the workspace. xtask does not depend on the program, so it is
/// compiled only for the xtask commands that need it.
pub fn program_command(name: &str) -> Command {
    command(&["run", "--quiet", "--bin", name, "--"])
}

/// Replaces this process with the command, so that signals reach the program.
pub fn exec(mut command: Command) -> Result<ExitCode> {
    Err(command.exec()).with_context(|| format!("cannot start {command:?}"))
}

pub fn run(args: &[&str]) -> Result<()> {
    run_checked(command(args))
}

/// Runs a command of cargo or of one of its tools. Returns an error unless it succeeds.
pub fn run_checked(mut command: Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    let program = Path::new(command.get_program()).file_name().unwrap_or_default();
    let words = std::iter::once(program).chain(command.get_args()).map(OsStr::to_string_lossy);
    ensure!(status.success(), "`{}` failed: {status}", words.collect::<Vec<_>>().join(" "));
    Ok(())
}

/// Returns whether a cargo subcommand is installed.
pub fn has_subcommand(subcommand: &str) -> bool {
    command(&[subcommand, "--version"]).output().is_ok_and(|output| output.status.success())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Returns the dependencies, with their features, for the given members and kinds of edges: lines such as
    /// `serde v1.0.0 [default,std]`.
    fn list_dependencies(members: &[&str], edges: &str) -> BTreeSet<String> {
        let tree_args = ["tree", "--offline", "--prefix", "none", "--format", "{p} [{f}]"];
        let output = command(&tree_args).args(["--edges", edges]).args(members).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let tree = String::from_utf8(output.stdout).unwrap();
        // "(*)" marks a repeated subtree.
        tree.lines().map(|line| line.trim_end_matches(" (*)").to_owned()).collect()
    }

    /// A dependency with different features is compiled again, as are all crates that depend on it.
    #[test]
    fn default_members_workspace_and_tests_share_compiled_crates() {
        let default_members = list_dependencies(&[], "normal,build");
        let workspace = list_dependencies(&["--workspace"], "normal,build");
        let tests = list_dependencies(&["--workspace"], "normal,build,dev");
        assert!(workspace.len() > 100, "{workspace:?}");
        let compiled_twice: Vec<&String> =
            default_members.difference(&workspace).chain(workspace.difference(&tests)).collect();
        assert!(compiled_twice.is_empty(), "{compiled_twice:#?}");
    }
}
