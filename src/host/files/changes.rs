//! Fetches home directory changes from the watcher and converts them for scheduling and saving.

use std::path::Path;

use svc_base::error_chain::format_chain;
use svc_files::save::ChangeSet;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::schedule::Observation;
use super::staging::STAGING_NAMES;
use crate::audit::file_changes::{
    ChangedPaths, ChangesReply, ChangesRequest, MAX_REPLY_BYTES, REQUEST_TIMEOUT, SOCKET,
};

/// Errors from requesting changes from the watcher.
#[derive(Debug, thiserror::Error)]
pub enum ChangesError {
    #[error("cannot request changes from svc-watch")]
    Io(#[from] std::io::Error),
    #[error("svc-watch did not respond within {} s", REQUEST_TIMEOUT.as_secs())]
    Timeout,
    #[error("svc-watch sent an invalid response")]
    Invalid,
}

/// Requests the changes since the reply with token `saved_token`.
///
/// # Errors
/// [`ChangesError`] if the watcher is unreachable, doesn't respond within `REQUEST_TIMEOUT`, or sends an invalid
/// response.
pub async fn request_changes(
    sockets: &Path,
    saved_token: Option<String>,
) -> Result<ChangesReply, ChangesError> {
    let exchange = async {
        let mut stream = UnixStream::connect(sockets.join(SOCKET)).await?;
        let request = ChangesRequest { saved: saved_token };
        let mut line = serde_json::to_vec(&request).map_err(std::io::Error::from)?;
        line.push(b'\n');
        stream.write_all(&line).await?;
        let mut reply = Vec::new();
        stream.take(MAX_REPLY_BYTES).read_to_end(&mut reply).await?;
        Ok::<_, std::io::Error>(reply)
    };
    let reply =
        tokio::time::timeout(REQUEST_TIMEOUT, exchange).await.map_err(|_| ChangesError::Timeout)??;
    ChangesReply::decode(&reply).ok_or(ChangesError::Invalid)
}

/// Converts a reply into an observation for the schedule.
pub fn to_observation(reply: &Result<ChangesReply, ChangesError>) -> Observation {
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
            tracing::debug!(error = %format_chain(error), "cannot get changes from the watcher");
            Observation::WatcherUnavailable
        }
    }
}

/// Converts watcher paths, relative to `home`, into paths relative to the user's home directory.
pub fn watched_changes(paths: Option<&ChangedPaths>) -> ChangeSet {
    use std::os::unix::ffi::OsStrExt;
    let below_home = |path: &[u8]| Path::new("home").join(std::ffi::OsStr::from_bytes(path));
    let mut changes = ChangeSet::default();
    for path in paths.into_iter().flat_map(|paths| &paths.directories) {
        changes.mark_directory(&below_home(path));
    }
    for path in paths.into_iter().flat_map(|paths| &paths.subtrees) {
        changes.mark_subtree(&below_home(path));
    }
    changes
}

/// Marks all unwatched paths as changed: program settings next to `home`, and records and settings in `home/system`.
pub fn unwatched_changes(user_home: &Path) -> ChangeSet {
    let mut changes = ChangeSet::default();
    changes.mark_directory(Path::new(""));
    changes.mark_subtree(Path::new("home/system"));
    // If listing fails, the save reports it.
    for entry in std::fs::read_dir(user_home).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if name != "home" && STAGING_NAMES.iter().all(|staging| name != *staging) {
            changes.mark_subtree(Path::new(&name));
        }
    }
    changes
}
