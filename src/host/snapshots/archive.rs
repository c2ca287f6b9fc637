//! The owner's archive: all of the owner's data on a machine in a single tar file, readable with any `tar` and a stock
//! `pg_restore`.
//!
//! Entries, in order: `export.json`, `database.dump`, `database.json`, `home/…`, `manifest.json`. The manifest lists
//! every other entry and comes last, so that truncated archives are never accepted.

use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::system::tar_reader::EntryKind;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use svc_base::clock;
use svc_machine::epoch::Epoch;
use svc_machine::id::MachineId;
use svc_machine::name::{IdpUserId, Slot};

pub const FORMAT_VERSION: u32 = 1;
/// Archive metadata: [`ArchiveInfo`].
pub const ARCHIVE_INFO: &str = "export.json";
/// Database dump in `pg_dump`'s custom format.
pub const DUMP: &str = "database.dump";
/// The dump's sidecar, in the snapshot sidecar format.
pub const SIDECAR: &str = "database.json";
/// Path prefix for home directory files.
pub const HOME: &str = "home";
pub const MANIFEST: &str = "manifest.json";
/// The gateway's directory below [`HOME`]: records and the owner's settings.
pub const SYSTEM: &str = "system";
/// Name prefix of import staging directories in the home directory and its [`SYSTEM`]; not archived.
pub const STAGING_PREFIX: &str = ".import-";
/// Name prefix of directories holding files replaced by an import, in the home directory and its [`SYSTEM`]; not
/// archived.
pub const REPLACED_PREFIX: &str = ".before-import-";

/// Maximum number of entries, including the records for long names and long link targets.
pub const MAX_ENTRIES: usize = 4_000_000;
/// Maximum total size of all paths and link targets, in bytes.
pub const MAX_TOTAL_NAME_BYTES: u64 = 256 << 20;
/// Maximum manifest size; enough for two million entries with 100-byte paths.
pub const MAX_MANIFEST_BYTES: u64 = 512 << 20;

/// Format version and origin of an archive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ArchiveInfo {
    pub version: u32,
    #[serde(with = "clock::wire")]
    pub created_at: Timestamp,
    pub idp_user_id: IdpUserId,
    pub slot: Slot,
    pub machine_id: MachineId,
    pub epoch: Epoch,
    /// Version of the program that wrote the archive.
    pub made_by: String,
}

/// An archive entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ArchiveEntry {
    /// Non-UTF-8 bytes and `%` itself are written as `%` and two hex digits.
    pub path: String,
    pub kind: EntryKind,
    pub size_bytes: u64,
    /// SHA-256 of the file content or symbolic link target; `None` for a directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    pub version: u32,
    pub entries: Vec<ArchiveEntry>,
    /// Home directory entries that are missing or incomplete: sockets, devices, FIFOs, and anything unreadable or
    /// deleted during the export.
    pub left_out: Vec<String>,
}

/// Encodes a path for the manifest; see [`ArchiveEntry::path`].
pub fn encode_path(path: &Path) -> String {
    let mut text = String::new();
    for chunk in path.as_os_str().as_bytes().utf8_chunks() {
        text.push_str(&chunk.valid().replace('%', "%25"));
        chunk.invalid().iter().for_each(|byte| text.push_str(&format!("%{byte:02X}")));
    }
    text
}

/// Returns the SHA-256 of a byte string in hex.
pub fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// Copies `from` to `to`, returning the number of bytes and their SHA-256.
///
/// # Errors
/// I/O errors from the reader or the writer.
pub fn copy_hashed(mut from: impl Read, mut to: impl Write) -> io::Result<(u64, String)> {
    let (mut digest, mut size, mut buffer) = (Sha256::new(), 0, vec![0; 1 << 18]);
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok((size, hex::encode(digest.finalize()))),
            read => {
                digest.update(&buffer[..read]);
                to.write_all(&buffer[..read])?;
                size += read as u64;
            }
        }
    }
}

/// Returns whether a directory with this name, directly below the home directory or its [`SYSTEM`], belongs to an
/// import. Such directories are not archived.
pub fn is_import_directory(name: &OsStr) -> bool {
    has_import_number(name, STAGING_PREFIX) || has_import_number(name, REPLACED_PREFIX)
}

/// Returns whether a name consists of the prefix and an import number. The owner's own files may have other names
/// starting with the prefix.
pub fn has_import_number(name: &OsStr, prefix: &str) -> bool {
    let number = name.as_bytes().strip_prefix(prefix.as_bytes());
    number.is_some_and(|number| !number.is_empty() && number.iter().all(u8::is_ascii_digit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encode_path_escapes_invalid_utf8_and_percent() {
        let encode = |bytes: &[u8]| encode_path(Path::new(OsStr::from_bytes(bytes)));
        assert_eq!(encode("home/ä b".as_bytes()), "home/ä b");
        assert_eq!(encode(b"home/\xff"), "home/%FF");
        assert_eq!(encode(b"home/%FF"), "home/%25FF");
    }

    #[test]
    fn copy_hashed_returns_length_and_digest() {
        let mut to = Vec::new();
        let (size, digest) = copy_hashed(&b"abc"[..], &mut to).unwrap();
        assert_eq!((size, to.as_slice(), digest), (3, &b"abc"[..], sha256(b"abc")));
    }
}
