//! Scans the apps directory for subdirectories containing an `svc.json`, and reads their manifests.

use std::io;
use std::path::{Path, PathBuf};

use super::manifest::Manifest;
use crate::name::Slug;
use svc_base::beneath::DirFd;

const MAX_MANIFEST_BYTES: u64 = 256 * 1024;
/// Relative to the home directory.
const APPS_DIR: &str = "apps";
const MANIFEST_FILE: &str = "svc.json";

/// An app directory, with its manifest or the manifest's error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AppDirectory {
    pub name: String,
    /// Relative to the home directory.
    pub path: PathBuf,
    pub manifest: Result<Manifest, String>,
}

/// Reads all app directories in name order. A missing apps directory means no apps; an invalid manifest affects only
/// its own app.
///
/// # Errors
/// The home or apps directory exists but can't be opened, or the apps directory can't be listed.
pub fn scan(home: &Path) -> io::Result<Vec<AppDirectory>> {
    let apps = match DirFd::open(home).and_then(|home| home.open_dir(Path::new(APPS_DIR))) {
        Ok(apps) => apps,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let names = apps.entry_names()?;
    let mut dirs: Vec<AppDirectory> =
        names.iter().filter_map(|name| read_app_directory(&apps, name.to_str()?)).collect();
    reject_shared_schemas(&mut dirs);
    Ok(dirs)
}

/// Reads an app directory. Returns `None` if `name` is hidden, a file, or a directory without a manifest.
fn read_app_directory(apps: &DirFd, name: &str) -> Option<AppDirectory> {
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
    Some(AppDirectory { name: name.to_owned(), path: Path::new(APPS_DIR).join(name), manifest })
}

/// If several manifests claim the same schema, only the directory named after its own slug gets it.
fn reject_shared_schemas(dirs: &mut [AppDirectory]) {
    let claims: Vec<(String, Slug)> = dirs
        .iter()
        .filter_map(|dir| Some((dir.name.clone(), dir.manifest.as_ref().ok()?.slug.clone())))
        .collect();
    for dir in dirs {
        let Ok(manifest) = &dir.manifest else { continue };
        let schema = manifest.slug.schema();
        let other = claims.iter().find(|(name, slug)| *name != dir.name && slug.schema() == schema);
        if let Some((other, _)) = other.filter(|_| dir.name != manifest.slug.as_str()) {
            dir.manifest = Err(format!(
                "the app in directory {other:?} has the same schema, {schema}: give one of them another slug"
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

    fn write_manifest(home: &Path, dir: &str, slug: &str) {
        let text = format!(r#"{{"name":"n","slug":"{slug}","version":"1","runtime":"static"}}"#);
        let file = home.join(APPS_DIR).join(dir).join(MANIFEST_FILE);
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
        let dirs = scan(home.path()).unwrap();
        let names: Vec<_> = dirs.iter().map(|dir| (dir.name.as_str(), dir.manifest.is_ok())).collect();
        assert_eq!(names, [("bad", false), ("good", true)]);
    }

    #[test]
    fn scan_rejects_links_fifos_and_large_manifests() {
        let (home, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write_manifest(home.path(), "good", "good");
        write_manifest(outside.path(), "other", "other");
        let apps = home.path().join(APPS_DIR);
        symlink(outside.path().join("apps/other"), apps.join("linked")).unwrap();
        for dir in ["fifo", "large", "link"] {
            fs::create_dir(apps.join(dir)).unwrap();
        }
        mkfifo(&apps.join("fifo/svc.json"), Mode::S_IRWXU).unwrap();
        symlink("../good/svc.json", apps.join("link/svc.json")).unwrap();
        fs::write(apps.join("large/svc.json"), vec![b' '; 300 * 1024]).unwrap();
        let dirs = scan(home.path()).unwrap();
        let error = |name: &str| {
            let dir = dirs.iter().find(|dir| dir.name == name).unwrap();
            dir.manifest.as_ref().unwrap_err().clone()
        };
        assert!(error("linked").contains("symbolic link"), "{}", error("linked"));
        assert!(error("link").contains("symbolic link"), "{}", error("link"));
        assert!(error("fifo").contains("not a regular file"), "{}", error("fifo"));
        assert!(error("large").contains("larger than 262144 bytes"), "{}", error("large"));
        assert_eq!(dirs.iter().filter(|dir| dir.manifest.is_ok()).count(), 1);
    }

    #[test]
    fn scan_rejects_shared_schemas() {
        let home = tempfile::tempdir().unwrap();
        write_manifest(home.path(), "one", "one");
        write_manifest(home.path(), "copy-of-one", "one");
        write_manifest(home.path(), "a", "same");
        write_manifest(home.path(), "b", "same");
        let dirs = scan(home.path()).unwrap();
        let good: Vec<_> = dirs.iter().filter(|f| f.manifest.is_ok()).map(|f| f.name.as_str()).collect();
        assert_eq!(good, ["one"]);
    }
}
