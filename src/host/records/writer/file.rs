//! Appends lines to whichever file is at a path at the time of the write, even if the previous one was renamed or
//! deleted.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::fcntl::OFlag;

use super::sync::UnsyncedFile;
use crate::records::jsonl;
use svc_base::fsx::FileError;

/// Line format; determines how torn lines are repaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineFormat {
    Json,
    Text,
}

/// Appends lines to whichever file has this name at the time of the write.
pub struct AppendFile {
    path: PathBuf,
    format: LineFormat,
    buffers: VecDeque<Vec<u8>>,
    /// Written buffers, for reuse.
    written_buffers: Vec<Vec<u8>>,
    unwritten_bytes: usize,
    /// Bytes of the first buffer already written.
    written_bytes: usize,
    /// Last written file and its stamp after that write. If either has changed, the file's tail is repaired.
    last: Option<LastWrite>,
    /// Whether `last` has unsynced writes.
    is_dirty: bool,
    /// Earlier files of this name with unsynced writes.
    earlier_files: Vec<UnsyncedFile>,
}

struct LastWrite {
    file: Arc<File>,
    stamp: FileStamp,
}

/// Identifies a file and its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileStamp {
    pub inode: u64,
    pub length: u64,
}

impl FileStamp {
    /// Returns the file's stamp.
    ///
    /// # Errors
    /// If the file's metadata cannot be read.
    pub fn of_file(file: &File) -> io::Result<Self> {
        let meta = file.metadata()?;
        Ok(Self { inode: meta.ino(), length: meta.len() })
    }
}

impl AppendFile {
    pub fn new(path: PathBuf, format: LineFormat) -> Self {
        Self {
            path,
            format,
            buffers: VecDeque::new(),
            written_buffers: Vec::new(),
            unwritten_bytes: 0,
            written_bytes: 0,
            last: None,
            is_dirty: false,
            earlier_files: Vec::new(),
        }
    }

    /// Takes the written buffers.
    pub fn take_written_buffers(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.written_buffers)
    }

    /// Queues complete lines.
    pub fn push(&mut self, lines: Vec<u8>) {
        self.unwritten_bytes += lines.len();
        self.buffers.push_back(lines);
    }

    pub fn unwritten_bytes(&self) -> usize {
        self.unwritten_bytes
    }

    /// Returns whether there are unsynced writes not yet returned by [`AppendFile::take_unsynced`].
    pub fn is_dirty(&self) -> bool {
        self.is_dirty || !self.earlier_files.is_empty()
    }

    /// Writes all buffers.
    ///
    /// # Errors
    /// [`FileError`] if the file cannot be opened, repaired or written. A later call writes the remaining bytes.
    pub fn write(&mut self) -> Result<(), FileError> {
        if self.unwritten_bytes == 0 {
            return Ok(());
        }
        self.append().map_err(FileError::wrap("append to", &self.path))
    }

    fn append(&mut self) -> io::Result<()> {
        let mut last = self.open()?;
        let result = loop {
            let Some(buffer) = self.buffers.front() else { break Ok(()) };
            match (&*last.file).write(&buffer[self.written_bytes..]) {
                Ok(0) => break Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    self.is_dirty = true;
                    last.stamp.length += written as u64;
                    self.unwritten_bytes -= written;
                    self.written_bytes += written;
                    if self.written_bytes == buffer.len() {
                        self.written_buffers.extend(self.buffers.pop_front());
                        self.written_bytes = 0;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => break Err(error),
            }
        };
        self.last = Some(last);
        result
    }

    /// Opens the file by name. Repairs its tail, unless the file is unchanged since the last write.
    fn open(&mut self) -> io::Result<LastWrite> {
        if let Some(dir) = self.path.parent() {
            std::fs::create_dir_all(dir)?;
        }
        let mut options = OpenOptions::new();
        options.create(true).read(true).append(true).mode(0o640).custom_flags(OFlag::O_NOFOLLOW.bits());
        let mut file = options.open(&self.path)?;
        let stamp = FileStamp::of_file(&file)?;
        if let Some(last) = self.last.take() {
            if last.stamp == stamp {
                return Ok(last);
            }
            // Sync the earlier file, even if it was renamed or deleted.
            self.retire(last);
        }
        // If part of a line went to a different file, rewrite the whole line.
        self.rewind_to_line();
        let missing = match self.format {
            LineFormat::Json => jsonl::repair_tail(&mut file)?,
            LineFormat::Text => find_missing_newline(&file, stamp.length)?,
        };
        file.write_all(missing)?;
        let stamp = FileStamp::of_file(&file)?;
        Ok(LastWrite { file: Arc::new(file), stamp })
    }

    fn rewind_to_line(&mut self) {
        let Some(buffer) = self.buffers.front() else { return };
        let line_start =
            buffer[..self.written_bytes].iter().rposition(|&byte| byte == b'\n').map_or(0, |index| index + 1);
        self.unwritten_bytes += self.written_bytes - line_start;
        self.written_bytes = line_start;
    }

    /// Closes a file, or queues it for a sync if it has unsynced writes.
    fn retire(&mut self, last: LastWrite) {
        if std::mem::take(&mut self.is_dirty) {
            let LastWrite { file, stamp } = last;
            self.earlier_files.push(UnsyncedFile::new(self.path.clone(), stamp.inode, file));
        }
    }

    /// Takes the files to sync.
    pub fn take_unsynced(&mut self) -> Vec<UnsyncedFile> {
        if let Some(last) = self.last.take() {
            // If a write failed mid-line, the next one must continue in the same file.
            let current =
                (self.unwritten_bytes > 0).then(|| LastWrite { file: Arc::clone(&last.file), ..last });
            self.retire(last);
            self.last = current;
        }
        std::mem::take(&mut self.earlier_files)
    }
}

/// Replaces a file if it still has the `expected` stamp; otherwise returns `false`.
///
/// # Errors
/// If the file cannot be opened or the replacement cannot be renamed.
pub fn replace_if_unchanged(path: &Path, replacement: &Path, expected: FileStamp) -> io::Result<bool> {
    if FileStamp::of_file(&File::open(path)?)? != expected {
        return Ok(false);
    }
    std::fs::rename(replacement, path)?;
    Ok(true)
}

/// Returns a newline if the file doesn't end with one, or an empty slice.
fn find_missing_newline(file: &File, length: u64) -> io::Result<&'static [u8]> {
    let mut last_byte = [b'\n'];
    if length > 0 {
        file.read_exact_at(&mut last_byte, length - 1)?;
    }
    Ok(if last_byte == [b'\n'] { b"" } else { b"\n" })
}
