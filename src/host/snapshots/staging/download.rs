//! The dump on this machine's disk: fetched with resume, believed only with the right size and SHA-256.
//!
//! A part that an earlier run fetched is kept and hashed again, never trusted by its name.

use std::path::{Path, PathBuf};

use futures_util::StreamExt;
use object_store::{GetOptions, GetRange};

use super::Means;
use crate::applet::Exit;
use crate::failpoint::{self, Injected};
use crate::fsx::FileError;
use crate::host::system::backoff::Backoff;
use crate::host::system::store;
use crate::http::problem::chain;
use crate::partial::Partial;
use crate::store::StoreError;
use crate::store::pointer::SnapshotRef;
use crate::store::snapshot::SideRecord;

/// Room that is left free.
const MARGIN: u64 = 64 << 20;
/// A database is larger than its compressed dump; where the side record does not say, by this.
const UNKNOWN_GROWTH: u64 = 6;
const FETCHING: &str = "fetching the snapshot";

/// Why there is no dump to load.
#[derive(Debug, thiserror::Error)]
pub enum DownloadError {
    #[error("the snapshot could not be read from the object store")]
    Store(#[source] StoreError),
    #[error("{key} has {found} bytes instead of {expected}")]
    WrongSize { key: String, expected: u64, found: u64 },
    #[error("the SHA-256 of {key} is not the one in its record: nothing of it is restored")]
    WrongDigest { key: String },
    #[error(
        "{}: {free} bytes are free and {needed} are needed for the database\n  next: free disk space, or recover onto a \
         server type with a larger disk (`svcctl recover --server-type`)", .path.display()
    )]
    NoSpace { path: PathBuf, needed: u64, free: u64 },
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Injected(#[from] Injected),
}

impl DownloadError {
    /// `Refused` where it is the object that is not what its record says.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Store(error) => store::exit(error),
            Self::WrongSize { .. } | Self::WrongDigest { .. } => Exit::Refused,
            Self::NoSpace { .. } | Self::File(_) | Self::Injected(_) => Exit::Internal,
        }
    }
}

/// Where a dump is read from while it is loaded.
#[derive(Debug)]
pub enum Dump {
    /// The whole, checked dump on this machine's disk.
    File(PathBuf),
    /// Only the database fits on the disk: the dump is streamed from the store, and checked as it passes.
    InStore(Box<SnapshotRef>),
}

/// The whole, checked dump, as a file in `dir`; or, where it does not fit beside the database, the one in the store.
///
/// # Errors
/// [`DownloadError`].
pub async fn fetch(
    means: &Means,
    dir: &Path,
    snapshot: &SnapshotRef,
    side: &SideRecord,
) -> Result<Dump, DownloadError> {
    std::fs::create_dir_all(dir).map_err(FileError::at("create directory", dir))?;
    let name = format!("{}.dump", snapshot.sha256);
    remove_others(dir, &name)?;
    let path = dir.join(name);
    let opened = path.clone();
    let size = snapshot.size_bytes;
    let mut partial = tokio::task::block_in_place(|| Partial::open(opened, size))?;
    if let Err(error) = ensure_room(dir, snapshot, side, partial.length()) {
        let DownloadError::NoSpace { free, .. } = &error else { return Err(error) };
        return stream_instead(dir, partial, *free, snapshot, side);
    }

    let mut patience = Backoff::new(means.deadline);
    let mut second_try = false;
    loop {
        complete(means, snapshot, &mut partial, &mut patience).await?;
        if partial.sha256() == snapshot.sha256 {
            // Nobody waits for the disk: after a power cut it is hashed again.
            return Ok(Dump::File(path));
        }
        partial.restart()?;
        if second_try {
            return Err(DownloadError::WrongDigest { key: snapshot.key.clone() });
        }
        tracing::warn!(key = snapshot.key, "the bytes are damaged; once more from the start");
        second_try = true;
    }
}

/// Without the part of the dump that an earlier run fetched, the database must fit.
fn stream_instead(
    dir: &Path,
    partial: Partial,
    free: u64,
    snapshot: &SnapshotRef,
    side: &SideRecord,
) -> Result<Dump, DownloadError> {
    let (free, needed) = (free.saturating_add(partial.length()), database_room(snapshot, side));
    drop(partial);
    remove_others(dir, "")?;
    if free < needed {
        return Err(DownloadError::NoSpace { path: dir.to_owned(), needed, free });
    }
    tracing::warn!(
        free,
        dump = snapshot.size_bytes,
        "the dump does not fit beside the database: it is streamed from the object store"
    );
    Ok(Dump::InStore(Box::new(snapshot.clone())))
}

