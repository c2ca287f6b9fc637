//! The apps folder as it lies on disk: which folders hold a `svc.json`, and what each of them says.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::manifest::Manifest;
use super::name::Slug;

const LARGEST_MANIFEST: u64 = 256 * 1024;

/// One app's folder: its name, and its manifest or what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AppFolder {
    pub name: String,
    pub path: PathBuf,
    pub manifest: Result<Manifest, String>,
}

/// Reads every app's folder in name order. No apps folder is no apps; a broken manifest is that app's alone.
///
/// # Errors
/// When the apps folder itself cannot be read.
pub fn scan(apps: &Path) -> io::Result<Vec<AppFolder>> {
    let entries = match fs::read_dir(apps) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut folders: Vec<AppFolder> = entries.filter_map(|entry| folder(&entry.ok()?.path())).collect();
    folders.sort_by(|a, b| a.name.cmp(&b.name));
    refuse_shared_schemas(&mut folders);
    Ok(folders)
}

fn folder(path: &Path) -> Option<AppFolder> {
    let name = path.file_name()?.to_str()?.to_owned();
    let file = path.join("svc.json");
    if name.starts_with('.') || !file.exists() {
        return None;
    }
    Some(AppFolder { name, path: path.to_owned(), manifest: read(&file) })
}

fn read(file: &Path) -> Result<Manifest, String> {
    let size = fs::metadata(file).map_err(|error| error.to_string())?.len();
    if size > LARGEST_MANIFEST {
        return Err(format!("svc.json is larger than {LARGEST_MANIFEST} bytes"));
    }
    let text = fs::read(file).map_err(|error| error.to_string())?;
    Manifest::parse(&text).map_err(|error| error.to_string())
}

/// Two folders that claim one schema: the one named after the slug has it; otherwise neither.
fn refuse_shared_schemas(folders: &mut [AppFolder]) {
    let claims: Vec<(String, Slug)> = folders
        .iter()
        .filter_map(|folder| Some((folder.name.clone(), folder.manifest.as_ref().ok()?.slug.clone())))
        .collect();
    for folder in folders {
        let Ok(manifest) = &folder.manifest else { continue };
        let schema = manifest.slug.schema();
        let rival = claims.iter().find(|(name, slug)| *name != folder.name && slug.schema() == schema);
        if let Some((rival, _)) = rival.filter(|_| folder.name != manifest.slug.as_str()) {
            folder.manifest = Err(format!("the app in folder {rival:?} has the same schema, {schema}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(apps: &Path, folder: &str, slug: &str) {
        let text = format!(r#"{{"name":"n","slug":"{slug}","version":"1","runtime":"static"}}"#);
        crate::fsx::write_atomic(&apps.join(folder).join("svc.json"), text.as_bytes(), 0o644).unwrap();
    }

    #[test]
    fn a_broken_manifest_is_its_own_app_s_alone() {
        let apps = tempfile::tempdir().unwrap();
        write(apps.path(), "good", "good");
        write(apps.path(), "bad", "Not A Slug");
        write(apps.path(), ".hidden", "hidden");
        fs::create_dir(apps.path().join("empty")).unwrap();
        let found = scan(apps.path()).unwrap();
        let names: Vec<_> = found.iter().map(|f| (f.name.as_str(), f.manifest.is_ok())).collect();
        assert_eq!(names, [("bad", false), ("good", true)]);
        assert!(scan(&apps.path().join("none")).unwrap().is_empty());
    }

    #[test]
    fn two_apps_never_share_a_schema() {
        let apps = tempfile::tempdir().unwrap();
        write(apps.path(), "one", "one");
        write(apps.path(), "copy-of-one", "one");
        write(apps.path(), "a", "same");
        write(apps.path(), "b", "same");
        let found = scan(apps.path()).unwrap();
        let good: Vec<_> = found.iter().filter(|f| f.manifest.is_ok()).map(|f| f.name.as_str()).collect();
        assert_eq!(good, ["one"]);
    }
}
