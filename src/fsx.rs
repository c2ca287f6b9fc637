//! Files that survive a crash: written whole beside the target, synced, renamed, the directory synced.
//!
//! A reader sees the old content or the new one, never a part. Every function blocks; async callers use
//! `spawn_blocking`.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// A file operation that failed, with the path it was about.
#[derive(Debug, thiserror::Error)]
#[error("{action} {}", .path.display())]
pub struct FileError {
    pub action: &'static str,
    pub path: PathBuf,
    #[source]
    pub source: io::Error,
}

impl FileError {
    pub fn at(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self { action, path, source }
    }

    pub fn is_not_found(&self) -> bool {
        self.source.kind() == io::ErrorKind::NotFound
    }
}

/// Replaces `path` with `content`, durably; `mode` are the permission bits of the new file. Missing parents are made.
pub fn write_atomic(path: &Path, content: &[u8], mode: u32) -> Result<(), FileError> {
    place(path, content, mode, |temp| fs::rename(temp, path))
}

/// As [`write_atomic`], where there is no such file yet; else nothing is done, and the answer is `false`.
pub fn create_atomic(path: &Path, content: &[u8], mode: u32) -> Result<bool, FileError> {
    let linked = place(path, content, mode, |temp| {
        fs::hard_link(temp, path)?;
        fs::remove_file(temp)
    });
    match linked {
        Ok(()) => Ok(true),
        Err(error) if error.source.kind() == io::ErrorKind::AlreadyExists && path.exists() => Ok(false),
        Err(error) => Err(error),
    }
}

fn place(
    path: &Path,
    content: &[u8],
    mode: u32,
    name: impl FnOnce(&Path) -> io::Result<()>,
) -> Result<(), FileError> {
    let dir = parent(path);
    fs::create_dir_all(dir).map_err(FileError::at("create directory", dir))?;
    let temp = dir.join(format!(".{}.{}.tmp", file_name(path), uuid::Uuid::new_v4().simple()));
    let written = (|| {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&temp)?;
        file.write_all(content)?;
        file.sync_all()?;
        name(&temp)
    })();
    if let Err(source) = written {
        // The half-written file is ours and useless; the first error is the one to tell.
        let _ = fs::remove_file(&temp);
        return Err(FileError { action: "write", path: path.to_owned(), source });
    }
    sync_dir(dir)
}

/// Removes what a [`write_atomic`] to `path` that was killed left beside it. A writer that runs has such a file, too, so the
/// caller holds the lock of all who write there.
pub fn remove_torn(path: &Path) -> Result<(), FileError> {
    remove_torn_in(parent(path), |name| name == file_name(path))
}

/// The same for all files of a directory whose names are `ours`.
pub fn remove_torn_in(dir: &Path, ours: impl Fn(&str) -> bool) -> Result<(), FileError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(());
        }
        Err(error) => return Err(FileError::at("read", dir)(error)),
    };
    for entry in entries.flatten() {
        if entry.file_name().to_str().and_then(torn_of).is_some_and(&ours) {
            remove_if_exists(&entry.path())?;
        }
    }
    Ok(())
}

/// The name that a temporary file was to get.
fn torn_of(temp: &str) -> Option<&str> {
    let (name, random) = temp.strip_prefix('.')?.strip_suffix(".tmp")?.rsplit_once('.')?;
    let is_ours = random.len() == 32 && random.bytes().all(|b| b.is_ascii_hexdigit());
    is_ours.then_some(name)
}

/// Points `link` at `target` by one rename, durably: there is no moment without a link.
pub fn symlink_atomic(target: &Path, link: &Path) -> Result<(), FileError> {
    let dir = parent(link);
    fs::create_dir_all(dir).map_err(FileError::at("create directory", dir))?;
    let temp = dir.join(format!(".{}.{}.tmp", file_name(link), uuid::Uuid::new_v4().simple()));
    std::os::unix::fs::symlink(target, &temp).map_err(FileError::at("link", &temp))?;
    if let Err(source) = fs::rename(&temp, link) {
        let _ = fs::remove_file(&temp);
        return Err(FileError { action: "switch link", path: link.to_owned(), source });
    }
    sync_dir(dir)
}

/// Where a write to `path` belongs: the target of the link that it is, else itself. A rename onto a link would replace
/// the link.
pub fn through_link(path: &Path) -> PathBuf {
    match fs::read_link(path) {
        Ok(target) => parent(path).join(target),
        Err(_) => path.to_owned(),
    }
}

/// Makes renames and creations in `dir` durable.
pub fn sync_dir(dir: &Path) -> Result<(), FileError> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(FileError::at("sync directory", dir))
}

/// The content of a file, or `None` where there is no such file.
pub fn read_if_exists(path: &Path) -> Result<Option<Vec<u8>>, FileError> {
    match fs::read(path) {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(FileError::at("read", path)(error)),
    }
}

/// Whether there is such a file.
pub fn exists(path: &Path) -> Result<bool, FileError> {
    path.try_exists().map_err(FileError::at("look for", path))
}

/// Removes a file; its absence is no error. It is absent as well where something else has its directory's name.
pub fn remove_if_exists(path: &Path) -> Result<(), FileError> {
    match fs::remove_file(path) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(())
        }
        Err(error) => Err(FileError::at("remove", path)(error)),
        Ok(()) => Ok(()),
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_write_replaces_whole_and_keeps_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/secret");
        write_atomic(&path, b"one", 0o600).unwrap();
        write_atomic(&path, b"two", 0o600).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn what_a_killed_write_left_is_removed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let names = |dir: &Path| {
            let mut names: Vec<_> = fs::read_dir(dir)
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        };
        let torn = |name: &str| format!(".{name}.{}.tmp", uuid::Uuid::new_v4().simple());
        let others = [torn("theirs"), ".ours.tmp".to_owned(), ".ours.123.tmp".to_owned(), "ours".to_owned()];
        for name in others.iter().chain(&[torn("ours"), torn("ours")]) {
            fs::write(dir.path().join(name), "").unwrap();
        }
        remove_torn(&dir.path().join("ours")).unwrap();
        let mut left = others.to_vec();
        left.sort();
        assert_eq!(names(dir.path()), left);
        remove_torn_in(&dir.path().join("none"), |_| true).unwrap();
    }

    #[test]
    fn a_link_is_switched_in_place() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("current");
        symlink_atomic(Path::new("releases/1"), &link).unwrap();
        symlink_atomic(Path::new("releases/2"), &link).unwrap();
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("releases/2"));
    }

    #[test]
    fn a_write_through_a_link_leaves_the_link() {
        let dir = tempfile::tempdir().unwrap();
        let (link, target) = (dir.path().join("opt/marker"), dir.path().join("var/marker"));
        symlink_atomic(&target, &link).unwrap();
        assert!(!link.exists(), "a link to nothing is no marker");
        write_atomic(&through_link(&link), b"set", 0o644).unwrap();
        assert_eq!(
            (fs::read(&link).unwrap(), fs::read_link(&link).unwrap()),
            (b"set".to_vec(), target.clone())
        );
        assert_eq!(through_link(&target), target);
    }

    #[test]
    fn an_error_names_the_path() {
        let error = write_atomic(Path::new("/proc/none/x"), b"", 0o600).unwrap_err();
        assert!(error.to_string().contains("/proc/none"), "{error}");
    }
}
