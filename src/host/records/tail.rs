//! A record as it grows: each whole line once, through rotations, in whichever of its files it is written.
//!
//! All files are looked at, not the newest alone: where days begin later by a new time zone, or a line comes late, one of an
//! earlier day grows.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::files::{self, FileId, Kind, Place, Places};
use crate::fsx::FileError;

const PIECE: usize = 256 << 10;
/// A line that is longer is none of ours.
const LONGEST_LINE: usize = 8 << 20;
/// So much is read at one look at most; it holds more than a line.
const MOST_READ: usize = 16 << 20;
/// A look ends once it has so much to give.
const ENOUGH: usize = 1 << 20;

/// Where a reader is in a record.
pub struct Tail {
    kind: Kind,
    logs: PathBuf,
    /// All that were ever seen: a few each day.
    files: Vec<Followed>,
    /// The file of the last line, and the one of the line before that was in another.
    last: Option<FileId>,
    other: Option<FileId>,
}

struct Followed {
    id: FileId,
    /// After the last line that was given.
    offset: u64,
    /// How long it was when it was read to its end.
    looked: Option<u64>,
    /// What is at `offset` is the rest of a line that is too long.
    skips: bool,
}

/// What one look may still do.
struct Look {
    left: usize,
    found: Vec<(Places, String)>,
    bytes: usize,
}

impl Tail {
    /// From the end of what is there now.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn at_end(kind: Kind, logs: PathBuf) -> Result<Self, FileError> {
        let mut tail = Self { kind, logs, files: Vec::new(), last: None, other: None };
        for path in tail.kind.files(&tail.logs)? {
            if let Some((id, file)) = opened(&path)? {
                tail.files.push(Followed::from_end(id, &file).map_err(FileError::at("read", &path))?);
                tail.last = Some(id);
            }
        }
        Ok(tail)
    }

    /// After a line that was given before; `None` where its file is not there any more.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn after(kind: Kind, logs: PathBuf, places: Places) -> Result<Option<Self>, FileError> {
        let mut files = Vec::new();
        for path in kind.files(&logs)? {
            files.extend(opened(&path)?.map(|(id, file)| (path, id, file)));
        }
        let at = |place: Place| files.iter().position(|(_, id, _)| *id == place.file);
        let Some(last) = at(places.last) else { return Ok(None) };
        // What came after the newest of them was not read yet, what is older was.
        let newest = places.other.and_then(at).map_or(last, |other| other.max(last));
        let mut tail = Self { kind, logs, files: Vec::new(), last: Some(places.last.file), other: None };
        for (at, (path, id, file)) in files.iter().enumerate() {
            let followed = if *id == places.last.file {
                Followed::after(places.last, file)
            } else if let Some(other) = places.other.filter(|other| other.file == *id) {
                tail.other = Some(*id);
                Followed::after(other, file)
            } else if at > newest {
                Ok(Some(Followed::new(*id)))
            } else {
                Followed::from_end(*id, file).map(Some)
            };
            let Some(followed) = followed.map_err(FileError::at("read", path))? else { return Ok(None) };
            tail.files.push(followed);
        }
        Ok(Some(tail))
    }

    /// After what was given last.
    pub fn place(&self) -> Option<Places> {
        let of = |id: FileId| {
            let followed = self.files.iter().find(|followed| followed.id == id)?;
            Some(Place { file: id, offset: followed.offset })
        };
        Some(Places { last: of(self.last?)?, other: self.other.and_then(of) })
    }

    /// The lines that have come, each with the place after it; a bounded number at once.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn lines(&mut self) -> Result<Vec<(Places, String)>, FileError> {
        let mut look = Look { left: MOST_READ, found: Vec::new(), bytes: 0 };
        for path in self.kind.files(&self.logs)? {
            let Ok(meta) = path.symlink_metadata() else { continue };
            let known = self.files.iter().find(|followed| followed.id == FileId::of(&meta));
            if known.is_some_and(|followed| followed.looked == Some(meta.len())) {
                continue;
            }
            // By this name there may be another one now: what is open counts.
            let Some((id, file)) = opened(&path)? else { continue };
            let at = self.files.iter().position(|followed| followed.id == id).unwrap_or_else(|| {
                self.files.push(Followed::new(id));
                self.files.len() - 1
            });
            self.read(at, &file, &mut look).map_err(FileError::at("read", &path))?;
            if look.is_over() {
                break;
            }
        }
        Ok(look.found)
    }

    fn read(&mut self, at: usize, file: &File, look: &mut Look) -> io::Result<()> {
        let followed = &mut self.files[at];
        let length = file.metadata()?.len();
        if length < followed.offset {
            // Somebody cut it.
            (followed.offset, followed.skips) = (length, false);
        }
        let id = followed.id;
        let (mut piece, mut begun) = (vec![0; PIECE], Vec::new());
        while !look.is_over() {
            let followed = &mut self.files[at];
            let from = followed.offset + begun.len() as u64;
            let read = file.read_at(&mut piece, from)?;
            if read == 0 {
                followed.looked = Some(from);
                break;
            }
            look.left = look.left.saturating_sub(read);
            let mut rest = &piece[..read];
            while let Some(length) = rest.iter().position(|&byte| byte == b'\n') {
                begun.extend_from_slice(&rest[..length]);
                rest = &rest[length + 1..];
                let followed = &mut self.files[at];
                followed.offset += begun.len() as u64 + 1;
                if !std::mem::take(&mut followed.skips) {
                    if self.last != Some(id) {
                        self.other = self.last.replace(id);
                    }
                    look.give(self.place(), &begun);
                }
                begun.clear();
            }
            let followed = &mut self.files[at];
            if followed.skips {
                followed.offset += rest.len() as u64;
            } else {
                begun.extend_from_slice(rest);
            }
            if begun.len() > LONGEST_LINE {
                let followed = &mut self.files[at];
                followed.offset += begun.len() as u64;
                followed.skips = true;
                begun.clear();
            }
        }
        Ok(())
    }
}

