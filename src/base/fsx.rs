//! Crash-safe file operations: write to a temporary file, sync it, rename or hard-link it to its final name, then sync
//! the directory.
//!
//! Readers see either the old content or the new, never a mix, except with [`write_atomic_or_in_place`] on a full disk.
//! All functions block; use `spawn_blocking` in async code.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A failed file operation, with its path.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}", .path.display())]
pub struct FileError {
    pub action: &'static str,
    pub path: PathBuf,
    #[source]
    pub source: io::Error,
}

impl FileError {
    pub fn wrap(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self { action, path, source }
    }

    pub fn is_not_found(&self) -> bool {
        self.source.kind() == io::ErrorKind::NotFound
    }
}

/// Durably replaces `path` with `content`, creating missing parent directories. The new file's permission bits are
/// `mode` minus the process umask.
pub fn write_atomic(path: &Path, content: &[u8], mode: u32) -> Result<(), FileError> {
    write_and_publish(path, content, mode, |temp| fs::rename(temp, path))
}

/// Like [`write_atomic`], but overwrites the file in place if the disk has no room for a second copy. Readers may then
/// see partial content, and a crash may leave the file incomplete.
pub fn write_atomic_or_in_place(path: &Path, content: &[u8], mode: u32) -> Result<(), FileError> {
    match write_atomic(path, content, mode) {
        Err(error) if error.source.kind() == io::ErrorKind::StorageFull => {
            overwrite(path, content).map_err(|_| error)
        }
        result => result,
    }
}

/// Overwrites a file in place. Fails if the content needs more blocks than the file already has, as there may be no
/// free ones.
fn overwrite(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).open(path)?;
    if file.metadata()?.blocks() * 512 < content.len() as u64 {
        return Err(io::ErrorKind::StorageFull.into());
    }
    file.write_all(content)?;
    file.set_len(content.len() as u64)?;
    file.sync_all()
}

/// Like [`write_atomic`], but returns `false` if the file already exists.
pub fn create_atomic(path: &Path, content: &[u8], mode: u32) -> Result<bool, FileError> {
    let created = write_and_publish(path, content, mode, |temp| {
        fs::hard_link(temp, path)?;
        fs::remove_file(temp)
    });
    match created {
        Ok(()) => Ok(true),
        Err(error) if error.source.kind() == io::ErrorKind::AlreadyExists && path.exists() => Ok(false),
        Err(error) => Err(error),
    }
}

fn write_and_publish(
    path: &Path,
    content: &[u8],
    mode: u32,
    publish: impl FnOnce(&Path) -> io::Result<()>,
) -> Result<(), FileError> {
    let dir = parent(path);
    fs::create_dir_all(dir).map_err(FileError::wrap("create directory", dir))?;
    let temp = dir.join(format!(".{}.{}.tmp", file_name(path), uuid::Uuid::new_v4().simple()));
    let written = (|| {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&temp)?;
        file.write_all(content)?;
        file.sync_all()?;
        publish(&temp)
    })();
    if let Err(source) = written {
        // Best-effort cleanup: report only the first error.
        let _ = fs::remove_file(&temp);
        return Err(FileError { action: "write", path: path.to_owned(), source });
    }
    sync_dir(dir)
}

/// Removes temporary files for `path` left behind by killed writers. Running writers have such files too, so the caller
/// must hold the lock shared by all writers.
pub fn remove_leftover_temps(path: &Path) -> Result<(), FileError> {
    remove_leftover_temps_in(parent(path), |name| name == file_name(path))
}

/// Like [`remove_leftover_temps`], but for all files in `dir` whose names `is_target` accepts.
pub fn remove_leftover_temps_in(dir: &Path, is_target: impl Fn(&str) -> bool) -> Result<(), FileError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(());
        }
        Err(error) => return Err(FileError::wrap("read", dir)(error)),
    };
    for entry in entries.flatten() {
        if entry.file_name().to_str().and_then(temp_file_target).is_some_and(&is_target) {
            remove_if_exists(&entry.path())?;
        }
    }
    Ok(())
}

/// Returns the target name encoded in a temporary file name.
fn temp_file_target(temp: &str) -> Option<&str> {
    let (name, random) = temp.strip_prefix('.')?.strip_suffix(".tmp")?.rsplit_once('.')?;
    let is_uuid = random.len() == 32 && random.bytes().all(|b| b.is_ascii_hexdigit());
    is_uuid.then_some(name)
}

