//! Installs a release's definitions of units, users and directories in `/etc`. Installed files that the release does
//! not have are removed.
//!
//! The path of each installed file, relative to its target directory, begins with `svc`. `installed.json`, next to the
//! journal, lists all installed files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::system::layout::Layout;
use svc_base::failpoint::{self, InjectedFailure};
use svc_base::fsx::{self, FileError};
use svc_machine::name::ImageVersion;

const UNIT_DIR: &str = "etc/systemd/system";
/// Directories below a release's `systemd/`, with the directories into which their files are copied.
const UNIT_TREES: [(&str, &str); 3] =
    [("system", UNIT_DIR), ("sysusers.d", "etc/sysusers.d"), ("tmpfiles.d", "etc/tmpfiles.d")];
const FORMAT_VERSION: u32 = 1;

#[derive(Debug, thiserror::Error)]
pub enum UnitsError {
    #[error(
        "the release's file {} must have a UTF-8 path that begins with svc below its target directory",
        .path.display()
    )]
    Foreign { path: PathBuf },
    #[error("{} is malformed or has an unsupported version", .path.display())]
    Record { path: PathBuf },
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

/// The installed files, as paths below the root. During an installation, the list also includes the new files.
#[derive(Debug, Serialize, Deserialize)]
struct InstalledFiles {
    version: u32,
    files: BTreeSet<PathBuf>,
}

/// Installs this release's files in `/etc`, and removes the installed files that it does not have. Idempotent.
///
/// New files are recorded before the first one is written. After an interruption, the next installation can therefore
/// remove the files that its release does not have, even if it installs a different release.
///
/// # Errors
/// [`UnitsError`] if a file's path, relative to its target directory, is not UTF-8 or does not begin with `svc`, if
/// `installed.json` is malformed, or if a file cannot be read or written. The call can be repeated.
pub fn install(layout: &Layout, version: &ImageVersion) -> Result<(), UnitsError> {
    let wanted = list_release_files(layout, version)?;
    let installed = read_installed_files(layout)?;
    write_record(layout, installed.iter().chain(wanted.keys()).cloned().collect())?;
    failpoint::trigger("update.units_planned")?;
    let dirs: BTreeSet<PathBuf> =
        installed.iter().chain(wanted.keys()).filter_map(|path| Some(path.parent()?.to_owned())).collect();
    for dir in dirs {
        // A killed installation may have left temporary files behind.
        let is_ours =
            |name: &str| installed.contains(&dir.join(name)) || wanted.contains_key(&dir.join(name));
        fsx::remove_leftover_temps_in(&layout.root().join(&dir), is_ours)?;
    }
    for (target, source) in &wanted {
        copy_file(source, &layout.root().join(target))?;
    }
    failpoint::trigger("update.units_written")?;
    for removed in installed.iter().filter(|path| !wanted.contains_key(*path)) {
        fsx::remove_if_exists(&layout.root().join(removed))?;
    }
    write_record(layout, wanted.into_keys().collect())?;
    failpoint::trigger("update.units_recorded")?;
    Ok(())
}

/// Returns the installed runnable units that this release does not have, as names for [`ServiceManager::stop`].
///
/// [`ServiceManager::stop`]: super::services::ServiceManager::stop
pub fn list_removed_units(layout: &Layout, version: &ImageVersion) -> Result<Vec<String>, UnitsError> {
    let wanted = list_release_files(layout, version)?;
    let installed = read_installed_files(layout)?;
    let removed = installed.iter().filter(|path| !wanted.contains_key(*path));
    let units = removed.filter_map(|path| path.strip_prefix(UNIT_DIR).ok()?.to_str());
    Ok(units.filter(|unit| is_runnable(unit)).map(instances_pattern).collect())
}

/// Returns the pattern of a template's instances, because the template itself cannot be stopped; the name of any other
/// unit is returned unchanged.
fn instances_pattern(unit: &str) -> String {
    unit.replacen("@.", "@*.", 1)
}

/// Returns whether a path below the unit directory is a unit that can run, rather than a drop-in or a target.
fn is_runnable(unit: &str) -> bool {
    let kinds = [".service", ".timer", ".path", ".socket"];
    !unit.contains('/') && kinds.iter().any(|kind| unit.ends_with(kind))
}

/// Returns the release's files, by the path at which each is installed.
///
/// # Errors
/// [`UnitsError::Foreign`] if a file's path, relative to its target directory, is not UTF-8 or does not begin with
/// `svc`; [`UnitsError::File`] if a directory cannot be read.
fn list_release_files(
    layout: &Layout,
    version: &ImageVersion,
) -> Result<BTreeMap<PathBuf, PathBuf>, UnitsError> {
    let root = layout.release(version).join("systemd");
    let mut wanted = BTreeMap::new();
    for (tree, dir) in UNIT_TREES {
        let mut found = Vec::new();
        collect_files(&root.join(tree), Path::new(""), &mut found)?;
        for inner in found {
            // The path must also be UTF-8, because the record of installed files is JSON.
            if !inner.to_str().is_some_and(|path| path.starts_with("svc")) {
                return Err(UnitsError::Foreign { path: Path::new(tree).join(inner) });
            }
            wanted.insert(Path::new(dir).join(&inner), root.join(tree).join(&inner));
        }
    }
    Ok(wanted)
}

fn record_path(layout: &Layout) -> PathBuf {
    layout.update_state().join("installed.json")
}

fn write_record(layout: &Layout, files: BTreeSet<PathBuf>) -> Result<(), FileError> {
    let text = serde_json::to_vec(&InstalledFiles { version: FORMAT_VERSION, files })
        .expect("paths in the list are UTF-8");
    fsx::write_atomic(&record_path(layout), &text, 0o644)
}

