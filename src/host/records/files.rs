//! The files of a record, in the order of their days, and places in them.
//!
//! A place names its file by inode: a rotation renames the file, and the place stays good.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::names::{self, ACTIVITY, AUDIT, INTERACTIONS};
use crate::fsx::FileError;

/// A record that can be read back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Interactions,
    Audit,
    Activity,
    Storage,
    Backups,
}

impl Kind {
    /// The file that is written now, where it has one name on all days.
    fn current(self) -> Option<String> {
        match self {
            Self::Interactions => None,
            Self::Audit => Some(AUDIT.current()),
            Self::Activity => Some(ACTIVITY.current()),
            Self::Storage => Some("storage.jsonl".to_owned()),
            Self::Backups => Some("backup.jsonl".to_owned()),
        }
    }

    fn dated(self) -> Option<names::Record> {
        match self {
            Self::Interactions => Some(INTERACTIONS),
            Self::Audit => Some(AUDIT),
            Self::Activity => Some(ACTIVITY),
            Self::Storage | Self::Backups => None,
        }
    }

    /// All its files, the oldest first.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn files(self, logs: &Path) -> Result<Vec<PathBuf>, FileError> {
        let mut dated = Vec::new();
        if let Some(record) = self.dated() {
            let entries = match std::fs::read_dir(logs) {
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
                entries => entries.map_err(FileError::at("read", logs))?,
            };
            for entry in entries {
                let entry = entry.map_err(FileError::at("read", logs))?;
                if let Some(place) = entry.file_name().to_str().and_then(|name| record.day_and_number(name)) {
                    dated.push((place, entry.path()));
                }
            }
            dated.sort();
        }
        let current = self.current().map(|name| logs.join(name)).filter(|path| path.exists());
        Ok(dated.into_iter().map(|(_, path)| path).chain(current).collect())
    }
}

/// Between two lines of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub inode: u64,
    pub offset: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.inode, self.offset)
    }
}

impl FromStr for Place {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = text.split_once('-').and_then(|(inode, offset)| {
            let number = |text: &str| text.parse::<u64>().ok().filter(|number| number.to_string() == text);
            Some(Self { inode: number(inode)?, offset: number(offset)? })
        });
        parsed.ok_or("must be a cursor or an id that was given before")
    }
}

/// A file that is read; `None` where there is none by this name any more, or something else.
///
/// # Errors
/// The file's.
pub fn open(path: &Path) -> io::Result<Option<(File, u64)>> {
    let mut options = OpenOptions::new();
    let opened = options.read(true).custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits()).open(path);
    let file = match opened {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        // A link, or a socket, that somebody has put there.
        Err(error)
            if [Errno::ELOOP as i32, Errno::ENXIO as i32].map(Some).contains(&error.raw_os_error()) =>
        {
            return Ok(None);
        }
        opened => opened?,
    };
    let meta = file.metadata()?;
    Ok(meta.is_file().then(|| (file, meta.ino())))
}
