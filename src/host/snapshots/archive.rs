//! The owner's archive: everything of a machine that is the owner's, in one tar file that any `tar` and a stock `pg_restore`
//! can read.
//!
//! Its entries, in this order: `export.json`, `database.dump`, `database.json`, `home/…`, `manifest.json`. The manifest comes
//! last, so that an archive that was cut off is never taken for a whole one; it lists each entry before it.

use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::host::system::tar_reader::EntryKind;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::clock;
use crate::machine::epoch::Epoch;
use crate::machine::id::MachineId;
use crate::machine::name::{IdpUserId, Slot};

pub const VERSION: u32 = 1;
/// Whose it is: [`About`].
pub const ABOUT: &str = "export.json";
/// In `pg_dump`'s custom format.
pub const DUMP: &str = "database.dump";
/// The dump's side record, as snapshots have one.
pub const SIDE: &str = "database.json";
/// What lies below the home, below this.
pub const HOME: &str = "home";
pub const MANIFEST: &str = "manifest.json";
/// The gateway's part of the home, below [`HOME`]: records and the owner's settings.
pub const SYSTEM: &str = "system";
/// Beginnings of names below the home and its [`SYSTEM`] that are no part of an archive: what an import works with.
pub const STAGED: &str = ".import-";
pub const BEFORE: &str = ".before-import-";

/// Where and when an archive was made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct About {
    pub version: u32,
    #[serde(with = "clock::wire")]
    pub created_at: Timestamp,
    pub idp_user_id: IdpUserId,
    pub slot: Slot,
    pub machine_id: MachineId,
    pub epoch: Epoch,
    /// Of the program that wrote it.
    pub made_by: String,
}

/// An entry of the archive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Listed {
    /// Bytes that are no text are written as `%` and two hexadecimal digits, as is `%` itself.
    pub path: String,
    pub kind: EntryKind,
    pub size_bytes: u64,
    /// Of a file's bytes, or of a link's target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    pub version: u32,
    pub entries: Vec<Listed>,
    /// Below the home, and no part of the archive: sockets, devices, and what was gone when its turn came.
    pub left_out: Vec<String>,
}

/// A path as a manifest writes it.
pub fn written(path: &Path) -> String {
    let mut text = String::new();
    for chunk in path.as_os_str().as_bytes().utf8_chunks() {
        text.push_str(&chunk.valid().replace('%', "%25"));
        chunk.invalid().iter().for_each(|byte| text.push_str(&format!("%{byte:02X}")));
    }
    text
}

/// Of a few bytes.
pub fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// Copies to the end, and says how much and which.
///
/// # Errors
/// The reader's or the writer's.
pub fn copy_hashed(mut from: impl Read, mut to: impl Write) -> io::Result<(u64, String)> {
    let (mut digest, mut size, mut piece) = (Sha256::new(), 0, vec![0; 1 << 18]);
    loop {
        match from.read(&mut piece)? {
            0 => return Ok((size, hex::encode(digest.finalize()))),
            read => {
                digest.update(&piece[..read]);
                to.write_all(&piece[..read])?;
                size += read as u64;
            }
        }
    }
}

/// Whether something directly below the home is of an import, and no part of an archive.
pub fn is_an_imports(name: &OsStr) -> bool {
    let name = name.as_bytes();
    name.starts_with(STAGED.as_bytes()) || name.starts_with(BEFORE.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_paths_are_written_alike() {
        let of = |bytes: &[u8]| written(Path::new(OsStr::from_bytes(bytes)));
        assert_eq!(of("home/ä b".as_bytes()), "home/ä b");
        assert_eq!(of(b"home/\xff"), "home/%FF");
        assert_eq!(of(b"home/%FF"), "home/%25FF");
    }

    #[test]
    fn what_is_copied_is_hashed() {
        let mut to = Vec::new();
        let (size, digest) = copy_hashed(&b"abc"[..], &mut to).unwrap();
        assert_eq!((size, to.as_slice(), digest), (3, &b"abc"[..], sha256(b"abc")));
    }
}
