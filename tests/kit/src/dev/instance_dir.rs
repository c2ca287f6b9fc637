//! A running instance's directory: `dev.json`, the operator's credential, and a link to `svcctl`.
//!
//! A file lock determines which instance owns the directory. If an instance is killed, its lock is released, and the
//! next instance replaces its files. Other files in the directory are never removed.

use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::service_info::ServiceInfo;
use crate::scenario::stack::Stack;

const INFO_FILE: &str = "dev.json";
const OPERATOR_FILE: &str = "operator.env";
const SVCCTL_LINK: &str = "svcctl";

/// Ownership of the directory, released on drop.
#[derive(Debug)]
pub struct DevLock {
    dir: PathBuf,
    _lock: File,
}

/// The error returned when another instance owns the directory.
#[derive(Debug)]
pub struct AlreadyRunning {
    pid: Option<u32>,
    /// The other instance's platform and router URLs; `None` while it is starting or stopping.
    urls: Option<(String, String)>,
    info: PathBuf,
}

/// Paths of the files that [`DevLock::publish`] has written.
#[derive(Debug)]
pub(super) struct PublishedFiles {
    pub(super) info: PathBuf,
    pub(super) operator: PathBuf,
}

impl DevLock {
    /// # Errors
    /// Returns [`AlreadyRunning`] if another instance owns the directory. Also fails if the directory or its lock file
    /// cannot be created or written.
    pub fn acquire(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let dir = dir.canonicalize()?;
        // The lock file is next to the directory, because the directory is removed on drop.
        let path = dir.with_added_extension("lock");
        let mut lock = File::options().read(true).write(true).create(true).truncate(false).open(&path)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(AlreadyRunning::read(&dir, lock).into()),
            Err(TryLockError::Error(error)) => return Err(error).context(path.display().to_string()),
        }
        lock.set_len(0)?;
        write!(lock, "{}", std::process::id())?;
        let dev_lock = Self { dir, _lock: lock };
        dev_lock.remove_files();
        Ok(dev_lock)
    }

    pub(super) fn publish(
        &self,
        info: &ServiceInfo,
        env: &[(String, String)],
        svc: &Path,
    ) -> Result<PublishedFiles> {
        fs::create_dir_all(&self.dir)?;
        let files = PublishedFiles { info: self.dir.join(INFO_FILE), operator: self.dir.join(OPERATOR_FILE) };
        symlink(svc, self.dir.join(SVCCTL_LINK)).context("cannot link svcctl")?;
        self.write(&files.operator, &self.render_operator_script(env))?;
        // Written last, so that programs that wait for this file find the others.
        let mut text = serde_json::to_string_pretty(info)?;
        text.push('\n');
        self.write(&files.info, &text)?;
        Ok(files)
    }

    /// Renders a script that a shell sources to get the operator's environment, with `svcctl` in `PATH`.
    fn render_operator_script(&self, env: &[(String, String)]) -> String {
        let exports = env.iter().map(|(name, value)| format!("export {name}={}\n", shell_quote(value)));
        let dir = shell_quote(&self.dir.display().to_string());
        exports.chain([format!("export PATH={dir}:\"$PATH\"\n")]).collect()
    }

    fn write(&self, path: &Path, text: &str) -> Result<()> {
        let staged = path.with_added_extension("new");
        let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&staged)?;
        file.write_all(text.as_bytes())?;
        fs::rename(&staged, path).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Removes the published files, before the services stop.
    pub(super) fn unpublish(&self) {
        self.remove_files();
    }

    fn remove_files(&self) {
        for name in [INFO_FILE, OPERATOR_FILE, SVCCTL_LINK] {
            fs::remove_file(self.dir.join(name)).ok();
        }
    }
}

impl Drop for DevLock {
    fn drop(&mut self) {
        self.remove_files();
        // Fails, as intended, if the directory contains other files.
        fs::remove_dir(&self.dir).ok();
    }
}

impl AlreadyRunning {
    fn read(dir: &Path, mut lock: File) -> Self {
        let mut pid = String::new();
        lock.rewind().and_then(|()| lock.read_to_string(&mut pid)).ok();
        let info = dir.join(INFO_FILE);
        let published: Option<ServiceInfo> =
            fs::read(&info).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let urls = published.map(|info| (info.platform_url, info.router_url));
        Self { pid: pid.trim().parse().ok(), urls, info }
    }
}

impl std::error::Error for AlreadyRunning {}

impl fmt::Display for AlreadyRunning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.urls {
            Some((platform, router)) => write!(
                f,
                "`cargo xtask dev` is already running: platform {platform}, router {router} (all values: {})",
                self.info.display()
            )?,
            None => write!(f, "`cargo xtask dev` is starting or stopping")?,
        }
        if let Some(pid) = self.pid {
            write!(f, "\n  next: use it, or stop it with Ctrl-C or `kill {pid}`")?;
        }
        write!(f, "; `--dir DIR` starts another instance")
    }
}

/// Quotes a word for a shell.
pub(super) fn shell_quote(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Returns the path of the running PostgreSQL's own `psql`. Without one, returns `psql`, which is looked up in `PATH`.
pub(super) fn psql_command(stack: &Stack) -> String {
    let bundled = stack.pg.dir().join("psql");
    if bundled.exists() { shell_quote(&bundled.display().to_string()) } else { "psql".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acquire_is_exclusive_and_replaces_stale_files() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("dev");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(INFO_FILE), r#"{"platformUrl": "stale"}"#).unwrap();
        let first = DevLock::acquire(&dir).unwrap();
        assert!(!dir.join(INFO_FILE).exists(), "the stale file was not removed");
        let error = DevLock::acquire(&dir).unwrap_err().to_string();
        assert!(error.contains(&format!("kill {}", std::process::id())), "{error}");
        drop(first);
        assert!(!dir.exists());
        drop(DevLock::acquire(&dir).unwrap());
    }

    #[test]
    fn drop_keeps_other_files() {
        let dir = tempfile::tempdir().unwrap();
        let notes = dir.path().join("notes.txt");
        fs::write(&notes, "mine").unwrap();
        drop(DevLock::acquire(dir.path()).unwrap());
        assert!(notes.exists());
        fs::remove_file(dir.path().with_added_extension("lock")).unwrap();
    }

    #[test]
    fn shell_quote_quotes_only_when_needed() {
        assert_eq!(shell_quote("http://127.0.0.1:1/a"), "http://127.0.0.1:1/a");
        assert_eq!(shell_quote("it's"), r"'it'\''s'");
        assert_eq!(shell_quote(""), "''");
    }
}
