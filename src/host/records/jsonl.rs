//! Records of one JSON object a line: how one is appended.
//!
//! A line is written whole by one write, to the file that has the name now: each append opens it anew. That is the rule
//! for every writer of a record that is rotated: the rotation renames the file, so what is written through a descriptor
//! that was opened before is in the renamed file and not lost, and what comes after goes by the name to a new one.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::fsx::FileError;

/// Appends one line by one write. A tail that a crash tore is dropped first, or closed where it is a whole line. The
/// caller sees to it that nobody else appends meanwhile.
///
/// # Errors
/// [`FileError`]; also where the name is a link, which somebody else has put there.
pub fn append_line(path: &Path, line: &[u8]) -> Result<(), FileError> {
    let dir = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir).map_err(FileError::at("create directory", dir))?;
    let append = || -> std::io::Result<()> {
        let no_link = nix::fcntl::OFlag::O_NOFOLLOW.bits();
        let mut options = File::options();
        let mut file = options.create(true).read(true).append(true).custom_flags(no_link).open(path)?;
        let mut text = repair(&mut file)?.to_vec();
        text.extend_from_slice(line);
        text.push(b'\n');
        file.write_all(&text)?;
        file.sync_data()
    };
    append().map_err(FileError::at("append to", path))
}

/// What must come before the next line: nothing, or the line end that a whole last line lacks. A torn one is cut off.
///
/// # Errors
/// The file's.
pub fn repair(file: &mut File) -> std::io::Result<&'static [u8]> {
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
    if whole == 0 && from > 0 {
        // A line that is longer than any of ours: what comes next is kept apart from it.
        return Ok(b"\n");
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
    fn a_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (victim, link) = (dir.path().join("victim"), dir.path().join("storage.jsonl"));
        std::fs::write(&victim, "A=1\n").unwrap();
        std::os::unix::fs::symlink(&victim, &link).unwrap();
        append_line(&link, b"{}").unwrap_err();
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "A=1\n");
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
