//! Finds a log's daily files, and tracks positions in them.
//!
//! Positions identify files by inode and birth time, so they stay valid when a rotation renames the file.

use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::SystemTime;

use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::log_file_names::{ACTIVITY, AUDIT, DatedLog, INTERACTIONS};
use svc_base::fsx::FileError;

/// A log readable with [`page`](super::page) and [`tail`](super::tail).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogKind {
    Interactions,
    Audit,
    Activity,
    Storage,
    Backups,
}

impl LogKind {
    /// Returns the name of the current file, or `None` if lines go straight to dated files.
    fn current_name(self) -> Option<String> {
        match self {
            Self::Interactions => None,
            Self::Audit => Some(AUDIT.current_name()),
            Self::Activity => Some(ACTIVITY.current_name()),
            Self::Storage => Some("storage.jsonl".to_owned()),
            Self::Backups => Some("backup.jsonl".to_owned()),
        }
    }

    fn dated_log(self) -> Option<DatedLog> {
        match self {
            Self::Interactions => Some(INTERACTIONS),
            Self::Audit => Some(AUDIT),
            Self::Activity => Some(ACTIVITY),
            Self::Storage | Self::Backups => None,
        }
    }

    /// Lists all files, oldest first. May miss a file that's being rotated concurrently.
    pub fn list_files(self, logs: &Path) -> Result<Vec<PathBuf>, FileError> {
        let dated = self.list_dated_files(logs)?;
        let current = self.current_name().map(|name| logs.join(name)).filter(|path| path.exists());
        Ok(dated.into_iter().chain(current).collect())
    }

    /// Opens all files, oldest first. Includes the file that's current at the time of the call, even if it's rotated
    /// concurrently.
    pub fn open_files(self, logs: &Path) -> Result<Vec<OpenLogFile>, FileError> {
        let current = self.open_current(logs)?;
        let mut files = Vec::new();
        for path in self.list_dated_files(logs)? {
            files.extend(OpenLogFile::open(path)?);
        }
        let current = current.filter(|current| files.iter().all(|file| file.id != current.id));
        files.extend(current);
        Ok(files)
    }

    fn open_current(self, logs: &Path) -> Result<Option<OpenLogFile>, FileError> {
        self.current_name().map_or(Ok(None), |name| OpenLogFile::open(logs.join(name)))
    }

    fn list_dated_files(self, logs: &Path) -> Result<Vec<PathBuf>, FileError> {
        let Some(log) = self.dated_log() else { return Ok(Vec::new()) };
        let entries = match std::fs::read_dir(logs) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(FileError::wrap("read", logs))?,
        };
        let mut dated = Vec::new();
        for entry in entries {
            let entry = entry.map_err(FileError::wrap("read", logs))?;
            let name = entry.file_name();
            if let Some(day_and_number) = name.to_str().and_then(|name| log.parse_day_and_number(name)) {
                dated.push((day_and_number, entry.path()));
            }
        }
        dated.sort();
        Ok(dated.into_iter().map(|(_, path)| path).collect())
    }
}

/// A log's files from newest to oldest, with older files opened lazily.
pub struct FilesBackward {
    current: Option<OpenLogFile>,
    /// The remaining files, oldest first.
    dated: Vec<PathBuf>,
}

impl FilesBackward {
    /// Opens the current file before listing the others, so that a rotation in between can't hide it.
    pub fn new(kind: LogKind, logs: &Path) -> Result<Self, FileError> {
        let current = kind.open_current(logs)?;
        let mut dated = kind.list_dated_files(logs)?;
        // If the current file was rotated in the meantime, it's the last one listed.
        let is_current = |path: &PathBuf| {
            let id = std::fs::symlink_metadata(path).ok().map(|meta| FileId::from_metadata(&meta));
            id.is_some() && id == current.as_ref().map(|current| current.id)
        };
        if dated.last().is_some_and(is_current) {
            dated.pop();
        }
        Ok(Self { current, dated })
    }

    /// Opens the next older file, or returns `None` if there are no more.
    pub fn open_next(&mut self) -> Result<Option<OpenLogFile>, FileError> {
        if let Some(current) = self.current.take() {
            return Ok(Some(current));
        }
        while let Some(path) = self.dated.pop() {
            if let Some(file) = OpenLogFile::open(path)? {
                return Ok(Some(file));
            }
        }
        Ok(None)
    }

