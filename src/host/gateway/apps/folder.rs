//! Scans the apps folder for folders that contain an `svc.json`, and reads their manifests.

use std::io;
use std::path::{Path, PathBuf};

use super::manifest::Manifest;
use crate::name::Slug;
use svc_base::beneath::DirFd;

const MAX_MANIFEST_BYTES: u64 = 256 * 1024;
/// Relative to the home directory.
const APPS_DIR: &str = "apps";
const MANIFEST_FILE: &str = "svc.json";

/// An app's folder: its name, and its manifest or the error in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AppFolder {
    pub name: String,
    /// Relative to the home directory.
    pub path: PathBuf,
    pub manifest: Result<Manifest, String>,
}

/// Reads all app folders in name order. Without an apps folder, there are no apps; an invalid manifest affects only its
/// app.
///
/// # Errors
/// The home directory or the apps folder exists but cannot be opened, or the apps folder cannot be listed.
pub fn scan(home: &Path) -> io::Result<Vec<AppFolder>> {
    let apps = match DirFd::open(home).and_then(|home| home.open_dir(Path::new(APPS_DIR))) {
        Ok(apps) => apps,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let names = apps.entry_names()?;
    let mut folders: Vec<AppFolder> =
        names.iter().filter_map(|name| read_app_folder(&apps, name.to_str()?)).collect();
    reject_shared_schemas(&mut folders);
    Ok(folders)
}

/// Reads an app's folder; `None` if `name` is hidden, a file, or a folder without a manifest.
fn read_app_folder(apps: &DirFd, name: &str) -> Option<AppFolder> {
    if name.starts_with('.') {
        return None;
    }
    let manifest = match apps.read(&Path::new(name).join(MANIFEST_FILE), MAX_MANIFEST_BYTES) {
        Ok(text) => Manifest::parse(&text).map_err(|error| error.to_string()),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return None;
        }
        Err(error) => Err(format!("{MANIFEST_FILE}: {error}")),
    };
    Some(AppFolder { name: name.to_owned(), path: Path::new(APPS_DIR).join(name), manifest })
}

/// If the manifests of several folders claim one schema, only the folder that is named after its own slug gets it.
fn reject_shared_schemas(folders: &mut [AppFolder]) {
    let claims: Vec<(String, Slug)> = folders
        .iter()
        .filter_map(|folder| Some((folder.name.clone(), folder.manifest.as_ref().ok()?.slug.clone())))
        .collect();
    for folder in folders {
        let Ok(manifest) = &folder.manifest else { continue };
        let schema = manifest.slug.schema();
        let rival = claims.iter().find(|(name, slug)| *name != folder.name && slug.schema() == schema);
        if let Some((rival, _)) = rival.filter(|_| folder.name != manifest.slug.as_str()) {
            folder.manifest = Err(format!(
                "the app in folder {rival:?} has the same schema, {schema}: give one of them another slug"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    fn write_manifest(home: &Path, folder: &str, slug: &str) {
        let text = format!(r#"{{"name":"n","slug":"{slug}","version":"1","runtime":"static"}}"#);
        let file = home.join(APPS_DIR).join(folder).join(MANIFEST_FILE);
        svc_base::fsx::write_atomic(&file, text.as_bytes(), 0o644).unwrap();
    }

    #[test]
    fn scan_isolates_invalid_manifest() {
        let home = tempfile::tempdir().unwrap();
        assert!(scan(home.path()).unwrap().is_empty());
        write_manifest(home.path(), "good", "good");
        write_manifest(home.path(), "bad", "Not A Slug");
        write_manifest(home.path(), ".hidden", "hidden");
        fs::create_dir(home.path().join("apps/empty")).unwrap();
        let folders = scan(home.path()).unwrap();
        let names: Vec<_> = folders.iter().map(|f| (f.name.as_str(), f.manifest.is_ok())).collect();
        assert_eq!(names, [("bad", false), ("good", true)]);
    }

    #[test]
    fn scan_rejects_links_fifos_and_large_manifests() {
        let (home, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write_manifest(home.path(), "good", "good");
        write_manifest(outside.path(), "other", "other");
        let apps = home.path().join(APPS_DIR);
        symlink(outside.path().join("apps/other"), apps.join("linked")).unwrap();
        for folder in ["fifo", "large", "link"] {
            fs::create_dir(apps.join(folder)).unwrap();
        }
        mkfifo(&apps.join("fifo/svc.json"), Mode::S_IRWXU).unwrap();
        symlink("../good/svc.json", apps.join("link/svc.json")).unwrap();
        fs::write(apps.join("large/svc.json"), vec![b' '; 300 * 1024]).unwrap();
        let folders = scan(home.path()).unwrap();
        let error = |name: &str| {
            let folder = folders.iter().find(|folder| folder.name == name).unwrap();
            folder.manifest.as_ref().unwrap_err().clone()
        };
        assert!(error("linked").contains("symbolic link"), "{}", error("linked"));
        assert!(error("link").contains("symbolic link"), "{}", error("link"));
        assert!(error("fifo").contains("not a regular file"), "{}", error("fifo"));
        assert!(error("large").contains("larger than 262144 bytes"), "{}", error("large"));
        assert_eq!(folders.iter().filter(|folder| folder.manifest.is_ok()).count(), 1);
    }

    #[test]
    fn scan_rejects_shared_schemas() {
        let home = tempfile::tempdir().unwrap();
        write_manifest(home.path(), "one", "one");
        write_manifest(home.path(), "copy-of-one", "one");
        write_manifest(home.path(), "a", "same");
        write_manifest(home.path(), "b", "same");
        let folders = scan(home.path()).unwrap();
        let good: Vec<_> = folders.iter().filter(|f| f.manifest.is_ok()).map(|f| f.name.as_str()).collect();
        assert_eq!(good, ["one"]);
    }
}
