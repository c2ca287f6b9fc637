//! Whether KVM can be used: the device may be there and still not run a kernel, so a kernel is started with it.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::image::Image;
use crate::child::{self, AtExit};

/// With KVM, a kernel comes to its panic within a second.
const PROBE: Duration = Duration::from_secs(10);

/// What runs the machines' processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accel {
    Kvm,
    /// Emulation, ten to twenty times slower.
    Tcg,
}

impl Accel {
    /// # Errors
    /// When QEMU cannot be started at all.
    pub fn probe(image: &Image) -> Result<Self> {
        if !Path::new("/dev/kvm").exists() {
            return Ok(Self::Tcg);
        }
        // Without a root the kernel panics, and QEMU ends instead of the reboot that follows.
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
        let mut qemu = qemu.spawn().context("start qemu-system-x86_64")?;
        child::kill_on_exit(qemu.id(), AtExit::Kill);
        let end = child::wait_until(&mut qemu, Instant::now() + PROBE);
        if end.is_none() {
            qemu.kill().ok();
            qemu.wait().ok();
        }
        child::unregister(qemu.id());
        Ok(if end.is_some_and(|status| status.success()) { Self::Kvm } else { Self::Tcg })
    }

    pub(super) fn args(self) -> [&'static str; 4] {
        match self {
            Self::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Self::Tcg => ["-accel", "tcg,thread=multi", "-cpu", "max"],
        }
    }
}
