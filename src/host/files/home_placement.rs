//! Moves restored files into place.
//!
//! A new machine's home directory is nearly empty: just the directories the services need and their first records.
//! Restored files replace existing files of the same name, and directories are merged. Files are moved by rename, so a
//! killed run can be retried. Replaced entries are moved to a separate directory, since a retry may run on a machine
//! that has been in use for days.
//!
//! `restore-home --retry` runs alongside the owner's programs, so directories are opened without following symbolic
//! links, and entries are addressed only relative to open directories.

use std::ffi::{CString, OsStr};
use std::fs::DirBuilder;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid, fchmod, fchown, fstat,
    futimens, openat, renameat, statat, unlinkat,
};
use rustix::io::Errno;
use svc_base::fsx::FileError;

use super::restore_entry::Directory;
use super::staging::STAGING_NAMES;

/// Entries moved before their siblings: the owner's `home` and, within it, the machine records and the apps.
const FIRST_NAMES: [&[u8]; 3] = [b"home", b"system", b"apps"];

/// Service-owned directories, relative to the destination. They keep their owner and mode so that a forged snapshot
/// can't hand them to the owner.
const SERVICE_DIRECTORIES: [&str; 3] = ["home", "home/system", "home/system/logs"];
/// The owner's apps directory, where `svc-apps.service` copies the bundled apps. Like [`SERVICE_DIRECTORIES`], it is
/// never replaced by an entry of another type, so a forged snapshot can't redirect service writes.
const APPS_DIRECTORY: &str = "home/apps";

/// Moves the contents of `from` into `to` on the same file system. Existing directories, except `SERVICE_DIRECTORIES`,
/// take on the owner, mode, xattrs and times of the restored ones. Replaced entries are moved to the same path in
/// `replaced`, which is created if missing and must not contain that path yet. Directories created in it belong to
/// `owner`.
///
/// Returns the number of entries set aside: replaced ones, plus snapshot entries that conflict with a reserved
/// directory.
///
/// # Errors
/// If an entry cannot be moved. Entries already moved stay in `to`; call again to move the rest.
pub fn move_contents(
    from: &Path,
    to: &Path,
    replaced: &Path,
    owner: Option<(u32, u32)>,
) -> Result<u64, FileError> {
    // Keep `replaced` private: the directories in it don't have the modes of the originals.
    let created = DirBuilder::new().recursive(true).mode(0o700).create(replaced);
    created.map_err(FileError::wrap("create", replaced))?;
    let open = |path: &Path| open_directory(CWD, path.as_os_str()).map_err(wrap("open", path));
    let destination = Destination { root: to, replaced, owner };
    move_between(&open(from)?, &open(to)?, Path::new(""), &destination)
}

/// Where restored and replaced entries go.
struct Destination<'a> {
    root: &'a Path,
    /// Receives the entries that are set aside.
    replaced: &'a Path,
    /// User and group for directories created in `replaced`.
    owner: Option<(u32, u32)>,
}

impl Destination<'_> {
    /// Moves an entry of the open `directory`, located at `path`, to the same path in `replaced`.
    fn set_aside(&self, directory: &OwnedFd, path: &Path, name: &CString) -> Result<(), FileError> {
        let moved = Directory::open(self.replaced, path, self.owner)?.move_from(directory, name);
        let target = self.root.join(path).join(OsStr::from_bytes(name.as_bytes()));
        moved.map_err(wrap("replace", &target))
    }
}

/// Attaches an action and a path to an error.
fn wrap(action: &'static str, path: &Path) -> impl FnOnce(Errno) -> FileError {
    move |errno| FileError::wrap(action, path)(errno.into())
}

fn open_directory(parent: impl std::os::fd::AsFd, name: &OsStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(parent, name, flags, Mode::empty())
}

/// Lists entries in the order in which to move them.
fn list_in_move_order(directory: &OwnedFd) -> Result<Vec<CString>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let name = entry?.file_name().to_owned();
        if !matches!(name.as_bytes(), b"." | b"..") {
            names.push(name);
        }
    }
    let rank = |name: &CString| FIRST_NAMES.iter().position(|first| *first == name.as_bytes());
    names.sort_by_cached_key(|name| (rank(name).unwrap_or(FIRST_NAMES.len()), name.clone()));
    Ok(names)
}

