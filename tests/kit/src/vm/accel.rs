//! Detects whether KVM works by booting a kernel, because `/dev/kvm` may exist even if KVM cannot run one.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::image::Image;
use crate::child::{self, AtExit};

/// With KVM, the kernel panics within a second.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// How the virtual processors are executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accel {
    Kvm,
    /// Emulation, ten to twenty times slower.
    Tcg,
}

impl Accel {
    /// Returns `Kvm` if KVM can boot the image's kernel, and `Tcg` otherwise.
    ///
    /// # Errors
    /// Fails if QEMU cannot be started.
    pub fn probe(image: &Image) -> Result<Self> {
        if !Path::new("/dev/kvm").exists() {
            return Ok(Self::Tcg);
        }
        // Without a root file system the kernel panics, and QEMU exits instead of rebooting.
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args([
            "-accel",
            "kvm",
            "-cpu",
            "host",
            "-m",
            "512",
            "-display",
            "none",
            "-no-reboot",
            "-nic",
            "none",
        ]);
        qemu.arg("-kernel").arg(image.kernel()).args(["-append", "panic=-1"]);
        qemu.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut qemu = qemu.spawn().context("cannot start qemu-system-x86_64")?;
        child::kill_on_exit(qemu.id(), AtExit::Kill);
        let status = child::wait_until(&mut qemu, Instant::now() + PROBE_TIMEOUT);
        if status.is_none() {
            qemu.kill().ok();
            qemu.wait().ok();
        }
        child::unregister(qemu.id());
        Ok(if status.is_some_and(|status| status.success()) { Self::Kvm } else { Self::Tcg })
    }

    pub(super) fn args(self) -> [&'static str; 4] {
        match self {
            Self::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Self::Tcg => ["-accel", "tcg,thread=multi", "-cpu", "max"],
        }
    }
}