impl Followed {
    fn new(id: FileId) -> Self {
        Self { id, offset: 0, looked: None, skips: false }
    }

    /// `None` where the file has no such place.
    fn after(place: Place, file: &File) -> io::Result<Option<Self>> {
        let is_there = place.offset <= file.metadata()?.len() && ends_line(file, place.offset)?;
        Ok(is_there.then(|| Self { offset: place.offset, ..Self::new(place.file) }))
    }

    /// After the last whole line.
    fn from_end(id: FileId, file: &File) -> io::Result<Self> {
        let length = file.metadata()?.len();
        let (mut end, mut skips) = (length, false);
        while !ends_line(file, end)? {
            let size = (PIECE as u64).min(end);
            let mut piece = vec![0; usize::try_from(size).unwrap_or_default()];
            file.read_exact_at(&mut piece, end - size)?;
            let at = piece.iter().rposition(|&byte| byte == b'\n').map(|at| at as u64 + 1);
            end = end - size + at.unwrap_or_default();
            if length - end > LONGEST_LINE as u64 {
                (end, skips) = (length, true);
                break;
            }
        }
        Ok(Self { id, offset: end, looked: Some(length), skips })
    }
}

impl Look {
    fn is_over(&self) -> bool {
        self.left == 0 || self.bytes >= ENOUGH
    }

    fn give(&mut self, place: Option<Places>, line: &[u8]) {
        self.bytes += line.len();
        self.found.extend(place.map(|place| (place, String::from_utf8_lossy(line).into_owned())));
    }
}

fn opened(path: &Path) -> Result<Option<(FileId, File)>, FileError> {
    let opened = files::open(path).map_err(FileError::at("read", path))?;
    Ok(opened.map(|(file, id)| (id, file)))
}

