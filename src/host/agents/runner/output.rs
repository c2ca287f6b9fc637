//! What an agent prints: its lines, within bounds, and the end of what it says on standard error.

use std::collections::VecDeque;
use std::io;

use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncReadExt};

use crate::host::agents::protocol::LONGEST_LINE;

/// So much of standard error is kept: its end.
const SAID: usize = 8 << 10;

#[derive(Debug, PartialEq, Eq)]
pub enum Line {
    Whole(Vec<u8>),
    /// It is read over.
    TooLong,
}

/// Reads line by line. What was read of a line stays here when a read is given up.
#[derive(Default)]
pub struct Lines {
    line: Vec<u8>,
    is_too_long: bool,
}

impl Lines {
    /// The next line, without its end; `None` at the end of the output. Can be given up and called again.
    ///
    /// # Errors
    /// The pipe's.
    pub async fn next(&mut self, input: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<Line>> {
        loop {
            let buffer = input.fill_buf().await?;
            if buffer.is_empty() {
                let is_rest = !self.line.is_empty() || self.is_too_long;
                return Ok(is_rest.then(|| self.take()));
            }
            let end = buffer.iter().position(|byte| *byte == b'\n');
            let part = &buffer[..end.unwrap_or(buffer.len())];
            if self.is_too_long || self.line.len() + part.len() > LONGEST_LINE {
                self.is_too_long = true;
                self.line = Vec::new();
            } else {
                self.line.extend_from_slice(part);
            }
            let used = part.len() + usize::from(end.is_some());
            input.consume(used);
            if end.is_some() {
                return Ok(Some(self.take()));
            }
        }
    }

    fn take(&mut self) -> Line {
        let line = std::mem::take(&mut self.line);
        if std::mem::take(&mut self.is_too_long) { Line::TooLong } else { Line::Whole(line) }
    }
}

/// The end of what comes, until it ends.
#[derive(Default)]
pub struct Said(VecDeque<u8>);

impl Said {
    /// # Errors
    /// The pipe's.
    pub async fn hear(&mut self, input: &mut (impl AsyncRead + Unpin)) -> io::Result<()> {
        let mut buffer = [0; 4096];
        loop {
            let read = input.read(&mut buffer).await?;
            if read == 0 {
                return Ok(());
            }
            self.0.extend(&buffer[..read]);
            let excess = self.0.len().saturating_sub(SAID);
            self.0.drain(..excess);
        }
    }

    /// Of a line that was cut in two nothing is left, where whole ones follow: it may have been a secret.
    pub fn text(mut self) -> String {
        let is_cut = self.0.len() >= SAID;
        let text = String::from_utf8_lossy(self.0.make_contiguous());
        match text.split_once('\n') {
            Some((_, rest)) if is_cut && !rest.is_empty() => rest.to_owned(),
            _ => text.into_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn lines(text: &[u8], pieces: usize) -> Vec<Line> {
        let mut input = tokio::io::BufReader::with_capacity(pieces, text);
        let (mut lines, mut all) = (Lines::default(), Vec::new());
        while let Some(line) = lines.next(&mut input).await.unwrap() {
            all.push(line);
        }
        all
    }

    #[tokio::test]
    async fn lines_are_whole_whatever_comes_at_once() {
        let whole = |text: &str| Line::Whole(text.as_bytes().to_vec());
        for pieces in [1, 2, 3, 100] {
            assert_eq!(lines(b"ab\n\nc", pieces).await, [whole("ab"), whole(""), whole("c")]);
            assert!(lines(b"", pieces).await.is_empty());
        }
        let mut text = vec![b'x'; LONGEST_LINE + 1];
        text.extend_from_slice(b"\nnext\n");
        assert_eq!(lines(&text, 1 << 16).await, [Line::TooLong, whole("next")]);
    }

    #[tokio::test]
    async fn the_end_of_what_is_said_is_kept() {
        let text = format!("{}the end", "x".repeat(3 * SAID));
        let mut said = Said::default();
        said.hear(&mut text.as_bytes()).await.unwrap();
        let kept = said.text();
        assert!(kept.len() == SAID && kept.ends_with("the end"));
        let mut said = Said::default();
        said.hear(&mut format!("{}\nthe end", "x".repeat(3 * SAID)).as_bytes()).await.unwrap();
        assert_eq!(said.text(), "the end");
    }
}
