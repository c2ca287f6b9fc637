//! A record as it grows: each whole line once, through rotations and into the next day's file.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use super::files::{self, Kind, Place};
use crate::fsx::FileError;

const PIECE: usize = 256 << 10;
/// A line that is longer and has no end yet is none of ours.
const LONGEST_LINE: usize = 8 << 20;

/// Where a reader is in a record.
pub struct Tail {
    kind: Kind,
    logs: PathBuf,
    /// `None` before there is a file.
    now: Option<Now>,
    /// The record's files when it was last looked: where ours is gone, what is not among them is new.
    known: Vec<u64>,
}

struct Now {
    file: File,
    place: Place,
    /// Read, and without an end yet; it begins at `place`.
    begun: Vec<u8>,
}

impl Tail {
    /// From the end of what is there now.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn at_end(kind: Kind, logs: PathBuf) -> Result<Self, FileError> {
        let mut tail = Self { kind, logs, now: None, known: Vec::new() };
        tail.known = tail.listed()?.into_iter().map(|(inode, _)| inode).collect();
        if let Some(path) = tail.kind.files(&tail.logs)?.pop() {
            let opened = files::open(&path).and_then(|opened| {
                let Some((file, inode)) = opened else { return Ok(None) };
                let offset = last_end(&file)?;
                Ok(Some(Now { file, place: Place { inode, offset }, begun: Vec::new() }))
            });
            tail.now = opened.map_err(FileError::at("read", &path))?;
        }
        Ok(tail)
    }

    /// After a line that was given before; `None` where its file is not there any more.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn after(kind: Kind, logs: PathBuf, place: Place) -> Result<Option<Self>, FileError> {
        for path in kind.files(&logs)? {
            let opened = files::open(&path).map_err(FileError::at("read", &path))?;
            if let Some((file, inode)) = opened
                && inode == place.inode
            {
                let mut tail =
                    Self { kind, logs, now: Some(Now { file, place, begun: Vec::new() }), known: Vec::new() };
                tail.known = tail.listed()?.into_iter().map(|(inode, _)| inode).collect();
                return Ok(Some(tail));
            }
        }
        Ok(None)
    }

    /// After what was given last.
    pub fn place(&self) -> Option<Place> {
        self.now.as_ref().map(|now| now.place)
    }

    /// The lines that have come, each with the place after it; a bounded number at once.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn lines(&mut self) -> Result<Vec<(Place, String)>, FileError> {
        if let Some(now) = &mut self.now {
            let lines = now.lines().map_err(FileError::at("read", &self.logs))?;
            if !lines.is_empty() {
                return Ok(lines);
            }
        }
        // This file may have been the last for today.
        let Some(next) = self.next()? else { return Ok(Vec::new()) };
        if let Some(now) = &mut self.now {
            // Where there is a next one, this one is complete: what it got since the last look comes first.
            let lines = now.lines().map_err(FileError::at("read", &self.logs))?;
            if !lines.is_empty() {
                return Ok(lines);
            }
        }
        self.now = Some(next);
        self.lines()
    }

    fn listed(&self) -> Result<Vec<(u64, PathBuf)>, FileError> {
        let mut listed = Vec::new();
        for path in self.kind.files(&self.logs)? {
            if let Ok(meta) = path.symlink_metadata() {
                listed.push((meta.ino(), path));
            }
        }
        Ok(listed)
    }

    /// The file that comes after the one of now.
    fn next(&mut self) -> Result<Option<Now>, FileError> {
        let listed = self.listed()?;
        let ours = self.now.as_ref().map(|now| now.place.inode);
        let at = ours.and_then(|ours| listed.iter().position(|(inode, _)| *inode == ours));
        let next = match at {
            Some(at) => listed.get(at + 1),
            None => listed.iter().find(|(inode, _)| !self.known.contains(inode)),
        };
        let mut opened = None;
        if let Some((_, path)) = next {
            let found = files::open(path).map_err(FileError::at("read", path))?;
            opened =
                found.map(|(file, inode)| Now { file, place: Place { inode, offset: 0 }, begun: Vec::new() });
        }
        if at.is_some() || opened.is_some() {
            self.known = listed.into_iter().map(|(inode, _)| inode).collect();
        }
        Ok(opened)
    }
}

impl Now {
    fn lines(&mut self) -> io::Result<Vec<(Place, String)>> {
        let (mut piece, mut lines) = (vec![0; PIECE], Vec::new());
        // A line may be longer than a piece.
        while lines.is_empty() {
            let read = self.file.read_at(&mut piece, self.place.offset + self.begun.len() as u64)?;
            if read == 0 {
                break;
            }
            let mut rest = &piece[..read];
            while let Some(length) = rest.iter().position(|&byte| byte == b'\n') {
                self.begun.extend_from_slice(&rest[..length]);
                rest = &rest[length + 1..];
                self.place.offset += self.begun.len() as u64 + 1;
                lines.push((self.place, String::from_utf8_lossy(&self.begun).into_owned()));
                self.begun.clear();
            }
            self.begun.extend_from_slice(rest);
            if self.begun.len() > LONGEST_LINE {
                self.place.offset += self.begun.len() as u64;
                self.begun.clear();
            }
        }
        let length = self.file.metadata()?.len();
        if length < self.place.offset {
            // Somebody cut it.
            (self.place.offset, self.begun) = (length, Vec::new());
        }
        Ok(lines)
    }
}

