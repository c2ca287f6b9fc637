//! A file that the writer appends to, even if it is renamed or deleted in the meantime.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::fcntl::OFlag;

use super::sync::Unsynced;
use crate::records::jsonl;
use svc_base::fsx::FileError;

/// The format of lines, which determines how a torn one is repaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineFormat {
    Json,
    Text,
}

/// Lines to be appended to the file that has this name at the time of the write.
pub struct AppendFile {
    path: PathBuf,
    form: LineFormat,
    pieces: VecDeque<Vec<u8>>,
    finished: Vec<Vec<u8>>,
    left: usize,
    /// Bytes of the first piece that are already written.
    done: usize,
    /// The last written file and its length then: another file or length needs its tail repaired.
    last: Option<Last>,
    /// `last` has unsynced writes.
    is_dirty: bool,
    /// Earlier files of this name with unsynced writes.
    left_behind: Vec<Unsynced>,
}

struct Last {
    file: Arc<File>,
    extent: Extent,
}

/// A file and its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    pub inode: u64,
    pub length: u64,
}

impl Extent {
    /// Reads the extent.
    ///
    /// # Errors
    /// The file's metadata cannot be read.
    pub fn of(file: &File) -> io::Result<Self> {
        let meta = file.metadata()?;
        Ok(Self { inode: meta.ino(), length: meta.len() })
    }
}

impl AppendFile {
    pub fn new(path: PathBuf, form: LineFormat) -> Self {
        Self {
            path,
            form,
            pieces: VecDeque::new(),
            finished: Vec::new(),
            left: 0,
            done: 0,
            last: None,
            is_dirty: false,
            left_behind: Vec::new(),
        }
    }

    /// Takes the pieces that are written.
    pub fn take_finished(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.finished)
    }

    /// Adds complete lines.
    pub fn push(&mut self, lines: Vec<u8>) {
        self.left += lines.len();
        self.pieces.push_back(lines);
    }

    /// Bytes that are not yet written.
    pub fn left(&self) -> usize {
        self.left
    }

    /// Whether there are writes that [`AppendFile::take_unsynced`] has not returned.
    pub fn is_dirty(&self) -> bool {
        self.is_dirty || !self.left_behind.is_empty()
    }

    /// Writes all pieces.
    ///
    /// # Errors
    /// [`FileError`]; the rest is written by a later call.
    pub fn write(&mut self) -> Result<(), FileError> {
        if self.left == 0 {
            return Ok(());
        }
        self.append().map_err(FileError::at("append to", &self.path))
    }

    fn append(&mut self) -> io::Result<()> {
        let mut last = self.open()?;
        let end = loop {
            let Some(piece) = self.pieces.front() else { break Ok(()) };
            match (&*last.file).write(&piece[self.done..]) {
                Ok(0) => break Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    self.is_dirty = true;
                    last.extent.length += written as u64;
                    self.left -= written;
                    self.done += written;
                    if self.done == piece.len() {
                        self.finished.extend(self.pieces.pop_front());
                        self.done = 0;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => break Err(error),
            }
        };
        self.last = Some(last);
        end
    }

    /// Opens the file of this name and repairs its tail.
    fn open(&mut self) -> io::Result<Last> {
        if let Some(dir) = self.path.parent() {
            std::fs::create_dir_all(dir)?;
        }
        let mut options = OpenOptions::new();
        options.create(true).read(true).append(true).mode(0o640).custom_flags(OFlag::O_NOFOLLOW.bits());
        let mut file = options.open(&self.path)?;
        let extent = Extent::of(&file)?;
        if let Some(last) = self.last.take() {
            if last.extent == extent {
                return Ok(last);
            }
            // Sync the earlier file, wherever it is now.
            self.leave(last);
        }
        // A line that is partly in another file is written again as a whole.
        self.rewind_to_line();
        let missing = match self.form {
            LineFormat::Json => jsonl::repair(&mut file)?,
            LineFormat::Text => line_end(&file, extent.length)?,
        };
        file.write_all(missing)?;
        let extent = Extent::of(&file)?;
        Ok(Last { file: Arc::new(file), extent })
    }

    fn rewind_to_line(&mut self) {
        let Some(piece) = self.pieces.front() else { return };
        let begun = piece[..self.done].iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        self.left += self.done - begun;
        self.done = begun;
    }

    fn leave(&mut self, last: Last) {
        if std::mem::take(&mut self.is_dirty) {
            let Last { file, extent } = last;
            self.left_behind.push(Unsynced::new(self.path.clone(), extent.inode, file));
        }
    }

    /// Takes the files that must be synced.
    pub fn take_unsynced(&mut self) -> Vec<Unsynced> {
        if let Some(last) = self.last.take() {
            let again = (self.left > 0).then(|| Last { file: Arc::clone(&last.file), ..last });
            self.leave(last);
            self.last = again;
        }
        std::mem::take(&mut self.left_behind)
    }
}

/// Replaces a file if it is unchanged; otherwise returns `false`.
///
/// # Errors
/// The files cannot be read or renamed.
pub fn replace(path: &Path, by: &Path, was: Extent) -> io::Result<bool> {
    if Extent::of(&File::open(path)?)? != was {
        return Ok(false);
    }
    std::fs::rename(by, path)?;
    Ok(true)
}

/// The missing line end of a text, if any.
fn line_end(file: &File, length: u64) -> io::Result<&'static [u8]> {
    let mut last = [b'\n'];
    if length > 0 {
        file.read_exact_at(&mut last, length - 1)?;
    }
    Ok(if last == [b'\n'] { b"" } else { b"\n" })
}
