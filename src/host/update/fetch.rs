//! A release onto the machine: downloaded, checked against what was stated of it, unpacked, and whole or not there.

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

/// An archive unpacks to a few times its size.
const GROWTH: u64 = 5;
/// Room that is left free.
const MARGIN: u64 = 64 << 20;

/// Why the release is not there.
#[derive(Debug, thiserror::Error)]
pub enum BringError {
    #[error(transparent)]
    Download(#[from] DownloadError),
    #[error(transparent)]
    Unpack(#[from] UnpackError),
    #[error("the bundle's SHA-256 is {found}, and {expected} was stated")]
    WrongDigest { expected: String, found: String },
    #[error("the bundle has {found} bytes, and {expected} were stated")]
    WrongSize { expected: u64, found: u64 },
    #[error("{}: {free} bytes are free and {needed} are needed", .path.display())]
    NoSpace { path: PathBuf, needed: u64, free: u64 },
    #[error(transparent)]
    Place(#[from] PlaceError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Injected(#[from] Injected),
}

/// What was stated of the archive by somebody who is trusted.
pub struct Expected<'a> {
    pub sha256: &'a str,
    pub size_bytes: Option<u64>,
}

/// Brings the release, unless it is there already.
///
/// # Errors
/// [`BringError`]; no release has come then.
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

/// One pass over the archive: hash, inflate, unpack beside; then the digest decides.
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
    // A panic in there is no error that we could name: it goes on here.
    let unpacked = unpacking.await.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
    // What the unpacker refused ends the download, too: its word comes first, unless the bytes just stopped coming.
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
