//! A Debian root to install packages in, made once by mmdebstrap and unpacked for each use.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::child::{self, AtExit};
use crate::fetch;

const SUITE: &str = "bookworm";
const INCLUDED: &str = "systemd,man-db";
const MIRROR: &str = "http://deb.debian.org/debian";
const MAKE: Duration = Duration::from_secs(900);
pub const RUN: Duration = Duration::from_secs(180);
/// What makes it, as Debian names the packages.
const TOOLS: [(&str, &str); 1] = [("mmdebstrap", "mmdebstrap")];

/// A root of its own; gone with the value.
pub struct Root {
    dir: TempDir,
}

impl Root {
    pub fn unpack() -> Result<Self> {
        ensure!(nix::unistd::geteuid().is_root(), "installing packages in a root needs root");
        let archive = archive()?;
        let dir = tempfile::Builder::new().prefix("svc-root-").tempdir()?;
        child::remove_on_exit(dir.path());
        let mut tar = Command::new("tar");
        // A root that is made without devices cannot be misused for them.
        tar.args(["--extract", "--numeric-owner", "--exclude=./dev/*", "--file"]).arg(archive);
        tar.arg("--directory").arg(dir.path());
        child::run(tar, MAKE)?;
        Ok(Self { dir })
    }

    pub fn path(&self, inside: &str) -> PathBuf {
        self.dir.path().join(inside.trim_start_matches('/'))
    }

    fn command<A: AsRef<OsStr>>(&self, user: &str, words: &[A]) -> Command {
        let mut command = Command::new("unshare");
        // /proc for what asks for it, in a namespace that ends with the command.
        let script = "mount -t proc proc \"$1/proc\" && mount --bind /dev \"$1/dev\" && root=$1 user=$2 && shift 2 && \
                      exec chroot --userspec=\"$user\" \"$root\" \"$@\"";
        command.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]);
        command.arg(self.dir.path()).arg(user).args(words).env_clear();
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("DEBIAN_FRONTEND", "noninteractive");
        command.env("LC_ALL", "C.UTF-8");
        command
    }

    /// Runs a command as root inside; gives what it printed, on both outputs.
    pub fn run<A: AsRef<OsStr>>(&self, words: &[A]) -> Result<String> {
        self.run_as("root:root", words)
    }

    pub fn run_as<A: AsRef<OsStr>>(&self, user: &str, words: &[A]) -> Result<String> {
        let mut command = self.command(user, words);
        command.current_dir("/");
        let words: Vec<_> = words.iter().map(|word| word.as_ref().to_string_lossy().into_owned()).collect();
        child::run(command, RUN).with_context(|| format!("in the root: {}", words.join(" ")))
    }

    /// Starts a command inside, whose outputs go to `log`.
    pub fn spawn<A: AsRef<OsStr>>(&self, user: &str, words: &[A], log: &Path) -> Result<Child> {
        let out = std::fs::File::create(log)?;
        let mut command = self.command(user, words);
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let child = command.spawn()?;
        child::kill_on_exit(child.id(), AtExit::Kill);
        Ok(child)
    }

    /// Copies a file to the root's /root.
    pub fn bring(&self, file: &Path) -> Result<String> {
        let name = file.file_name().context("a file")?.to_string_lossy().into_owned();
        std::fs::copy(file, self.path("root").join(&name))?;
        Ok(format!("/root/{name}"))
    }
}

fn archive() -> Result<PathBuf> {
    let name = format!("debian-{SUITE}-{}", INCLUDED.replace(',', "-"));
    let dir = fetch::once(&fetch::target_dir(), &name, |dir| {
        install_missing()?;
        println!("deb: making a Debian root, once");
        let mut make = Command::new("mmdebstrap");
        make.args(["--variant=minbase", &format!("--include={INCLUDED}"), SUITE]);
        make.arg(dir.join("root.tar")).arg(MIRROR);
        child::run(make, MAKE).map(drop)
    })?;
    Ok(dir.join("root.tar"))
}

fn install_missing() -> Result<()> {
    for (program, package) in TOOLS {
        if super::has(program) {
            continue;
        }
        let mut update = Command::new("apt-get");
        update.args(["-o", "DPkg::Lock::Timeout=300", "update", "-qq"]);
        child::run(update, MAKE)?;
        let mut install = Command::new("apt-get");
        install.args(["-o", "DPkg::Lock::Timeout=300", "install", "-y", "--no-install-recommends", package]);
        child::run(install, MAKE).with_context(|| format!("install {package}"))?;
    }
    Ok(())
}
