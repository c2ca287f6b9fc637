//! The release's own apps, copied into the owner's apps folder. What the owner changed, made or removed stays as it is.
//!
//! A record in the home says which files were copied. An app is replaced whole, by rename, and only while it is
//! exactly what was copied.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::name::Slug;
use crate::applet::{Exit, Failure, OrExit};
use crate::fsx::{self, FileError};
use crate::host::system::layout::Layout;

/// The files of one app: path below its folder, SHA-256 of the content.
type Tree = BTreeMap<String, String>;

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    version: u32,
    apps: BTreeMap<String, Tree>,
}

impl Default for Record {
    fn default() -> Self {
        Self { version: 1, apps: BTreeMap::new() }
    }
}

/// Why an app of the release was not copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kept {
    Changed(String),
    Removed(String),
}

#[derive(Debug, thiserror::Error)]
pub enum BundledError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("write the record of bundled apps")]
    Record(#[from] serde_json::Error),
}

/// `svc-gateway install-apps`.
///
/// # Errors
/// When files cannot be read or written.
pub fn run(layout: &Layout) -> Result<(), Failure> {
    install(layout).or_exit(Exit::Internal)?.iter().for_each(tell);
    Ok(())
}

/// Says which app of the release was not copied.
pub fn tell(kept: &Kept) {
    match kept {
        Kept::Changed(app) => {
            tracing::info!(%app, "the owner's version stays; the release's is not copied");
        }
        Kept::Removed(app) => tracing::debug!(%app, "removed by the owner; not copied"),
    }
}

/// Whether this process may write where the apps are, or, where they are not yet, make their folder.
pub fn may_install(layout: &Layout) -> bool {
    let apps = layout.apps();
    let there = apps.ancestors().find(|dir| dir.exists());
    there.is_some_and(|dir| nix::unistd::access(dir, nix::unistd::AccessFlags::W_OK).is_ok())
}

/// Brings the apps folder up to the release; blocks.
///
/// # Errors
/// When files cannot be read or written.
pub fn install(layout: &Layout) -> Result<Vec<Kept>, BundledError> {
    let apps = layout.apps();
    fs::create_dir_all(&apps).map_err(FileError::at("create directory", &apps))?;
    remove_leftovers(&apps);
    let mut record = read_record(&layout.bundled_apps_record())?;
    let mut kept = Vec::new();
    for (slug, source) in bundled(&layout.bundled_apps())? {
        let fresh = tree(&source)?;
        let place = apps.join(&slug);
        let copied = record.apps.get(&slug);
        let there = if place.exists() { Some(tree(&place)?) } else { None };
        match (there, copied) {
            (None, Some(_)) => kept.push(Kept::Removed(slug)),
            (None, None) => {
                copy(&source, &place, &fresh)?;
                record.apps.insert(slug, fresh);
            }
            (Some(there), _) if there == fresh => {
                record.apps.insert(slug, fresh);
            }
            (Some(there), Some(copied)) if there == *copied => {
                copy(&source, &place, &fresh)?;
                record.apps.insert(slug, fresh);
            }
            (Some(_), _) => kept.push(Kept::Changed(slug)),
        }
    }
    let text = serde_json::to_vec_pretty(&record)?;
    if fsx::read_if_exists(&layout.bundled_apps_record())?.as_deref() != Some(&text) {
        fsx::write_atomic(&layout.bundled_apps_record(), &text, 0o644)?;
    }
    Ok(kept)
}

/// A record that does not parse counts as none: then every app that differs is taken for the owner's.
fn read_record(path: &Path) -> Result<Record, BundledError> {
    let Some(text) = fsx::read_if_exists(path)? else { return Ok(Record::default()) };
    Ok(serde_json::from_slice(&text).unwrap_or_else(|error| {
        tracing::warn!(path = %path.display(), %error, "record of bundled apps not usable");
        Record::default()
    }))
}

fn bundled(dir: &Path) -> Result<Vec<(String, PathBuf)>, FileError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(FileError::at("read", dir)(error)),
    };
    let mut found: Vec<(String, PathBuf)> = entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let slug = path.file_name()?.to_str()?.to_owned();
            (slug.parse::<Slug>().is_ok() && path.is_dir()).then_some((slug, path))
        })
        .collect();
    found.sort();
    Ok(found)
}

fn tree(root: &Path) -> Result<Tree, FileError> {
    let mut files = Tree::new();
    let mut open = vec![root.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(&dir).map_err(FileError::at("read", &dir))? {
            let entry = entry.map_err(FileError::at("read", &dir))?;
            let path = entry.path();
            let kind = entry.file_type().map_err(FileError::at("read", &path))?;
            if kind.is_dir() {
                open.push(path);
            } else if let Ok(below) = path.strip_prefix(root) {
                // A link or a device is never ours: its mere name makes the tree differ from what was copied.
                let content = if kind.is_file() { digest(&path)? } else { "not a file".to_owned() };
                files.insert(below.to_string_lossy().into_owned(), content);
            }
        }
    }
    Ok(files)
}

fn digest(path: &Path) -> Result<String, FileError> {
    let mut hash = Sha256::new();
    let mut file = File::open(path).map_err(FileError::at("open", path))?;
    io::copy(&mut file, &mut Hashing(&mut hash)).map_err(FileError::at("read", path))?;
    Ok(hex::encode(hash.finalize()))
}

struct Hashing<'a>(&'a mut Sha256);

