//! Follows a growing log, returning each complete line of up to `MAX_LINE_BYTES` once, across rotations and all of the
//! log's files.
//!
//! Checks all files, not only the newest: an earlier day's file can still grow after a time zone change or due to a
//! late line.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::files::{self, FileId, LinePosition, LogKind, OpenLogFile, TailPosition};
use svc_base::fsx::FileError;

const CHUNK_BYTES: usize = 256 << 10;
/// Longer lines are skipped.
const MAX_LINE_BYTES: usize = 8 << 20;
/// Maximum number of bytes read per call, rounded up to a chunk. The next call re-reads an incomplete line, so this
/// must exceed `MAX_LINE_BYTES`.
const MAX_READ_BYTES: usize = 16 << 20;
/// A call returns once it has collected this many bytes of lines.
const BATCH_BYTES: usize = 1 << 20;

/// A reader for a growing log.
pub struct Tail {
    kind: LogKind,
    logs: PathBuf,
    /// All files seen so far: a few per day.
    files: Vec<FollowedFile>,
    /// File with the last returned line, or the newest file before the first line.
    last_file: Option<FileId>,
    /// File with the latest returned line outside `last_file`.
    other_file: Option<FileId>,
}

struct FollowedFile {
    id: FileId,
    /// End of the last returned or skipped line, or a position within an overlong line.
    offset: u64,
    /// File length when it was last read to the end, or `None` if it hasn't been.
    read_length: Option<u64>,
    /// Whether the text at `offset` is the rest of an overlong line.
    is_skipping: bool,
}

/// Read budget and results of one call.
struct ReadBatch {
    /// Bytes this call may still read.
    budget: usize,
    lines: Vec<(TailPosition, String)>,
    line_bytes: usize,
}

impl Tail {
    /// Starts after the last complete line of each file.
    pub fn from_end(kind: LogKind, logs: PathBuf) -> Result<Self, FileError> {
        let mut tail = Self { kind, logs, files: Vec::new(), last_file: None, other_file: None };
        for OpenLogFile { path, id, file } in tail.kind.open_files(&tail.logs)? {
            tail.files.push(FollowedFile::from_end(id, &file).map_err(FileError::wrap("read", &path))?);
            tail.last_file = Some(id);
        }
        Ok(tail)
    }

    /// Resumes after an earlier line. Returns `None` if its file was deleted, or if the file was truncated so that the
    /// position no longer starts a line.
    pub fn resume_after(
        kind: LogKind,
        logs: PathBuf,
        position: TailPosition,
    ) -> Result<Option<Self>, FileError> {
        let files = kind.open_files(&logs)?;
        let index_of = |position: LinePosition| files.iter().position(|file| file.id == position.file);
        let Some(last) = index_of(position.last) else { return Ok(None) };
        // Files newer than those in the position are unread. All others are assumed to be read to the end, since a
        // position only records the last two files that grew.
        let newest = position.other_file.and_then(index_of).map_or(last, |other| other.max(last));
        let last_file = Some(position.last.file);
        let mut tail = Self { kind, logs, files: Vec::new(), last_file, other_file: None };
        for (index, OpenLogFile { path, id, file }) in files.iter().enumerate() {
            let followed = if *id == position.last.file {
                FollowedFile::after(position.last, file)
            } else if let Some(other) = position.other_file.filter(|other| other.file == *id) {
                tail.other_file = Some(*id);
                FollowedFile::after(other, file)
            } else if index > newest {
                Ok(Some(FollowedFile::new(*id)))
            } else {
                FollowedFile::from_end(*id, file).map(Some)
            };
            let Some(followed) = followed.map_err(FileError::wrap("read", path))? else { return Ok(None) };
            tail.files.push(followed);
        }
        Ok(Some(tail))
    }

    /// Returns the position after the last returned line, or `None` if no file existed at the start and no line has
    /// been returned.
    pub fn position(&self) -> Option<TailPosition> {
        let position_in = |id: FileId| {
            let followed = self.files.iter().find(|followed| followed.id == id)?;
            Some(LinePosition { file: id, offset: followed.offset })
        };
        let other_file = self.other_file.and_then(position_in);
        Some(TailPosition { last: position_in(self.last_file?)?, other_file })
    }