fn read_installed_files(layout: &Layout) -> Result<BTreeSet<PathBuf>, UnitsError> {
    let path = record_path(layout);
    let Some(text) = fsx::read_if_exists(&path)? else { return Ok(BTreeSet::new()) };
    match serde_json::from_slice::<InstalledFiles>(&text) {
        Ok(installed) if installed.version == FORMAT_VERSION => Ok(installed.files),
        _ => Err(UnitsError::Record { path }),
    }
}

fn collect_files(root: &Path, inner: &Path, found: &mut Vec<PathBuf>) -> Result<(), FileError> {
    let dir = root.join(inner);
    let entries = match fs::read_dir(&dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(FileError::wrap("read", &dir)(error)),
    };
    for entry in entries {
        let entry = entry.map_err(FileError::wrap("read", &dir))?;
        let inner = inner.join(entry.file_name());
        if entry.file_type().map_err(FileError::wrap("read", &dir))?.is_dir() {
            collect_files(root, &inner, found)?;
        } else {
            found.push(inner);
        }
    }
    Ok(())
}

fn copy_file(from: &Path, to: &Path) -> Result<(), FileError> {
    let content = fs::read(from).map_err(FileError::wrap("read", from))?;
    if fsx::read_if_exists(to)?.is_some_and(|existing| existing == content) {
        return Ok(());
    }
    fsx::write_atomic(to, &content, 0o644)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn release(layout: &Layout, version: &str, files: &[(&str, &str)]) -> ImageVersion {
        let version: ImageVersion = version.parse().unwrap();
        for (path, content) in files {
            let path = layout.release(&version).join("systemd").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        version
    }

    #[test]
    fn install_replaces_own_units_and_keeps_others() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let one = release(
            &layout,
            "1",
            &[("system/svc-a.service", "a1"), ("system/svc-b.service", "b"), ("tmpfiles.d/svc.conf", "t")],
        );
        let two = release(
            &layout,
            "2",
            &[("system/svc-a.service", "a2"), ("system/svc-c.service.d/10-x.conf", "c")],
        );
        let etc = dir.path().join("etc/systemd/system");
        fsx::write_atomic(&etc.join("svc-by-hand.service"), b"hand", 0o644).unwrap();
        install(&layout, &one).unwrap();
        assert_eq!(fs::read(etc.join("svc-a.service")).unwrap(), b"a1");
        install(&layout, &two).unwrap();
        install(&layout, &two).unwrap();
        assert_eq!(fs::read(etc.join("svc-a.service")).unwrap(), b"a2");
        assert_eq!(fs::read(etc.join("svc-c.service.d/10-x.conf")).unwrap(), b"c");
        assert!(!etc.join("svc-b.service").exists() && !dir.path().join("etc/tmpfiles.d/svc.conf").exists());
        assert!(etc.join("svc-by-hand.service").exists());
        install(&layout, &one).unwrap();
        assert!(etc.join("svc-b.service").exists() && !etc.join("svc-c.service.d/10-x.conf").exists());
    }

    #[test]
    fn install_removes_files_left_by_failed_installation() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let one = release(&layout, "1", &[("system/svc-a.service", "a1")]);
        let two = release(
            &layout,
            "2",
            &[
                ("system/svc-b.service", "b"),
                ("system/svc-a.service.d/10-x.conf", "x"),
                ("system/svc-z.service.d/10-x.conf", "z"),
            ],
        );
        install(&layout, &one).unwrap();
        let etc = dir.path().join(UNIT_DIR);
        // No directory can be created at that path.
        fs::write(etc.join("svc-z.service.d"), "a file").unwrap();
        assert!(matches!(install(&layout, &two), Err(UnitsError::File(_))));
        assert!(etc.join("svc-b.service").exists() && etc.join("svc-a.service.d/10-x.conf").exists());
        assert_eq!(list_removed_units(&layout, &one).unwrap(), ["svc-b.service"]);
        install(&layout, &one).unwrap();
        assert_eq!(fs::read(etc.join("svc-a.service")).unwrap(), b"a1");
        assert!(!etc.join("svc-b.service").exists() && !etc.join("svc-a.service.d/10-x.conf").exists());
        assert!(list_removed_units(&layout, &one).unwrap().is_empty());
    }

    #[test]
    fn list_removed_units_names_instances_of_template() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let files =
            [("system/svc-a.socket", ""), ("system/svc-a@.service", ""), ("system/svc-b@.service", "")];
        let one = release(&layout, "1", &files);
        let two = release(&layout, "2", &[("system/svc-b@.service", "")]);
        install(&layout, &one).unwrap();
        // The socket must be stopped first: it could start another instance.
        assert_eq!(list_removed_units(&layout, &two).unwrap(), ["svc-a.socket", "svc-a@*.service"]);
    }

    #[test]
    fn install_copies_nothing_from_release_with_foreign_file() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let files = [("system/svc-a.service", "a"), ("tmpfiles.d/other.conf", "x")];
        let version = release(&layout, "1", &files);
        assert!(matches!(install(&layout, &version), Err(UnitsError::Foreign { .. })));
        assert!(!dir.path().join(UNIT_DIR).join("svc-a.service").exists());
    }

    #[test]
    fn install_does_not_replace_foreign_unit() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let version = release(&layout, "1", &[("system/ssh.service", "x")]);
        let foreign = dir.path().join(UNIT_DIR).join("ssh.service");
        fsx::write_atomic(&foreign, b"original", 0o644).unwrap();
        assert!(matches!(install(&layout, &version), Err(UnitsError::Foreign { .. })));
        assert_eq!(fs::read(foreign).unwrap(), b"original");
    }
}
