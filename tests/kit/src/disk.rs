//! Temporary directories: one in memory, and a small disk for full-disk tests.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use nix::sys::statfs::statfs;
use nix::sys::statvfs::{FsFlags, statvfs};
use nix::unistd::{AccessFlags, access};

use crate::{child, skip};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Returns the in-memory directory for temporary data, if it is writable, has at least `min_free_bytes` free bytes, and
/// allows programs to run.
///
/// A test creates hundreds of small files; creating them on a disk takes up to a third of the test's CPU time. The path
/// is short, because a Unix socket's path is limited to 107 bytes.
pub fn in_memory_dir(min_free_bytes: u64) -> Option<&'static Path> {
    let dir = Path::new("/dev/shm");
    let stats = statvfs(dir).ok()?;
    let free_bytes = stats.blocks_available() * stats.fragment_size();
    let is_usable = free_bytes >= min_free_bytes
        && !stats.flags().contains(FsFlags::ST_NOEXEC)
        && access(dir, AccessFlags::W_OK).is_ok();
    is_usable.then_some(dir)
}

/// A mounted tmpfs that contains the previous content of its directory; unmounted on drop, or when this process ends.
pub struct SmallDisk {
    dir: PathBuf,
}

impl SmallDisk {
    /// Mounts a tmpfs of `mib` MiB over `dir`. Returns `None`, and records the test as skipped, if the tmpfs cannot be
    /// mounted.
    ///
    /// # Errors
    /// Fails if `dir` cannot be created, or if its previous content cannot be copied.
    pub fn mount(dir: PathBuf, mib: u64) -> Result<Option<Self>> {
        if !nix::unistd::geteuid().is_root() {
            skip::record(format_args!("only root can mount a small disk at {}", dir.display()));
            return Ok(None);
        }
        fs::create_dir_all(&dir)?;
        let saved_content = tempfile::tempdir()?;
        copy_content(&dir, saved_content.path())?;
        // Registered before mounting, so that the mount is removed even if this process is killed in between.
        child::unmount_on_exit(&dir);
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={mib}m"), "tmpfs"]).arg(&dir);
        if let Err(error) = child::run(mount, TIMEOUT) {
            skip::record(format_args!("cannot mount a small disk: {error:#}"));
            return Ok(None);
        }
        let disk = Self { dir };
        copy_content(saved_content.path(), &disk.dir)?;
        Ok(Some(disk))
    }

    /// Limits the number of files and directories on the disk, including the existing ones.
    ///
    /// # Errors
    /// Fails if the disk already has more, or cannot be remounted.
    pub fn limit_inodes(&self, count: u64) -> Result<()> {
        let mut mount = Command::new("mount");
        mount.args(["-o", &format!("remount,nr_inodes={count}")]).arg(&self.dir);
        child::run(mount, TIMEOUT)?;
        Ok(())
    }

    fn filler(&self) -> PathBuf {
        self.dir.join("filler")
    }

    /// Fills the disk until at most this many bytes are free.
    ///
    /// # Errors
    /// Fails if the filler file cannot be created, or if the free space cannot be determined.
    pub fn fill(&self, free_bytes: u64) -> Result<()> {
        let mut file = File::create(self.filler())?;
        let piece = vec![0; 4096];
        while available_bytes(&self.dir)? > free_bytes {
            // The disk may be full a page earlier than reported.
            if file.write_all(&piece).is_err() {
                break;
            }
        }
        Ok(())
    }

    /// Deletes the filler file, if there is one.
    ///
    /// # Errors
    /// Fails if the file cannot be deleted.
    pub fn delete_filler(&self) -> Result<()> {
        match fs::remove_file(self.filler()) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            result => Ok(result?),
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let mut umount = Command::new("umount");
        umount.arg("-l").arg(&self.dir);
        child::run(umount, TIMEOUT).ok();
    }
}

fn copy_content(from: &Path, to: &Path) -> Result<()> {
    let mut copy = Command::new("cp");
    copy.arg("-a").arg(from.join(".")).arg(to);
    child::run(copy, TIMEOUT).map(|_| ())
}

fn available_bytes(dir: &Path) -> Result<u64> {
    let stats = statfs(dir)?;
    Ok(stats.blocks_available() * u64::try_from(stats.block_size())?)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::unix::fs::MetadataExt;
    use std::process::Stdio;
    use std::time::Instant;

    use super::*;
    use crate::child::OwnedChild;

    /// The program that the next test kills: it mounts a disk, and waits.
    #[test]
    #[ignore = "not a test: the child process of killed_process_leaves_no_mount"]
    fn victim() {
        let Some(dir) = std::env::var_os("KIT_VICTIM_DISK") else {
            return;
        };
        let Some(_disk) = SmallDisk::mount(dir.into(), 1).expect("the directory can be copied") else {
            return;
        };
        println!("mounted");
        std::thread::sleep(Duration::from_secs(600));
    }

    #[test]
    fn killed_process_leaves_no_mount() {
        let dir = tempfile::tempdir().expect("the directory is created");
        let disk_dir = dir.path().join("with space");
        fs::create_dir(&disk_dir).expect("the directory is created");
        let device = |path: &Path| fs::metadata(path).expect("the directory exists").dev();
        let is_mounted = || device(&disk_dir) != device(dir.path());
        let mut victim = OwnedChild::spawn(
            Command::new(std::env::current_exe().expect("the test executable has a path"))
                .args(["--ignored", "--exact", "--nocapture", "disk::tests::victim"])
                .env("KIT_VICTIM_DISK", &disk_dir)
                .stdout(Stdio::piped()),
        )
        .expect("the victim starts");
        let output = BufReader::new(victim.take_stdout().expect("the output is piped"));
        let is_result = |line: &String| line.contains("mounted") || line.contains("SKIPPED");
        let result = output.lines().map_while(Result::ok).find(is_result);
        if result.expect("the victim mounts a disk, or records that it cannot").contains("SKIPPED") {
            return;
        }
        assert!(is_mounted());

        victim.kill().expect("the victim can be killed");
        let deadline = Instant::now() + Duration::from_secs(20);
        while is_mounted() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(!is_mounted(), "the disk is still mounted");
    }
}
