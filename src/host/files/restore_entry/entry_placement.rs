//! Moves restored entries into place beneath the user's home directory.
//!
//! The owner's programs run concurrently and could plant symbolic links, and this process can write where they can't.
//! Directories are therefore opened one component at a time without following links, and entries are addressed only
//! relative to open directories, except in the staging directory, which those programs can't enter.

use std::ffi::{CStr, OsStr, OsString};
use std::os::fd::OwnedFd;
use std::path::{Component, Path};

use jiff::Timestamp;
use jiff::tz::TimeZone;
use nix::unistd::geteuid;
use rustix::fs::{
    AtFlags, CWD, Gid, Mode, OFlags, RenameFlags, Uid, fchmod, fchown, fstat, mkdirat, openat, renameat_with,
    statat,
};
use rustix::io::Errno;
use svc_base::fsx::FileError;

/// Maximum number of candidate names to try.
const MAX_NAME_ATTEMPTS: u32 = 100;
const MAX_NAME_BYTES: usize = 255;

/// An open handle to the user's home directory or one beneath it.
pub struct Directory(OwnedFd);

impl Directory {
    /// Opens `path` beneath `home`, creating missing directories owned by `owner`.
    ///
    /// # Errors
    /// `NotADirectory` if a component is a symbolic link or a file; `InvalidInput` if `path` is absolute or contains
    /// `..`; other file system errors.
    pub fn open(home: &Path, path: &Path, owner: Option<(u32, u32)>) -> Result<Self, FileError> {
        let full_path = home.join(path);
        let wrap = |action| move |errno: Errno| FileError::wrap(action, &full_path)(errno.into());
        let mut directory =
            openat(CWD, home, directory_flags(), Mode::empty()).map_err(wrap.clone()("open"))?;
        for component in path.components() {
            let Component::Normal(name) = component else {
                return Err(wrap("use")(Errno::INVAL));
            };
            directory = match openat(&directory, name, directory_flags(), Mode::empty()) {
                Err(Errno::NOENT) => create_directory(&directory, name).map_err(wrap.clone()("create"))?,
                opened => opened.map_err(wrap.clone()("open"))?,
            };
            finish_new_directory(&directory, owner).map_err(wrap.clone()("change the owner of"))?;
        }
        Ok(Self(directory))
    }

    /// Whether an entry with this name exists, including a dangling symbolic link.
    ///
    /// # Errors
    /// File system errors other than `NOENT`.
    pub(super) fn has(&self, name: &OsStr) -> Result<bool, Errno> {
        match statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns an unused name derived from `name` and `mark`, such as `notes.restored-20261128T021907Z.txt`.
    ///
    /// # Errors
    /// `EXIST` if all candidates are taken; other file system errors.
    pub fn find_free_name(&self, name: &OsStr, mark: &str, at: Timestamp) -> Result<OsString, Errno> {
        for number in 1..=MAX_NAME_ATTEMPTS {
            let candidate = mark_name(name, mark, at, number);
            if !self.has(&candidate)? {
                return Ok(candidate);
            }
        }
        Err(Errno::EXIST)
    }

    /// Atomically exchanges an entry in this directory with the one at `with`.
    ///
    /// # Errors
    /// `NOENT` if either is missing; `XDEV` if they are on different file systems; other file system errors.
    pub(super) fn exchange(&self, name: &OsStr, with: &Path) -> Result<(), Errno> {
        renameat_with(CWD, with, &self.0, name, RenameFlags::EXCHANGE)
    }

    /// Moves the entry at `from` to an unused name in this directory.
    ///
    /// # Errors
    /// `EXIST` if the name is taken; `XDEV` if the entry is on another file system; other file system errors.
    pub fn move_in(&self, from: &Path, name: &OsStr) -> Result<(), Errno> {
        renameat_with(CWD, from, &self.0, name, RenameFlags::NOREPLACE)
    }

    /// Moves an entry from another open directory into this one, keeping its name.
    ///
    /// # Errors
    /// `EXIST` if the name is taken; other file system errors.
    pub fn move_from(&self, directory: &OwnedFd, name: &CStr) -> Result<(), Errno> {
        renameat_with(directory, name, &self.0, name, RenameFlags::NOREPLACE)
    }
}

fn directory_flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

/// Creates and opens a directory, private until [`finish_new_directory`] sets its mode.
fn create_directory(parent: &OwnedFd, name: &OsStr) -> Result<OwnedFd, Errno> {
    match mkdirat(parent, name, Mode::RWXU) {
        // One of the owner's programs may have created it concurrently.
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error),
    }
    openat(parent, name, directory_flags(), Mode::empty())
}

