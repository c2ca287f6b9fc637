//! The directory that says that one runs: `dev.json`, the operator's credential, a link to `svcctl`.
//!
//! A lock of the file system decides who has it, so that one that was killed is in nobody's way: the lock goes with the
//! process, and the files that it left are replaced. Only files that were made here are removed.

use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::handbill::Handbill;
use crate::story::stack::Stack;

const HANDBILL: &str = "dev.json";
const OPERATOR: &str = "operator.env";
const SVCCTL: &str = "svcctl";

/// The right to be the one; given up when dropped.
#[derive(Debug)]
pub struct Claim {
    dir: PathBuf,
    _lock: File,
}

/// Somebody else has it.
#[derive(Debug)]
pub struct Taken {
    pid: Option<u32>,
    /// What the other one published; nothing while it starts.
    urls: Option<(String, String)>,
    handbill: PathBuf,
}

/// Where the published files are.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) handbill: PathBuf,
    pub(super) operator: PathBuf,
}

impl Claim {
    /// # Errors
    /// [`Taken`], or when the directory cannot be made.
    pub fn acquire(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
        let dir = dir.canonicalize()?;
        // Beside the directory, because the directory goes.
        let path = dir.with_added_extension("lock");
        let mut lock = File::options().read(true).write(true).create(true).truncate(false).open(&path)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(Taken::read(&dir, lock).into()),
            Err(TryLockError::Error(error)) => return Err(error).context(path.display().to_string()),
        }
        lock.set_len(0)?;
        write!(lock, "{}", std::process::id())?;
        let claim = Self { dir, _lock: lock };
        claim.remove_files();
        Ok(claim)
    }

    pub(super) fn publish(&self, handbill: &Handbill, env: &[(String, String)], svc: &Path) -> Result<Files> {
        fs::create_dir_all(&self.dir)?;
        let files = Files { handbill: self.dir.join(HANDBILL), operator: self.dir.join(OPERATOR) };
        symlink(svc, self.dir.join(SVCCTL)).context("link svcctl")?;
        self.write(&files.operator, &self.operator(env))?;
        // The last: whoever waits for it finds all else.
        let mut text = serde_json::to_string_pretty(handbill)?;
        text.push('\n');
        self.write(&files.handbill, &text)?;
        Ok(files)
    }

    /// For `.` in a shell: the operator's environment, with `svcctl` in the path.
    fn operator(&self, env: &[(String, String)]) -> String {
        let exports = env.iter().map(|(name, value)| format!("export {name}={}\n", quoted(value)));
        let dir = quoted(&self.dir.display().to_string());
        exports.chain([format!("export PATH={dir}:\"$PATH\"\n")]).collect()
    }

    fn write(&self, path: &Path, text: &str) -> Result<()> {
        let unfinished = path.with_added_extension("new");
        let mut file =
            File::options().write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
        file.write_all(text.as_bytes())?;
        fs::rename(&unfinished, path).with_context(|| format!("write {}", path.display()))
    }

    /// Takes back what was published, before what it speaks of ends.
    pub(super) fn withdraw(&self) {
        self.remove_files();
    }

    fn remove_files(&self) {
        for name in [HANDBILL, OPERATOR, SVCCTL] {
            fs::remove_file(self.dir.join(name)).ok();
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.remove_files();
        // Only if nobody put anything else there.
        fs::remove_dir(&self.dir).ok();
    }
}

impl Taken {
    fn read(dir: &Path, mut lock: File) -> Self {
        let mut pid = String::new();
        lock.rewind().and_then(|()| lock.read_to_string(&mut pid)).ok();
        let handbill = dir.join(HANDBILL);
        let published: Option<Handbill> =
            fs::read(&handbill).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let urls = published.map(|handbill| (handbill.platform_url, handbill.router_url));
        Self { pid: pid.trim().parse().ok(), urls, handbill }
    }
}

impl std::error::Error for Taken {}

impl fmt::Display for Taken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.urls {
            Some((platform, router)) => write!(
                f,
                "`cargo xtask dev` runs already: platform {platform}, router {router} (all of it: {})",
                self.handbill.display()
            )?,
            None => write!(f, "`cargo xtask dev` is starting or stopping")?,
        }
        if let Some(pid) = self.pid {
            write!(f, "\n  next: use it, or end it with Ctrl-C or `kill {pid}`")?;
        }
        write!(f, "; `--dir DIR` starts another beside it")
    }
}

/// A word of a shell, whatever is in it.
pub(super) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// `psql` of the PostgreSQL that runs, where it came with one.
pub(super) fn psql(stack: &Stack) -> String {
    let beside = stack.pg.dir().join("psql");
    if beside.exists() { quoted(&beside.display().to_string()) } else { "psql".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_and_none_is_stopped_by_what_a_killed_one_left() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("dev");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(HANDBILL), r#"{"platformUrl": "stale"}"#).unwrap();
        let first = Claim::acquire(&dir).unwrap();
        assert!(!dir.join(HANDBILL).exists(), "what was left by another is gone");
        let refused = Claim::acquire(&dir).unwrap_err().to_string();
        assert!(refused.contains(&format!("kill {}", std::process::id())), "{refused}");
        drop(first);
        assert!(!dir.exists());
        drop(Claim::acquire(&dir).unwrap());
    }

    #[test]
    fn what_is_not_ours_stays() {
        let home = tempfile::tempdir().unwrap();
        let other = home.path().join("notes.txt");
        fs::write(&other, "mine").unwrap();
        drop(Claim::acquire(home.path()).unwrap());
        assert!(other.exists());
        fs::remove_file(home.path().with_added_extension("lock")).unwrap();
    }

    #[test]
    fn a_word_for_a_shell_is_quoted_when_it_must_be() {
        assert_eq!(quoted("http://127.0.0.1:1/a"), "http://127.0.0.1:1/a");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }
}
