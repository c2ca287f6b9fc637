//! Fetches a release: downloads, verifies and unpacks it. A release is installed whole or not at all.

use std::path::{Path, PathBuf};

use super::download::{DownloadError, Source};
use super::releases;
use super::releases::PlaceError;
use super::unpack::{self, Limits, UnpackError};
use crate::failpoint::{self, Injected};
use crate::fsx::FileError;
use crate::host::system::layout::Layout;
use crate::host::system::release;
use crate::machine::name::ImageVersion;

/// Upper bound of the unpacked size, as a multiple of the archive's size.
const GROWTH: u64 = 5;
/// Disk space that stays free, in bytes.
const MARGIN: u64 = 64 << 20;

/// Reason why the release was not installed.
#[derive(Debug, thiserror::Error)]
pub enum BringError {
    #[error(transparent)]
    Download(#[from] DownloadError),
    #[error(transparent)]
    Unpack(#[from] UnpackError),
    #[error("bundle SHA-256 mismatch: expected {expected}, found {found}")]
    WrongDigest { expected: String, found: String },
    #[error("bundle size mismatch: expected {expected} bytes, found {found}")]
    WrongSize { expected: u64, found: u64 },
    #[error("{}: {needed} bytes needed, {free} available", .path.display())]
    NoSpace { path: PathBuf, needed: u64, free: u64 },
    #[error(transparent)]
    Place(#[from] PlaceError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Injected(#[from] Injected),
}

/// Properties of the archive as a trusted source states them.
pub struct Expected<'a> {
    pub sha256: &'a str,
    pub size_bytes: Option<u64>,
}

/// Fetches the release, unless it is installed already.
///
/// # Errors
/// [`FetchError`]; no release is installed then.
pub async fn bring(
    layout: &Layout,
    source: &Source,
    version: &ImageVersion,
    expected: &Expected<'_>,
) -> Result<(), BringError> {
    let there = layout.release(version);
    if !there.is_dir() {
        return fetch(layout, source, version, expected).await;
    }
    let found = release::digest(&there)?.unwrap_or_default();
    if found == expected.sha256 {
        return Ok(());
    }
    Err(BringError::WrongDigest { expected: expected.sha256.to_owned(), found })
}

/// Hashes, decompresses and unpacks the archive in one pass into a staging directory, then verifies the digest.
async fn fetch(
    layout: &Layout,
    source: &Source,
    version: &ImageVersion,
    expected: &Expected<'_>,
) -> Result<(), BringError> {
    if let Some(size) = expected.size_bytes {
        ensure_room(&layout.releases(), size)?;
    }
    let download = source.open().await?;
    if let (Some(expected), Some(found)) = (expected.size_bytes, download.length())
        && expected != found
    {
        return Err(BringError::WrongSize { expected, found });
    }
    let partial = releases::Partial::create(layout, version)?;
    if let (None, Some(length)) = (expected.size_bytes, download.length()) {
        ensure_room(partial.path(), length)?;
    }
    let (chunks, archive) = unpack::channel();
    let into = partial.path().to_owned();
    let unpacking = tokio::task::spawn_blocking(move || unpack::unpack(archive, &into, Limits::BUNDLE));
    let downloaded = download.pump(chunks).await;
    // A panic in the unpacker has no error to report, so it is propagated.
    let unpacked = unpacking.await.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
    // An unpacker that refuses the archive also ends the download, so its error comes first, unless the download
    // itself failed.
    let found = match (downloaded, unpacked) {
        (Ok(found), Ok(())) => found,
        (Err(error), Ok(())) => return Err(error.into()),
        (Err(DownloadError::Abandoned) | Ok(_), Err(error)) => return Err(error.into()),
        (Err(error), Err(_)) => return Err(error.into()),
    };
    failpoint::pass("update.unpacked")?;
    if found != expected.sha256 {
        return Err(BringError::WrongDigest { expected: expected.sha256.to_owned(), found });
    }
    failpoint::pass("update.verified")?;
    partial.keep(layout, version, &found)?;
    Ok(())
}

/// # Errors
/// [`BringError::NoSpace`].
fn ensure_room(dir: &Path, archive: u64) -> Result<(), BringError> {
    let needed = archive.saturating_mul(GROWTH).saturating_add(MARGIN);
    let free = fs4::available_space(dir).map_err(FileError::at("measure", dir))?;
    if free < needed {
        return Err(BringError::NoSpace { path: dir.to_owned(), needed, free });
    }
    Ok(())
}
