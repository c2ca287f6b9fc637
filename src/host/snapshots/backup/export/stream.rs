//! The protocol between the process that reads the home directory as the owner's user and the one that writes the
//! archive: frames with a kind, a length and a payload. The writer checks every frame and the order of the frames.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::files::{HomeEntry, OmittedEntry};
use crate::system::tar_reader::EntryKind;

/// Maximum size of a frame's payload.
pub const MAX_FRAME_BYTES: usize = 256 * 1024;

/// A message from the process that reads the home directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// An entry; a file's content follows, up to [`Frame::FileEnd`].
    Entry {
        entry: HomeEntry,
        link_target: Option<PathBuf>,
    },
    /// A chunk of a file.
    Data(Vec<u8>),
    FileEnd,
    OmittedEntry(OmittedEntry),
    /// End of the stream.
    End,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct EntryHead {
    /// Hexadecimal, because a path need not be UTF-8.
    path: String,
    kind: EntryKind,
    mode: u32,
    modified: u64,
    link_target: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct OmittedHead {
    path: String,
    reason: String,
}

impl Frame {
    /// Writes the frame.
    ///
    /// # Errors
    /// I/O errors from the writer.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        match self {
            Self::Entry { entry, link_target } => {
                let head = EntryHead {
                    path: to_hex(&entry.path),
                    kind: entry.kind,
                    mode: entry.mode,
                    modified: entry.modified,
                    link_target: link_target.as_deref().map(to_hex),
                };
                write_frame(to, b'E', &serde_json::to_vec(&head)?)
            }
            Self::Data(chunk) => write_data(chunk, to),
            Self::FileEnd => write_frame(to, b'F', b""),
            Self::OmittedEntry(OmittedEntry { path, reason }) => {
                let head = OmittedHead { path: to_hex(path), reason: reason.clone() };
                write_frame(to, b'L', &serde_json::to_vec(&head)?)
            }
            Self::End => write_frame(to, b'Z', b""),
        }
    }

    /// Reads and checks the next frame.
    ///
    /// # Errors
    /// I/O errors from the reader, and `UnexpectedEof` if the stream ends before the frame is complete; an error if
    /// the frame is invalid, or its path is not below the home directory.
    pub fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut head = [0; 5];
        from.read_exact(&mut head)?;
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
        if length > MAX_FRAME_BYTES {
            return Err(invalid_frame_error());
        }
        let mut payload = vec![0; length];
        from.read_exact(&mut payload)?;
        match head[0] {
            b'E' => {
                let head: EntryHead = serde_json::from_slice(&payload)?;
                let link_target = head.link_target.as_deref().map(from_hex).transpose()?;
                if link_target.is_some() != (head.kind == EntryKind::Symlink) {
                    return Err(invalid_frame_error());
                }
                let path = check_below_home(from_hex(&head.path)?)?;
                let entry =
                    HomeEntry { path, kind: head.kind, mode: head.mode & 0o7777, modified: head.modified };
                Ok(Self::Entry { entry, link_target })
            }
            b'D' => Ok(Self::Data(payload)),
            b'F' => Ok(Self::FileEnd),
            b'L' => {
                let head: OmittedHead = serde_json::from_slice(&payload)?;
                let path = check_below_home(from_hex(&head.path)?)?;
                Ok(Self::OmittedEntry(OmittedEntry { path, reason: head.reason }))
            }
            b'Z' => Ok(Self::End),
            _ => Err(invalid_frame_error()),
        }
    }
}

/// Writes a [`Frame::Data`] without copying the chunk.
///
/// # Errors
/// I/O errors from the writer.
pub fn write_data(chunk: &[u8], to: &mut impl Write) -> io::Result<()> {
    write_frame(to, b'D', chunk)
}

fn write_frame(to: &mut impl Write, kind: u8, payload: &[u8]) -> io::Result<()> {
    let length = u32::try_from(payload.len()).map_err(io::Error::other)?;
    to.write_all(&[kind])?;
    to.write_all(&length.to_be_bytes())?;
    to.write_all(payload)
}

fn to_hex(path: &Path) -> String {
    hex::encode(path.as_os_str().as_bytes())
}

fn from_hex(text: &str) -> io::Result<PathBuf> {
    hex::decode(text).map(|bytes| OsString::from_vec(bytes).into()).map_err(|_| invalid_frame_error())
}

fn check_below_home(path: PathBuf) -> io::Result<PathBuf> {
    let is_plain = path.components().all(|part| matches!(part, Component::Normal(_)));
    if is_plain && !path.as_os_str().is_empty() { Ok(path) } else { Err(invalid_frame_error()) }
}

fn invalid_frame_error() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "the process that reads the home directory sent an invalid frame",
    )
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    fn entry(path: &[u8], kind: EntryKind) -> HomeEntry {
        HomeEntry { path: OsStr::from_bytes(path).into(), kind, mode: 0o640, modified: 7 }
    }

    #[test]
    fn frames_round_trip() {
        let frames = [
            Frame::Entry { entry: entry(b"odd \xff\n", EntryKind::Directory), link_target: None },
            Frame::Entry {
                entry: entry(b"a/link", EntryKind::Symlink),
                link_target: Some("/etc/passwd".into()),
            },
            Frame::Entry { entry: entry(b"a/file", EntryKind::File), link_target: None },
            Frame::Data(vec![0; 70_000]),
            Frame::FileEnd,
            Frame::OmittedEntry(OmittedEntry { path: "a/socket".into(), reason: "not a file".into() }),
            Frame::End,
        ];
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.write(&mut bytes).unwrap());
        let mut rest = bytes.as_slice();
        for frame in frames {
            assert_eq!(Frame::read(&mut rest).unwrap(), frame);
        }
        assert_eq!(Frame::read(&mut rest).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn read_refuses_outside_paths_and_oversized_frames() {
        for path in ["../x", "a/../x", "/etc/passwd", ""] {
            let mut bytes = Vec::new();
            let frame = Frame::Entry { entry: entry(path.as_bytes(), EntryKind::File), link_target: None };
            frame.write(&mut bytes).unwrap();
            assert_eq!(Frame::read(&mut bytes.as_slice()).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
        let mut long = vec![b'D'];
        long.extend(u32::MAX.to_be_bytes());
        assert_eq!(Frame::read(&mut long.as_slice()).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
