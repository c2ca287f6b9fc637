//! Installs Debian packages on this machine.

use std::env;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::child;

const TIMEOUT: Duration = Duration::from_secs(600);

/// Installs packages. The error begins with `reason` if this user or system cannot install them.
///
/// # Errors
/// Fails without root or apt-get, or if apt-get fails.
pub fn install(packages: &[&str], reason: &str) -> Result<()> {
    let names = packages.join(" ");
    let can_install = nix::unistd::geteuid().is_root() && is_in_path("apt-get");
    ensure!(can_install, "{reason}: run as root on Debian, or install {names}");
    println!("setup: installing {names}");
    let install_args = [&["install", "--yes", "--no-install-recommends"], packages].concat();
    // Package lists may be missing or outdated.
    run_apt_get(&install_args).or_else(|_| run_apt_get(&["update"]).and_then(|()| run_apt_get(&install_args)))
}

fn run_apt_get(args: &[&str]) -> Result<()> {
    let mut command = Command::new("apt-get");
    command.args(["--quiet=2", "-o", "DPkg::Lock::Timeout=300"]).args(args);
    command.env("DEBIAN_FRONTEND", "noninteractive");
    child::run(command, TIMEOUT).with_context(|| format!("apt-get {}", args.join(" ")))?;
    Ok(())
}

/// Whether a program is in `PATH`, or in a system administration directory.
pub fn is_in_path(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<_> = env::split_paths(&path).collect();
    dirs.extend(["/usr/sbin", "/sbin"].map(|dir| Path::new(dir).to_owned()));
    dirs.iter().any(|dir| dir.join(program).is_file())
}

/// Whether a Debian package is installed.
pub fn is_installed(package: &str) -> bool {
    let info_dir = Path::new("/var/lib/dpkg/info");
    [format!("{package}.list"), format!("{package}:amd64.list")]
        .iter()
        .any(|list| info_dir.join(list).exists())
}
