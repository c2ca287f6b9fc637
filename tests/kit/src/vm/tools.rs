//! Installs the programs that a lab needs, from Debian packages.

use anyhow::{Result, ensure};

use crate::apt::{self, is_in_path};

/// Programs with their packages. QEMU comes first, because installing it can replace a `qemu-img` of another version.
const PROGRAMS: [(&str, &str); 7] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("qemu-img", "qemu-utils"),
    ("mmdebstrap", "mmdebstrap"),
    ("podman", "podman"),
    ("genisoimage", "genisoimage"),
    ("ssh", "openssh-client"),
    ("mkfs.ext4", "e2fsprogs"),
];

/// Installs missing programs.
///
/// # Errors
/// Fails without root, or if a missing program cannot be installed.
pub fn ensure_installed() -> Result<()> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "the lab must run as root: it builds a Debian disk with package tools"
    );
    let missing = || PROGRAMS.into_iter().find(|(program, _)| !is_in_path(program));
    while let Some((program, package)) = missing() {
        apt::install(&[package], &format!("the lab needs {program}"))?;
        ensure!(is_in_path(program), "{package} is installed, but {program} is still missing");
    }
    Ok(())
}
