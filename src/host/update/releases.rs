//! Releases on disk. A release is complete or absent, and one symbolic link names the current release.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::system::layout::Layout;
use crate::system::release;
use crate::system::release::{Release, ReleaseError};
use svc_base::failpoint::{self, InjectedFailure};
use svc_base::fsx::{self, FileError};
use svc_machine::name::ImageVersion;

/// Links next to `current` that the specification requires.
const LINKS: [&str; 3] = ["bin", "app", "runtime"];

/// The reason a release could not be installed or made current.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    #[error("the bundle has no executable bin/svc")]
    NoBinary,
    #[error("the bundle contains version {found} instead of {expected}")]
    WrongVersion { expected: ImageVersion, found: ImageVersion },
    #[error(transparent)]
    Release(#[from] ReleaseError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

/// A staged release. Dropping it removes the directory, unless the release was committed.
pub struct StagedRelease {
    path: PathBuf,
    is_committed: bool,
}

impl StagedRelease {
    pub fn create(layout: &Layout, version: &ImageVersion) -> Result<Self, FileError> {
        let name = format!(".{version}.partial-{}", uuid::Uuid::new_v4().simple());
        let path = layout.releases().join(name);
        fs::create_dir_all(&path).map_err(FileError::wrap("create directory", &path))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
            .map_err(FileError::wrap("set permissions of", &path))?;
        Ok(Self { path, is_committed: false })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Installs the directory durably as the release `version`. The caller must have verified the digest.
    ///
    /// # Errors
    /// `NoBinary`, `Release` or `WrongVersion` if the staged release is unusable; `File` if it cannot be installed. If
    /// only the final sync of the releases directory fails, the release is installed nevertheless.
    pub fn commit(
        mut self,
        layout: &Layout,
        version: &ImageVersion,
        sha256: &str,
    ) -> Result<(), InstallError> {
        check_release(&self.path, version)?;
        let digest = self.path.join(release::DIGEST_FILE);
        fs::write(&digest, format!("{sha256}\n")).map_err(FileError::wrap("write", &digest))?;
        // Syncing the file system once is cheaper than syncing each file.
        File::open(&self.path)
            .and_then(|dir| Ok(nix::unistd::syncfs(dir)?))
            .map_err(FileError::wrap("sync", &self.path))?;
        failpoint::trigger("update.synced")?;
        let target = layout.release(version);
        fs::rename(&self.path, &target).map_err(FileError::wrap("rename", &self.path))?;
        self.is_committed = true;
        fsx::sync_dir(&layout.releases())?;
        failpoint::trigger("update.renamed")?;
        Ok(())
    }
}

impl Drop for StagedRelease {
    fn drop(&mut self) {
        if !self.is_committed
            && let Err(error) = fs::remove_dir_all(&self.path)
        {
            tracing::warn!(%error, path = %self.path.display(), "could not remove a staged release");
        }
    }
}

fn check_release(dir: &Path, version: &ImageVersion) -> Result<(), InstallError> {
    let binary = fs::symlink_metadata(dir.join("bin/svc"));
    if !binary.is_ok_and(|meta| meta.is_file() && meta.mode() & 0o111 != 0) {
        return Err(InstallError::NoBinary);
    }
    let found = Release::read(dir)?.image_version;
    if found != *version {
        return Err(InstallError::WrongVersion { expected: version.clone(), found });
    }
    Ok(())
}

/// Returns the current release, if it is complete.
pub fn find_complete_current(layout: &Layout) -> Option<ImageVersion> {
    release::current_version(layout)
        .filter(|version| check_release(&layout.release(version), version).is_ok())
}

/// Makes a release current by atomically replacing the `current` link, and creates the links to its directories.
/// Idempotent.
pub fn switch(layout: &Layout, version: &ImageVersion) -> Result<(), InstallError> {
    set_link(&layout.current(), &Path::new("releases").join(version.as_str()))?;
    failpoint::trigger("update.switched")?;
    for name in LINKS {
        set_link(&layout.link(name), &Path::new("current").join(name))?;
    }
    failpoint::trigger("update.linked")?;
    Ok(())
}

fn set_link(link: &Path, target: &Path) -> Result<(), FileError> {
    match fs::read_link(link) {
        Ok(existing) if existing == target => Ok(()),
        _ => fsx::symlink_atomic(target, link),
    }
}

/// Removes what killed runs left behind: staged releases, temporary links, and temporary files in the update state
/// directory.
pub fn remove_leftovers(layout: &Layout) -> Result<(), FileError> {
    let releases = layout.releases();
    fs::create_dir_all(&releases).map_err(FileError::wrap("create directory", &releases))?;
    for entry in list_names(&releases)? {
        if entry.starts_with('.') && entry.contains(".partial-") {
            let path = releases.join(entry);
            fs::remove_dir_all(&path).map_err(FileError::wrap("remove", &path))?;
        }
    }
    let current = layout.current();
    let opt = current.parent().unwrap_or(&releases);
    for entry in list_names(opt)? {
        let is_ours = ["current"].iter().chain(&LINKS).any(|name| entry.starts_with(&format!(".{name}.")));
        if is_ours && entry.ends_with(".tmp") {
            fsx::remove_if_exists(&opt.join(entry))?;
        }
    }
    fsx::remove_leftover_temps_in(&layout.update_state(), |_| true)
}

fn list_names(dir: &Path) -> Result<Vec<String>, FileError> {
    let read = fs::read_dir(dir).map_err(FileError::wrap("read", dir))?;
    Ok(read.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
}

/// Returns the installed versions, in lexicographic order.
pub fn list_versions(layout: &Layout) -> Result<Vec<ImageVersion>, FileError> {
    let releases = layout.releases();
    if !releases.is_dir() {
        return Ok(Vec::new());
    }
    let mut versions: Vec<ImageVersion> =
        list_names(&releases)?.iter().filter_map(|name| name.parse().ok()).collect();
    versions.sort();
    Ok(versions)
}
