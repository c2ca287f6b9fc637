//! Reads a log page by page across all its files, newest lines first.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::files::{FileId, FilesBackward, LinePosition, LogKind, OpenLogFile};
use svc_base::fsx::FileError;

const CHUNK_BYTES: u64 = 64 << 10;
/// Longer lines are skipped.
const MAX_LINE_BYTES: usize = 8 << 20;
/// Read budget per page: a filter with few matches gets a short page and a cursor. The last chunk can overshoot by up
/// to `MAX_LINE_BYTES`.
const MAX_READ_BYTES: u64 = 16 << 20;

/// The caller's decision on a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Take,
    Skip,
    /// Ends the search: skips this line and all older ones.
    Stop,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Page {
    pub lines: Vec<String>,
    /// Cursor for the next page, or `None` if there are no older lines.
    pub next: Option<LinePosition>,
}

/// Errors from reading a page.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    #[error("cursor expired: the lines it points to no longer exist")]
    Gone,
    #[error(transparent)]
    File(#[from] FileError),
}

/// Reads backward from `before`, or from the end of the newest file, until `visit` has taken `limit` lines or returned
/// [`Verdict::Stop`], or `MAX_READ_BYTES` have been read.
///
/// # Errors
/// [`PageError::Gone`] if the file `before` refers to no longer exists, or has been truncated below its offset;
/// [`PageError::File`] if a file can't be read.
pub fn read_newest(
    kind: LogKind,
    logs: &Path,
    before: Option<LinePosition>,
    limit: usize,
    mut visit: impl FnMut(&str) -> Verdict,
) -> Result<Page, PageError> {
    let mut files = FilesBackward::new(kind, logs)?;
    let mut lines = Vec::new();
    let mut budget = MAX_READ_BYTES;
    let mut from = before;
    while let Some(OpenLogFile { path, id, file }) = files.open_next()? {
        let read_error = FileError::wrap("read", &path);
        let Some(mut reader) = BackwardReader::start(file, id, from).map_err(read_error)? else { continue };
        from = None;
        loop {
            let (offset, is_page_complete) =
                match reader.next_step(&mut budget).map_err(FileError::wrap("read", &path))? {
                    ReadOutcome::Start => break,
                    ReadOutcome::LimitReached(offset) => (offset, true),
                    ReadOutcome::Line(offset, line) => {
                        let line = String::from_utf8_lossy(&line);
                        match visit(&line) {
                            Verdict::Take => lines.push(line.into_owned()),
                            Verdict::Skip => {}
                            Verdict::Stop => return Ok(Page { lines, next: None }),
                        }
                        (offset, lines.len() == limit)
                    }
                };
            if is_page_complete {
                let is_last = offset == 0 && files.is_empty();
                let next = (!is_last).then_some(LinePosition { file: reader.id, offset });
                return Ok(Page { lines, next });
            }
        }
    }
    if from.is_some() {
        return Err(PageError::Gone);
    }
    Ok(Page { lines, next: None })
}

/// Reads a file's lines backward from an offset.
struct BackwardReader {
    file: File,
    id: FileId,
    /// Offset of `text` in the file.
    text_offset: u64,
    /// Text read but not yet returned: empty, or ending with a newline.
    text: Vec<u8>,
    /// Number of bytes at the end of `text` already searched for a line start.
    searched: usize,
    /// The bytes before `text_offset` belong to a line being skipped.
    is_skipping: bool,
}

enum ReadOutcome {
    /// A line and its offset.
    Line(u64, Vec<u8>),
    /// Reached the start of the file.
    Start,
    /// Read budget exhausted; continue from this offset.
    LimitReached(u64),
}

impl BackwardReader {
    /// Starts at a position, or at the end of the file. Returns `None` if the position is in a different file or past
    /// the end of this one.
    fn start(file: File, id: FileId, from: Option<LinePosition>) -> io::Result<Option<Self>> {
        let length = file.metadata()?.len();
        if from.is_some_and(|position| position.file != id || position.offset > length) {
            return Ok(None);
        }
        let text_offset = from.map_or(length, |position| position.offset);
        // A line without a newline here is torn, still being written, or too long for a page.
        let mut last = [b'\n'];
        if text_offset > 0 {
            file.read_exact_at(&mut last, text_offset - 1)?;
        }
        Ok(Some(Self { file, id, text_offset, text: Vec::new(), searched: 0, is_skipping: last != [b'\n'] }))
    }

    /// Reads another chunk, as large as the current text, so long lines are copied only a few times.
    fn read_chunk(&mut self, budget: &mut u64) -> io::Result<()> {
        let size = CHUNK_BYTES.max(self.text.len() as u64).min(self.text_offset);
        let mut chunk = vec![0; usize::try_from(size).unwrap_or_default()];
        self.file.read_exact_at(&mut chunk, self.text_offset - size)?;
        self.text_offset -= size;
        *budget = budget.saturating_sub(size);
        self.searched = self.text.len();
        chunk.append(&mut self.text);
        self.text = chunk;
        Ok(())
    }