    /// Reads new lines, each with the position after it. Each call reads a bounded number of bytes, so it may return no
    /// lines while skipping an overlong one, even if more lines follow.
    pub fn read_lines(&mut self) -> Result<Vec<(TailPosition, String)>, FileError> {
        let mut batch = ReadBatch { budget: MAX_READ_BYTES, lines: Vec::new(), line_bytes: 0 };
        for path in self.kind.list_files(&self.logs)? {
            let Ok(meta) = path.symlink_metadata() else { continue };
            let followed = self.files.iter().find(|followed| followed.id == FileId::from_metadata(&meta));
            if followed.is_some_and(|followed| followed.read_length == Some(meta.len())) {
                continue;
            }
            // The name may refer to a different file by now, so use the opened file's ID.
            let opened = files::open_regular(&path).map_err(FileError::wrap("read", &path))?;
            let Some((file, id)) = opened else { continue };
            let index = self.files.iter().position(|followed| followed.id == id).unwrap_or_else(|| {
                self.files.push(FollowedFile::new(id));
                self.files.len() - 1
            });
            self.read_file(index, &file, &mut batch).map_err(FileError::wrap("read", &path))?;
            if batch.is_full() {
                break;
            }
        }
        Ok(batch.lines)
    }

    fn read_file(&mut self, index: usize, file: &File, batch: &mut ReadBatch) -> io::Result<()> {
        let followed = &mut self.files[index];
        let length = file.metadata()?.len();
        if length < followed.offset {
            // The file was truncated: continue at its new end.
            (followed.offset, followed.is_skipping) = (length, false);
        }
        let id = followed.id;
        let (mut chunk, mut line) = (vec![0; CHUNK_BYTES], Vec::new());
        while !batch.is_full() {
            let followed = &mut self.files[index];
            let from = followed.offset + line.len() as u64;
            let read = file.read_at(&mut chunk, from)?;
            if read == 0 {
                followed.read_length = Some(from);
                break;
            }
            batch.budget = batch.budget.saturating_sub(read);
            let mut rest = &chunk[..read];
            while let Some(length) = rest.iter().position(|&byte| byte == b'\n') {
                line.extend_from_slice(&rest[..length]);
                rest = &rest[length + 1..];
                let followed = &mut self.files[index];
                followed.offset += line.len() as u64 + 1;
                let is_overlong = std::mem::take(&mut followed.is_skipping) || line.len() > MAX_LINE_BYTES;
                if !is_overlong {
                    if self.last_file != Some(id) {
                        self.other_file = self.last_file.replace(id);
                    }
                    batch.push(self.position(), &line);
                }
                line.clear();
            }
            let followed = &mut self.files[index];
            if followed.is_skipping {
                followed.offset += rest.len() as u64;
            } else {
                line.extend_from_slice(rest);
            }
            if line.len() > MAX_LINE_BYTES {
                let followed = &mut self.files[index];
                followed.offset += line.len() as u64;
                followed.is_skipping = true;
                line.clear();
            }
        }
        Ok(())
    }
}

impl FollowedFile {
    fn new(id: FileId) -> Self {
        Self { id, offset: 0, read_length: None, is_skipping: false }
    }

    /// Starts at a position. Returns `None` if it isn't the start of a line or is past the end of the file.
    fn after(position: LinePosition, file: &File) -> io::Result<Option<Self>> {
        let is_valid = position.offset <= file.metadata()?.len() && is_line_start(file, position.offset)?;
        Ok(is_valid.then(|| Self { offset: position.offset, ..Self::new(position.file) }))
    }

    /// Starts after the last complete line, or within the incomplete line after it if that one is overlong.
    fn from_end(id: FileId, file: &File) -> io::Result<Self> {
        let length = file.metadata()?.len();
        let (mut end, mut is_skipping) = (length, false);
        while !is_line_start(file, end)? {
            let size = (CHUNK_BYTES as u64).min(end);
            let mut chunk = vec![0; usize::try_from(size).unwrap_or_default()];
            file.read_exact_at(&mut chunk, end - size)?;
            let line_start = chunk.iter().rposition(|&byte| byte == b'\n').map(|index| index as u64 + 1);
            end = end - size + line_start.unwrap_or_default();
            if length - end > MAX_LINE_BYTES as u64 {
                (end, is_skipping) = (length, true);
                break;
            }
        }
        Ok(Self { id, offset: end, read_length: Some(length), is_skipping })
    }
}

impl ReadBatch {
    fn is_full(&self) -> bool {
        self.budget == 0 || self.line_bytes >= BATCH_BYTES
    }

