//! A Debian chroot in which packages are installed; created once with mmdebstrap, and unpacked for each use.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::child::{self, AtExit};
use crate::fetch;

const SUITE: &str = "bookworm";
const EXTRA_PACKAGES: &str = "systemd,man-db";
const MIRROR: &str = "http://deb.debian.org/debian";
const BUILD_TIMEOUT: Duration = Duration::from_secs(900);
pub const RUN_TIMEOUT: Duration = Duration::from_secs(180);
/// Programs that are needed to build the chroot, with their Debian packages.
const TOOLS: [(&str, &str); 1] = [("mmdebstrap", "mmdebstrap")];

/// An unpacked chroot, deleted on drop.
pub struct Chroot {
    dir: TempDir,
}

impl Chroot {
    pub fn unpack() -> Result<Self> {
        ensure!(
            nix::unistd::geteuid().is_root(),
            "installing packages in a Debian chroot requires the root user"
        );
        let archive = locate_or_build_archive()?;
        let dir = tempfile::Builder::new().prefix("svc-root-").tempdir()?;
        child::remove_on_exit(dir.path());
        let mut tar = Command::new("tar");
        // Device nodes are omitted for safety; /dev is bind-mounted later.
        tar.args(["--extract", "--numeric-owner", "--exclude=./dev/*", "--file"]).arg(archive);
        tar.arg("--directory").arg(dir.path());
        child::run(tar, BUILD_TIMEOUT)?;
        Ok(Self { dir })
    }

    pub fn path(&self, inside: &str) -> PathBuf {
        self.dir.path().join(inside.trim_start_matches('/'))
    }

    fn command<A: AsRef<OsStr>>(&self, user: &str, args: &[A]) -> Command {
        let mut command = Command::new("unshare");
        // Mounts /proc and /dev in a namespace that ends with the command.
        let script = "mount -t proc proc \"$1/proc\" && mount --bind /dev \"$1/dev\" && root=$1 user=$2 && shift 2 && \
                      exec chroot --userspec=\"$user\" \"$root\" \"$@\"";
        command.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]);
        command.arg(self.dir.path()).arg(user).args(args).env_clear();
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("DEBIAN_FRONTEND", "noninteractive");
        command.env("LC_ALL", "C.UTF-8");
        command
    }

    /// Runs a command as the root user in the chroot and returns its output.
    pub fn run<A: AsRef<OsStr>>(&self, args: &[A]) -> Result<String> {
        self.run_as("root:root", args)
    }

    pub fn run_as<A: AsRef<OsStr>>(&self, user: &str, args: &[A]) -> Result<String> {
        let mut command = self.command(user, args);
        command.current_dir("/");
        let args: Vec<_> = args.iter().map(|arg| arg.as_ref().to_string_lossy().into_owned()).collect();
        child::run(command, RUN_TIMEOUT)
            .with_context(|| format!("a command failed in the Debian chroot: {}", args.join(" ")))
    }

    /// Starts a command in the chroot, with its output in `log`.
    pub fn spawn<A: AsRef<OsStr>>(&self, user: &str, args: &[A], log: &Path) -> Result<Child> {
        let out = std::fs::File::create(log)?;
        let mut command = self.command(user, args);
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let child = command.spawn()?;
        child::kill_on_exit(child.id(), AtExit::Kill);
        Ok(child)
    }

    /// Copies a file to `/root` in the chroot and returns its path there.
    pub fn copy_in(&self, file: &Path) -> Result<String> {
        let name = file.file_name().context("the path has no file name")?.to_string_lossy().into_owned();
        std::fs::copy(file, self.path("root").join(&name))?;
        Ok(format!("/root/{name}"))
    }
}

fn locate_or_build_archive() -> Result<PathBuf> {
    let name = format!("debian-{SUITE}-{}", EXTRA_PACKAGES.replace(',', "-"));
    let dir = fetch::locate_or_create(&fetch::target_dir(), &name, |dir| {
        install_missing_tools()?;
        println!("deb: creating a Debian chroot (only the first time)");
        let mut make = Command::new("mmdebstrap");
        make.args(["--variant=minbase", &format!("--include={EXTRA_PACKAGES}"), SUITE]);
        make.arg(dir.join("root.tar")).arg(MIRROR);
        child::run(make, BUILD_TIMEOUT).map(drop)
    })?;
    Ok(dir.join("root.tar"))
}

fn install_missing_tools() -> Result<()> {
    for (program, package) in TOOLS {
        if crate::apt::is_in_path(program) {
            continue;
        }
        let mut update = Command::new("apt-get");
        update.args(["-o", "DPkg::Lock::Timeout=300", "update", "-qq"]);
        child::run(update, BUILD_TIMEOUT)?;
        let mut install = Command::new("apt-get");
        install.args(["-o", "DPkg::Lock::Timeout=300", "install", "-y", "--no-install-recommends", package]);
        child::run(install, BUILD_TIMEOUT).with_context(|| format!("cannot install {package}"))?;
    }
    Ok(())
}
