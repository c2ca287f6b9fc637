//! The protocol by which the watcher reports changed paths in the home directory to the service that backs up files.
//!
//! The service sends the token of the last reply whose changes it has saved. The watcher replies with all changes since
//! then. If it cannot list them, it replies that anything may have changed: on the first request, after a restart of
//! the watcher, after it has lost events, at the watch limit, if the token is too old, or if there are too many
//! changes.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The socket's file name in [`crate::system::layout::Layout::watch_sockets`].
pub const SOCKET: &str = "changes.sock";
/// Maximum number of bytes in a request.
pub const MAX_REQUEST_BYTES: u64 = 1024;
/// Maximum number of bytes in a reply.
pub const MAX_REPLY_BYTES: u64 = 64 << 20;

/// Timeout for a request, on both sides. The watcher may be scanning a home directory with a million files.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// A request: one line of JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangesRequest {
    /// The token of the last reply whose changes are saved; `None` if the service has saved nothing yet.
    pub saved: Option<String>,
}

/// The changed paths, relative to the home directory, as bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChangedPaths {
    /// Directories in which an entry was added, removed or changed.
    pub directories: Vec<Vec<u8>>,
    /// Entries that were added, removed or moved, including everything below them.
    pub subtrees: Vec<Vec<u8>>,
}

/// The changes since the reply that the request names.
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
    /// Encodes the reply: a line of JSON, then the paths, each followed by a NUL, which no path contains.
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

    /// Decodes a reply; `None` if it is incomplete or invalid.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (header, rest) = bytes.split_at_checked(bytes.iter().position(|byte| *byte == b'\n')? + 1)?;
        let header: Header = serde_json::from_slice(header).ok()?;
        let mut paths: Vec<Vec<u8>> = rest.split(|byte| *byte == 0).map(<[u8]>::to_vec).collect();
        // Every path ends with a NUL, so the last part must be empty.
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
    fn decode_restores_a_reply_and_rejects_a_truncated_one() {
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
