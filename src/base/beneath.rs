//! Safe access to files below a directory that a less trusted user can modify.
//!
//! Paths are resolved one component at a time from an open descriptor: symlinks are never followed, paths can't escape
//! the directory, and opening a FIFO doesn't block. Callers get the checked descriptor and never reopen the path.
//! (openat2(2) would do this in one call, but systemd's `RestrictSUIDSGID=` blocks it.)

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open, openat};
use nix::sys::stat::{Mode, SFlag, fstat, fstatat};

const LINK_REFUSED: &str = "symbolic links are not followed";

/// An open directory. Everything below it is opened relative to its descriptor.
#[derive(Debug)]
pub struct DirFd {
    fd: OwnedFd,
    /// Expected file owner: the directory's owner, unless overridden by [`Self::with_owner`]. Other users' files are
    /// opened read-only, and only if world-readable.
    owner: u32,
}

impl DirFd {
    /// Opens a directory by path. No component may be writable by a user we don't trust.
    ///
    /// # Errors
    /// `NotADirectory` if a component isn't a directory or the last one is a symlink; other file system errors.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        Self::new(open(path, flags, Mode::empty())?)
    }

    /// Overrides the expected file owner, for a root-owned directory containing this user's files.
    pub fn with_owner(self, owner: u32) -> Self {
        Self { owner, ..self }
    }

    /// Opens a directory below this one. Its files are checked against its own owner, not this directory's.
    ///
    /// # Errors
    /// `NotFound` if a component doesn't exist; `NotADirectory` if one isn't a directory; `InvalidInput` if one is a
    /// symlink or the path isn't below this directory; other file system errors.
    pub fn open_dir(&self, path: &Path) -> io::Result<Self> {
        Self::new(self.resolve(path, OFlag::O_DIRECTORY)?)
    }

    /// Opens a regular file below this directory for reading.
    ///
    /// The file must belong to the expected owner or be world-readable. Otherwise, a hard link could expose another
    /// user's private file that this process happens to be able to read.
    ///
    /// # Errors
    /// `NotFound` if a component doesn't exist; `NotADirectory` if a parent isn't a directory; `InvalidInput` if the
    /// file is a directory, FIFO or device, a component is a symlink, or the path isn't below this directory;
    /// `PermissionDenied` if this process can't read the file or the rule above rejects it; other file system errors.
    pub fn open_file(&self, path: &Path) -> io::Result<File> {
        let file = File::from(self.resolve(path, OFlag::O_NONBLOCK | OFlag::O_NOCTTY)?);
        let meta = file.metadata()?;
        if !meta.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        if meta.uid() != self.owner && meta.mode() & 0o004 == 0 {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "file belongs to another user"));
        }
        Ok(file)
    }

    /// Opens or creates a file in this directory for appending.
    ///
    /// It must be a regular file with a single hard link, owned by the expected user. When running as root, a new file
    /// is chowned to the directory's owner.
    ///
    /// # Errors
    /// `InvalidInput` if the name is a symlink, FIFO or device; `IsADirectory` if it is a directory; `PermissionDenied`
    /// if the file belongs to another user or has multiple hard links; other file system errors.
    pub fn open_for_append(&self, name: &OsStr) -> io::Result<File> {
        let flags = OFlag::O_RDWR | OFlag::O_APPEND | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let file = match open_in(self.fd.as_fd(), name, flags) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.create(name, flags),
            opened => opened.map(File::from),
        }?;
        let meta = file.metadata()?;
        if !meta.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        if meta.uid() != self.owner {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "file belongs to another user"));
        }
        if meta.nlink() != 1 {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "file has multiple hard links"));
        }
        Ok(file)
    }

    fn create(&self, name: &OsStr, flags: OFlag) -> io::Result<File> {
        let flags = flags | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let file = match openat(&self.fd, name, flags, Mode::from_bits_truncate(0o640)) {
            Ok(created) => File::from(created),
            // Another process created it concurrently.
            Err(Errno::EEXIST) => {
                return open_in(self.fd.as_fd(), name, flags & !(OFlag::O_CREAT | OFlag::O_EXCL))
                    .map(File::from);
            }
            Err(error) => return Err(error.into()),
        };
        if file.metadata()?.uid() != self.owner {
            let directory = fstat(&self.fd)?;
            std::os::unix::fs::fchown(&file, Some(directory.st_uid), Some(directory.st_gid))?;
        }
        Ok(file)
    }

    /// Reads a whole file of at most `max` bytes.
    ///
    /// # Errors
    /// Same as [`Self::open_file`], plus `FileTooLarge` if the file is larger than `max` bytes, and read errors.
    pub fn read(&self, path: &Path, max: u64) -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        // Checking the size in the metadata isn't enough: another process may be appending.
        self.open_file(path)?.take(max.saturating_add(1)).read_to_end(&mut content)?;
        if content.len() as u64 > max {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("larger than {max} bytes")));
        }
        Ok(content)
    }

    /// Returns the sorted names of the directory's entries.
    ///
    /// # Errors
    /// File system errors.
    pub fn entry_names(&self) -> io::Result<Vec<OsString>> {
        let mut entries = Dir::from_fd(self.fd.try_clone()?)?;
        let mut names = Vec::new();
        for entry in entries.iter() {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name != "." && name != ".." {
                names.push(name.to_owned());
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn new(fd: OwnedFd) -> io::Result<Self> {
        let owner = fstat(&fd)?.st_uid;
        Ok(Self { fd, owner })
    }

    fn resolve(&self, path: &Path, flags: OFlag) -> io::Result<OwnedFd> {
        let mut names = path.components().map(|part| match part {
            Component::Normal(name) => Ok(name),
            _ => Err(not_below()),
        });
        let mut name = names.next().ok_or_else(not_below)??;
        let mut directory = None;
        loop {
            let parent = directory.as_ref().map_or(self.fd.as_fd(), OwnedFd::as_fd);
            let Some(next) = names.next() else { return open_in(parent, name, flags | OFlag::O_RDONLY) };
            directory = Some(open_in(parent, name, OFlag::O_DIRECTORY | OFlag::O_PATH)?);
            name = next?;
        }
    }
}

fn not_below() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "path is not below the directory")
}