/// Durably creates the symlink `link` to `target`. An existing link is replaced with a single rename, so it's never
/// missing.
pub fn symlink_atomic(target: &Path, link: &Path) -> Result<(), FileError> {
    let dir = parent(link);
    fs::create_dir_all(dir).map_err(FileError::wrap("create directory", dir))?;
    let temp = dir.join(format!(".{}.{}.tmp", file_name(link), uuid::Uuid::new_v4().simple()));
    std::os::unix::fs::symlink(target, &temp).map_err(FileError::wrap("create symbolic link", &temp))?;
    if let Err(source) = fs::rename(&temp, link) {
        let _ = fs::remove_file(&temp);
        return Err(FileError { action: "replace symbolic link", path: link.to_owned(), source });
    }
    sync_dir(dir)
}

/// Returns the file to replace when writing to `path`: the target of a symlink, or `path` itself. Renaming onto a
/// symlink would replace the link. Follows one link only.
pub fn resolve_link(path: &Path) -> PathBuf {
    match fs::read_link(path) {
        Ok(target) => parent(path).join(target),
        Err(_) => path.to_owned(),
    }
}

/// Makes file creations and renames in `dir` durable.
pub fn sync_dir(dir: &Path) -> Result<(), FileError> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(FileError::wrap("sync directory", dir))
}

/// Reads a file, returning `None` if it doesn't exist.
pub fn read_if_exists(path: &Path) -> Result<Option<Vec<u8>>, FileError> {
    match fs::read(path) {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(FileError::wrap("read", path)(error)),
    }
}

/// Like [`Path::try_exists`], but with the path in the error.
pub fn exists(path: &Path) -> Result<bool, FileError> {
    path.try_exists().map_err(FileError::wrap("check for", path))
}

/// Removes a file if it exists. A file whose parent isn't a directory is treated as missing.
pub fn remove_if_exists(path: &Path) -> Result<(), FileError> {
    match fs::remove_file(path) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(())
        }
        Err(error) => Err(FileError::wrap("remove", path)(error)),
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
    fn write_atomic_replaces_file_and_sets_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/secret");
        write_atomic(&path, b"one", 0o600).unwrap();
        write_atomic(&path, b"two", 0o600).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "a temporary file remains");
    }

    #[test]
    fn remove_leftover_temps_keeps_other_files() {
        let dir = tempfile::tempdir().unwrap();
        let names = |dir: &Path| {
            let mut names: Vec<_> = fs::read_dir(dir)
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        };
        let temp_name = |name: &str| format!(".{name}.{}.tmp", uuid::Uuid::new_v4().simple());
        let foreign =
            [temp_name("theirs"), ".ours.tmp".to_owned(), ".ours.123.tmp".to_owned(), "ours".to_owned()];
        for name in foreign.iter().chain(&[temp_name("ours"), temp_name("ours")]) {
            fs::write(dir.path().join(name), "").unwrap();
        }
        remove_leftover_temps(&dir.path().join("ours")).unwrap();
        let mut expected = foreign.to_vec();
        expected.sort();
        assert_eq!(names(dir.path()), expected);
        remove_leftover_temps_in(&dir.path().join("none"), |_| true).unwrap();
    }

    #[test]
    fn symlink_atomic_replaces_link() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("current");
        symlink_atomic(Path::new("releases/1"), &link).unwrap();
        symlink_atomic(Path::new("releases/2"), &link).unwrap();
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("releases/2"));
    }

    #[test]
    fn write_to_resolved_link_keeps_link() {
        let dir = tempfile::tempdir().unwrap();
        let (link, target) = (dir.path().join("opt/marker"), dir.path().join("var/marker"));
        symlink_atomic(&target, &link).unwrap();
        assert!(!link.exists(), "the link's target already exists");
        write_atomic(&resolve_link(&link), b"set", 0o644).unwrap();
        assert_eq!(
            (fs::read(&link).unwrap(), fs::read_link(&link).unwrap()),
            (b"set".to_vec(), target.clone())
        );
        assert_eq!(resolve_link(&target), target);
    }

    #[test]
    fn write_error_names_path() {
        let error = write_atomic(Path::new("/proc/none/x"), b"", 0o600).unwrap_err();
        assert!(error.to_string().contains("/proc/none"), "{error}");
    }
}
