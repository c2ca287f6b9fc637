//! A small disk, for what happens when it is full: a tmpfs that is mounted where something is written.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use nix::sys::statfs::statfs;

use crate::child;

const DEADLINE: Duration = Duration::from_secs(20);

/// A file system of its own, with what was at its place before.
pub struct SmallDisk {
    place: PathBuf,
}

impl SmallDisk {
    /// `None` where nothing can be mounted; said by name.
    ///
    /// # Errors
    /// When what was there cannot be copied.
    pub fn at(place: PathBuf, mib: u64) -> Result<Option<Self>> {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIPPED: only root can mount a small disk at {}", place.display());
            return Ok(None);
        }
        fs::create_dir_all(&place)?;
        let before = tempfile::tempdir()?;
        copy(&place, before.path())?;
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={mib}m"), "tmpfs"]).arg(&place);
        if let Err(error) = child::run(mount, DEADLINE) {
            println!("SKIPPED: no small disk can be mounted here: {error:#}");
            return Ok(None);
        }
        let disk = Self { place };
        copy(before.path(), &disk.place)?;
        Ok(Some(disk))
    }

    fn filler(&self) -> PathBuf {
        self.place.join("filler")
    }

    /// Leaves so many bytes.
    ///
    /// # Errors
    /// When the file that fills it cannot be made.
    pub fn fill(&self, left: u64) -> Result<()> {
        let mut file = File::create(self.filler())?;
        let piece = vec![0; 4096];
        while available(&self.place)? > left {
            // Full a page earlier than it says is full, too.
            if file.write_all(&piece).is_err() {
                break;
            }
        }
        Ok(())
    }

    /// Takes back what filled it.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn empty(&self) -> Result<()> {
        match fs::remove_file(self.filler()) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => Ok(removed?),
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let mut umount = Command::new("umount");
        umount.arg("-l").arg(&self.place);
        child::run(umount, DEADLINE).ok();
    }
}

/// All that is in one directory into another.
fn copy(from: &Path, to: &Path) -> Result<()> {
    let mut copy = Command::new("cp");
    copy.arg("-a").arg(from.join(".")).arg(to);
    child::run(copy, DEADLINE).map(|_| ())
}

fn available(place: &Path) -> Result<u64> {
    let stats = statfs(place)?;
    Ok(stats.blocks_available() * u64::try_from(stats.block_size())?)
}
