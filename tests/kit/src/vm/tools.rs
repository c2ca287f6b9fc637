//! Programs that a lab needs, from Debian packages.

use std::env;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::child;

/// Programs with their packages. The order matters: QEMU's own `qemu-img` replaces another version.
const PROGRAMS: [(&str, &str); 7] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("qemu-img", "qemu-utils"),
    ("mmdebstrap", "mmdebstrap"),
    ("podman", "podman"),
    ("genisoimage", "genisoimage"),
    ("ssh", "openssh-client"),
    ("mkfs.ext4", "e2fsprogs"),
];
const INSTALL_TIMEOUT: Duration = Duration::from_secs(600);

/// Installs missing programs as root on Debian; elsewhere, a missing program is an error.
///
/// # Errors
/// Fails if a missing program cannot be installed.
pub fn ensure_installed() -> Result<()> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "the lab needs root: it builds a Debian disk with package tools"
    );
    let missing = || PROGRAMS.into_iter().find(|(program, _)| !is_in_path(program));
    if missing().is_none() {
        return Ok(());
    }
    if !is_in_path("apt-get") {
        let names: Vec<&str> =
            PROGRAMS.iter().map(|(program, _)| *program).filter(|p| !is_in_path(p)).collect();
        bail!("missing programs, and no apt-get to install them: {}", names.join(", "));
    }
    apt(&["update"])?;
    while let Some((program, package)) = missing() {
        println!("lab: installing {package}");
        apt(&["install", "--yes", "--no-install-recommends", package])?;
        ensure!(is_in_path(program), "{package} is installed, but {program} is still missing");
    }
    Ok(())
}

fn apt(args: &[&str]) -> Result<()> {
    let mut command = Command::new("apt-get");
    command.args(["--quiet", "--quiet", "-o", "DPkg::Lock::Timeout=300"]).args(args);
    command.env("DEBIAN_FRONTEND", "noninteractive");
    child::run(command, INSTALL_TIMEOUT).with_context(|| format!("apt-get {}", args.join(" ")))?;
    Ok(())
}

fn is_in_path(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<_> = env::split_paths(&path).collect();
    dirs.extend(["/usr/sbin", "/sbin"].map(|dir| Path::new(dir).to_owned()));
    dirs.iter().any(|dir| dir.join(program).is_file())
}
