//! Fetches a release: downloads its bundle, unpacks it, and verifies the digest. Releases are installed atomically.

use std::path::{Path, PathBuf};

use super::download::{BundleSource, DownloadError};
use super::releases::{InstallError, StagedRelease};
use super::unpack::{self, UnpackError, UnpackLimits};
use crate::system::layout::Layout;
use crate::system::release;
use svc_base::failpoint::{self, InjectedFailure};
use svc_base::fsx::FileError;
use svc_machine::name::ImageVersion;

/// Assumed maximum ratio of unpacked to archive size.
const UNPACKED_SIZE_FACTOR: u64 = 5;
/// Disk space to keep free.
const RESERVED_BYTES: u64 = 64 << 20;

/// Errors from fetching a release.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error(transparent)]
    Download(#[from] DownloadError),
    #[error(transparent)]
    Unpack(#[from] UnpackError),
    #[error("bundle SHA-256 mismatch: expected {expected}, found {found}")]
    DigestMismatch { expected: String, found: String },
    #[error("bundle size mismatch: expected {expected} bytes, found {found}")]
    SizeMismatch { expected: u64, found: u64 },
    #[error("not enough disk space in {}: {free} bytes are free and {needed} are needed", .path.display())]
    NoSpace { path: PathBuf, needed: u64, free: u64 },
    #[error(transparent)]
    Install(#[from] InstallError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

/// Expected properties of the archive, from a trusted source.
pub struct ExpectedArchive<'a> {
    pub sha256: &'a str,
    pub size_bytes: Option<u64>,
}

/// Fetches the release unless it is already installed.
///
/// # Errors
/// - [`FetchError::DigestMismatch`] if the archive, or an installed release of this version, doesn't match the expected
///   digest. An installed release is left alone.
/// - [`FetchError::SizeMismatch`] if the server reports a different size than expected.
/// - [`FetchError::NoSpace`] on low disk space.
/// - [`FetchError::File`] if the installed digest or the free space can't be read, or the staging directory can't be
///   created.
/// - Any other error from the download, unpacking or installation.
pub async fn ensure_release(
    layout: &Layout,
    source: &BundleSource,
    version: &ImageVersion,
    expected: &ExpectedArchive<'_>,
) -> Result<(), FetchError> {
    let dir = layout.release(version);
    if !dir.is_dir() {
        return fetch_release(layout, source, version, expected).await;
    }
    let found = release::read_digest(&dir)?.unwrap_or_default();
    if found == expected.sha256 {
        return Ok(());
    }
    Err(FetchError::DigestMismatch { expected: expected.sha256.to_owned(), found })
}

/// Hashes, decompresses and unpacks the archive into a staging directory in a single pass, then verifies the digest and
/// installs the release.
async fn fetch_release(
    layout: &Layout,
    source: &BundleSource,
    version: &ImageVersion,
    expected: &ExpectedArchive<'_>,
) -> Result<(), FetchError> {
    if let Some(size) = expected.size_bytes {
        ensure_disk_space(&layout.releases(), size)?;
    }
    let download = source.open().await?;
    if let (Some(expected), Some(found)) = (expected.size_bytes, download.length())
        && expected != found
    {
        return Err(FetchError::SizeMismatch { expected, found });
    }
    let staged = StagedRelease::create(layout, version)?;
    if let (None, Some(length)) = (expected.size_bytes, download.length()) {
        ensure_disk_space(staged.path(), length)?;
    }
    let (chunks, archive) = unpack::channel();
    let into = staged.path().to_owned();
    let unpacking = tokio::task::spawn_blocking(move || unpack::unpack(archive, &into, UnpackLimits::BUNDLE));
    let downloaded = download.stream_to(chunks).await;
    // Propagate panics from the unpacker: there's no error to report.
    let unpacked = unpacking.await.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
    // An unpacker that rejects the archive also aborts the download, so its error takes precedence unless the download
    // itself failed.
    let found = match (downloaded, unpacked) {
        (Ok(found), Ok(())) => found,
        (Err(error), Ok(())) => return Err(error.into()),
        (Err(DownloadError::Abandoned) | Ok(_), Err(error)) => return Err(error.into()),
        (Err(error), Err(_)) => return Err(error.into()),
    };
    failpoint::trigger("update.unpacked")?;
    if found != expected.sha256 {
        return Err(FetchError::DigestMismatch { expected: expected.sha256.to_owned(), found });
    }
    failpoint::trigger("update.verified")?;
    staged.commit(layout, version, &found)?;
    Ok(())
}

/// Checks that the directory's file system has enough space to unpack an archive of this size.
///
/// # Errors
/// [`FetchError::NoSpace`], or [`FetchError::File`] if the free space can't be read.
fn ensure_disk_space(dir: &Path, archive_bytes: u64) -> Result<(), FetchError> {
    let needed = archive_bytes.saturating_mul(UNPACKED_SIZE_FACTOR).saturating_add(RESERVED_BYTES);
    let free = fs4::available_space(dir).map_err(FileError::wrap("read the free space of", dir))?;
    if free < needed {
        return Err(FetchError::NoSpace { path: dir.to_owned(), needed, free });
    }
    Ok(())
}