    fn push(&mut self, position: Option<TailPosition>, line: &[u8]) {
        self.line_bytes += line.len();
        self.lines.extend(position.map(|position| (position, String::from_utf8_lossy(line).into_owned())));
    }
}

fn is_line_start(file: &File, offset: u64) -> io::Result<bool> {
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
    use std::path::Path;

    use super::*;

    fn append(path: &Path, text: &str) {
        let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }

    fn read_all(tail: &mut Tail) -> Vec<String> {
        let mut all = Vec::new();
        loop {
            let lines = tail.read_lines().unwrap();
            if lines.is_empty() {
                return all;
            }
            all.extend(lines.into_iter().map(|(_, line)| line));
        }
    }

    #[test]
    fn complete_lines_are_returned_once_across_rotations() {
        let dir = tempfile::tempdir().unwrap();
        let (logs, current) = (dir.path().to_owned(), dir.path().join("audit.jsonl"));
        append(&current, "0\n");
        let mut tail = Tail::from_end(LogKind::Audit, logs.clone()).unwrap();
        assert!(read_all(&mut tail).is_empty());
        append(&current, "1\n2\nhal");
        assert_eq!(read_all(&mut tail), ["1", "2"]);
        let position = tail.position().unwrap();
        append(&current, "f\n");
        fs::rename(&current, dir.path().join("audit-2026-11-21.jsonl")).unwrap();
        append(&current, "3\n");
        assert_eq!(read_all(&mut tail), ["half", "3"]);
        // Two rotations between two reads.
        fs::rename(&current, dir.path().join("audit-2026-11-22.jsonl")).unwrap();
        append(&dir.path().join("audit-2026-11-23.jsonl"), "4\n");
        append(&current, "5\n");
        assert_eq!(read_all(&mut tail), ["4", "5"]);
        let mut resumed = Tail::resume_after(LogKind::Audit, logs.clone(), position).unwrap().unwrap();
        assert_eq!(read_all(&mut resumed), ["half", "3", "4", "5"]);
        fs::write(&current, "").unwrap();
        assert!(read_all(&mut tail).is_empty());
        append(&current, "6\n");
        assert_eq!(read_all(&mut tail), ["6"]);
        let unknown = "1-1-0".parse().unwrap();
        assert!(Tail::resume_after(LogKind::Audit, logs, unknown).unwrap().is_none());
    }

    #[test]
    fn deleted_file_does_not_replay_old_lines() {
        let dir = tempfile::tempdir().unwrap();
        let (logs, current) = (dir.path().to_owned(), dir.path().join("audit.jsonl"));
        append(&dir.path().join("audit-2026-11-20.jsonl"), "old\n");
        append(&current, "0\n");
        let mut tail = Tail::from_end(LogKind::Audit, logs).unwrap();
        fs::remove_file(&current).unwrap();
        assert!(read_all(&mut tail).is_empty());
        append(&current, "1\n");
        assert_eq!(read_all(&mut tail), ["1"]);
    }

    #[test]
    fn long_line_is_finished_before_the_next_file() {
        let dir = tempfile::tempdir().unwrap();
        let (logs, current) = (dir.path().to_owned(), dir.path().join("audit.jsonl"));
        append(&current, "0\n");
        let mut tail = Tail::from_end(LogKind::Audit, logs).unwrap();
        let long = "x".repeat(3 * CHUNK_BYTES);
        append(&current, &format!("{long}\n1\n"));
        fs::rename(&current, dir.path().join("audit-2026-11-21.jsonl")).unwrap();
        append(&current, "2\n");
        assert_eq!(read_all(&mut tail), [&*long, "1", "2"]);
    }

    #[test]
    fn absent_log_and_next_day_are_followed() {
        let dir = tempfile::tempdir().unwrap();
        let mut tail = Tail::from_end(LogKind::Interactions, dir.path().join("logs")).unwrap();
        assert!(read_all(&mut tail).is_empty());
        fs::create_dir(dir.path().join("logs")).unwrap();
        append(&dir.path().join("logs/interactions-2026-11-22.jsonl"), "1\n");
        assert_eq!(read_all(&mut tail), ["1"]);
        append(&dir.path().join("logs/interactions-2026-11-23.jsonl"), "2\n");
        append(&dir.path().join("logs/interactions-2026-11-22.jsonl"), "late\n");
        assert_eq!(read_all(&mut tail), ["late", "2"]);
    }

    /// After a time zone change to the west, the previous day continues.
    #[test]
    fn earlier_days_are_followed_and_resumed_exactly() {
        let dir = tempfile::tempdir().unwrap();
        let (logs, path) =
            (dir.path().to_owned(), |day: u32| dir.path().join(format!("interactions-2026-11-{day}.jsonl")));
        append(&path(20), "old\n");
        append(&path(21), "1\n");
        append(&path(22), "2\n");
        let mut tail = Tail::from_end(LogKind::Interactions, logs.clone()).unwrap();
        append(&path(22), "3\n");
        assert_eq!(read_all(&mut tail), ["3"]);
        append(&path(21), "4\n");
        assert_eq!(read_all(&mut tail), ["4"]);
        append(&path(22), "5\n");
        append(&path(21), "6\n");
        let lines = tail.read_lines().unwrap();
        assert_eq!(lines.iter().map(|(_, line)| &**line).collect::<Vec<_>>(), ["6", "5"]);
        append(&path(21), "7\n");
        append(&path(23), "8\n");
        for (position, expected) in [(lines[0].0, vec!["7", "5", "8"]), (lines[1].0, vec!["7", "8"])] {
            let position = position.to_string().parse().unwrap();
            let mut resumed =
                Tail::resume_after(LogKind::Interactions, logs.clone(), position).unwrap().unwrap();
            assert_eq!(read_all(&mut resumed), expected, "{position:?}");
        }
        assert_eq!(read_all(&mut tail), ["7", "8"]);
    }

    #[test]
    fn resume_at_invalid_position_returns_none() {
        let dir = tempfile::tempdir().unwrap();
        let (logs, current) = (dir.path().to_owned(), dir.path().join("audit.jsonl"));
        append(&current, "one\ntwo\n");
        let position = Tail::from_end(LogKind::Audit, logs.clone()).unwrap().position().unwrap();
        let resume_at = |offset: u64| {
            let last = LinePosition { offset, ..position.last };
            let position = TailPosition { last, other_file: None };
            Tail::resume_after(LogKind::Audit, logs.clone(), position)
                .unwrap()
                .map(|mut tail| read_all(&mut tail))
        };
        assert_eq!(resume_at(8), Some(vec![]));
        assert_eq!(resume_at(4), Some(vec!["two".to_owned()]));
        assert_eq!((resume_at(3), resume_at(9)), (None, None));
    }

    #[test]
    fn line_one_byte_over_the_limit_is_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let (logs, current) = (dir.path().to_owned(), dir.path().join("audit.jsonl"));
        append(&current, "0\n");
        let mut tail = Tail::from_end(LogKind::Audit, logs).unwrap();
        // The overlong line's newline is in the chunk that crosses the limit.
        let (longest, overlong) = ("x".repeat(MAX_LINE_BYTES), "y".repeat(MAX_LINE_BYTES + 1));
        append(&current, &format!("{longest}\n{overlong}\n1\n"));
        let lines = read_all(&mut tail);
        let lengths: Vec<usize> = lines.iter().map(String::len).collect();
        assert_eq!(lengths, [MAX_LINE_BYTES, 1]);
        assert!(lines == [&*longest, "1"]);
    }

    #[test]
    fn overlong_line_is_skipped_in_bounded_reads() {
        let dir = tempfile::tempdir().unwrap();
        let (logs, current) = (dir.path().to_owned(), dir.path().join("audit.jsonl"));
        append(&current, "0\n");
        let mut tail = Tail::from_end(LogKind::Audit, logs.clone()).unwrap();
        // Sparse file: the last line is 100 MiB long and has no newline.
        OpenOptions::new().write(true).open(&current).unwrap().set_len(100 << 20).unwrap();
        append(&current, "rest\n1\n");
        assert!(tail.read_lines().unwrap().is_empty());
        let mut reads = 1;
        let lines = loop {
            let lines = tail.read_lines().unwrap();
            reads += 1;
            if !lines.is_empty() {
                break lines;
            }
        };
        assert_eq!((lines.len(), &*lines[0].1), (1, "1"));
        assert!((6..12).contains(&reads), "{reads}");
        OpenOptions::new().write(true).open(&current).unwrap().set_len(200 << 20).unwrap();
        let mut late = Tail::from_end(LogKind::Audit, logs).unwrap();
        append(&current, "rest\n2\n");
        assert_eq!(read_all(&mut late), ["2"]);
    }
}
