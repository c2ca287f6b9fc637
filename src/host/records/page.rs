//! Pages of a record, the newest lines first, over all its files.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::files::{self, FileId, Kind, Place};
use crate::fsx::FileError;

const PIECE: u64 = 64 << 10;
/// A longer line is none of ours.
const LONGEST_LINE: usize = 8 << 20;
/// So much is read for one page at most: a filter that finds little gives a short page and a cursor to go on.
const MOST_READ: u64 = 16 << 20;

/// What becomes of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Take,
    Leave,
    /// It, and all that is older, is not asked for.
    Enough,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Page {
    pub lines: Vec<String>,
    /// Where the next page begins; `None` where there is nothing older.
    pub next: Option<Place>,
}

/// Why there is no page.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    #[error("the record that the cursor names is not there any more")]
    Gone,
    #[error(transparent)]
    File(#[from] FileError),
}

/// At most `limit` lines, from `before` on backwards.
///
/// # Errors
/// [`PageError`].
pub fn newest(
    kind: Kind,
    logs: &Path,
    before: Option<Place>,
    limit: usize,
    mut judge: impl FnMut(&str) -> Verdict,
) -> Result<Page, PageError> {
    let mut files: Vec<PathBuf> = kind.files(logs)?;
    let mut lines = Vec::new();
    let mut left = MOST_READ;
    let mut from = before;
    while let Some(path) = files.pop() {
        let failed = FileError::at("read", &path);
        let Some(mut back) = Backwards::open(&path, from).map_err(failed)? else { continue };
        from = None;
        loop {
            let (offset, is_enough) = match back.step(&mut left).map_err(FileError::at("read", &path))? {
                Step::Begin => break,
                Step::Tired(offset) => (offset, true),
                Step::Line(offset, line) => {
                    let line = String::from_utf8_lossy(&line);
                    match judge(&line) {
                        Verdict::Take => lines.push(line.into_owned()),
                        Verdict::Leave => {}
                        Verdict::Enough => return Ok(Page { lines, next: None }),
                    }
                    (offset, lines.len() == limit)
                }
            };
            if is_enough {
                let is_last = offset == 0 && files.is_empty();
                let next = (!is_last).then_some(Place { file: back.id, offset });
                return Ok(Page { lines, next });
            }
        }
    }
    if from.is_some() {
        return Err(PageError::Gone);
    }
    Ok(Page { lines, next: None })
}

/// The whole lines of a file, from an offset backwards.
struct Backwards {
    file: File,
    id: FileId,
    /// Where `text` begins in the file.
    at: u64,
    /// What is read and not given out: nothing, or something that ends with a line's end.
    text: Vec<u8>,
    /// So much at its end has no other line's end in it.
    searched: usize,
    /// What stands before `at` is the rest of a line that is not given out.
    skips: bool,
}

enum Step {
    /// A line, and where it begins.
    Line(u64, Vec<u8>),
    /// There is nothing before.
    Begin,
    /// So much was read that it is to be gone on from here another time.
    Tired(u64),
}

impl Backwards {
    /// `None` where the file is not that of the place, or not as long any more.
    fn open(path: &Path, from: Option<Place>) -> io::Result<Option<Self>> {
        let Some((file, id)) = files::open(path)? else { return Ok(None) };
        let length = file.metadata()?.len();
        if from.is_some_and(|place| place.file != id || place.offset > length) {
            return Ok(None);
        }
        let at = from.map_or(length, |place| place.offset);
        // What has no end yet is being written, or torn, or was longer than one page reads.
        let mut last = [b'\n'];
        if at > 0 {
            file.read_exact_at(&mut last, at - 1)?;
        }
        Ok(Some(Self { file, id, at, text: Vec::new(), searched: 0, skips: last != [b'\n'] }))
    }

    /// One piece more in front, as large as what is there: a long line is copied a few times, and not for each piece.
    fn read(&mut self, left: &mut u64) -> io::Result<()> {
        let size = PIECE.max(self.text.len() as u64).min(self.at);
        let mut piece = vec![0; usize::try_from(size).unwrap_or_default()];
        self.file.read_exact_at(&mut piece, self.at - size)?;
        self.at -= size;
        *left = left.saturating_sub(size);
        self.searched = self.text.len();
        piece.append(&mut self.text);
        self.text = piece;
        Ok(())
    }

