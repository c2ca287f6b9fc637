//! Long names in a tar archive: entries of their own that name the one after them (GNU `L` and `K`, POSIX `x`).
//!
//! Read here and not by the `tar` crate, which takes as much memory as such an entry claims.

use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use tar::EntryType;

/// Room for a path, a link and some attributes.
const MAX_NAME_BYTES: u64 = 64 * 1024;

/// Why a name is not taken.
#[derive(Debug, thiserror::Error)]
pub enum NameError {
    #[error("the archive is damaged")]
    Archive(#[source] io::Error),
    #[error("a name is longer than 64 KiB")]
    TooLong,
    #[error("{0}: an attribute that changes the content")]
    Attribute(String),
}

/// What the entries before said of the next one.
#[derive(Debug, Default)]
pub struct Names {
    pub path: Option<PathBuf>,
    pub link: Option<PathBuf>,
}

impl Names {
    /// Takes an entry that only speaks of the next; `false` when it is one itself.
    ///
    /// # Errors
    /// [`NameError`] when it is too long, or changes more than names.
    pub fn take_from(&mut self, entry: &mut tar::Entry<'_, impl Read>) -> Result<bool, NameError> {
        match entry.header().entry_type() {
            EntryType::GNULongName => self.path = Some(path(until_nul(&read(entry)?))),
            EntryType::GNULongLink => self.link = Some(path(until_nul(&read(entry)?))),
            EntryType::XHeader => self.take_attributes(&read(entry)?)?,
            EntryType::XGlobalHeader => drop(read(entry)?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn take_attributes(&mut self, text: &[u8]) -> Result<(), NameError> {
        for attribute in tar::PaxExtensions::new(text) {
            let attribute = attribute.map_err(NameError::Archive)?;
            match attribute.key_bytes() {
                b"path" => self.path = Some(path(attribute.value_bytes())),
                b"linkpath" => self.link = Some(path(attribute.value_bytes())),
                key if key == b"size" || key.starts_with(b"GNU.sparse") => {
                    return Err(NameError::Attribute(String::from_utf8_lossy(key).into_owned()));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn read(entry: &mut tar::Entry<'_, impl Read>) -> Result<Vec<u8>, NameError> {
    if entry.size() > MAX_NAME_BYTES {
        return Err(NameError::TooLong);
    }
    let mut text = Vec::new();
    entry.read_to_end(&mut text).map_err(NameError::Archive)?;
    if (text.len() as u64) < entry.size() {
        return Err(NameError::Archive(io::ErrorKind::UnexpectedEof.into()));
    }
    Ok(text)
}

fn until_nul(text: &[u8]) -> &[u8] {
    text.split(|&byte| byte == 0).next().unwrap_or_default()
}

fn path(bytes: &[u8]) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(bytes))
}
