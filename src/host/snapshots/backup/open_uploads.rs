//! The list of open uploads, on disk. The parts that a killed run has uploaded are invisible, but occupy space in the
//! store until the next run aborts the upload.
//!
//! The backup's lock guards the list. A failed write does not fail the backup.

use serde::{Deserialize, Serialize};

use crate::system::layout::Layout;
use svc_base::fsx::{self, FileError};
use svc_http::problem::format_chain;
use svc_store::Bucket;
use svc_store::multipart::OpenUpload;

const FORMAT_VERSION: u32 = 1;
/// Maximum number of open uploads in the list; the latest are kept.
const MAX_UPLOADS: usize = 16;

#[derive(Debug, Default, Serialize, Deserialize)]
struct UploadList {
    version: u32,
    uploads: Vec<OpenUpload>,
}

/// Reads the list. A list that does not parse, or has another version, counts as empty.
fn read(layout: &Layout) -> Result<Vec<OpenUpload>, FileError> {
    let text = fsx::read_if_exists(&layout.open_uploads())?.unwrap_or_default();
    let list: UploadList = serde_json::from_slice(&text).unwrap_or_default();
    Ok(if list.version == FORMAT_VERSION { list.uploads } else { Vec::new() })
}

fn write(layout: &Layout, mut uploads: Vec<OpenUpload>) -> Result<(), FileError> {
    if uploads.is_empty() {
        return fsx::remove_if_exists(&layout.open_uploads());
    }
    uploads.drain(..uploads.len().saturating_sub(MAX_UPLOADS));
    let text = serde_json::to_vec(&UploadList { version: FORMAT_VERSION, uploads })
        .expect("plain fields serialize to JSON");
    fsx::write_atomic(&layout.open_uploads(), &text, 0o600)
}

/// Adds an upload, before its first part is sent.
pub fn record(layout: &Layout, upload: &OpenUpload) {
    let result = read(layout).and_then(|mut uploads| {
        uploads.push(upload.clone());
        write(layout, uploads)
    });
    if let Err(error) = result {
        tracing::warn!(error = %format_chain(&error), "could not record the upload: if this run is killed, its parts stay in the store");
    }
}

/// Removes a completed or aborted upload.
pub fn remove(layout: &Layout, upload: &OpenUpload) {
    let result = read(layout).and_then(|mut uploads| {
        uploads.retain(|other| other != upload);
        write(layout, uploads)
    });
    if let Err(error) = result {
        tracing::warn!(error = %format_chain(&error), "could not remove a completed or aborted upload from the list");
    }
}

/// Aborts the open uploads of earlier runs and removes their temporary files. Uploads that cannot be aborted now stay
/// in the list.
pub async fn abort_all(layout: &Layout, bucket: &Bucket) {
    let (list, last) = (layout.open_uploads(), layout.last_backup());
    for path in [&list, &last] {
        if let Err(error) = fsx::remove_leftover_temps(path) {
            tracing::warn!(error = %format_chain(&error), "could not remove temporary files of an interrupted run");
        }
    }
    for upload in read(layout).unwrap_or_default() {
        match bucket.abort_upload(&upload).await {
            Ok(()) => {
                tracing::info!(key = upload.key, "aborted the upload of an interrupted run");
                remove(layout, &upload);
            }
            Err(error) => {
                tracing::warn!(error = %format_chain(&error), "could not abort the upload of an interrupted run");
            }
        }
    }
}
