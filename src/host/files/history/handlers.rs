//! Route handlers for `history.sock`. The gateway has already authenticated each request.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};
use futures_util::TryStreamExt;
use http::{HeaderValue, header};
use jiff::Timestamp;
use strum::{EnumString, VariantNames};
use svc_base::clock::rfc3339_ms;
use svc_files::history::{Entry, EntryKind, History, Version, VersionQuery};
use svc_files::{FilesError, Id, Repository, Snapshot};
use svc_http::fields::Fields;
use svc_http::problem::{Code, Problem, format_chain};
use svc_machine::choice::must_be_one_of;
use svc_store::StoreError;
use svc_wire::files::{
    DEFAULT_ENTRIES, DEFAULT_VERSIONS, FileEntry, FileKind, FileListing, FileVersion, FileVersions,
    MAX_ENTRIES, MAX_VERSIONS,
};

use super::archive::{ArchiveFormat, stream_archive};
use crate::files::access::{AccessError, FilesSettings};
use crate::files::home_path::HomePath;
use crate::system::activity;

/// Maximum number of snapshots searched per request.
const MAX_SEARCHED_SNAPSHOTS: usize = 2000;
/// Maximum search time before a partial page is sent. The platform and svcctl wait only 20 s.
const MAX_SEARCH_DURATION: Duration = Duration::from_secs(12);
/// Timeout for starting a response, shorter than the gateway's.
const RESPONSE_START_TIMEOUT: Duration = Duration::from_secs(120);
const RETRY_SECONDS: u64 = 5;

/// Download format of a file or directory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, EnumString, VariantNames)]
#[strum(serialize_all = "lowercase", parse_err_ty = String, parse_err_fn = unknown_format)]
pub enum DownloadFormat {
    /// Plain file content.
    #[default]
    Raw,
    Tar,
    Zip,
}

fn unknown_format(_: &str) -> String {
    must_be_one_of(DownloadFormat::VARIANTS)
}

/// `GET /api/files/versions`
pub async fn list_versions(
    State(settings): State<Arc<FilesSettings>>,
    RawQuery(query): RawQuery,
) -> Result<Json<FileVersions>, Problem> {
    let mut fields = Fields::from_query(query.as_deref().unwrap_or_default());
    let path: Option<HomePath> = fields.required("path");
    let before = fields.optional_time("before");
    let limit = fields.number_in_range("limit", 1..=MAX_VERSIONS, DEFAULT_VERSIONS);
    let path = fields.finish(path)?;
    let deadline = Instant::now() + MAX_SEARCH_DURATION;
    let query =
        VersionQuery { before, limit, max_snapshots: MAX_SEARCHED_SNAPSHOTS, deadline: Some(deadline) };
    with_timeout(async {
        let history = History::open(open_repository(&settings).await?).await.map_err(to_problem)?;
        let page = history.list_versions(path.as_path(), query).await.map_err(to_problem)?;
        Ok(Json(FileVersions {
            path: path.to_string(),
            versions: page.versions.iter().map(describe_version).collect(),
            next_before: page.next_before.map(Into::into),
            damaged_snapshots: page.damaged_snapshots,
        }))
    })
    .await
}

/// `GET /api/files/at`
pub async fn list_entries(
    State(settings): State<Arc<FilesSettings>>,
    RawQuery(query): RawQuery,
) -> Result<Json<FileListing>, Problem> {
    let mut fields = Fields::from_query(query.as_deref().unwrap_or_default());
    let path: Option<HomePath> = fields.optional("path");
    let time = fields.optional_time("time");
    let cursor = fields.number_in_range("cursor", 0..=usize::MAX, 0);
    let limit = fields.number_in_range("limit", 1..=MAX_ENTRIES, DEFAULT_ENTRIES);
    let path = fields.finish(Some(path.unwrap_or_else(HomePath::files)))?;
    with_timeout(async {
        let repository = open_repository(&settings).await?;
        let latest = read_latest(&settings, time).await?;
        let history = History::open_latest(repository, latest).await.map_err(to_problem)?;
        let SnapshotEntry { id, snapshot, entry } = find_entry(&history, &path, time).await?;
        let entries = history.list(&entry).await.map_err(to_problem)?;
        let next_cursor = cursor.checked_add(limit).filter(|next| *next < entries.len());
        Ok(Json(FileListing {
            path: path.to_string(),
            snapshot: id.to_string(),
            saved_at: snapshot.time.into(),
            entry: describe(&entry),
            entries: entries.iter().skip(cursor).take(limit).map(describe).collect(),
            next_cursor: next_cursor.map(|next| next as u64),
        }))
    })
    .await
}

