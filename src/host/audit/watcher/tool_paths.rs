//! Resolves tool path arguments to files in the home directory.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use super::diff::Change;
use crate::records::entry::FileOperation;

/// Lists the paths below the home directory that a tool may have written: the name in its resolved directory and, for a
/// symlink, its target. Omits paths outside the home directory or in its `system` directory.
pub fn resolve_written_paths(home: &Path, cwd: Option<&str>, path: &str) -> Vec<Vec<u8>> {
    let path = Path::new(cwd.unwrap_or("/")).join(path);
    let mut paths = Vec::new();
    if let (Some(dir), Some(name)) = (path.parent(), path.file_name()) {
        paths.extend(path_within_home(home, &resolve_existing_part(dir).join(name)));
    }
    let target = std::fs::canonicalize(&path).ok().and_then(|target| path_within_home(home, &target));
    if let Some(target) = target.filter(|target| !paths.contains(target)) {
        paths.push(target);
    }
    paths
}

/// Returns the write reported by a tool. The caller records it if the watcher's check didn't find one: the tool may
/// have written identical content, or an earlier check may have collected the change.
pub fn find_reported_write(home: &Path, cwd: Option<&str>, path: &str) -> Option<Change> {
    let path = resolve_written_paths(home, cwd, path).pop()?;
    let meta = std::fs::symlink_metadata(home.join(OsStr::from_bytes(&path))).ok();
    // The last path is a symlink only if its target is missing or not audited, so there's no write to record.
    if meta.as_ref().is_some_and(std::fs::Metadata::is_symlink) {
        return None;
    }
    let size = meta.map_or(0, |meta| meta.len());
    Some(Change { op: FileOperation::Write, path, size })
}

fn path_within_home(home: &Path, path: &Path) -> Option<Vec<u8>> {
    let below = path.strip_prefix(home).ok()?;
    let is_excluded = below.components().next().is_none_or(|first| first.as_os_str() == "system");
    (!is_excluded).then(|| below.as_os_str().as_bytes().to_owned())
}

/// Canonicalizes the longest existing prefix of a path and appends the rest.
fn resolve_existing_part(path: &Path) -> PathBuf {
    let mut existing = path.to_owned();
    let mut rest = Vec::new();
    loop {
        if let Ok(mut real) = std::fs::canonicalize(&existing) {
            for part in rest.into_iter().rev() {
                match Path::new(&part).components().next() {
                    Some(Component::ParentDir) => _ = real.pop(),
                    Some(Component::Normal(name)) => real.push(name),
                    _ => {}
                }
            }
            return real;
        }
        let Some(last) = existing.components().next_back().map(|part| part.as_os_str().to_owned()) else {
            return path.to_owned();
        };
        rest.push(last);
        if !existing.pop() {
            return path.to_owned();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_paths_resolve_links_and_stay_in_home() {
        let dir = tempfile::tempdir().unwrap();
        let root = std::fs::canonicalize(dir.path()).unwrap();
        let home = root.join("home");
        for dir in ["home/a/b", "home/system", "out"] {
            std::fs::create_dir_all(root.join(dir)).unwrap();
        }
        for (link, target) in [
            ("home/in", "a/b"),
            ("home/a/file", "b/real"),
            ("home/outside", "../out"),
            ("out/back", "../home/a"),
        ] {
            std::os::unix::fs::symlink(target, root.join(link)).unwrap();
        }
        std::fs::write(home.join("a/b/real"), "").unwrap();
        let cwd = home.join("a").display().to_string();
        for (path, expected) in [
            ("b/new", &["a/b/new"][..]),
            ("n/e/w", &["a/n/e/w"]),
            ("n/../w", &["a/w"]),
            ("../in/x", &["a/b/x"]),
            ("file", &["a/file", "a/b/real"]),
            ("../outside/x", &[]),
            ("../system/config.json", &[]),
            ("../../out/x", &[]),
            ("../../out/back/x", &["a/x"]),
            ("/etc/passwd", &[]),
            ("..", &[]),
        ] {
            let expected: Vec<&[u8]> = expected.iter().map(|path| path.as_bytes()).collect();
            assert_eq!(resolve_written_paths(&home, Some(&cwd), path), expected, "{path}");
        }
    }

    #[test]
    fn written_paths_preserve_non_utf8_names() {
        let dir = tempfile::tempdir().unwrap();
        let home = std::fs::canonicalize(dir.path()).unwrap();
        let dir = OsStr::from_bytes(b"\xff");
        std::fs::create_dir(home.join(dir)).unwrap();
        std::os::unix::fs::symlink(dir, home.join("link")).unwrap();
        std::fs::write(home.join("link/file"), "12").unwrap();
        let path = home.join("link/file").display().to_string();
        assert_eq!(resolve_written_paths(&home, None, &path), [b"\xff/file".to_vec()]);
        let reported = Change { op: FileOperation::Write, path: b"\xff/file".to_vec(), size: 2 };
        assert_eq!(find_reported_write(&home, None, &path), Some(reported));
    }
}
