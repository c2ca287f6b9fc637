//! Reads agent output: length-limited lines, and a redacted tail of stderr.

use std::collections::VecDeque;
use std::io;

use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncReadExt};

use crate::agents::adapters::preview::Secrets;
use crate::agents::protocol::MAX_LINE_BYTES;

/// Maximum size of the reported stderr tail.
const STDERR_TAIL_BYTES: usize = 8 << 10;

#[derive(Debug, PartialEq, Eq)]
pub enum OutputLine {
    Whole(Vec<u8>),
    /// The line was skipped.
    TooLong,
}

/// Line reader. A partially read line survives a cancelled read.
#[derive(Default)]
pub struct LineReader {
    line: Vec<u8>,
    is_too_long: bool,
}

impl LineReader {
    /// Returns the next line without its terminator, or `None` at EOF. Cancel-safe.
    ///
    /// # Errors
    /// The read failed.
    pub async fn next(&mut self, input: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<OutputLine>> {
        loop {
            let buffer = input.fill_buf().await?;
            if buffer.is_empty() {
                let has_partial_line = !self.line.is_empty() || self.is_too_long;
                return Ok(has_partial_line.then(|| self.take_line()));
            }
            let end = buffer.iter().position(|byte| *byte == b'\n');
            let part = &buffer[..end.unwrap_or(buffer.len())];
            if self.is_too_long || self.line.len() + part.len() > MAX_LINE_BYTES {
                self.is_too_long = true;
                self.line = Vec::new();
            } else {
                self.line.extend_from_slice(part);
            }
            let consumed = part.len() + usize::from(end.is_some());
            input.consume(consumed);
            if end.is_some() {
                return Ok(Some(self.take_line()));
            }
        }
    }

    fn take_line(&mut self) -> OutputLine {
        let line = std::mem::take(&mut self.line);
        if std::mem::take(&mut self.is_too_long) { OutputLine::TooLong } else { OutputLine::Whole(line) }
    }
}

/// Buffers the tail of stderr and redacts its secrets.
pub struct StderrTail {
    bytes: VecDeque<u8>,
    /// Bytes retained on top of the reported ones, so that a secret straddling the cut is still redacted. Equals the
    /// length of the longest secret.
    margin: usize,
    is_truncated: bool,
}

impl StderrTail {
    pub fn new(secrets: &Secrets) -> Self {
        Self { bytes: VecDeque::new(), margin: secrets.max_bytes(), is_truncated: false }
    }

    /// Reads to EOF.
    ///
    /// # Errors
    /// The read failed.
    pub async fn read_from(&mut self, input: &mut (impl AsyncRead + Unpin)) -> io::Result<()> {
        let mut buffer = [0; 4096];
        loop {
            let read = input.read(&mut buffer).await?;
            if read == 0 {
                return Ok(());
            }
            self.bytes.extend(&buffer[..read]);
            let excess = self.bytes.len().saturating_sub(STDERR_TAIL_BYTES + self.margin);
            self.bytes.drain(..excess);
            self.is_truncated |= excess > 0;
        }
    }

    /// Returns the last `STDERR_TAIL_BYTES` as redacted text. Drops a truncated first line if another line follows.
    pub fn into_text(mut self, secrets: &Secrets) -> String {
        let bytes = self.bytes.make_contiguous();
        let (mut partial_char_bytes, mut min_cut) = (0, 0);
        if self.is_truncated {
            partial_char_bytes = bytes.iter().take(3).take_while(|byte| **byte & 0xc0 == 0x80).count();
            // The text may start with the rest of a truncated secret, which is shorter than the margin.
            min_cut = self.margin;
        }
        let mut text = String::from_utf8_lossy(&bytes[partial_char_bytes..]).into_owned();
        secrets.redact(&mut text);
        let cut = text.len().saturating_sub(STDERR_TAIL_BYTES).max(min_cut).min(text.len());
        let cut = text.ceil_char_boundary(cut);
        text.drain(..cut);
        match text.split_once('\n') {
            Some((_, rest)) if (self.is_truncated || cut > 0) && !rest.is_empty() => rest.to_owned(),
            _ => text,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read_lines(text: &[u8], capacity: usize) -> Vec<OutputLine> {
        let mut input = tokio::io::BufReader::with_capacity(capacity, text);
        let (mut lines, mut all) = (LineReader::default(), Vec::new());
        while let Some(line) = lines.next(&mut input).await.unwrap() {
            all.push(line);
        }
        all
    }

    #[tokio::test]
    async fn lines_are_complete_for_any_read_size() {
        let whole = |text: &str| OutputLine::Whole(text.as_bytes().to_vec());
        for capacity in [1, 2, 3, 100] {
            assert_eq!(read_lines(b"ab\n\nc", capacity).await, [whole("ab"), whole(""), whole("c")]);
            assert!(read_lines(b"", capacity).await.is_empty());
        }
        let mut text = vec![b'x'; MAX_LINE_BYTES + 1];
        text.extend_from_slice(b"\nnext\n");
        assert_eq!(read_lines(&text, 1 << 16).await, [OutputLine::TooLong, whole("next")]);
    }

    async fn read_tail(text: &str, secrets: &Secrets) -> String {
        let mut tail = StderrTail::new(secrets);
        tail.read_from(&mut text.as_bytes()).await.unwrap();
        tail.into_text(secrets)
    }

    #[tokio::test]
    async fn stderr_tail_keeps_the_end() {
        let (filler, none) = ("x".repeat(3 * STDERR_TAIL_BYTES), Secrets::default());
        let tail = read_tail(&format!("{filler}the end"), &none).await;
        assert!(tail.len() == STDERR_TAIL_BYTES && tail.ends_with("the end"));
        assert_eq!(read_tail(&format!("{filler}\nthe end"), &none).await, "the end");
        let complete = format!("{}\nthe end", &filler[..STDERR_TAIL_BYTES - 8]);
        assert_eq!(
            read_tail(&complete, &none).await,
            complete,
            "text of exactly the maximum length was truncated"
        );
    }

    #[tokio::test]
    async fn stderr_tail_never_contains_partial_secret() {
        let secret = "BEGIN KEY\nÄBC123\nDEF456\nEND KEY";
        let secrets = Secrets::from_environment(&[("A_KEY".to_owned(), secret.to_owned())].into());
        for length in STDERR_TAIL_BYTES - 10..STDERR_TAIL_BYTES + 2 * secret.len() {
            for filler in ["y".repeat(length), "y\n".repeat(length / 2)] {
                let tail = read_tail(&format!("yy{secret}{filler}"), &secrets).await;
                assert!(
                    (STDERR_TAIL_BYTES - 100..=STDERR_TAIL_BYTES).contains(&tail.len()),
                    "{}",
                    tail.len()
                );
                let is_expected = |c: char| "y\n*".contains(c);
                assert!(tail.chars().all(is_expected), "{length}: {:?}", tail.trim_matches(['y', '\n']));
            }
        }
    }
}
