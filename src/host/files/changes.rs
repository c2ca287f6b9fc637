//! Asks the watcher what has changed in the home directory, converts its reply for the save, and estimates its size.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use svc_base::chain::format_chain;
use svc_files::save::Changes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::schedule::Observation;
use super::staging::STAGING_NAMES;
use crate::audit::file_changes::{ChangedPaths, ChangesReply, ChangesRequest, MAX_REPLY_BYTES, SOCKET};

/// Timeout for a request. The watcher may be scanning a home directory with a million files.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of entries that an estimate examines.
const MAX_ESTIMATED: usize = 100_000;

/// Why the watcher did not answer.
#[derive(Debug, thiserror::Error)]
pub enum ChangesError {
    #[error("cannot ask svc-watch what has changed")]
    Io(#[from] std::io::Error),
    #[error("svc-watch did not answer within {} s", TIMEOUT.as_secs())]
    Timeout,
    #[error("svc-watch sent an invalid answer")]
    Invalid,
}

/// Returns the changes since the reply whose token is `saved`.
///
/// # Errors
/// [`ChangesError`].
pub async fn request(sockets: &Path, saved: Option<String>) -> Result<ChangesReply, ChangesError> {
    let exchange = async {
        let mut stream = UnixStream::connect(sockets.join(SOCKET)).await?;
        let mut line = serde_json::to_vec(&ChangesRequest { saved }).map_err(std::io::Error::from)?;
        line.push(b'\n');
        stream.write_all(&line).await?;
        let mut reply = Vec::new();
        stream.take(MAX_REPLY_BYTES).read_to_end(&mut reply).await?;
        Ok::<_, std::io::Error>(reply)
    };
    let reply = tokio::time::timeout(TIMEOUT, exchange).await.map_err(|_| ChangesError::Timeout)??;
    ChangesReply::decode(&reply).ok_or(ChangesError::Invalid)
}

/// What a reply means for the schedule.
pub fn observe(reply: &Result<ChangesReply, ChangesError>) -> Observation {
    match reply {
        Ok(ChangesReply { paths: None, .. }) => Observation::Unknown,
        Ok(ChangesReply { paths: Some(paths), has_new, .. }) => {
            if paths.directories.is_empty() && paths.subtrees.is_empty() {
                Observation::Unchanged
            } else {
                Observation::Changed { is_settled: !has_new }
            }
        }
        Err(error) => {
            tracing::debug!(error = %format_chain(error), "the watcher does not say what has changed");
            Observation::Unattended
        }
    }
}

/// The watcher's paths, which are below `home`.
pub fn watched_changes(paths: Option<&ChangedPaths>) -> Changes {
    use std::os::unix::ffi::OsStrExt;
    let below_home = |path: &[u8]| Path::new("home").join(std::ffi::OsStr::from_bytes(path));
    let mut changes = Changes::default();
    for path in paths.into_iter().flat_map(|paths| &paths.directories) {
        changes.mark_directory(&below_home(path));
    }
    for path in paths.into_iter().flat_map(|paths| &paths.subtrees) {
        changes.mark_subtree(&below_home(path));
    }
    changes
}

/// Estimates how many bytes of changes are not saved: the total size of the files in `paths` that have changed since
/// `since`. Examines at most `MAX_ESTIMATED` entries, so the estimate may be too low.
pub fn estimate_bytes(home: &Path, paths: &ChangedPaths, since: Option<Timestamp>) -> u64 {
    use std::os::unix::ffi::OsStrExt;
    let since = since.map_or(i64::MIN, Timestamp::as_second);
    let full = |path: &Vec<u8>| home.join(std::ffi::OsStr::from_bytes(path));
    let mut pending: Vec<(PathBuf, bool)> = paths.subtrees.iter().map(|path| (full(path), true)).collect();
    pending.extend(paths.directories.iter().map(|path| (full(path), false)));
    let (mut bytes, mut left) = (0, MAX_ESTIMATED);
    while let Some((path, is_deep)) = pending.pop().filter(|_| left > 0) {
        let entries: Vec<PathBuf> = match std::fs::read_dir(&path) {
            Ok(entries) => entries.flatten().map(|entry| entry.path()).take(left).collect(),
            // A changed file.
            Err(_) => vec![path],
        };
        left -= entries.len().min(left);
        for path in entries {
            match std::fs::symlink_metadata(&path) {
                Ok(meta) if meta.is_file() && meta.ctime() >= since => bytes += meta.len(),
                Ok(meta) if meta.is_dir() && is_deep => pending.push((path, true)),
                _ => {}
            }
        }
    }
    bytes
}

/// Everything that the watcher does not watch: the settings of programs beside `home`, and the machine's records.
pub fn unwatched_changes(user_home: &Path) -> Changes {
    let mut changes = Changes::default();
    changes.mark_directory(Path::new(""));
    changes.mark_subtree(Path::new("home/system"));
    // If the directory cannot be listed, the save reports it.
    for entry in std::fs::read_dir(user_home).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if name != "home" && STAGING_NAMES.iter().all(|staging| name != *staging) {
            changes.mark_subtree(Path::new(&name));
        }
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimate_counts_changed_files_only() {
        let home = tempfile::tempdir().unwrap();
        let write = |path: &str, size: usize| {
            let path = home.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, vec![0; size]).unwrap();
        };
        write("notes/a", 10);
        write("notes/inner/not-listed", 1000);
        write("new/deep/b", 300);
        write("moved-file", 5);
        std::os::unix::fs::symlink("/etc", home.path().join("new/link")).unwrap();
        let bytes = |path: &str| path.as_bytes().to_vec();
        let paths = ChangedPaths {
            directories: vec![bytes("notes"), bytes("gone")],
            subtrees: vec![bytes("new"), bytes("moved-file")],
        };
        assert_eq!(estimate_bytes(home.path(), &paths, None), 315);
        let later = Timestamp::now() + jiff::SignedDuration::from_secs(60);
        assert_eq!(estimate_bytes(home.path(), &paths, Some(later)), 0);
    }
}