    fn next_step(&mut self, budget: &mut u64) -> io::Result<ReadOutcome> {
        loop {
            if self.is_skipping {
                let end = self.text.iter().rposition(|&byte| byte == b'\n');
                self.text.truncate(end.map_or(0, |index| index + 1));
                (self.searched, self.is_skipping) = (0, end.is_none());
            }
            if !self.is_skipping && !self.text.is_empty() {
                let unsearched = self.text.len() - self.searched.max(1);
                let newline = self.text[..unsearched].iter().rposition(|&byte| byte == b'\n');
                let line_start = newline.map(|index| index + 1);
                if let Some(start) = line_start.or((self.text_offset == 0).then_some(0)) {
                    let mut line = self.text.split_off(start);
                    line.pop();
                    self.searched = 0;
                    if line.len() > MAX_LINE_BYTES {
                        continue;
                    }
                    return Ok(ReadOutcome::Line(self.text_offset + start as u64, line));
                }
                if self.text.len() > MAX_LINE_BYTES {
                    self.text.clear();
                    self.is_skipping = true;
                }
            }
            if self.text_offset == 0 {
                return Ok(ReadOutcome::Start);
            }
            if *budget == 0 {
                // The next page rereads the partial line.
                return Ok(ReadOutcome::LimitReached(self.text_offset + self.text.len() as u64));
            }
            self.read_chunk(budget)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    fn read_all_pages(kind: LogKind, logs: &Path, limit: usize) -> Vec<String> {
        let (mut lines, mut before) = (Vec::new(), None);
        loop {
            let page = read_newest(kind, logs, before, limit, |_| Verdict::Take).unwrap();
            assert!(page.lines.len() <= limit);
            lines.extend(page.lines);
            before = page.next;
            if before.is_none() {
                return lines;
            }
        }
    }

    proptest! {
        /// Pages return each line once, newest first, for any line lengths and distribution across files.
        #[test]
        fn pages_return_each_line_once(
            files in prop::collection::vec(prop::collection::vec(0_usize..70_000, 0..6), 1..4),
            limit in 1_usize..5,
            is_torn in any::<bool>(),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let mut expected = Vec::new();
            let last = files.len() - 1;
            for (n, lengths) in files.iter().enumerate() {
                let name = if n == last { "audit.jsonl".to_owned() } else { format!("audit-2026-11-{:02}.jsonl", n + 1) };
                let mut text = String::new();
                for (index, length) in lengths.iter().enumerate() {
                    let line = format!("{n} {index} {}", "x".repeat(*length));
                    text.push_str(&line);
                    text.push('\n');
                    expected.push(line);
                }
                if is_torn && n == last {
                    text.push_str("half a li");
                }
                fs::write(dir.path().join(name), text).unwrap();
            }
            expected.reverse();
            prop_assert_eq!(read_all_pages(LogKind::Audit, dir.path(), limit), expected);
        }
    }

    #[test]
    fn cursor_survives_rotation_but_not_deletion() {
        let dir = tempfile::tempdir().unwrap();
        let current = dir.path().join("audit.jsonl");
        fs::write(&current, "1\n2\n3\n").unwrap();
        let page = read_newest(LogKind::Audit, dir.path(), None, 1, |_| Verdict::Take).unwrap();
        let renamed = dir.path().join("audit-2026-11-21.jsonl");
        fs::rename(&current, &renamed).unwrap();
        fs::write(&current, "4\n").unwrap();
        let cursor = page.next.unwrap().to_string().parse().unwrap();
        let next = read_newest(LogKind::Audit, dir.path(), Some(cursor), 5, |_| Verdict::Take).unwrap();
        assert_eq!(
            (page.lines, next),
            (vec!["3".to_owned()], Page { lines: vec!["2".into(), "1".into()], next: None })
        );
        fs::remove_file(renamed).unwrap();
        let result = read_newest(LogKind::Audit, dir.path(), Some(cursor), 5, |_| Verdict::Take);
        assert!(matches!(result, Err(PageError::Gone)));
        for wrong in ["", "1", "1-2", "1-2-", "-1-2", "01-2-3", "1-2-3-4", "a-b-c"] {
            assert!(wrong.parse::<LinePosition>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn page_opens_older_files_lazily_and_none_twice() {
        let dir = tempfile::tempdir().unwrap();
        let logs = dir.path().canonicalize().unwrap();
        let (current, old) = (logs.join("audit.jsonl"), logs.join("audit-2026-11-20.jsonl"));
        fs::write(&old, "1\n").unwrap();
        fs::write(&current, "2\n3\n").unwrap();
        // Simulate a rotation after the file was opened.
        fs::hard_link(&current, logs.join("audit-2026-11-21.jsonl")).unwrap();
        let is_old_open = || {
            let mut open = fs::read_dir("/proc/self/fd").unwrap().flatten();
            open.any(|entry| fs::read_link(entry.path()).is_ok_and(|path| path == old))
        };
        let mut visited = Vec::new();
        let page = read_newest(LogKind::Audit, &logs, None, 5, |line| {
            visited.push((line.to_owned(), is_old_open()));
            Verdict::Take
        });
        assert_eq!(page.unwrap().next, None);
        let expected = [("3", false), ("2", false), ("1", true)];
        assert_eq!(visited, expected.map(|(line, is_open)| (line.to_owned(), is_open)));
    }

    #[test]
    fn last_page_has_no_cursor_after_a_concurrent_rotation() {
        let dir = tempfile::tempdir().unwrap();
        let current = dir.path().join("audit.jsonl");
        fs::write(&current, "1\n2\n").unwrap();
        // Simulate a rotation after the file was opened.
        fs::hard_link(&current, dir.path().join("audit-2026-11-21.jsonl")).unwrap();
        let page = read_newest(LogKind::Audit, dir.path(), None, 2, |_| Verdict::Take).unwrap();
        assert_eq!(page, Page { lines: vec!["2".into(), "1".into()], next: None });
    }

    #[test]
    fn stop_ends_search_and_sparse_matches_yield_a_cursor() {
        let dir = tempfile::tempdir().unwrap();
        let line = "x".repeat(1 << 20);
        fs::write(dir.path().join("backup.jsonl"), format!("{line}\n").repeat(20)).unwrap();
        let page = read_newest(LogKind::Backups, dir.path(), None, 5, |_| Verdict::Skip).unwrap();
        assert!(page.lines.is_empty() && page.next.is_some());
        let page = read_newest(LogKind::Backups, dir.path(), page.next, 5, |_| Verdict::Skip).unwrap();
        assert_eq!(page.next, None);
        let page = read_newest(LogKind::Backups, dir.path(), None, 5, |_| Verdict::Stop).unwrap();
        assert_eq!(page, Page { lines: Vec::new(), next: None });
        assert_eq!(
            read_newest(LogKind::Interactions, dir.path(), None, 5, |_| Verdict::Take).unwrap().lines.len(),
            0
        );
    }

    #[test]
    fn cursor_into_truncated_or_newer_file_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        fs::write(&path, "1\n2\n3\n").unwrap();
        let cursor =
            read_newest(LogKind::Audit, dir.path(), None, 1, |_| Verdict::Take).unwrap().next.unwrap();
        let read_from = |cursor| read_newest(LogKind::Audit, dir.path(), Some(cursor), 5, |_| Verdict::Take);
        assert_eq!(read_from(cursor).unwrap().lines, ["2", "1"]);
        fs::write(&path, "1\n").unwrap();
        assert!(matches!(read_from(cursor), Err(PageError::Gone)), "cursor past the end was accepted");
        // The inode alone doesn't identify a file: it may have been reused.
        fs::write(&path, "4\n5\n6\n").unwrap();
        let text = cursor.to_string();
        let mut numbers = text.split('-');
        let (inode, birth_time) = (numbers.next().unwrap(), numbers.next().unwrap().parse::<u64>().unwrap());
        assert!(birth_time > 0, "the file system does not report birth times");
        let earlier = format!("{inode}-{}-4", birth_time - 1).parse().unwrap();
        assert!(matches!(read_from(earlier), Err(PageError::Gone)));
    }

    #[test]
    fn page_reads_a_bounded_amount_for_any_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        // 200 MiB without a newline, as a sparse file; then a long line, an overlong one, and an unfinished one.
        fs::write(&path, "first\n").unwrap();
        let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
        file.set_len(200 << 20).unwrap();
        let (long, too_long) = ("x".repeat(MAX_LINE_BYTES - 10), "y".repeat(MAX_LINE_BYTES + 1));
        let end = format!("\nsecond\n{long}\n{too_long}\nlast\nhalf");
        std::io::Write::write_all(&mut file, end.as_bytes()).unwrap();
        file.set_len(file.metadata().unwrap().len() + (50 << 20)).unwrap();
        let (mut found, mut before, mut pages) = (Vec::new(), None, 0);
        loop {
            let page = read_newest(LogKind::Audit, dir.path(), before, 100, |_| Verdict::Take).unwrap();
            found.extend(page.lines.iter().map(|line| (line.len(), line.chars().next())));
            (before, pages) = (page.next, pages + 1);
            if before.is_none() {
                break;
            }
        }
        assert_eq!(found, [(4, Some('l')), (long.len(), Some('x')), (6, Some('s')), (5, Some('f'))]);
        assert!((12..40).contains(&pages), "{pages} pages of at most 16 MiB");
    }
}
