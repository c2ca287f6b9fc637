//! The changed-paths protocol: the watcher reports changes in the home directory to the file-backup service.
//!
//! The service sends the token of the last reply whose changes it has saved, and the watcher replies with all changes
//! since then. When it can't list them, it replies that anything may have changed: on the first request, after a
//! watcher restart or lost events, at the watch limit, if the token is too old, or if there are too many changes.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Socket name in [`crate::system::layout::Layout::watch_sockets`].
pub const SOCKET: &str = "changes.sock";
/// Maximum request size.
pub const MAX_REQUEST_BYTES: u64 = 1024;
/// Maximum reply size.
pub const MAX_REPLY_BYTES: u64 = 64 << 20;

/// Request timeout on both sides. The watcher may be busy scanning a home directory with a million files.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// A request, sent as one line of JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangesRequest {
    /// Token of the last reply whose changes are saved, or `None` if nothing has been saved yet.
    pub saved: Option<String>,
}

/// Changed paths as bytes, relative to the home directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChangedPaths {
    /// Directories with added, removed or changed entries.
    pub directories: Vec<Vec<u8>>,
    /// Entries that were added, removed or moved, with everything below them.
    pub subtrees: Vec<Vec<u8>>,
}

/// Changes since the reply referenced by the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangesReply {
    /// Identifies this reply in a later request.
    pub token: String,
    /// Whether the kernel has reported events since the previous request.
    pub has_new: bool,
    /// `None` if anything may have changed.
    pub paths: Option<ChangedPaths>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Header {
    token: String,
    has_new: bool,
    is_complete: bool,
    directories: usize,
    subtrees: usize,
}

impl ChangesReply {
    /// Encodes the reply: a line of JSON, then the NUL-terminated paths. Paths can't contain a NUL.
    pub fn encode(&self) -> Vec<u8> {
        let none = ChangedPaths::default();
        let paths = self.paths.as_ref().unwrap_or(&none);
        let header = Header {
            token: self.token.clone(),
            has_new: self.has_new,
            is_complete: self.paths.is_some(),
            directories: paths.directories.len(),
            subtrees: paths.subtrees.len(),
        };
        let mut bytes = serde_json::to_vec(&header).expect("plain fields serialize to JSON");
        bytes.push(b'\n');
        for path in paths.directories.iter().chain(&paths.subtrees) {
            bytes.extend_from_slice(path);
            bytes.push(0);
        }
        bytes
    }

    /// Decodes a reply, or returns `None` if it is truncated or invalid.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (header, rest) = bytes.split_at_checked(bytes.iter().position(|byte| *byte == b'\n')? + 1)?;
        let header: Header = serde_json::from_slice(header).ok()?;
        let mut paths: Vec<Vec<u8>> = rest.split(|byte| *byte == 0).map(<[u8]>::to_vec).collect();
        // Every path is NUL-terminated, so the last part must be empty.
        if !paths.pop()?.is_empty() || paths.len() != header.directories.checked_add(header.subtrees)? {
            return None;
        }
        let subtrees = paths.split_off(header.directories);
        let paths = header.is_complete.then_some(ChangedPaths { directories: paths, subtrees });
        Some(Self { token: header.token, has_new: header.has_new, paths })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_round_trips_and_decode_rejects_truncation() {
        let paths = ChangedPaths {
            directories: vec![Vec::new(), b"a/line\nbreak".to_vec()],
            subtrees: vec![b"not \xff utf-8".to_vec()],
        };
        for paths in [Some(paths), Some(ChangedPaths::default()), None] {
            let reply = ChangesReply { token: "1-2".to_owned(), has_new: true, paths };
            let encoded = reply.encode();
            assert_eq!(ChangesReply::decode(&encoded), Some(reply));
            for end in 0..encoded.len() {
                assert_eq!(ChangesReply::decode(&encoded[..end]), None, "{end}");
            }
        }
    }
}
