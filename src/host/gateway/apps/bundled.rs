//! Copies the release's bundled apps into the owner's apps directory. Apps changed, created or removed by the owner are
//! left alone.
//!
//! `.bundled-apps.json` in the apps directory records the copied files. Apps are replaced whole, by rename, and only if
//! their files are exactly the ones we copied.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::name::Slug;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::error_chain::format_chain;
use svc_base::fsx::{self, FileError};
use svc_host::system::layout::Layout;

/// An app's files: maps relative paths to the content's SHA-256, or to [`NOT_A_FILE`].
type Tree = BTreeMap<String, String>;

/// Digest placeholder for symbolic links and special files in a [`Tree`].
const NOT_A_FILE: &str = "not a file";

/// Contents of `.bundled-apps.json`: the files copied for each app.
#[derive(Debug, Serialize, Deserialize)]
struct InstallRecord {
    version: u32,
    apps: BTreeMap<String, Tree>,
}

impl Default for InstallRecord {
    fn default() -> Self {
        Self { version: 1, apps: BTreeMap::new() }
    }
}

/// A skipped bundled app, and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SkippedApp {
    Changed(String),
    Removed(String),
}

#[derive(Debug, thiserror::Error)]
pub enum BundledAppsError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("cannot serialize the bundled-apps record")]
    Record(#[from] serde_json::Error),
}

/// Runs `svc-gateway install-apps`.
///
/// # Errors
/// `Internal` if [`install`] fails.
pub fn run_install(layout: &Layout) -> Result<(), Failure> {
    install(layout).or_exit(Exit::Internal)?.iter().for_each(log_skipped);
    Ok(())
}

pub fn log_skipped(skipped: &SkippedApp) {
    match skipped {
        SkippedApp::Changed(app) => {
            tracing::info!(%app, "app created or changed by the owner; skipping the bundled version");
        }
        SkippedApp::Removed(app) => tracing::debug!(%app, "app removed by the owner; skipping it"),
    }
}

/// Whether this process may write to the apps directory or create it.
pub fn can_install(layout: &Layout) -> bool {
    let apps = layout.apps();
    let existing = apps.ancestors().find(|dir| dir.exists());
    existing.is_some_and(|dir| nix::unistd::access(dir, nix::unistd::AccessFlags::W_OK).is_ok())
}

/// Updates the bundled apps in the apps directory to the release's versions, and returns the skipped ones. Failures to
/// read or write an app's files are logged and don't affect other apps. Blocks.
///
/// # Errors
/// The directories can't be listed or created, or the record can't be read or written.
pub fn install(layout: &Layout) -> Result<Vec<SkippedApp>, BundledAppsError> {
    let apps = layout.apps();
    fs::create_dir_all(&apps).map_err(FileError::wrap("create directory", &apps))?;
    remove_leftovers(&apps);
    let mut record = read_record(&layout.bundled_apps_record())?;
    let mut skipped = Vec::new();
    for (slug, source) in list_bundled(&layout.bundled_apps())? {
        match install_app(&source, &apps.join(&slug), record.apps.get(&slug)) {
            Ok(AppInstallation::Current(tree)) => {
                record.apps.insert(slug, tree);
                // If this app were missing from the record, the next release would treat it as the owner's.
                write_record(&layout.bundled_apps_record(), &record)?;
            }
            Ok(AppInstallation::Changed) => skipped.push(SkippedApp::Changed(slug)),
            Ok(AppInstallation::Removed) => skipped.push(SkippedApp::Removed(slug)),
            Err(error) => {
                tracing::warn!(app = %slug, error = %format_chain(&error), "cannot copy bundled app");
            }
        }
    }
    Ok(skipped)
}

/// State of a bundled app in the apps directory.
enum AppInstallation {
    /// Matches the release, possibly because it was just copied.
    Current(Tree),
    Changed,
    Removed,
}

/// Copies one app from `source` to `target`, unless the owner changed or removed it. `copied` lists the files from the
/// last copy.
fn install_app(source: &Path, target: &Path, copied: Option<&Tree>) -> Result<AppInstallation, FileError> {
    let bundled = read_tree(source)?;
    let installed = if target.exists() { Some(read_tree(target)?) } else { None };
    match (installed, copied) {
        (None, Some(_)) => return Ok(AppInstallation::Removed),
        (Some(installed), _) if installed == bundled => {}
        (Some(installed), copied) if copied != Some(&installed) => return Ok(AppInstallation::Changed),
        _ => copy(source, target, &bundled)?,
    }
    Ok(AppInstallation::Current(bundled))
}

fn write_record(path: &Path, record: &InstallRecord) -> Result<(), BundledAppsError> {
    let text = serde_json::to_vec_pretty(record)?;
    if fsx::read_if_exists(path)?.as_deref() != Some(&text) {
        fsx::write_atomic(path, &text, 0o644)?;
    }
    Ok(())
}

