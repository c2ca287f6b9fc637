//! Downloads the dump to local disk and verifies its size and SHA-256.
//!
//! Interrupted downloads are resumed. A partial file from an earlier run is reused, but rehashed.

use std::path::{Path, PathBuf};

use futures_util::StreamExt;
use object_store::{GetOptions, GetRange};

use super::RestoreContext;
use crate::system::backoff::Backoff;
use crate::system::store;
use svc_base::applet::Exit;
use svc_base::failpoint::{self, InjectedFailure};
use svc_base::fsx::FileError;
use svc_base::partial_file::PartialFile;
use svc_http::problem::format_chain;
use svc_store::StoreError;
use svc_store::pointer::SnapshotRef;
use svc_store::snapshot::Sidecar;

/// Disk space to keep free.
pub const FREE_SPACE_MARGIN_BYTES: u64 = 64 << 20;
/// Assumed ratio of database size to compressed dump size if the sidecar doesn't record the database size.
const DEFAULT_EXPANSION_FACTOR: u64 = 6;
const DOWNLOAD_PHASE: &str = "downloading the snapshot";

/// Errors from fetching a dump.
#[derive(Debug, thiserror::Error)]
pub enum DownloadError {
    #[error("the snapshot could not be read from the object store")]
    Store(#[source] StoreError),
    #[error("{key} has {found} bytes instead of {expected}")]
    WrongSize { key: String, expected: u64, found: u64 },
    #[error("the SHA-256 of {key} does not match the recorded one: nothing was restored")]
    WrongDigest { key: String },
    #[error(
        "{}: {free} bytes are free and {needed} are needed\n  next: delete files, or recover onto a server \
         type with a larger disk (`svcctl recover USER --server-type TYPE`)", .path.display()
    )]
    NoSpace { path: PathBuf, needed: u64, free: u64 },
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

impl DownloadError {
    /// Returns `Refused` if the dump's size or SHA-256 doesn't match the snapshot reference.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Store(error) => store::to_exit(error),
            Self::WrongSize { .. } | Self::WrongDigest { .. } => Exit::Refused,
            Self::NoSpace { .. } | Self::File(_) | Self::Injected(_) => Exit::Internal,
        }
    }
}

/// Where to load the dump from.
#[derive(Debug)]
pub enum Dump {
    /// A complete, verified dump on local disk.
    File(PathBuf),
    /// The disk only has room for the database, so the dump is streamed from the store and verified in transit.
    InStore(Box<SnapshotRef>),
}

/// Downloads the dump to `dir` and verifies it. If it doesn't fit on disk alongside the database, it stays in the
/// store.
pub async fn fetch_dump(
    context: &RestoreContext,
    dir: &Path,
    snapshot: &SnapshotRef,
    sidecar: &Sidecar,
) -> Result<Dump, DownloadError> {
    std::fs::create_dir_all(dir).map_err(FileError::wrap("create directory", dir))?;
    let name = format!("{}.dump", snapshot.sha256);
    remove_other_dumps(dir, &name)?;
    let path = dir.join(name);
    let partial_path = path.clone();
    let size = snapshot.size_bytes;
    let mut partial = tokio::task::block_in_place(|| PartialFile::open(partial_path, size))?;
    if let Err(error) = ensure_space_for_snapshot(dir, snapshot, sidecar, partial.length()) {
        let DownloadError::NoSpace { free, .. } = &error else { return Err(error) };
        return plan_streaming(dir, partial, *free, snapshot, sidecar);
    }

    let mut backoff = Backoff::new(context.outage_timeout);
    let mut has_retried = false;
    loop {
        download_rest(context, snapshot, &mut partial, &mut backoff).await?;
        if partial.sha256() == snapshot.sha256 {
            // No need to sync: after a power failure, the file is rehashed.
            return Ok(Dump::File(path));
        }
        partial.restart()?;
        if has_retried {
            return Err(DownloadError::WrongDigest { key: snapshot.key.clone() });
        }
        tracing::warn!(key = snapshot.key, "downloaded dump is corrupt; starting over");
        has_retried = true;
    }
}

/// Removes the partial dump and checks that the database then fits on disk.
fn plan_streaming(
    dir: &Path,
    partial: PartialFile,
    free: u64,
    snapshot: &SnapshotRef,
    sidecar: &Sidecar,
) -> Result<Dump, DownloadError> {
    let (free, needed) = (free.saturating_add(partial.length()), database_bytes_needed(snapshot, sidecar));
    drop(partial);
    remove_dumps(dir)?;
    if free < needed {
        return Err(DownloadError::NoSpace { path: dir.to_owned(), needed, free });
    }
    tracing::warn!(
        free_bytes = free,
        dump_bytes = snapshot.size_bytes,
        "the dump does not fit on disk alongside the database: streaming it from the object store"
    );
    Ok(Dump::InStore(Box::new(snapshot.clone())))
}

