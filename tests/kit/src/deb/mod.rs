//! Builds the Debian packages from the files in `packaging/` and one binary. Builds are reproducible.

pub mod check;
mod chroot;
pub mod sbom;
mod stage;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::apt::is_in_path;
use crate::child;

pub const PACKAGES: [&str; 2] = ["svc-platform", "svc-host"];
const TIMEOUT: Duration = Duration::from_secs(300);

/// The inputs for a build.
#[derive(Debug, Clone)]
pub struct Options {
    /// The packaged binary.
    pub svc: PathBuf,
    /// The source tree, with `packaging/`, `systemd/`, `CHANGELOG.md` and `Cargo.lock`.
    pub source: PathBuf,
    pub version: String,
    pub out: PathBuf,
}

impl Options {
    /// Returns options with this workspace's version.
    pub fn new(svc: PathBuf, source: PathBuf, out: PathBuf) -> Self {
        Self { svc, source, version: env!("CARGO_PKG_VERSION").to_owned(), out }
    }
}

/// Builds both packages and the bill of materials.
///
/// # Errors
/// Fails if a source file is missing, if `SOURCE_DATE_EPOCH` is not a number, or if cargo, the packaged binary, dpkg or
/// dpkg-deb fails.
pub fn build(options: &Options) -> Result<Vec<PathBuf>> {
    ensure!(is_in_path("dpkg-deb"), "dpkg-deb is missing: run `apt-get install dpkg`");
    std::fs::create_dir_all(&options.out)?;
    let epoch = source_date_epoch(&options.source)?;
    let sbom_json = sbom::generate(&options.source, &options.svc)?;
    std::fs::write(options.out.join("svc.cdx.json"), &sbom_json)?;
    PACKAGES.iter().map(|name| build_package(options, name, &sbom_json, &epoch)).collect()
}

fn build_package(options: &Options, name: &str, sbom_json: &str, epoch: &str) -> Result<PathBuf> {
    let stage = tempfile::Builder::new().prefix("svc-deb-").tempdir()?;
    stage::fill_stage(stage.path(), options, name, sbom_json, epoch)?;
    let arch = architecture()?;
    let deb = options.out.join(format!("{name}_{}_{arch}.deb", options.version));
    let mut build = Command::new("dpkg-deb");
    // Single-threaded gzip: xz's output depends on the number of threads. Level 9 would take three times as long as
    // level 6, and save only half a percent.
    build.args(["--build", "--root-owner-group", "-Zgzip", "-z6"]).arg(stage.path()).arg(&deb);
    build.env("SOURCE_DATE_EPOCH", epoch);
    child::run(build, TIMEOUT).with_context(|| format!("cannot build {name}"))?;
    Ok(deb)
}

fn architecture() -> Result<String> {
    let mut dpkg = Command::new("dpkg");
    dpkg.arg("--print-architecture");
    Ok(child::run(dpkg, TIMEOUT)?.trim().to_owned())
}

/// Returns the timestamp for all packaged files: `SOURCE_DATE_EPOCH`, otherwise the last commit's, otherwise 0.
fn source_date_epoch(source: &Path) -> Result<String> {
    if let Ok(epoch) = std::env::var("SOURCE_DATE_EPOCH") {
        return Ok(epoch);
    }
    let mut git = Command::new("git");
    git.args(["log", "-1", "--format=%ct"]).current_dir(source);
    Ok(child::run(git, TIMEOUT).unwrap_or_else(|_| "0".to_owned()).trim().to_owned())
}
