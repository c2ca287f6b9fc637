//! Notes of uploads under way, on disk: what a run that was killed has sent is invisible and takes room at the store, until
//! the next run gives it up.
//!
//! The lock of the backup guards them. A note that cannot be written costs no backup.

use serde::{Deserialize, Serialize};

use crate::fsx::{self, FileError};
use crate::host::system::layout::Layout;
use crate::http::problem::chain;
use crate::store::Bucket;
use crate::store::multipart::OpenUpload;

const FORMAT: u32 = 1;
/// Where the store is away at each end, the latest are kept.
const MOST: usize = 16;

#[derive(Debug, Default, Serialize, Deserialize)]
struct Notes {
    version: u32,
    uploads: Vec<OpenUpload>,
}

/// What cannot be read names none.
fn read(layout: &Layout) -> Result<Vec<OpenUpload>, FileError> {
    let text = fsx::read_if_exists(&layout.open_uploads())?.unwrap_or_default();
    let notes: Notes = serde_json::from_slice(&text).unwrap_or_default();
    Ok(if notes.version == FORMAT { notes.uploads } else { Vec::new() })
}

fn write(layout: &Layout, mut uploads: Vec<OpenUpload>) -> Result<(), FileError> {
    if uploads.is_empty() {
        return fsx::remove_if_exists(&layout.open_uploads());
    }
    uploads.drain(..uploads.len().saturating_sub(MOST));
    let text = serde_json::to_vec(&Notes { version: FORMAT, uploads }).expect("plain fields are JSON");
    fsx::write_atomic(&layout.open_uploads(), &text, 0o600)
}

/// Before its first part is sent.
pub fn note(layout: &Layout, upload: &OpenUpload) {
    let noted = read(layout).and_then(|mut uploads| {
        uploads.push(upload.clone());
        write(layout, uploads)
    });
    if let Err(error) = noted {
        tracing::warn!(error = %chain(&error), "the upload is not noted: what a kill left of it would stay");
    }
}

/// It was completed or aborted.
pub fn forget(layout: &Layout, upload: &OpenUpload) {
    let forgotten = read(layout).and_then(|mut uploads| {
        uploads.retain(|other| other != upload);
        write(layout, uploads)
    });
    if let Err(error) = forgotten {
        tracing::warn!(error = %chain(&error), "an upload that has ended stays noted");
    }
}

/// Gives up what earlier runs left, at the store and of files that were being written. What the store does not do now stays
/// noted.
pub async fn give_up(layout: &Layout, bucket: &Bucket) {
    let (notes, last) = (layout.open_uploads(), layout.last_backup());
    for path in [&notes, &last] {
        if let Err(error) = fsx::remove_torn(path) {
            tracing::warn!(error = %chain(&error), "what a run that was cut off was writing stays");
        }
    }
    for upload in read(layout).unwrap_or_default() {
        match bucket.give_up(&upload).await {
            Ok(()) => {
                tracing::info!(key = upload.key, "the upload of a run that was cut off is given up");
                forget(layout, &upload);
            }
            Err(error) => tracing::warn!(error = %chain(&error), "an upload that was cut off is still open"),
        }
    }
}