/// Downloads the rest of the dump, resuming after interruptions.
async fn download_rest(
    context: &RestoreContext,
    snapshot: &SnapshotRef,
    partial: &mut PartialFile,
    backoff: &mut Backoff,
) -> Result<(), DownloadError> {
    context.progress.start_bytes_phase(DOWNLOAD_PHASE, Some(snapshot.size_bytes));
    while partial.length() < snapshot.size_bytes {
        let previous_length = partial.length();
        match resume_download(context, snapshot, partial).await {
            Ok(()) => {}
            Err(DownloadError::Store(error)) if error.is_transient() => {
                tracing::warn!(
                    error = %format_chain(&error), offset = partial.length(),
                    "the download was interrupted"
                );
                if partial.length() > previous_length {
                    backoff.record_progress();
                }
                backoff.pause().await.map_err(|_| DownloadError::Store(error))?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

async fn resume_download(
    context: &RestoreContext,
    snapshot: &SnapshotRef,
    partial: &mut PartialFile,
) -> Result<(), DownloadError> {
    let key = context.slot.snapshot(&snapshot.key).expect("the key has already been validated");
    let store_error = |error| DownloadError::Store(StoreError::classify(&key, error));
    let range = (partial.length() > 0).then_some(GetRange::Offset(partial.length()));
    let options = GetOptions { range, ..GetOptions::default() };
    let response = context.bucket.raw().get_opts(&key, options).await.map_err(store_error)?;
    if response.meta.size != snapshot.size_bytes {
        return Err(DownloadError::WrongSize {
            key: snapshot.key.clone(),
            expected: snapshot.size_bytes,
            found: response.meta.size,
        });
    }
    let mut stream = response.into_stream();
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.map_err(store_error)?;
        tokio::task::block_in_place(|| partial.append(&chunk))?;
        context.progress.report_bytes(DOWNLOAD_PHASE, partial.length(), Some(snapshot.size_bytes));
        failpoint::trigger("restore.downloading")?;
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

/// Checks that the dump and the database fit on `dir`'s file system. `already_downloaded` is the size of the partial
/// file.
///
/// # Errors
/// [`DownloadError::NoSpace`] if they don't fit; [`DownloadError::File`] if the free space can't be read.
pub fn ensure_space_for_snapshot(
    dir: &Path,
    snapshot: &SnapshotRef,
    sidecar: &Sidecar,
    already_downloaded: u64,
) -> Result<(), DownloadError> {
    ensure_free_space(
        dir,
        (snapshot.size_bytes - already_downloaded).saturating_add(database_bytes_needed(snapshot, sidecar)),
    )
}

/// Checks that a directory's file system has at least `needed` bytes free.
///
/// # Errors
/// [`DownloadError::NoSpace`] if there is less; [`DownloadError::File`] if the free space cannot be read.
pub fn ensure_free_space(dir: &Path, needed: u64) -> Result<(), DownloadError> {
    let free = fs4::available_space(dir).map_err(FileError::wrap("read the free space of", dir))?;
    if free < needed {
        return Err(DownloadError::NoSpace { path: dir.to_owned(), needed, free });
    }
    Ok(())
}

fn database_bytes_needed(snapshot: &SnapshotRef, sidecar: &Sidecar) -> u64 {
    let database = sidecar.database.as_ref().map(|facts| facts.size_bytes);
    let database = database.unwrap_or_else(|| snapshot.size_bytes.saturating_mul(DEFAULT_EXPANSION_FACTOR));
    database.saturating_add(FREE_SPACE_MARGIN_BYTES)
}

/// Removes all dumps in a directory except `keep`.
fn remove_other_dumps(dir: &Path, keep: &str) -> Result<(), FileError> {
    for entry in std::fs::read_dir(dir).map_err(FileError::wrap("read", dir))?.flatten() {
        let name = entry.file_name();
        if name != keep && name.to_string_lossy().ends_with(".dump") {
            svc_base::fsx::remove_if_exists(&entry.path())?;
        }
    }
    Ok(())
}

/// Removes all dumps in a directory, if it exists.
pub fn remove_dumps(dir: &Path) -> Result<(), FileError> {
    if dir.exists() { remove_other_dumps(dir, "") } else { Ok(()) }
}