/// Sets the owner and mode of a directory created by this process or an interrupted run.
fn finish_new_directory(directory: &OwnedFd, owner: Option<(u32, u32)>) -> Result<(), Errno> {
    let stat = fstat(directory)?;
    let mode = Mode::from_raw_mode(stat.st_mode);
    // A new directory inherits this bit from its parent and, if it's set, the parent's group too.
    let set_group_id = mode & Mode::SGID;
    let is_new = stat.st_uid == geteuid().as_raw() && mode == Mode::RWXU | set_group_id;
    if !is_new {
        return Ok(());
    }
    if let Some((uid, gid)) = owner {
        let gid = set_group_id.is_empty().then(|| Gid::from_raw(gid));
        fchown(directory, Some(Uid::from_raw(uid)), gid)?;
    }
    fchmod(directory, Mode::from_raw_mode(0o755) | set_group_id)
}

/// Turns `notes.txt` into `notes.restored-20261128T021907Z.txt`. A `number` above 1 is appended to the time. If the
/// result would be too long for a file name, it is just the mark, time and number.
fn mark_name(name: &OsStr, mark: &str, at: Timestamp, number: u32) -> OsString {
    let at = at.to_zoned(TimeZone::UTC).strftime("%Y%m%dT%H%M%SZ");
    let suffix = if number == 1 { format!(".{mark}-{at}") } else { format!(".{mark}-{at}-{number}") };
    let path = Path::new(name);
    let (stem, extension) = (path.file_stem().unwrap_or(name), path.extension());
    let marked = |stem: &OsStr| {
        let mut marked = stem.to_owned();
        marked.push(&suffix);
        if let Some(extension) = extension {
            marked.push(".");
            marked.push(extension);
        }
        marked
    };
    let full = marked(stem);
    if full.len() <= MAX_NAME_BYTES { full } else { OsString::from(&suffix[1..]) }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    fn home() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    #[test]
    fn open_creates_directories_without_following_links() {
        let (home, outside) = (home(), home());
        symlink(outside.path(), home.path().join("link")).unwrap();
        fs::write(home.path().join("file"), "x").unwrap();
        Directory::open(home.path(), Path::new("a/b"), None).unwrap();
        assert!(home.path().join("a/b").is_dir());
        for path in ["link", "link/a", "file", "file/a", "..", "a/../..", "/etc"] {
            assert!(Directory::open(home.path(), Path::new(path), None).is_err(), "{path}");
        }
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    }

    #[test]
    fn created_directory_keeps_inherited_set_group_id_bit() {
        let home = home();
        let parent = home.path().join("parent");
        fs::create_dir(&parent).unwrap();
        for (mode, expected) in [(0o755, 0o755), (0o2755, 0o2755)] {
            fs::set_permissions(&parent, Permissions::from_mode(mode)).unwrap();
            Directory::open(home.path(), Path::new("parent/new/inner"), None).unwrap();
            for created in ["new", "new/inner"] {
                let meta = fs::metadata(parent.join(created)).unwrap();
                assert_eq!(meta.mode() & 0o7777, expected, "{created} below a directory with mode {mode:o}");
            }
            fs::remove_dir_all(parent.join("new")).unwrap();
        }
    }

    #[test]
    fn exchange_and_move_in_never_lose_entries() {
        let home = home();
        fs::write(home.path().join("staged"), "restored").unwrap();
        fs::write(home.path().join("taken"), "present").unwrap();
        let directory = Directory::open(home.path(), Path::new(""), None).unwrap();
        fs::write(home.path().join("other"), "other").unwrap();
        directory.exchange(OsStr::new("taken"), &home.path().join("other")).unwrap();
        assert_eq!(fs::read_to_string(home.path().join("other")).unwrap(), "present");
        directory.exchange(OsStr::new("taken"), &home.path().join("other")).unwrap();
        let none = directory.exchange(OsStr::new("none"), &home.path().join("other"));
        assert_eq!(none, Err(Errno::NOENT));
        let taken = directory.move_in(&home.path().join("staged"), OsStr::new("taken"));
        assert_eq!(taken, Err(Errno::EXIST));
        let (name, at) = (OsStr::new("taken"), Timestamp::UNIX_EPOCH);
        let first = directory.find_free_name(name, "restored", at).unwrap();
        assert_eq!(first, "taken.restored-19700101T000000Z");
        directory.move_in(&home.path().join("staged"), &first).unwrap();
        let second = directory.find_free_name(name, "restored", at).unwrap();
        assert_eq!(second, "taken.restored-19700101T000000Z-2");
        assert_eq!(fs::read_to_string(home.path().join("taken")).unwrap(), "present");
    }

    #[test]
    fn mark_name_keeps_extension_and_limits_length() {
        let mark = |name: &str| mark_name(OsStr::new(name), "replaced", Timestamp::UNIX_EPOCH, 1);
        assert_eq!(mark("a.tar.gz"), "a.tar.replaced-19700101T000000Z.gz");
        assert_eq!(mark(".bashrc"), ".bashrc.replaced-19700101T000000Z");
        assert_eq!(mark(&"x".repeat(255)), "replaced-19700101T000000Z");
    }
}
