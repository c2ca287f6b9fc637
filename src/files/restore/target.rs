//! The target directory. Entries are created and opened relative to their parent because full paths may exceed
//! `PATH_MAX`.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags};

/// Longer paths are opened one component at a time.
const MAX_SINGLE_OPEN_PATH_BYTES: usize = 2048;

pub(super) struct Target {
    root: OwnedFd,
    /// Most recently used parent.
    parent: Option<(PathBuf, OwnedFd)>,
}

impl Target {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { root: rustix::fs::open(path, directory_flags(), Mode::empty())?, parent: None })
    }

    pub(super) fn create_directory(&mut self, path: &Path) -> io::Result<()> {
        let (parent, name) = self.locate(path)?;
        Ok(rustix::fs::mkdirat(parent, name, Mode::RWXU)?)
    }

    pub(super) fn create_file(&mut self, path: &Path) -> io::Result<File> {
        self.open_with(path, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)
    }

    pub(super) fn open_for_writing(&mut self, path: &Path) -> io::Result<File> {
        self.open_with(path, OFlags::WRONLY)
    }

    pub(super) fn remove_file(&mut self, path: &Path) -> io::Result<()> {
        let (parent, name) = self.locate(path)?;
        Ok(rustix::fs::unlinkat(parent, name, AtFlags::empty())?)
    }

    /// Opens a file or a directory.
    pub(super) fn open_for_reading(&mut self, path: &Path) -> io::Result<File> {
        self.open_with(path, OFlags::RDONLY)
    }

    fn open_with(&mut self, path: &Path, flags: OFlags) -> io::Result<File> {
        let (parent, name) = self.locate(path)?;
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(File::from(rustix::fs::openat(parent, name, flags, Mode::RUSR | Mode::WUSR)?))
    }

    pub(super) fn create_symlink(&mut self, path: &Path, link_target: &OsStr) -> io::Result<()> {
        let (parent, name) = self.locate(path)?;
        Ok(rustix::fs::symlinkat(link_target, parent, name)?)
    }

    pub(super) fn create_hard_link(&mut self, path: &Path, existing: &Path) -> io::Result<()> {
        let (parent, name) = self.locate(existing)?;
        let parent = parent.try_clone_to_owned()?;
        let (new_parent, new_name) = self.locate(path)?;
        Ok(rustix::fs::linkat(parent, name, new_parent, new_name, AtFlags::empty())?)
    }

    /// Returns an entry's parent directory and its name in it.
    pub(super) fn locate<'a>(&mut self, path: &'a Path) -> io::Result<(BorrowedFd<'_>, &'a OsStr)> {
        let invalid = || io::Error::new(io::ErrorKind::InvalidInput, "not a path below the target");
        let name = path.file_name().ok_or_else(invalid)?;
        let parent = path.parent().unwrap_or(Path::new(""));
        if self.parent.as_ref().is_none_or(|(last, _)| last != parent) {
            self.parent = Some((parent.to_owned(), self.open_directory(parent)?));
        }
        let opened = self.parent.as_ref().map_or(self.root.as_fd(), |(_, opened)| opened.as_fd());
        Ok((opened, name))
    }

    fn open_directory(&self, path: &Path) -> io::Result<OwnedFd> {
        let open = |directory: BorrowedFd<'_>, path: &Path| {
            rustix::fs::openat(directory, path, directory_flags(), Mode::empty())
        };
        if path.as_os_str().is_empty() {
            return self.root.try_clone();
        }
        if path.as_os_str().len() <= MAX_SINGLE_OPEN_PATH_BYTES {
            return Ok(open(self.root.as_fd(), path)?);
        }
        let mut directory = self.root.try_clone()?;
        for name in path {
            directory = open(directory.as_fd(), Path::new(name))?;
        }
        Ok(directory)
    }
}

fn directory_flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}
