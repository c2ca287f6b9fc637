//! The programs that a lab needs, from Debian's packages.

use std::env;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::child;

/// A program, and the package that has it. In this order: QEMU's own `qemu-img` replaces another version's.
const PROGRAMS: [(&str, &str); 7] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("qemu-img", "qemu-utils"),
    ("mmdebstrap", "mmdebstrap"),
    ("podman", "podman"),
    ("genisoimage", "genisoimage"),
    ("ssh", "openssh-client"),
    ("mkfs.ext4", "e2fsprogs"),
];
const INSTALL: Duration = Duration::from_secs(600);

/// Installs what is missing, as root on a Debian; anywhere else what is missing is an error that names it.
///
/// # Errors
/// When something is missing and cannot be installed.
pub fn ensure_there() -> Result<()> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "the lab needs root: it makes a Debian disk with its package tools"
    );
    let missing = || PROGRAMS.into_iter().find(|(program, _)| !is_there(program));
    if missing().is_none() {
        return Ok(());
    }
    if !is_there("apt-get") {
        let names: Vec<&str> =
            PROGRAMS.iter().map(|(program, _)| *program).filter(|p| !is_there(p)).collect();
        bail!("these programs are missing, and there is no apt-get to install them: {}", names.join(", "));
    }
    apt(&["update"])?;
    while let Some((program, package)) = missing() {
        println!("lab: installing {package}");
        apt(&["install", "--yes", "--no-install-recommends", package])?;
        ensure!(is_there(program), "{package} was installed, but there is no {program}");
    }
    Ok(())
}

fn apt(args: &[&str]) -> Result<()> {
    let mut command = Command::new("apt-get");
    command.args(["--quiet", "--quiet", "-o", "DPkg::Lock::Timeout=300"]).args(args);
    command.env("DEBIAN_FRONTEND", "noninteractive");
    child::run(command, INSTALL).with_context(|| format!("apt-get {}", args.join(" ")))?;
    Ok(())
}

fn is_there(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<_> = env::split_paths(&path).collect();
    dirs.extend(["/usr/sbin", "/sbin"].map(|dir| Path::new(dir).to_owned()));
    dirs.iter().any(|dir| dir.join(program).is_file())
}
