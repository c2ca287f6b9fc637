//! Appends to JSON Lines log files.
//!
//! Each append reopens the file by name, to create a new one if the old file was renamed or deleted. The whole line is
//! written in a single call, so that concurrent appends don't interleave.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use svc_base::fsx::FileError;

const LOCK_TIMEOUT: Duration = Duration::from_secs(1);
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Appends a line in a single write and syncs the file. A torn last line is removed first; a complete one missing its
/// newline is terminated. Waits up to `LOCK_TIMEOUT` for concurrent appends; if the file is still locked, a torn line
/// is terminated instead of removed.
///
/// # Errors
/// [`FileError`] if the file can't be created, read or written, or if the path is a symlink.
pub fn append_line(path: &Path, line: &[u8]) -> Result<(), FileError> {
    let dir = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir).map_err(FileError::wrap("create directory", dir))?;
    let append = || -> std::io::Result<()> {
        let no_link = nix::fcntl::OFlag::O_NOFOLLOW.bits();
        let mut options = File::options();
        let mut file = options.create(true).read(true).append(true).custom_flags(no_link).open(path)?;
        let is_locked = wait_for_lock(&file);
        let mut text =
            if is_locked { repair_tail(&mut file)? } else { find_missing_newline(&mut file)? }.to_vec();
        text.extend_from_slice(line);
        text.push(b'\n');
        file.write_all(&text)?;
        file.sync_data()
    };
    append().map_err(FileError::wrap("append to", path))
}

/// Waits for concurrent appends and locks the file. Gives up and returns `false` after `LOCK_TIMEOUT`: the owner's
/// programs can also lock the file, which must not block a backup.
fn wait_for_lock(file: &File) -> bool {
    let deadline = Instant::now() + LOCK_TIMEOUT;
    while file.try_lock().is_err() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(LOCK_POLL_INTERVAL);
    }
    true
}

/// Returns a newline if the last line lacks one, otherwise an empty slice. Unlike [`repair_tail`], never truncates the
/// file, since another process may be appending.
fn find_missing_newline(file: &mut File) -> std::io::Result<&'static [u8]> {
    let mut last = [b'\n'];
    if file.metadata()?.len() > 0 {
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
    }
    Ok(if last == *b"\n" { b"" } else { b"\n" })
}

/// Removes a torn last line, unless it's longer than 1 MiB. Returns the text to write before the next line: a missing
/// newline, or nothing.
///
/// # Errors
/// If the file can't be read or truncated.
pub fn repair_tail(file: &mut File) -> std::io::Result<&'static [u8]> {
    const MAX_LINE_BYTES: u64 = 1 << 20;
    let length = file.metadata()?.len();
    let start = length.saturating_sub(MAX_LINE_BYTES);
    file.seek(SeekFrom::Start(start))?;
    let mut buffer = Vec::new();
    file.take(MAX_LINE_BYTES).read_to_end(&mut buffer)?;
    let tail_start = buffer.iter().rposition(|&byte| byte == b'\n').map_or(0, |index| index + 1);
    let tail = &buffer[tail_start..];
    if tail.is_empty() {
        return Ok(b"");
    }
    if tail_start == 0 && start > 0 {
        // The last line is too long to check, so just terminate it.
        return Ok(b"\n");
    }
    if serde_json::from_slice::<serde::de::IgnoredAny>(tail).is_ok() {
        return Ok(b"\n");
    }
    file.set_len(start + tail_start as u64)?;
    Ok(b"")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn append_to(before: &str) -> String {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("logs/backup.jsonl");
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, before).unwrap();
        append_line(&path, b"{\"n\":2}").unwrap();
        std::fs::read_to_string(&path).unwrap()
    }

    #[test]
    fn append_rejects_symlinks() {
        let dir = tempfile::tempdir().unwrap();
        let (victim, link) = (dir.path().join("victim"), dir.path().join("storage.jsonl"));
        std::fs::write(&victim, "A=1\n").unwrap();
        std::os::unix::fs::symlink(&victim, &link).unwrap();
        append_line(&link, b"{}").unwrap_err();
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "A=1\n");
    }

    #[test]
    fn append_repairs_a_torn_tail() {
        assert_eq!(append_to(""), "{\"n\":2}\n");
        assert_eq!(append_to("{\"n\":1}\n"), "{\"n\":1}\n{\"n\":2}\n");
        assert_eq!(append_to("{\"n\":1}"), "{\"n\":1}\n{\"n\":2}\n");
        assert_eq!(append_to("{\"n\":1}\n{\"n\":"), "{\"n\":1}\n{\"n\":2}\n");
        assert_eq!(append_to("{\"n\""), "{\"n\":2}\n");
    }
}