/// `GET /api/files/download`
pub async fn download(
    State(settings): State<Arc<FilesSettings>>,
    RawQuery(query): RawQuery,
) -> Result<Response, Problem> {
    let mut fields = Fields::from_query(query.as_deref().unwrap_or_default());
    let path: Option<HomePath> = fields.required("path");
    let time = fields.optional_time("time");
    let format: Option<DownloadFormat> = fields.optional("format");
    let path = fields.finish(path)?;
    with_timeout(async {
        let repository = open_repository(&settings).await?;
        let latest = read_latest(&settings, time).await?;
        let history = History::open_with_contents(repository, latest).await.map_err(to_problem)?;
        let SnapshotEntry { snapshot, entry, .. } = find_entry(&history, &path, time).await?;
        let format = match (entry.kind(), format) {
            (EntryKind::File, format) => format.unwrap_or_default(),
            (EntryKind::Directory, Some(DownloadFormat::Raw)) => {
                let detail = "A directory can be downloaded only as tar or zip.";
                return Err(Problem::field("?format", "raw is only for files").with("hint", detail.into()));
            }
            (EntryKind::Directory, format) => format.unwrap_or(DownloadFormat::Tar),
            _ => return Err(Problem::field("?path", "names neither a file nor a directory")),
        };
        let at = rfc3339_ms(snapshot.time);
        activity::note(&settings.layout, &format!("a download of {path} as it was at {at} began"));
        let name = entry.name();
        let name = if name.is_empty() { OsStr::new("home") } else { name }.to_owned();
        Ok(match format {
            DownloadFormat::Raw => {
                history.check_content(&entry).map_err(to_problem)?;
                send_file(Arc::new(history), entry, &name)
            }
            DownloadFormat::Tar => send_archive(history.with_whole_packs(), entry, &name, ArchiveFormat::Tar),
            DownloadFormat::Zip => send_archive(history.with_whole_packs(), entry, &name, ArchiveFormat::Zip),
        })
    })
    .await
}

async fn with_timeout<T>(work: impl Future<Output = Result<T, Problem>>) -> Result<T, Problem> {
    tokio::time::timeout(RESPONSE_START_TIMEOUT, work).await.unwrap_or_else(|_| {
        let detail =
            format!("The file backup did not respond within {} s.", RESPONSE_START_TIMEOUT.as_secs());
        Err(Problem::new(Code::StoreUnavailable, detail).retry_after(RETRY_SECONDS))
    })
}

async fn open_repository(settings: &FilesSettings) -> Result<Repository, Problem> {
    let repository = settings.open_with_stored_key().await.map_err(|error| {
        tracing::warn!(error = %format_chain(&error), "cannot open the file backup");
        match error {
            AccessError::Files(error) => to_problem(error),
            AccessError::KeyRefused(_) => {
                Problem::new(Code::Superseded, "Another machine has replaced this one.")
            }
            error @ AccessError::KeyLost(_) => Problem::new(Code::Conflict, error.to_string()),
            _ => Problem::new(
                Code::Unavailable,
                "The key of the file backup is currently unavailable; try again.",
            )
            .retry_after(RETRY_SECONDS),
        }
    })?;
    repository.ok_or_else(|| Problem::new(Code::NotFound, "No files have been saved yet."))
}

/// An entry and the snapshot that contains it.
struct SnapshotEntry {
    id: Id,
    snapshot: Snapshot,
    entry: Entry,
}

/// Returns the snapshot id from the pointer, the only snapshot needed by a request without a time. Returns `None` for a
/// request with a time, or if the pointer is missing or corrupt, or doesn't reference a snapshot.
///
/// The latest snapshot may not have the latest time: the clock may have been ahead when an earlier one was taken.
async fn read_latest(settings: &FilesSettings, time: Option<Timestamp>) -> Result<Option<Id>, Problem> {
    if time.is_some() {
        return Ok(None);
    }
    match settings.read_latest().await {
        // The snapshots may still be intact.
        Err(error @ StoreError::Corrupt { .. }) => {
            tracing::warn!(error = %format_chain(&error), "corrupt file-backup pointer; using the snapshot with the latest time");
            Ok(None)
        }
        latest => latest.map_err(|error| to_problem(error.into())),
    }
}

