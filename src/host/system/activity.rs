//! Appends single lines to `activity.log`, bypassing the `host::records::writer` queues that the gateway and svc-watch
//! use for most of their lines.
//!
//! Each line is a single append to the file that currently has this name, so concurrent writers don't overwrite each
//! other and rotation doesn't lose lines. Because `svc-update` runs as root, symlinks aren't followed, existing files
//! must belong to the directory's owner and have a single hard link, and new files are chowned to that owner.

use std::ffi::OsStr;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use jiff::Timestamp;

use crate::system::layout::Layout;
use svc_base::beneath::DirFd;
use svc_base::clock;
use svc_base::error_chain::format_chain;

const FILE: &str = "activity.log";

/// Appends a timestamped line. Failures are only logged, since nothing depends on the line.
pub fn note(layout: &Layout, text: &str) {
    match append(layout, text) {
        Ok(()) => {}
        // The directory is created early at boot, so this isn't expected on a real machine.
        Err(error) if error.kind() == ErrorKind::NotFound => {
            tracing::debug!(error = %format_chain(&error), "no directory for activity.log");
        }
        Err(error) => tracing::warn!(error = %format_chain(&error), "cannot write to activity.log"),
    }
}

/// Appends a timestamped line, replacing control characters with spaces.
///
/// # Errors
/// If the directory doesn't exist, or the file is a link, belongs to another user, or can't be written.
pub fn append(layout: &Layout, text: &str) -> io::Result<()> {
    let logs = layout.logs();
    let relative = logs.strip_prefix(layout.root()).unwrap_or(Path::new(""));
    let mut file = DirFd::open(layout.root())?.open_dir(relative)?.open_for_append(OsStr::new(FILE))?;
    let length = file.metadata()?.size();
    let mut last = [b'\n'];
    if length > 0 {
        file.read_exact_at(&mut last, length - 1)?;
    }
    // A killed writer may have left a partial line.
    let missing_newline = if last == [b'\n'] { "" } else { "\n" };
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    file.write_all(format!("{missing_newline}{} {text}\n", clock::rfc3339_ms(Timestamp::now())).as_bytes())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{chown, symlink};

    use super::*;

    fn machine() -> (tempfile::TempDir, Layout) {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        fs::create_dir_all(layout.logs()).unwrap();
        (dir, layout)
    }

    fn lines(layout: &Layout) -> Vec<String> {
        let text = fs::read_to_string(layout.logs().join(FILE)).unwrap();
        text.lines().map(|line| line.split_once(' ').map_or(line, |(_, text)| text).to_owned()).collect()
    }

    #[test]
    fn note_writes_whole_lines_concurrently() {
        let (_dir, layout) = machine();
        fs::write(layout.logs().join(FILE), "torn").unwrap();
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let layout = &layout;
                scope.spawn(move || (0..50).for_each(|n| note(layout, &format!("{writer}\n{n}"))));
            }
        });
        let mut found = lines(&layout);
        assert_eq!(found.remove(0), "torn");
        found.retain(|line| !line.is_empty());
        let mut expected: Vec<String> = (0..200).map(|n| format!("{} {}", n / 50, n % 50)).collect();
        found.sort();
        expected.sort();
        assert_eq!(found, expected);
    }

    #[test]
    fn note_sets_owner_and_refuses_links() {
        let (dir, layout) = machine();
        let path = layout.logs().join(FILE);
        let victim = dir.path().join("victim");
        fs::write(&victim, "A=1\n").unwrap();
        symlink(&victim, &path).unwrap();
        note(&layout, "x");
        fs::remove_file(&path).unwrap();
        fs::hard_link(&victim, &path).unwrap();
        note(&layout, "x");
        assert_eq!(fs::read_to_string(&victim).unwrap(), "A=1\n");
        fs::remove_file(&path).unwrap();
        // Symlinked directories aren't followed either.
        let system = layout.home().join("system");
        fs::rename(&system, dir.path().join("elsewhere")).unwrap();
        symlink(dir.path().join("elsewhere"), &system).unwrap();
        note(&layout, "x");
        assert!(!path.exists());
        fs::remove_file(&system).unwrap();
        note(&layout, "there is no directory");
        fs::rename(dir.path().join("elsewhere"), &system).unwrap();

        if !nix::unistd::geteuid().is_root() {
            note(&layout, "mine");
            assert_eq!(lines(&layout), ["mine"]);
            return;
        }
        let (gateway, svc) = (4940, 4941);
        chown(layout.logs(), Some(gateway), Some(svc)).unwrap();
        note(&layout, "first");
        note(&layout, "second");
        let meta = fs::metadata(&path).unwrap();
        assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o777), (gateway, svc, 0o640));
        chown(&path, Some(0), Some(0)).unwrap();
        note(&layout, "not into the file of another user");
        assert_eq!(lines(&layout), ["first", "second"]);
    }
}
