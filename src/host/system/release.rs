//! A release as it lies on the machine: `release.json`, the digest of the bundle that it came from, and which is
//! current.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::layout::Layout;
use crate::fsx::{self, FileError};
use crate::machine::name::ImageVersion;

pub const MANIFEST: &str = "release.json";
/// Written by us beside the unpacked files, never part of a bundle.
pub const DIGEST: &str = ".bundle-sha256";

/// `release.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Release {
    pub version: u32,
    pub image_version: ImageVersion,
    #[serde(default)]
    pub created_at: Option<String>,
    #[serde(default)]
    pub components: Vec<Component>,
}

/// One thing inside a release.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Component {
    pub name: String,
    pub version: String,
    #[serde(default)]
    pub path: Option<String>,
}

/// A release that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{path} is not a release's: {why}")]
    Malformed { path: String, why: String },
}

impl Release {
    /// # Errors
    /// [`ReleaseError`]; its absence is one.
    pub fn read(dir: &Path) -> Result<Self, ReleaseError> {
        let path = dir.join(MANIFEST);
        let text = std::fs::read(&path).map_err(FileError::at("read", &path))?;
        serde_json::from_slice(&text)
            .map_err(|why| ReleaseError::Malformed { path: path.display().to_string(), why: why.to_string() })
    }
}

/// The digest of the bundle that a release came from.
///
/// # Errors
/// When it is there and cannot be read.
pub fn digest(dir: &Path) -> Result<Option<String>, FileError> {
    let read = fsx::read_if_there(&dir.join(DIGEST))?;
    Ok(read.map(|text| String::from_utf8_lossy(&text).trim().to_owned()))
}

/// The version that `current` names.
pub fn current(layout: &Layout) -> Option<ImageVersion> {
    let target = std::fs::read_link(layout.current()).ok()?;
    target.file_name()?.to_str()?.parse().ok()
}
