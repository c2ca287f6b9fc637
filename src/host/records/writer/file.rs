//! One file of the writer's: lines that are to be appended, whatever becomes of the file meanwhile.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::fcntl::OFlag;

use super::sync::Unsynced;
use crate::fsx::FileError;
use crate::host::records::jsonl;

/// What a line is, which says what becomes of one that is torn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    Json,
    Text,
}

/// What is to be appended to the file that has this name when it is written.
pub struct Appended {
    path: PathBuf,
    form: Form,
    pieces: VecDeque<Vec<u8>>,
    finished: Vec<Vec<u8>>,
    left: usize,
    /// Of the first piece: bytes that are in a file already.
    done: usize,
    /// The file that was last written, and how long it was then: another one, or another length, has another's tail.
    last: Option<Last>,
    /// What was written to `last` may be lost where the power goes.
    is_dirty: bool,
    /// Files that had this name before, with the same.
    left_behind: Vec<Unsynced>,
}

struct Last {
    file: Arc<File>,
    extent: Extent,
}

/// Which file it is, and how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    pub inode: u64,
    pub length: u64,
}

impl Extent {
    /// # Errors
    /// The file's.
    pub fn of(file: &File) -> io::Result<Self> {
        let meta = file.metadata()?;
        Ok(Self { inode: meta.ino(), length: meta.len() })
    }
}

impl Appended {
    pub fn new(path: PathBuf, form: Form) -> Self {
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

    /// Pieces that are written.
    pub fn finished(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.finished)
    }

    /// Whole lines, to be written after those that are there.
    pub fn take(&mut self, lines: Vec<u8>) {
        self.left += lines.len();
        self.pieces.push_back(lines);
    }

    /// Bytes that are not written yet.
    pub fn left(&self) -> usize {
        self.left
    }

    /// Something was written that was not handed over by [`Appended::unsynced`].
    pub fn is_dirty(&self) -> bool {
        self.is_dirty || !self.left_behind.is_empty()
    }

    /// Writes all of it.
    ///
    /// # Errors
    /// [`FileError`]; what is not written stays, and is written by a later call.
    pub fn write(&mut self) -> Result<(), FileError> {
        if self.left == 0 {
            return Ok(());
        }
        self.append().map_err(FileError::at("append to", &self.path))
    }

    fn append(&mut self) -> io::Result<()> {
        let mut last = self.opened()?;
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

    /// The file of this name, with a tail to go on from.
    fn opened(&mut self) -> io::Result<Last> {
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
            // What was written is made durable, wherever it went.
            self.leave(last);
        }
        // A line that was begun in another file is written whole here.
        self.back_to_line();
        let missing = match self.form {
            Form::Json => jsonl::repair(&mut file)?,
            Form::Text => line_end(&file, extent.length)?,
        };
        file.write_all(missing)?;
        let extent = Extent::of(&file)?;
        Ok(Last { file: Arc::new(file), extent })
    }

    fn back_to_line(&mut self) {
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

    /// The files that are to be made durable, for whoever does that. Lets go of them.
    pub fn unsynced(&mut self) -> Vec<Unsynced> {
        if let Some(last) = self.last.take() {
            let again = (self.left > 0).then(|| Last { file: Arc::clone(&last.file), ..last });
            self.leave(last);
            self.last = again;
        }
        std::mem::take(&mut self.left_behind)
    }
}

/// Puts a file in the place of one that is still what it was; `false` where it is not.
///
/// # Errors
/// The files'.
pub fn replace(path: &Path, by: &Path, was: Extent) -> io::Result<bool> {
    if Extent::of(&File::open(path)?)? != was {
        return Ok(false);
    }
    std::fs::rename(by, path)?;
    Ok(true)
}

/// The line end that a text lacks.
fn line_end(file: &File, length: u64) -> io::Result<&'static [u8]> {
    let mut last = [b'\n'];
    if length > 0 {
        file.read_exact_at(&mut last, length - 1)?;
    }
    Ok(if last == [b'\n'] { b"" } else { b"\n" })
}