async fn find_entry(
    history: &History,
    path: &HomePath,
    time: Option<Timestamp>,
) -> Result<SnapshotEntry, Problem> {
    let (id, snapshot) = history.find_snapshot(time).cloned().ok_or_else(|| {
        let detail = match time {
            Some(time) => format!("There is no snapshot at or before {}.", rfc3339_ms(time)),
            None => "No files have been saved yet.".to_owned(),
        };
        Problem::new(Code::NotFound, detail)
    })?;
    let entry = history.find(&snapshot, path.as_path()).await.map_err(to_problem)?;
    let entry = entry.ok_or_else(|| {
        let detail = format!(
            "{path} is not in the snapshot taken at {}; list its versions to see which snapshots contain it.",
            rfc3339_ms(snapshot.time)
        );
        Problem::new(Code::NotFound, detail)
    })?;
    Ok(SnapshotEntry { id, snapshot, entry })
}

fn to_problem(error: FilesError) -> Problem {
    tracing::warn!(error = %format_chain(&error), "cannot read the file backup");
    match error {
        FilesError::Store(StoreError::NotFound { .. } | StoreError::Corrupt { .. })
        | FilesError::Corrupt { .. } => {
            let detail =
                "The part of the file backup that this request needs is damaged; try another snapshot.";
            Problem::new(Code::Conflict, detail)
        }
        FilesError::Store(_) | FilesError::IndexChanging => {
            Problem::new(Code::StoreUnavailable, "The file backup is currently unreadable; try again.")
                .retry_after(RETRY_SECONDS)
        }
        FilesError::WrongKey => {
            let detail = "Neither this machine's key nor the platform's opens the file backup.";
            Problem::new(Code::Conflict, detail)
        }
        error => Problem::internal(&error),
    }
}

fn describe(entry: &Entry) -> FileEntry {
    FileEntry {
        name: entry.name().to_string_lossy().into_owned(),
        kind: match entry.kind() {
            EntryKind::File => FileKind::File,
            EntryKind::Directory => FileKind::Directory,
            EntryKind::Symlink => FileKind::Symlink,
            EntryKind::Special => FileKind::Special,
        },
        size_bytes: entry.size(),
        mode: format!("{:04o}", entry.mode()),
        modified_at: entry.modified_at().into(),
        target: entry.link_target().map(|target| target.to_string_lossy().into_owned()),
    }
}

fn describe_version(version: &Version) -> FileVersion {
    FileVersion {
        first_saved_at: version.first_saved_at.into(),
        last_saved_at: version.last_saved_at.into(),
        snapshot: version.snapshot.to_string(),
        entry: version.entry.as_ref().map(describe),
    }
}

fn send_file(history: Arc<History>, entry: Entry, name: &OsStr) -> Response {
    let size = entry.size();
    let (sender, chunks) = tokio::sync::mpsc::channel::<Result<Vec<u8>, FilesError>>(2);
    tokio::spawn(async move {
        let mut content = std::pin::pin!(history.read_content(&entry));
        let mut remaining = size;
        loop {
            let next = match content.try_next().await {
                Ok(Some(chunk)) => match remaining.checked_sub(chunk.len() as u64) {
                    Some(rest) => {
                        remaining = rest;
                        Ok(chunk)
                    }
                    // The content is corrupt. The body must not exceed its declared length.
                    None => {
                        tracing::warn!("a downloaded file is longer than its recorded size");
                        break;
                    }
                },
                Ok(None) => {
                    if remaining > 0 {
                        tracing::warn!("a downloaded file is shorter than its recorded size");
                    }
                    break;
                }
                Err(error) => {
                    tracing::warn!(error = %format_chain(&error), "incomplete file download");
                    Err(error)
                }
            };
            // Fails if the client has disconnected.
            if sender.send(next).await.is_err() {
                return;
            }
        }
    });
    let chunks = futures_util::stream::unfold(chunks, async |mut chunks| {
        chunks.recv().await.map(|chunk| (chunk, chunks))
    });
    let mut response = Body::from_stream(chunks).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(size));
    set_attachment(&mut response, name, "", "application/octet-stream");
    response
}

fn send_archive(history: History, entry: Entry, name: &OsStr, format: ArchiveFormat) -> Response {
    let mut response = stream_archive(history, entry, name.to_owned(), format).into_response();
    set_attachment(&mut response, name, format.extension(), format.media_type());
    response
}

/// Makes browsers save the response as a file instead of displaying or running it.
fn set_attachment(response: &mut Response, name: &OsStr, extension: &str, media_type: &'static str) {
    use std::fmt::Write as _;
    let mut encoded = String::new();
    for byte in name.as_bytes().iter().chain(extension.as_bytes()) {
        if byte.is_ascii_alphanumeric() || b"-._".contains(byte) {
            encoded.push(char::from(*byte));
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    let headers = response.headers_mut();
    let disposition = format!("attachment; filename*=UTF-8''{encoded}");
    if let Ok(value) = HeaderValue::from_str(&disposition) {
        headers.insert(header::CONTENT_DISPOSITION, value);
    }
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(media_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
}