    fn step(&mut self, left: &mut u64) -> io::Result<Step> {
        loop {
            if self.skips {
                let end = self.text.iter().rposition(|&byte| byte == b'\n');
                self.text.truncate(end.map_or(0, |at| at + 1));
                (self.searched, self.skips) = (0, end.is_none());
            }
            if !self.skips && !self.text.is_empty() {
                let unsearched = self.text.len() - self.searched.max(1);
                let before = self.text[..unsearched].iter().rposition(|&byte| byte == b'\n').map(|at| at + 1);
                if let Some(begins) = before.or((self.at == 0).then_some(0)) {
                    let mut line = self.text.split_off(begins);
                    line.pop();
                    self.searched = 0;
                    return Ok(Step::Line(self.at + begins as u64, line));
                }
                if self.text.len() > LONGEST_LINE {
                    self.text.clear();
                    self.skips = true;
                }
            }
            if self.at == 0 {
                return Ok(Step::Begin);
            }
            if *left == 0 {
                // A line that was begun is read again.
                return Ok(Step::Tired(self.at + self.text.len() as u64));
            }
            self.read(left)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    fn all(kind: Kind, logs: &Path, limit: usize) -> Vec<String> {
        let (mut lines, mut before) = (Vec::new(), None);
        loop {
            let page = newest(kind, logs, before, limit, |_| Verdict::Take).unwrap();
            assert!(page.lines.len() <= limit);
            lines.extend(page.lines);
            before = page.next;
            if before.is_none() {
                return lines;
            }
        }
    }

    proptest! {
        /// However the lines lie in files, and however long they are: pages give each once, the newest first.
        #[test]
        fn pages_give_each_line_once(
            files in prop::collection::vec(prop::collection::vec(0_usize..70_000, 0..6), 1..4),
            limit in 1_usize..5,
            torn in any::<bool>(),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let mut expected = Vec::new();
            let last = files.len() - 1;
            for (n, lengths) in files.iter().enumerate() {
                let name = if n == last { "audit.jsonl".to_owned() } else { format!("audit-2026-11-{:02}.jsonl", n + 1) };
                let mut text = String::new();
                for (at, length) in lengths.iter().enumerate() {
                    let line = format!("{n} {at} {}", "x".repeat(*length));
                    text.push_str(&line);
                    text.push('\n');
                    expected.push(line);
                }
                if torn && n == last {
                    text.push_str("half a li");
                }
                fs::write(dir.path().join(name), text).unwrap();
            }
            expected.reverse();
            prop_assert_eq!(all(Kind::Audit, dir.path(), limit), expected);
        }
    }

    #[test]
    fn a_cursor_holds_over_a_rotation_and_not_over_a_deletion() {
        let dir = tempfile::tempdir().unwrap();
        let current = dir.path().join("audit.jsonl");
        fs::write(&current, "1\n2\n3\n").unwrap();
        let page = newest(Kind::Audit, dir.path(), None, 1, |_| Verdict::Take).unwrap();
        let renamed = dir.path().join("audit-2026-11-21.jsonl");
        fs::rename(&current, &renamed).unwrap();
        fs::write(&current, "4\n").unwrap();
        let cursor = page.next.unwrap().to_string().parse().unwrap();
        let next = newest(Kind::Audit, dir.path(), Some(cursor), 5, |_| Verdict::Take).unwrap();
        assert_eq!(
            (page.lines, next),
            (vec!["3".to_owned()], Page { lines: vec!["2".into(), "1".into()], next: None })
        );
        fs::remove_file(renamed).unwrap();
        let gone = newest(Kind::Audit, dir.path(), Some(cursor), 5, |_| Verdict::Take);
        assert!(matches!(gone, Err(PageError::Gone)));
        for wrong in ["", "1", "1-2", "1-2-", "-1-2", "01-2-3", "1-2-3-4", "a-b-c"] {
            assert!(wrong.parse::<Place>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_older_than_asked_ends_it_and_little_that_fits_gives_a_cursor() {
        let dir = tempfile::tempdir().unwrap();
        let line = "x".repeat(1 << 20);
        fs::write(dir.path().join("backup.jsonl"), format!("{line}\n").repeat(20)).unwrap();
        let page = newest(Kind::Backups, dir.path(), None, 5, |_| Verdict::Leave).unwrap();
        assert!(page.lines.is_empty() && page.next.is_some());
        let page = newest(Kind::Backups, dir.path(), page.next, 5, |_| Verdict::Leave).unwrap();
        assert_eq!(page.next, None);
        let page = newest(Kind::Backups, dir.path(), None, 5, |_| Verdict::Enough).unwrap();
        assert_eq!(page, Page { lines: Vec::new(), next: None });
        assert_eq!(
            newest(Kind::Interactions, dir.path(), None, 5, |_| Verdict::Take).unwrap().lines.len(),
            0
        );
    }

    #[test]
    fn a_cursor_beyond_the_end_or_of_a_file_that_came_later_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        fs::write(&path, "1\n2\n3\n").unwrap();
        let cursor = newest(Kind::Audit, dir.path(), None, 1, |_| Verdict::Take).unwrap().next.unwrap();
        let of = |cursor| newest(Kind::Audit, dir.path(), Some(cursor), 5, |_| Verdict::Take);
        assert_eq!(of(cursor).unwrap().lines, ["2", "1"]);
        fs::write(&path, "1\n").unwrap();
        assert!(matches!(of(cursor), Err(PageError::Gone)), "the file is shorter");
        // The inode alone says nothing: it may be another file's by now.
        fs::write(&path, "4\n5\n6\n").unwrap();
        let text = cursor.to_string();
        let mut numbers = text.split('-');
        let (inode, born) = (numbers.next().unwrap(), numbers.next().unwrap().parse::<u64>().unwrap());
        assert!(born > 0, "this file system tells births");
        let earlier = format!("{inode}-{}-4", born - 1).parse().unwrap();
        assert!(matches!(of(earlier), Err(PageError::Gone)));
    }

    #[test]
    fn no_page_reads_more_than_its_share_however_long_a_line_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        // 200 MiB without a line's end, almost none of it on the disk; then a long line, then what nobody has ended.
        fs::write(&path, "first\n").unwrap();
        let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
        file.set_len(200 << 20).unwrap();
        let long = "x".repeat(LONGEST_LINE - 10);
        std::io::Write::write_all(&mut file, format!("\nsecond\n{long}\nlast\nhalf").as_bytes()).unwrap();
        file.set_len(file.metadata().unwrap().len() + (50 << 20)).unwrap();
        let (mut found, mut before, mut pages) = (Vec::new(), None, 0);
        loop {
            let page = newest(Kind::Audit, dir.path(), before, 100, |_| Verdict::Take).unwrap();
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