/// Whether services write to this directory.
fn is_written_by_services(path: &Path) -> bool {
    SERVICE_DIRECTORIES.iter().chain([&APPS_DIRECTORY]).any(|directory| path == Path::new(directory))
}

fn is_directory(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

/// Moves the contents of one open directory to another. `path` is relative to both the source and destination roots.
fn move_between(
    from: &OwnedFd,
    to: &OwnedFd,
    path: &Path,
    destination: &Destination<'_>,
) -> Result<u64, FileError> {
    let mut set_aside_count = 0;
    let full_path = destination.root.join(path);
    let times = modification_time(&fstat(from).map_err(wrap("read", &full_path))?);
    // Moving an entry out updates the mtime of `from`. Reset it, since a retry after a kill needs the original.
    let reset_times = || futimens(from, &times).map_err(wrap("change the times of", &full_path));
    for name in list_in_move_order(from).map_err(wrap("list", &full_path))? {
        let target = full_path.join(OsStr::from_bytes(name.as_bytes()));
        let source = statat(from, &name, AtFlags::SYMLINK_NOFOLLOW).map_err(wrap("read", &target))?;
        let existing = match statat(to, &name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(existing) => Some(existing),
            Err(Errno::NOENT) => None,
            Err(error) => return Err(wrap("read", &target)(error)),
        };
        let inner_path = path.join(OsStr::from_bytes(name.as_bytes()));
        // Only a forged snapshot contains entries with these names. Never merge them into the real staging directories.
        let is_staging = STAGING_NAMES.iter().any(|staging| inner_path == Path::new(staging));
        if is_directory(&source) && existing.as_ref().is_some_and(is_directory) && !is_staging {
            set_aside_count += merge(from, to, path, &name, destination)?;
            reset_times()?;
            continue;
        }
        if is_staging || !is_directory(&source) && is_written_by_services(&inner_path) {
            tracing::error!(path = %target.display(), "snapshot entry conflicts with a reserved directory; setting it aside");
            destination.set_aside(from, path, &name)?;
            reset_times()?;
            set_aside_count += 1;
            continue;
        }
        if existing.is_some() {
            destination.set_aside(to, path, &name)?;
            set_aside_count += 1;
        }
        renameat(from, &name, to, &name).map_err(wrap("move", &target))?;
        reset_times()?;
    }
    Ok(set_aside_count)
}

/// Merges a directory into its existing counterpart. `path` is the path of `from` and `to`.
fn merge(
    from: &OwnedFd,
    to: &OwnedFd,
    path: &Path,
    name: &CString,
    destination: &Destination<'_>,
) -> Result<u64, FileError> {
    let name_text = OsStr::from_bytes(name.as_bytes());
    let inner_path = path.join(name_text);
    let target = &destination.root.join(&inner_path);
    let inner_from = open_directory(from, name_text).map_err(wrap("open", target))?;
    let inner_to = open_directory(to, name_text).map_err(wrap("open", target))?;
    let restored = fstat(&inner_from).map_err(wrap("read", target))?;
    let set_aside_count = move_between(&inner_from, &inner_to, &inner_path, destination)?;
    if !SERVICE_DIRECTORIES.iter().any(|directory| inner_path == Path::new(directory)) {
        copy_metadata(&restored, &inner_from, &inner_to, target)?;
    }
    unlinkat(from, name, AtFlags::REMOVEDIR).map_err(wrap("remove", target))?;
    Ok(set_aside_count)
}

/// Applies the restored directory's metadata to the existing one.
fn copy_metadata(restored: &Stat, from: &OwnedFd, to: &OwnedFd, target: &Path) -> Result<(), FileError> {
    let existing = fstat(to).map_err(wrap("read", target))?;
    if (restored.st_uid, restored.st_gid) != (existing.st_uid, existing.st_gid) {
        let (uid, gid) = (Uid::from_raw(restored.st_uid), Gid::from_raw(restored.st_gid));
        fchown(to, Some(uid), Some(gid)).map_err(wrap("change the owner of", target))?;
    }
    // Set the mode after the owner: `chown` can clear mode bits.
    fchmod(to, Mode::from_raw_mode(restored.st_mode)).map_err(wrap("change the mode of", target))?;
    if let Err(error) = svc_files::replace_xattrs(from, to) {
        tracing::warn!(path = %target.display(), %error, "cannot restore directory xattrs");
    }
    futimens(to, &modification_time(restored)).map_err(wrap("change the times of", target))
}

/// Returns the modification time, also used as the access time.
fn modification_time(stat: &Stat) -> Timestamps {
    let modified = Timespec { tv_sec: stat.st_mtime, tv_nsec: stat.st_mtime_nsec.cast_signed() };
    Timestamps { last_access: modified, last_modification: modified }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    #[test]
    fn list_in_move_order_puts_home_records_and_apps_first() {
        let root = tempfile::tempdir().unwrap();
        for name in ["a", "apps", "home", "projects", "system"] {
            fs::create_dir(root.path().join(name)).unwrap();
        }
        let names = list_in_move_order(&open_directory(CWD, root.path().as_os_str()).unwrap()).unwrap();
        let names: Vec<&str> = names.iter().map(|name| name.to_str().unwrap()).collect();
        assert_eq!(names, ["home", "system", "apps", "a", "projects"]);
    }

    #[test]
    fn move_contents_merges_directories_and_replaces_files() {
        let root = tempfile::tempdir().unwrap();
        let [from, to, replaced] = ["from", "to", "replaced"].map(|name| root.path().join(name));
        let write = |path: &Path, text: &str| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(&from.join("system/logs/a.log"), "restored");
        write(&from.join("notes/today"), "restored");
        write(&from.join("was-a-directory"), "restored");
        write(&from.join("was-a-file/inside"), "restored");
        write(&from.join("system/logs/.svc-replaced-1"), "an owner's file");
        fs::set_permissions(from.join("system"), Permissions::from_mode(0o2750)).unwrap();
        let modified = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::new(1_234_567, 89);
        fs::File::open(from.join("system")).unwrap().set_modified(modified).unwrap();
        std::os::unix::fs::symlink("/etc", from.join("link")).unwrap();
        write(&to.join("system/logs/a.log"), "new");
        write(&to.join("system/logs/b.log"), "new");
        write(&to.join("was-a-directory/inside"), "new");
        write(&to.join("was-a-file"), "new");
        // A symbolic link in the new home directory is replaced, not followed.
        fs::create_dir(root.path().join("outside")).unwrap();
        std::os::unix::fs::symlink(root.path().join("outside"), to.join("notes")).unwrap();

        assert_eq!(move_contents(&from, &to, &replaced, None).unwrap(), 4);
        let read = |path: &str| fs::read_to_string(to.join(path)).unwrap();
        for path in ["system/logs/a.log", "notes/today", "was-a-directory", "was-a-file/inside"] {
            assert_eq!(read(path), "restored", "{path}");
        }
        assert_eq!(read("system/logs/b.log"), "new");
        let system = fs::metadata(to.join("system")).unwrap();
        assert_eq!((system.mode() & 0o7777, system.modified().unwrap()), (0o2750, modified));
        assert_eq!(fs::read_link(to.join("link")).unwrap(), Path::new("/etc"));
        assert_eq!(fs::read_dir(root.path().join("outside")).unwrap().count(), 0);
        assert_eq!(read("system/logs/.svc-replaced-1"), "an owner's file");
        let count = |dir: &Path| fs::read_dir(dir).unwrap().count();
        assert_eq!(count(&from), 0);
        for path in ["system/logs/a.log", "was-a-directory/inside", "was-a-file"] {
            assert_eq!(fs::read_to_string(replaced.join(path)).unwrap(), "new", "{path} is kept");
        }
        assert_eq!(fs::read_link(replaced.join("notes")).unwrap(), root.path().join("outside"));
        let retried = move_contents(&from, &to, &replaced, None).unwrap();
        assert_eq!(retried, 0, "a second call moves nothing");
    }

    /// A killed or failed run must not replace the restored time with its own.
    #[test]
    fn interrupted_move_keeps_times_of_directories() {
        let root = tempfile::tempdir().unwrap();
        let [from, to, replaced] = ["from", "to", "replaced"].map(|name| root.path().join(name));
        for dir in [&from, &to] {
            fs::create_dir_all(dir.join("projects")).unwrap();
            fs::write(dir.join("projects/b"), "b").unwrap();
        }
        fs::write(from.join("projects/a"), "a").unwrap();
        let modified = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::new(1_234_567, 89);
        fs::File::open(from.join("projects")).unwrap().set_modified(modified).unwrap();
        // `b` cannot be set aside.
        fs::create_dir(&replaced).unwrap();
        fs::write(replaced.join("projects"), "in the way").unwrap();
        move_contents(&from, &to, &replaced, None).unwrap_err();
        assert!(to.join("projects/a").exists() && from.join("projects/b").exists());
        fs::remove_file(replaced.join("projects")).unwrap();
        move_contents(&from, &to, &replaced, None).unwrap();
        assert_eq!(fs::metadata(to.join("projects")).unwrap().modified().unwrap(), modified);
    }

    #[test]
    fn service_directories_are_not_replaced() {
        for path in SERVICE_DIRECTORIES.into_iter().chain([APPS_DIRECTORY]) {
            let root = tempfile::tempdir().unwrap();
            let [from, to, replaced] = ["from", "to", "replaced"].map(|name| root.path().join(name));
            fs::create_dir_all(to.join(path)).unwrap();
            fs::set_permissions(to.join(path), Permissions::from_mode(0o2750)).unwrap();
            let link = from.join(path);
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            std::os::unix::fs::symlink(root.path(), &link).unwrap();
            assert_eq!(move_contents(&from, &to, &replaced, None).unwrap(), 1);
            assert!(fs::symlink_metadata(replaced.join(path)).unwrap().is_symlink(), "{path}");
            fs::create_dir_all(&link).unwrap();
            fs::set_permissions(&link, Permissions::from_mode(0o777)).unwrap();
            fs::write(link.join("file"), "restored").unwrap();
            assert_eq!(move_contents(&from, &to, &replaced, None).unwrap(), 0);
            let expected = if path == APPS_DIRECTORY { 0o777 } else { 0o2750 };
            assert_eq!(fs::metadata(to.join(path)).unwrap().mode() & 0o7777, expected, "{path}");
            assert_eq!(fs::read_to_string(to.join(path).join("file")).unwrap(), "restored");
        }
    }

    #[test]
    fn forged_staging_entries_are_set_aside() {
        for name in STAGING_NAMES {
            for is_dir in [true, false] {
                let root = tempfile::tempdir().unwrap();
                let staging = root.path().join(".svc-restore");
                let [from, replaced] = ["files", "replaced"].map(|name| staging.join(name));
                fs::create_dir_all(&from).unwrap();
                fs::write(from.join("file"), "restored").unwrap();
                fs::set_permissions(&staging, Permissions::from_mode(0o700)).unwrap();
                if is_dir {
                    fs::create_dir_all(from.join(name).join("files")).unwrap();
                    fs::set_permissions(from.join(name), Permissions::from_mode(0o777)).unwrap();
                } else {
                    std::os::unix::fs::symlink("/etc", from.join(name)).unwrap();
                }
                assert_eq!(move_contents(&from, root.path(), &replaced, None).unwrap(), 1, "{name}");
                assert!(fs::symlink_metadata(replaced.join(name)).is_ok());
                assert_eq!(fs::metadata(&staging).unwrap().mode() & 0o7777, 0o700);
                assert_eq!(fs::read_to_string(root.path().join("file")).unwrap(), "restored");
                assert_eq!(fs::read_dir(&from).unwrap().count(), 0);
            }
        }
    }
}
