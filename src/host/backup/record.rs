//! What is left of a run: a line of `backup.jsonl`, and `last-backup.json` for heartbeat and gateway.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use jiff::Timestamp;
use serde::Serialize;

use super::job::Stage;
use crate::clock;
use crate::fsx::{self, FileError};
use crate::host::layout::Layout;

/// One run (contract, part 4).
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// When the run began.
    #[serde(with = "clock::wire")]
    pub timestamp: Timestamp,
    pub status: Status,
    /// How far it came.
    pub stage: Stage,
    pub key: Option<String>,
    pub size_bytes: Option<u64>,
    pub sha256: Option<String>,
    pub duration_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Success,
    Error,
}

/// Writes both. The caller holds the lock of the backup, so nobody else appends.
///
/// # Errors
/// [`FileError`].
pub fn write(layout: &Layout, record: &Record) -> Result<(), FileError> {
    let line = serde_json::to_vec(record).expect("a record of plain fields is JSON");
    fsx::write_atomic(&layout.last_backup(), &line, 0o644)?;
    append_line(&layout.logs().join("backup.jsonl"), &line)
}

/// Appends one line by one write. A tail that a crash tore is dropped first, or closed where it is a whole line.
fn append_line(path: &Path, line: &[u8]) -> Result<(), FileError> {
    let dir = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir).map_err(FileError::at("create directory", dir))?;
    let append = || -> std::io::Result<()> {
        let mut file = File::options().create(true).read(true).append(true).open(path)?;
        let mut text = repair(&mut file)?.to_vec();
        text.extend_from_slice(line);
        text.push(b'\n');
        file.write_all(&text)?;
        file.sync_data()
    };
    append().map_err(FileError::at("append to", path))
}

/// What must come before the next line: nothing, or the line end that a whole last line lacks.
fn repair(file: &mut File) -> std::io::Result<&'static [u8]> {
    const LONGEST_LINE: u64 = 1 << 20;
    let length = file.metadata()?.len();
    let from = length.saturating_sub(LONGEST_LINE);
    file.seek(SeekFrom::Start(from))?;
    let mut end = Vec::new();
    file.take(LONGEST_LINE).read_to_end(&mut end)?;
    let whole = end.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    let tail = &end[whole..];
    if tail.is_empty() {
        return Ok(b"");
    }
    if serde_json::from_slice::<serde::de::IgnoredAny>(tail).is_ok() {
        return Ok(b"\n");
    }
    file.set_len(from + whole as u64)?;
    Ok(b"")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(before: &str) -> String {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("logs/backup.jsonl");
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, before).unwrap();
        append_line(&path, b"{\"n\":2}").unwrap();
        std::fs::read_to_string(&path).unwrap()
    }

    #[test]
    fn a_torn_tail_is_repaired_and_no_whole_line_is_lost() {
        assert_eq!(after(""), "{\"n\":2}\n");
        assert_eq!(after("{\"n\":1}\n"), "{\"n\":1}\n{\"n\":2}\n");
        assert_eq!(after("{\"n\":1}"), "{\"n\":1}\n{\"n\":2}\n");
        assert_eq!(after("{\"n\":1}\n{\"n\":"), "{\"n\":1}\n{\"n\":2}\n");
        assert_eq!(after("{\"n\""), "{\"n\":2}\n");
    }
}