/// After the last whole line.
fn last_end(file: &File) -> io::Result<u64> {
    let mut end = file.metadata()?.len();
    while end > 0 {
        let size = (PIECE as u64).min(end);
        let mut piece = vec![0; usize::try_from(size).unwrap_or_default()];
        file.read_exact_at(&mut piece, end - size)?;
        if let Some(at) = piece.iter().rposition(|&byte| byte == b'\n') {
            return Ok(end - size + at as u64 + 1);
        }
        end -= size;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::io::Write;
    use std::path::Path;

    use super::*;

    fn append(path: &Path, text: &str) {
        let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }

    fn read(tail: &mut Tail) -> Vec<String> {
        let mut all = Vec::new();
        loop {
            let lines = tail.lines().unwrap();
            if lines.is_empty() {
                return all;
            }
            all.extend(lines.into_iter().map(|(_, line)| line));
        }
    }

    #[test]
    fn each_line_comes_once_when_it_is_whole_and_through_a_rotation() {
        let dir = tempfile::tempdir().unwrap();
        let (logs, current) = (dir.path().to_owned(), dir.path().join("audit.jsonl"));
        append(&current, "0\n");
        let mut tail = Tail::at_end(Kind::Audit, logs.clone()).unwrap();
        assert!(read(&mut tail).is_empty());
        append(&current, "1\n2\nhal");
        assert_eq!(read(&mut tail), ["1", "2"]);
        let place = tail.place().unwrap();
        append(&current, "f\n");
        fs::rename(&current, dir.path().join("audit-2026-11-21.jsonl")).unwrap();
        append(&current, "3\n");
        assert_eq!(read(&mut tail), ["half", "3"]);
        // Two rotations while nobody looked.
        fs::rename(&current, dir.path().join("audit-2026-11-22.jsonl")).unwrap();
        append(&dir.path().join("audit-2026-11-23.jsonl"), "4\n");
        append(&current, "5\n");
        assert_eq!(read(&mut tail), ["4", "5"]);
        let mut again = Tail::after(Kind::Audit, logs.clone(), place).unwrap().unwrap();
        assert_eq!(read(&mut again), ["half", "3", "4", "5"]);
        fs::write(&current, "").unwrap();
        assert!(read(&mut tail).is_empty());
        append(&current, "6\n");
        assert_eq!(read(&mut tail), ["6"]);
        assert!(Tail::after(Kind::Audit, logs, Place { inode: 1, offset: 0 }).unwrap().is_none());
    }

    #[test]
    fn a_file_that_is_deleted_brings_no_old_line_back() {
        let dir = tempfile::tempdir().unwrap();
        let (logs, current) = (dir.path().to_owned(), dir.path().join("audit.jsonl"));
        append(&dir.path().join("audit-2026-11-20.jsonl"), "old\n");
        append(&current, "0\n");
        let mut tail = Tail::at_end(Kind::Audit, logs).unwrap();
        fs::remove_file(&current).unwrap();
        assert!(read(&mut tail).is_empty());
        append(&current, "1\n");
        assert_eq!(read(&mut tail), ["1"]);
    }

    #[test]
    fn a_long_line_is_read_whole_before_the_next_file() {
        let dir = tempfile::tempdir().unwrap();
        let (logs, current) = (dir.path().to_owned(), dir.path().join("audit.jsonl"));
        append(&current, "0\n");
        let mut tail = Tail::at_end(Kind::Audit, logs).unwrap();
        let long = "x".repeat(3 * PIECE);
        append(&current, &format!("{long}\n1\n"));
        fs::rename(&current, dir.path().join("audit-2026-11-21.jsonl")).unwrap();
        append(&current, "2\n");
        assert_eq!(read(&mut tail), [&*long, "1", "2"]);
    }

    #[test]
    fn a_record_that_is_not_there_yet_is_waited_for_and_the_next_day_is_gone_into() {
        let dir = tempfile::tempdir().unwrap();
        let mut tail = Tail::at_end(Kind::Interactions, dir.path().join("logs")).unwrap();
        assert!(read(&mut tail).is_empty());
        fs::create_dir(dir.path().join("logs")).unwrap();
        append(&dir.path().join("logs/interactions-2026-11-22.jsonl"), "1\n");
        assert_eq!(read(&mut tail), ["1"]);
        append(&dir.path().join("logs/interactions-2026-11-23.jsonl"), "2\n");
        append(&dir.path().join("logs/interactions-2026-11-22.jsonl"), "late\n");
        assert_eq!(read(&mut tail), ["late", "2"]);
    }
}