/// Treats an invalid record as empty. Every app that differs is then the owner's, and apps removed by the owner are
/// copied again.
fn read_record(path: &Path) -> Result<InstallRecord, BundledAppsError> {
    let Some(text) = fsx::read_if_exists(path)? else { return Ok(InstallRecord::default()) };
    Ok(serde_json::from_slice(&text).unwrap_or_else(|error| {
        tracing::warn!(path = %path.display(), %error, "ignoring invalid bundled-apps record");
        InstallRecord::default()
    }))
}

fn list_bundled(dir: &Path) -> Result<Vec<(String, PathBuf)>, FileError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(FileError::wrap("read", dir)(error)),
    };
    let mut apps: Vec<(String, PathBuf)> = entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let slug = path.file_name()?.to_str()?.to_owned();
            (slug.parse::<Slug>().is_ok() && path.is_dir()).then_some((slug, path))
        })
        .collect();
    apps.sort();
    Ok(apps)
}

fn read_tree(root: &Path) -> Result<Tree, FileError> {
    let mut files = Tree::new();
    let mut pending = vec![root.to_owned()];
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(&dir).map_err(FileError::wrap("read", &dir))? {
            let entry = entry.map_err(FileError::wrap("read", &dir))?;
            let path = entry.path();
            let kind = entry.file_type().map_err(FileError::wrap("read", &path))?;
            if kind.is_dir() {
                pending.push(path);
            } else if let Ok(relative) = path.strip_prefix(root) {
                // Symbolic links and special files are never copied, so a tree with one differs from the copied tree.
                let digest = if kind.is_file() { digest(&path)? } else { NOT_A_FILE.to_owned() };
                files.insert(relative.to_string_lossy().into_owned(), digest);
            }
        }
    }
    Ok(files)
}

fn digest(path: &Path) -> Result<String, FileError> {
    let mut hash = Sha256::new();
    let mut file = File::open(path).map_err(FileError::wrap("open", path))?;
    io::copy(&mut file, &mut HashWriter(&mut hash)).map_err(FileError::wrap("read", path))?;
    Ok(hex::encode(hash.finalize()))
}

struct HashWriter<'a>(&'a mut Sha256);

impl Write for HashWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Copies the files to a temporary directory, then replaces `target` with it.
fn copy(source: &Path, target: &Path, files: &Tree) -> Result<(), FileError> {
    let temporary = |suffix: &str| {
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        target.with_file_name(format!(".{name}.{}.{suffix}", uuid::Uuid::new_v4().simple()))
    };
    let (new, old) = (temporary("new"), temporary("old"));
    let replaced = copy_files(source, &new, files).and_then(|()| replace(target, &new, &old));
    if replaced.is_err() {
        // The disk may be full, and the next install, which would also remove the directory, may be far off.
        let _ = fs::remove_dir_all(&new);
    }
    replaced
}

fn copy_files(source: &Path, to: &Path, files: &Tree) -> Result<(), FileError> {
    for (path, _) in files.iter().filter(|(_, digest)| *digest != NOT_A_FILE) {
        let destination = to.join(path);
        let dir = destination.parent().unwrap_or(to);
        fs::create_dir_all(dir).map_err(FileError::wrap("create directory", dir))?;
        fs::copy(source.join(path), &destination).map_err(FileError::wrap("write", &destination))?;
        File::open(&destination)
            .and_then(|file| file.sync_all())
            .map_err(FileError::wrap("sync", &destination))?;
    }
    Ok(())
}

/// Moves the existing directory aside to `old`, and renames `new` to `target`.
fn replace(target: &Path, new: &Path, old: &Path) -> Result<(), FileError> {
    if target.exists() {
        fs::rename(target, old).map_err(FileError::wrap("rename", target))?;
    }
    fs::rename(new, target).map_err(FileError::wrap("rename new directory to", target))?;
    // Best effort: the next install removes any remainder.
    let _ = fs::remove_dir_all(old);
    fsx::sync_dir(target.parent().unwrap_or(target))
}