fn open_in(directory: BorrowedFd<'_>, name: &OsStr, flags: OFlag) -> io::Result<OwnedFd> {
    let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(directory, name, flags, Mode::empty()).map_err(|error| {
        // With `O_DIRECTORY`, the kernel reports a symlink as `ENOTDIR`.
        let is_link = || {
            fstatat(directory, name, AtFlags::AT_SYMLINK_NOFOLLOW)
                .is_ok_and(|meta| meta.st_mode & SFlag::S_IFMT.bits() == SFlag::S_IFLNK.bits())
        };
        match error {
            Errno::ELOOP => io::Error::new(io::ErrorKind::InvalidInput, LINK_REFUSED),
            Errno::ENOTDIR if is_link() => io::Error::new(io::ErrorKind::InvalidInput, LINK_REFUSED),
            error => error.into(),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use nix::unistd::mkfifo;

    use super::*;

    fn create_home() -> (tempfile::TempDir, DirFd) {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().join("home");
        fs::create_dir_all(home.join("app/dist")).unwrap();
        fs::write(dir.path().join("secret"), "secret").unwrap();
        fs::write(home.join("app/dist/page"), "page").unwrap();
        let directory = DirFd::open(&home).unwrap();
        (dir, directory)
    }

    fn refusal_kind(result: io::Result<impl std::fmt::Debug>) -> io::ErrorKind {
        result.expect_err("not refused").kind()
    }

    #[test]
    fn open_file_refuses_links_in_every_component() {
        let (dir, directory) = create_home();
        let home = dir.path().join("home");
        symlink("/", home.join("root")).unwrap();
        symlink("app/dist", home.join("inside")).unwrap();
        symlink(dir.path().join("secret"), home.join("app/secret")).unwrap();
        for path in ["root/etc/passwd", "inside/page", "app/secret", "inside"] {
            let error = directory.open_file(Path::new(path)).expect_err("not refused");
            assert_eq!(error.to_string(), LINK_REFUSED, "{path}");
        }
        assert_eq!(refusal_kind(directory.open_dir(Path::new("inside"))), io::ErrorKind::InvalidInput);
        assert_eq!(directory.read(Path::new("app/dist/page"), 4).unwrap(), b"page");
        assert!(DirFd::open(&home.join("inside")).is_err(), "opened a link to the directory itself");
    }

    #[test]
    fn open_file_refuses_paths_outside_directory() {
        let (_dir, directory) = create_home();
        for path in ["../secret", "app/../../secret", "/etc/passwd"] {
            assert!(directory.open_file(Path::new(path)).is_err(), "{path}");
        }
        let app = directory.open_dir(Path::new("app")).unwrap();
        assert!(app.open_file(Path::new("../app/dist/page")).is_err());
        assert_eq!(app.read(Path::new("dist/page"), 9).unwrap(), b"page");
    }

    #[test]
    fn open_file_refuses_fifos_and_directories() {
        let (dir, directory) = create_home();
        mkfifo(&dir.path().join("home/fifo"), Mode::S_IRWXU).unwrap();
        assert_eq!(refusal_kind(directory.open_file(Path::new("fifo"))), io::ErrorKind::InvalidInput);
        assert_eq!(refusal_kind(directory.open_file(Path::new("app"))), io::ErrorKind::InvalidInput);
        let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("home/socket")).unwrap();
        assert!(directory.open_file(Path::new("socket")).is_err());
    }

    #[test]
    fn read_refuses_file_above_limit() {
        let (_dir, directory) = create_home();
        assert_eq!(refusal_kind(directory.read(Path::new("app/dist/page"), 3)), io::ErrorKind::FileTooLarge);
    }

    #[test]
    fn entry_names_are_sorted() {
        let (dir, directory) = create_home();
        fs::write(dir.path().join("home/.hidden"), "").unwrap();
        for _ in 0..2 {
            assert_eq!(directory.entry_names().unwrap(), [".hidden", "app"]);
        }
    }

    /// Requires root for the chown.
    #[test]
    fn open_file_refuses_hard_link_to_foreign_secret() {
        let (dir, directory) = create_home();
        let (secret, link) = (dir.path().join("secret"), dir.path().join("home/link"));
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
        fs::hard_link(&secret, &link).unwrap();
        if std::os::unix::fs::chown(&secret, Some(65534), None).is_err() {
            eprintln!("skipped: only root can give a file to another user");
            return;
        }
        assert_eq!(refusal_kind(directory.open_file(Path::new("link"))), io::ErrorKind::PermissionDenied);
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(directory.open_file(Path::new("link")).is_ok(), "refused a file that everyone can read");
    }
}