/// Whether a line ends before this offset, or the file begins there.
fn ends_line(file: &File, offset: u64) -> io::Result<bool> {
    let mut last = [b'\n'];
    if offset > 0 {
        file.read_exact_at(&mut last, offset - 1)?;
    }
    Ok(last == [b'\n'])
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::io::Write;

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
        let elsewhere = "1-1-0".parse().unwrap();
        assert!(Tail::after(Kind::Audit, logs, elsewhere).unwrap().is_none());
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

    /// A time zone was moved to the west at noon: the day before goes on.
    #[test]
    fn lines_of_an_earlier_day_come_too_and_a_break_loses_none_and_doubles_none() {
        let dir = tempfile::tempdir().unwrap();
        let (logs, path) =
            (dir.path().to_owned(), |day: u32| dir.path().join(format!("interactions-2026-11-{day}.jsonl")));
        append(&path(20), "old\n");
        append(&path(21), "1\n");
        append(&path(22), "2\n");
        let mut tail = Tail::at_end(Kind::Interactions, logs.clone()).unwrap();
        append(&path(22), "3\n");
        assert_eq!(read(&mut tail), ["3"]);
        append(&path(21), "4\n");
        assert_eq!(read(&mut tail), ["4"]);
        append(&path(22), "5\n");
        append(&path(21), "6\n");
        let mut again = Vec::new();
        for (place, line) in tail.lines().unwrap() {
            again.push((place, line));
        }
        assert_eq!(again.iter().map(|(_, line)| &**line).collect::<Vec<_>>(), ["6", "5"]);
        append(&path(21), "7\n");
        append(&path(23), "8\n");
        for (place, rest) in [(again[0].0, vec!["7", "5", "8"]), (again[1].0, vec!["7", "8"])] {
            let place = place.to_string().parse().unwrap();
            let mut resumed = Tail::after(Kind::Interactions, logs.clone(), place).unwrap().unwrap();
            assert_eq!(read(&mut resumed), rest, "{place:?}");
        }
        assert_eq!(read(&mut tail), ["7", "8"]);
    }

    #[test]
    fn a_place_that_its_file_does_not_have_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let (logs, current) = (dir.path().to_owned(), dir.path().join("audit.jsonl"));
        append(&current, "one\ntwo\n");
        let place = Tail::at_end(Kind::Audit, logs.clone()).unwrap().place().unwrap();
        let at = |offset: u64| {
            let place = Places { last: Place { offset, ..place.last }, other: None };
            Tail::after(Kind::Audit, logs.clone(), place).unwrap().map(|mut tail| read(&mut tail))
        };
        assert_eq!(at(8), Some(vec![]));
        assert_eq!(at(4), Some(vec!["two".to_owned()]));
        assert_eq!((at(3), at(9)), (None, None));
    }

    #[test]
    fn a_line_that_is_too_long_is_left_out_and_no_look_reads_all_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let (logs, current) = (dir.path().to_owned(), dir.path().join("audit.jsonl"));
        append(&current, "0\n");
        let mut tail = Tail::at_end(Kind::Audit, logs.clone()).unwrap();
        // Almost nothing of it is on the disk.
        OpenOptions::new().write(true).open(&current).unwrap().set_len(100 << 20).unwrap();
        append(&current, "rest\n1\n");
        assert!(tail.lines().unwrap().is_empty());
        let mut looks = 1;
        let lines = loop {
            let lines = tail.lines().unwrap();
            looks += 1;
            if !lines.is_empty() {
                break lines;
            }
        };
        assert_eq!((lines.len(), &*lines[0].1), (1, "1"));
        assert!((6..12).contains(&looks), "{looks}");
        OpenOptions::new().write(true).open(&current).unwrap().set_len(200 << 20).unwrap();
        let mut late = Tail::at_end(Kind::Audit, logs).unwrap();
        append(&current, "rest\n2\n");
        assert_eq!(read(&mut late), ["2"]);
    }
}
