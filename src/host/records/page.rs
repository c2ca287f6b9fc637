//! Pages of a record, the newest lines first, over all its files.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::files::{self, Kind, Place};
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
        let read = || -> io::Result<Option<Backwards>> {
            let Some((file, inode)) = files::open(&path)? else { return Ok(None) };
            match from {
                Some(place) if place.inode != inode => Ok(None),
                Some(place) => Backwards::new(file, inode, Some(place.offset)).map(Some),
                None => Backwards::new(file, inode, None).map(Some),
            }
        };
        let Some(mut back) = read().map_err(failed)? else { continue };
        from = None;
        while let Some((offset, line)) = back.line(&mut left).map_err(FileError::at("read", &path))? {
            let place = Place { inode: back.inode, offset };
            let line = String::from_utf8_lossy(&line);
            match judge(&line) {
                Verdict::Take => lines.push(line.into_owned()),
                Verdict::Leave => {}
                Verdict::Enough => return Ok(Page { lines, next: None }),
            }
            if lines.len() == limit || left == 0 {
                let is_last = offset == 0 && files.is_empty();
                return Ok(Page { lines, next: (!is_last).then_some(place) });
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
    inode: u64,
    /// Where `text` begins in the file.
    at: u64,
    /// What is read and not given out: it ends with a line's end.
    text: Vec<u8>,
}

impl Backwards {
    fn new(file: File, inode: u64, end: Option<u64>) -> io::Result<Self> {
        let length = file.metadata()?.len();
        let mut back = Self { file, inode, at: end.unwrap_or(length).min(length), text: Vec::new() };
        // What has no end yet is being written, or torn.
        while back.at > 0 && !back.text.contains(&b'\n') {
            if back.text.len() > LONGEST_LINE {
                back.text.clear();
            }
            back.read(&mut u64::MAX.clone())?;
        }
        let whole = back.text.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        back.text.truncate(whole);
        Ok(back)
    }

    /// One piece more in front.
    fn read(&mut self, left: &mut u64) -> io::Result<()> {
        let size = PIECE.min(self.at);
        let mut piece = vec![0; usize::try_from(size).unwrap_or_default()];
        self.file.read_exact_at(&mut piece, self.at - size)?;
        self.at -= size;
        *left = left.saturating_sub(size);
        piece.append(&mut self.text);
        self.text = piece;
        Ok(())
    }

    /// The line before, and where it begins.
    fn line(&mut self, left: &mut u64) -> io::Result<Option<(u64, Vec<u8>)>> {
        loop {
            let body = self.text.len().saturating_sub(1);
            let begins = self.text[..body].iter().rposition(|&byte| byte == b'\n').map(|at| at + 1);
            if let Some(begins) = begins.or((self.at == 0 && !self.text.is_empty()).then_some(0)) {
                let mut line = self.text.split_off(begins);
                line.pop();
                return Ok(Some((self.at + begins as u64, line)));
            }
            if self.at == 0 {
                return Ok(None);
            }
            if self.text.len() > LONGEST_LINE {
                // The rest of it goes, too, with what stands before it.
                self.text.clear();
                self.text.push(b'\n');
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
        for wrong in ["", "1", "1-", "-1", "01-2", "1-2-3", "a-b"] {
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
}