/// Reads until the file has the snapshot's size, again from where it broke off.
async fn complete(
    means: &Means,
    snapshot: &SnapshotRef,
    partial: &mut Partial,
    patience: &mut Backoff,
) -> Result<(), DownloadError> {
    means.progress.of_bytes(FETCHING, snapshot.size_bytes);
    while partial.length() < snapshot.size_bytes {
        let before = partial.length();
        match read_on(means, snapshot, partial).await {
            Ok(()) => {}
            Err(DownloadError::Store(error)) if error.is_transient() => {
                tracing::warn!(error = %chain(&error), at = partial.length(), "the download broke off");
                if partial.length() > before {
                    patience.progress();
                }
                patience.pause().await.map_err(|_| DownloadError::Store(error))?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

async fn read_on(means: &Means, snapshot: &SnapshotRef, partial: &mut Partial) -> Result<(), DownloadError> {
    let key = means.slot.snapshot(&snapshot.key).expect("the snapshot was looked at by this key");
    let failed = |error| DownloadError::Store(StoreError::of(&key, error));
    let range = (partial.length() > 0).then_some(GetRange::Offset(partial.length()));
    let options = GetOptions { range, ..GetOptions::default() };
    let got = means.bucket.raw().get_opts(&key, options).await.map_err(failed)?;
    if got.meta.size != snapshot.size_bytes {
        return Err(DownloadError::WrongSize {
            key: snapshot.key.clone(),
            expected: snapshot.size_bytes,
            found: got.meta.size,
        });
    }
    let mut stream = got.into_stream();
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.map_err(failed)?;
        tokio::task::block_in_place(|| partial.append(&chunk))?;
        means.progress.bytes(FETCHING, partial.length(), snapshot.size_bytes);
        failpoint::pass("restore.downloading")?;
        if partial.length() > snapshot.size_bytes {
            return Err(DownloadError::WrongSize {
                key: snapshot.key.clone(),
                expected: snapshot.size_bytes,
                found: partial.length(),
            });
        }
    }
    Ok(())
}

/// Dump and database must both fit, as far as this file system holds them both; `there` bytes of the dump are there.
///
/// # Errors
/// [`DownloadError::NoSpace`].
pub fn ensure_room(
    dir: &Path,
    snapshot: &SnapshotRef,
    side: &SideRecord,
    there: u64,
) -> Result<(), DownloadError> {
    ensure_bytes(dir, (snapshot.size_bytes - there).saturating_add(database_room(snapshot, side)))
}

/// So much must fit into the file system of a directory.
///
/// # Errors
/// [`DownloadError::NoSpace`].
pub fn ensure_bytes(dir: &Path, needed: u64) -> Result<(), DownloadError> {
    let free = fs4::available_space(dir).map_err(FileError::at("measure", dir))?;
    if free < needed {
        return Err(DownloadError::NoSpace { path: dir.to_owned(), needed, free });
    }
    Ok(())
}

fn database_room(snapshot: &SnapshotRef, side: &SideRecord) -> u64 {
    let database = side.database.as_ref().map(|facts| facts.size_bytes);
    let database = database.unwrap_or_else(|| snapshot.size_bytes.saturating_mul(UNKNOWN_GROWTH));
    database.saturating_add(MARGIN)
}

/// Dumps of snapshots that are no longer the latest.
fn remove_others(dir: &Path, keep: &str) -> Result<(), FileError> {
    for entry in std::fs::read_dir(dir).map_err(FileError::at("read", dir))?.flatten() {
        let name = entry.file_name();
        if name != keep && name.to_string_lossy().ends_with(".dump") {
            crate::fsx::remove_if_exists(&entry.path())?;
        }
    }
    Ok(())
}

/// All that is in it; a directory that is not there holds none.
///
/// # Errors
/// [`FileError`].
pub fn remove_all(dir: &Path) -> Result<(), FileError> {
    if dir.exists() { remove_others(dir, "") } else { Ok(()) }
}
