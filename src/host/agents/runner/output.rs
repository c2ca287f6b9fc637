//! An agent's output: its lines, limited in length, and the tail of its standard error.

use std::collections::VecDeque;
use std::io;

use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncReadExt};

use crate::agents::protocol::MAX_LINE_BYTES;

/// Maximum number of bytes kept from the end of standard error.
const STDERR_TAIL_BYTES: usize = 8 << 10;

#[derive(Debug, PartialEq, Eq)]
pub enum OutputLine {
    Whole(Vec<u8>),
    /// The line was skipped.
    TooLong,
}

/// Reads line by line. A partially read line is kept when a read is cancelled.
#[derive(Default)]
pub struct LineReader {
    line: Vec<u8>,
    is_too_long: bool,
}

impl LineReader {
    /// Returns the next line, without its terminator; `None` at the end of the output. Cancel-safe.
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
            let used = part.len() + usize::from(end.is_some());
            input.consume(used);
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

/// The last `STDERR_TAIL_BYTES` of standard error.
#[derive(Default)]
pub struct StderrTail(VecDeque<u8>);

impl StderrTail {
    /// Reads until the end of the stream.
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
            self.0.extend(&buffer[..read]);
            let excess = self.0.len().saturating_sub(STDERR_TAIL_BYTES);
            self.0.drain(..excess);
        }
    }

    /// Returns the tail as text. A truncated first line is dropped if whole lines follow: it may contain part of a
    /// secret, which the gateway would not recognize and redact.
    pub fn into_text(mut self) -> String {
        let is_truncated = self.0.len() >= STDERR_TAIL_BYTES;
        let text = String::from_utf8_lossy(self.0.make_contiguous());
        match text.split_once('\n') {
            Some((_, rest)) if is_truncated && !rest.is_empty() => rest.to_owned(),
            _ => text.into_owned(),
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

    #[tokio::test]
    async fn stderr_tail_keeps_the_end() {
        let text = format!("{}the end", "x".repeat(3 * STDERR_TAIL_BYTES));
        let mut tail = StderrTail::default();
        tail.read_from(&mut text.as_bytes()).await.unwrap();
        let tail_text = tail.into_text();
        assert!(tail_text.len() == STDERR_TAIL_BYTES && tail_text.ends_with("the end"));
        let mut tail = StderrTail::default();
        tail.read_from(&mut format!("{}\nthe end", "x".repeat(3 * STDERR_TAIL_BYTES)).as_bytes())
            .await
            .unwrap();
        assert_eq!(tail.into_text(), "the end");
    }
}