    /// Returns whether all files have been opened.
    pub fn is_empty(&self) -> bool {
        self.current.is_none() && self.dated.is_empty()
    }
}

#[derive(Debug)]
pub struct OpenLogFile {
    pub path: PathBuf,
    pub id: FileId,
    pub file: File,
}

impl OpenLogFile {
    fn open(path: PathBuf) -> Result<Option<Self>, FileError> {
        let opened = open_regular(&path).map_err(FileError::wrap("read", &path))?;
        Ok(opened.map(|(file, id)| Self { path, id, file }))
    }
}

/// Identifies a file regardless of its name. The birth time tells reused inodes apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileId {
    inode: u64,
    /// Birth time in nanoseconds since the Unix epoch, or 0 if the file system doesn't report it.
    birth_time: u64,
}

impl FileId {
    pub fn from_metadata(meta: &Metadata) -> Self {
        let birth_time = meta.created().ok().and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
        let birth_time =
            birth_time.and_then(|since| u64::try_from(since.as_nanos()).ok()).unwrap_or_default();
        Self { inode: meta.ino(), birth_time }
    }
}

/// A position between lines in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinePosition {
    pub file: FileId,
    pub offset: u64,
}

impl fmt::Display for LinePosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{}", self.file.inode, self.file.birth_time, self.offset)
    }
}

impl FromStr for LinePosition {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut numbers = text.split('-').map(|part| {
            let number = part.parse::<u64>().ok();
            number.filter(|number| number.to_string() == part)
        });
        let mut number = || numbers.next().flatten().ok_or("must be a cursor or id from an earlier response");
        let position = Self { file: FileId { inode: number()?, birth_time: number()? }, offset: number()? };
        if numbers.next().is_some() {
            Err("must be a cursor or id from an earlier response")
        } else {
            Ok(position)
        }
    }
}

/// A reader's position: in the file containing the last line read, and in another file that has also grown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TailPosition {
    pub last: LinePosition,
    pub other_file: Option<LinePosition>,
}

impl fmt::Display for TailPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.other_file {
            Some(other_file) => write!(f, "{}_{other_file}", self.last),
            None => write!(f, "{}", self.last),
        }
    }
}

impl FromStr for TailPosition {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('_') {
            Some((last, other_file)) => {
                Ok(Self { last: last.parse()?, other_file: Some(other_file.parse()?) })
            }
            None => Ok(Self { last: text.parse()?, other_file: None }),
        }
    }
}

/// Opens a regular file, or returns `None` if `path` doesn't exist or isn't one.
///
/// # Errors
/// If the file can't be opened.
pub fn open_regular(path: &Path) -> io::Result<Option<(File, FileId)>> {
    let mut options = OpenOptions::new();
    let opened = options.read(true).custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits()).open(path);
    let file = match opened {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        // A symlink (ELOOP) or socket (ENXIO) created by another program.
        Err(error)
            if [Errno::ELOOP as i32, Errno::ENXIO as i32].map(Some).contains(&error.raw_os_error()) =>
        {
            return Ok(None);
        }
        opened => opened?,
    };
    let meta = file.metadata()?;
    Ok(meta.is_file().then(|| (file, FileId::from_metadata(&meta))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_files_includes_file_being_rotated() {
        let dir = tempfile::tempdir().unwrap();
        let (logs, current) = (dir.path(), dir.path().join(AUDIT.current_name()));
        std::fs::write(&current, "0\n").unwrap();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for n in 1..=200 {
                    let day = jiff::civil::date(2026, 11, 20);
                    std::fs::rename(&current, logs.join(AUDIT.dated_name(day, n))).unwrap();
                    std::fs::write(&current, format!("{n}\n")).unwrap();
                }
            });
            while !writer.is_finished() {
                let Ok(meta) = current.symlink_metadata() else { continue };
                let id = FileId::from_metadata(&meta);
                let files = LogKind::Audit.open_files(logs).unwrap();
                assert_eq!(files.iter().filter(|file| file.id == id).count(), 1);
            }
        });
        assert_eq!(LogKind::Audit.open_files(logs).unwrap().len(), 201);
    }
}
