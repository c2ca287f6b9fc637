//! The Debian packages: `packaging/` as it is installed, around one binary. The same inputs give the same bytes.

pub mod check;
mod root;
pub mod sbom;
mod stage;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::child;

pub const PACKAGES: [&str; 2] = ["svc-platform", "svc-host"];
const DEADLINE: Duration = Duration::from_secs(300);

/// What packages are made of.
#[derive(Debug, Clone)]
pub struct Options {
    /// The binary that they carry.
    pub svc: PathBuf,
    /// The source tree: `packaging/`, `systemd/`, `LICENSE`, `CHANGELOG.md`.
    pub source: PathBuf,
    pub version: String,
    pub out: PathBuf,
}

impl Options {
    /// The version of the source tree, and of the commit that it is at.
    pub fn new(svc: PathBuf, source: PathBuf, out: PathBuf) -> Self {
        Self { svc, source, version: env!("CARGO_PKG_VERSION").to_owned(), out }
    }
}

/// Builds both packages, and the bill of materials beside them.
///
/// # Errors
/// When something of `packaging/` is missing, or dpkg-deb fails.
pub fn build(options: &Options) -> Result<Vec<PathBuf>> {
    ensure!(has("dpkg-deb"), "dpkg-deb is not here: `apt-get install dpkg` (it is part of every Debian)");
    std::fs::create_dir_all(&options.out)?;
    let epoch = source_date_epoch(&options.source)?;
    let bill = sbom::generate(&options.source, &options.svc)?;
    std::fs::write(options.out.join("svc.cdx.json"), &bill)?;
    PACKAGES.iter().map(|name| package(options, name, &bill, &epoch)).collect()
}

fn package(options: &Options, name: &str, bill: &str, epoch: &str) -> Result<PathBuf> {
    let stage = tempfile::Builder::new().prefix("svc-deb-").tempdir()?;
    stage::fill(stage.path(), options, name, bill, epoch)?;
    let arch = architecture()?;
    let deb = options.out.join(format!("{name}_{}_{arch}.deb", options.version));
    let mut build = Command::new("dpkg-deb");
    // gzip of one thread: what xz makes depends on the number of threads.
    build.args(["--build", "--root-owner-group", "-Zgzip", "-z9"]).arg(stage.path()).arg(&deb);
    build.env("SOURCE_DATE_EPOCH", epoch);
    child::run(build, DEADLINE).with_context(|| format!("build {name}"))?;
    Ok(deb)
}

fn architecture() -> Result<String> {
    let mut ask = Command::new("dpkg");
    ask.arg("--print-architecture");
    Ok(child::run(ask, DEADLINE)?.trim().to_owned())
}

/// The moment that all files of a package are dated: of the commit, where nothing else is said.
fn source_date_epoch(source: &Path) -> Result<String> {
    if let Ok(epoch) = std::env::var("SOURCE_DATE_EPOCH") {
        return Ok(epoch);
    }
    let mut ask = Command::new("git");
    ask.args(["log", "-1", "--format=%ct"]).current_dir(source);
    Ok(child::run(ask, DEADLINE).unwrap_or_else(|_| "0".to_owned()).trim().to_owned())
}

fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}