/// Cleans up after an interrupted copy, restoring the old app if its replacement is missing.
fn remove_leftovers(apps: &Path) {
    let Ok(entries) = fs::read_dir(apps) else { return };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let parts: Vec<&str> = name.split('.').collect();
        let ["", slug, id, suffix @ ("new" | "old")] = parts[..] else { continue };
        // Match only names generated by `copy`: the owner's directories may look similar.
        if id.len() != 32 || !id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            continue;
        }
        let target = apps.join(slug);
        let cleaned = if suffix == "old" && !target.exists() {
            fs::rename(&path, &target)
        } else {
            fs::remove_dir_all(&path)
        };
        if let Err(error) = cleaned {
            tracing::warn!(path = %path.display(), %error, "cannot clean up after interrupted copy");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixture {
        _root: tempfile::TempDir,
        layout: Layout,
    }

    impl Fixture {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let layout = Layout::new(root.path());
            Self { _root: root, layout }
        }

        fn bundle(&self, file: &str, content: &str) {
            fsx::write_atomic(&self.layout.bundled_apps().join(file), content.as_bytes(), 0o644).unwrap();
        }

        fn write_owner_file(&self, file: &str, content: &str) {
            fsx::write_atomic(&self.layout.apps().join(file), content.as_bytes(), 0o644).unwrap();
        }

        fn read(&self, file: &str) -> Option<String> {
            fs::read_to_string(self.layout.apps().join(file)).ok()
        }
    }

    #[test]
    fn install_updates_unchanged_app() {
        let fixture = Fixture::new();
        fixture.bundle("notes/svc.json", "1");
        fixture.bundle("notes/dist/old.js", "old");
        assert_eq!(install(&fixture.layout).unwrap(), []);
        assert_eq!(fixture.read("notes/svc.json").as_deref(), Some("1"));
        fixture.bundle("notes/svc.json", "2");
        fs::remove_file(fixture.layout.bundled_apps().join("notes/dist/old.js")).unwrap();
        assert_eq!(install(&fixture.layout).unwrap(), []);
        assert_eq!(fixture.read("notes/svc.json").as_deref(), Some("2"));
        assert_eq!(fixture.read("notes/dist/old.js"), None);
    }

    #[test]
    fn install_skips_changed_created_and_removed_apps() {
        let fixture = Fixture::new();
        fixture.bundle("notes/svc.json", "1");
        fixture.bundle("removed/svc.json", "1");
        fixture.write_owner_file("mine/svc.json", "mine");
        fixture.bundle("mine/svc.json", "1");
        install(&fixture.layout).unwrap();
        fixture.write_owner_file("notes/extra.txt", "owner");
        fs::remove_dir_all(fixture.layout.apps().join("removed")).unwrap();
        for app in ["notes", "removed", "mine"] {
            fixture.bundle(&format!("{app}/svc.json"), "2");
        }
        let skipped = install(&fixture.layout).unwrap();
        let expected = [
            SkippedApp::Changed("mine".into()),
            SkippedApp::Changed("notes".into()),
            SkippedApp::Removed("removed".into()),
        ];
        assert_eq!(skipped, expected);
        assert_eq!(fixture.read("notes/svc.json").as_deref(), Some("1"));
        assert_eq!(fixture.read("notes/extra.txt").as_deref(), Some("owner"));
        assert_eq!(fixture.read("mine/svc.json").as_deref(), Some("mine"));
        assert_eq!(fixture.read("removed/svc.json"), None);
    }

    #[test]
    fn install_updates_other_apps_after_failure() {
        let fixture = Fixture::new();
        // A file can't be listed like a directory.
        fixture.write_owner_file("broken", "a file");
        for version in ["1", "2", "3"] {
            for app in ["alpha", "broken", "zeta"] {
                fixture.bundle(&format!("{app}/svc.json"), version);
            }
            assert_eq!(install(&fixture.layout).unwrap(), []);
            for app in ["alpha", "zeta"] {
                assert_eq!(fixture.read(&format!("{app}/svc.json")).as_deref(), Some(version));
            }
        }
        assert_eq!(fixture.read("broken").as_deref(), Some("a file"));
    }

    #[test]
    fn copy_removes_temporary_directory_after_failure() {
        let fixture = Fixture::new();
        fixture.bundle("notes/a", "1");
        let (source, apps) = (fixture.layout.bundled_apps().join("notes"), fixture.layout.apps());
        // The second file doesn't exist, so copying it fails.
        let files = Tree::from(["a", "b"].map(|path| (path.to_owned(), String::new())));
        assert!(copy(&source, &apps.join("notes"), &files).is_err());
        assert_eq!(fs::read_dir(&apps).unwrap().count(), 0);
    }

    #[test]
    fn install_recovers_from_crash_between_renames() {
        let fixture = Fixture::new();
        fixture.bundle("notes/svc.json", "1");
        install(&fixture.layout).unwrap();
        let apps = fixture.layout.apps();
        let id = "0123456789abcdef0123456789abcdef";
        fs::rename(apps.join("notes"), apps.join(format!(".notes.{id}.old"))).unwrap();
        fixture.write_owner_file(&format!(".notes.{id}.new/svc.json"), "half");
        install(&fixture.layout).unwrap();
        assert_eq!(fixture.read("notes/svc.json").as_deref(), Some("1"));
        let remaining: Vec<_> =
            fs::read_dir(&apps).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(remaining.len() == 2 && remaining.contains(&"notes".into()), "{remaining:?}");
    }

    #[test]
    fn install_keeps_directories_named_like_leftovers() {
        let fixture = Fixture::new();
        fixture.bundle("notes/svc.json", "1");
        for file in [".notes.2026.old/draft.txt", ".gone.mine.old/svc.json", ".notes.a.new/x"] {
            fixture.write_owner_file(file, "mine");
        }
        install(&fixture.layout).unwrap();
        assert_eq!(fixture.read(".notes.2026.old/draft.txt").as_deref(), Some("mine"));
        assert_eq!(fixture.read(".gone.mine.old/svc.json").as_deref(), Some("mine"));
        assert_eq!(fixture.read(".notes.a.new/x").as_deref(), Some("mine"));
    }
}
