//! Installed releases: `release.json`, the bundle digest, and the `current` link.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::layout::Layout;
use svc_base::fsx::{self, FileError};
use svc_machine::name::ImageVersion;

pub const MANIFEST_FILE: &str = "release.json";
/// File with the SHA-256 of the release's bundle. Written at installation; never part of a bundle.
pub const DIGEST_FILE: &str = ".bundle-sha256";

/// Contents of `release.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Release {
    /// Format version of `release.json`.
    pub version: u32,
    pub image_version: ImageVersion,
    #[serde(default)]
    pub created_at: Option<String>,
    #[serde(default)]
    pub components: Vec<Component>,
}

/// A component of a release.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Component {
    pub name: String,
    pub version: String,
    #[serde(default)]
    pub path: Option<String>,
}

/// Errors from reading `release.json`.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{path} is not a valid release.json: {reason}")]
    Malformed { path: String, reason: String },
}

impl Release {
    /// # Errors
    /// [`ReleaseError::File`] if the file is missing or unreadable; [`ReleaseError::Malformed`] if it is invalid.
    pub fn read(dir: &Path) -> Result<Self, ReleaseError> {
        let path = dir.join(MANIFEST_FILE);
        let text = std::fs::read(&path).map_err(FileError::wrap("read", &path))?;
        serde_json::from_slice(&text).map_err(|error| ReleaseError::Malformed {
            path: path.display().to_string(),
            reason: error.to_string(),
        })
    }
}

/// Reads the digest from [`DIGEST_FILE`]. Returns `None` if the file doesn't exist.
///
/// # Errors
/// If the file exists but can't be read.
pub fn read_digest(dir: &Path) -> Result<Option<String>, FileError> {
    let content = fsx::read_if_exists(&dir.join(DIGEST_FILE))?;
    Ok(content.map(|text| String::from_utf8_lossy(&text).trim().to_owned()))
}

/// Returns the version the `current` link points to.
pub fn current_version(layout: &Layout) -> Option<ImageVersion> {
    let target = std::fs::read_link(layout.current()).ok()?;
    target.file_name()?.to_str()?.parse().ok()
}
