//! Debian packages that are installed on this machine.

use std::env;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::child;

const TIMEOUT: Duration = Duration::from_secs(600);

/// Installs packages; `reason` is named if only another user or another system could.
///
/// # Errors
/// Fails without root or apt-get, and if apt-get does.
pub fn install(packages: &[&str], reason: &str) -> Result<()> {
    let names = packages.join(" ");
    let can_install = nix::unistd::geteuid().is_root() && is_in_path("apt-get");
    ensure!(can_install, "{reason} ({names}): only root on Debian can install it");
    println!("setup: installing {names}");
    let install = [&["install", "--yes", "--no-install-recommends"], packages].concat();
    // Package lists may be missing or outdated.
    apt(&install).or_else(|_| apt(&["update"]).and_then(|()| apt(&install)))
}

fn apt(args: &[&str]) -> Result<()> {
    let mut command = Command::new("apt-get");
    command.args(["--quiet=2", "-o", "DPkg::Lock::Timeout=300"]).args(args);
    command.env("DEBIAN_FRONTEND", "noninteractive");
    child::run(command, TIMEOUT).with_context(|| format!("apt-get {}", args.join(" ")))?;
    Ok(())
}

/// Whether a program is in `PATH` or among those of the administrator.
pub fn is_in_path(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<_> = env::split_paths(&path).collect();
    dirs.extend(["/usr/sbin", "/sbin"].map(|dir| Path::new(dir).to_owned()));
    dirs.iter().any(|dir| dir.join(program).is_file())
}

/// Whether a Debian package is installed.
pub fn is_installed(package: &str) -> bool {
    let lists = Path::new("/var/lib/dpkg/info");
    [format!("{package}.list"), format!("{package}:amd64.list")].iter().any(|list| lists.join(list).exists())
}