impl Write for Hashing<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Copies beside the place, then swaps.
fn copy(source: &Path, place: &Path, files: &Tree) -> Result<(), FileError> {
    let beside = |ending: &str| {
        let name = place.file_name().unwrap_or_default().to_string_lossy();
        place.with_file_name(format!(".{name}.{}.{ending}", uuid::Uuid::new_v4().simple()))
    };
    let (new, old) = (beside("new"), beside("old"));
    for (path, _) in files.iter().filter(|(_, content)| *content != "not a file") {
        let to = new.join(path);
        let dir = to.parent().unwrap_or(&new);
        fs::create_dir_all(dir).map_err(FileError::at("create directory", dir))?;
        fs::copy(source.join(path), &to).map_err(FileError::at("write", &to))?;
        File::open(&to).and_then(|file| file.sync_all()).map_err(FileError::at("sync", &to))?;
    }
    if place.exists() {
        fs::rename(place, &old).map_err(FileError::at("move away", place))?;
    }
    fs::rename(&new, place).map_err(FileError::at("move in", place))?;
    // What is left of the old one is swept at the next start.
    let _ = fs::remove_dir_all(&old);
    fsx::sync_dir(place.parent().unwrap_or(place))
}

/// What a kill in the middle of a copy left. An old app whose new one never came goes back to its place.
fn remove_leftovers(apps: &Path) {
    let Ok(entries) = fs::read_dir(apps) else { return };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let parts: Vec<&str> = name.split('.').collect();
        let ["", slug, id, ending @ ("new" | "old")] = parts[..] else { continue };
        // Only what was named here: the owner's own may look alike.
        if id.len() != 32 || !id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            continue;
        }
        let place = apps.join(slug);
        let done = if ending == "old" && !place.exists() {
            fs::rename(&path, &place)
        } else {
            fs::remove_dir_all(&path)
        };
        if let Err(error) = done {
            tracing::warn!(path = %path.display(), %error, "leftover of a copy stays");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Place {
        _root: tempfile::TempDir,
        layout: Layout,
    }

    impl Place {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let layout = Layout::new(root.path());
            Self { _root: root, layout }
        }

        fn bundle(&self, file: &str, content: &str) {
            fsx::write_atomic(&self.layout.bundled_apps().join(file), content.as_bytes(), 0o644).unwrap();
        }

        fn own(&self, file: &str, content: &str) {
            fsx::write_atomic(&self.layout.apps().join(file), content.as_bytes(), 0o644).unwrap();
        }

        fn read(&self, file: &str) -> Option<String> {
            fs::read_to_string(self.layout.apps().join(file)).ok()
        }
    }

    #[test]
    fn an_untouched_app_follows_the_release() {
        let place = Place::new();
        place.bundle("notes/svc.json", "1");
        place.bundle("notes/dist/old.js", "old");
        assert_eq!(install(&place.layout).unwrap(), []);
        assert_eq!(place.read("notes/svc.json").as_deref(), Some("1"));
        place.bundle("notes/svc.json", "2");
        fs::remove_file(place.layout.bundled_apps().join("notes/dist/old.js")).unwrap();
        assert_eq!(install(&place.layout).unwrap(), []);
        assert_eq!(place.read("notes/svc.json").as_deref(), Some("2"));
        assert_eq!(place.read("notes/dist/old.js"), None);
    }

    #[test]
    fn what_the_owner_changed_made_or_removed_stays() {
        let place = Place::new();
        place.bundle("notes/svc.json", "1");
        place.bundle("gone/svc.json", "1");
        place.own("mine/svc.json", "mine");
        place.bundle("mine/svc.json", "1");
        install(&place.layout).unwrap();
        place.own("notes/extra.txt", "owner");
        fs::remove_dir_all(place.layout.apps().join("gone")).unwrap();
        for app in ["notes", "gone", "mine"] {
            place.bundle(&format!("{app}/svc.json"), "2");
        }
        let kept = install(&place.layout).unwrap();
        let expected =
            [Kept::Removed("gone".into()), Kept::Changed("mine".into()), Kept::Changed("notes".into())];
        assert_eq!(kept, expected);
        assert_eq!(place.read("notes/svc.json").as_deref(), Some("1"));
        assert_eq!(place.read("notes/extra.txt").as_deref(), Some("owner"));
        assert_eq!(place.read("mine/svc.json").as_deref(), Some("mine"));
        assert_eq!(place.read("gone/svc.json"), None);
    }

    #[test]
    fn a_kill_between_the_two_renames_is_put_right() {
        let place = Place::new();
        place.bundle("notes/svc.json", "1");
        install(&place.layout).unwrap();
        let apps = place.layout.apps();
        let id = "0123456789abcdef0123456789abcdef";
        fs::rename(apps.join("notes"), apps.join(format!(".notes.{id}.old"))).unwrap();
        place.own(&format!(".notes.{id}.new/svc.json"), "half");
        install(&place.layout).unwrap();
        assert_eq!(place.read("notes/svc.json").as_deref(), Some("1"));
        let left: Vec<_> = fs::read_dir(&apps).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(left.len() == 2 && left.contains(&"notes".into()), "{left:?}");
    }

    #[test]
    fn what_only_looks_like_a_leftover_stays() {
        let place = Place::new();
        place.bundle("notes/svc.json", "1");
        for own in [".notes.2026.old/draft.txt", ".gone.mine.old/svc.json", ".notes.a.new/x"] {
            place.own(own, "mine");
        }
        install(&place.layout).unwrap();
        assert_eq!(place.read(".notes.2026.old/draft.txt").as_deref(), Some("mine"));
        assert_eq!(place.read(".gone.mine.old/svc.json").as_deref(), Some("mine"));
        assert_eq!(place.read(".notes.a.new/x").as_deref(), Some("mine"));
    }
}
