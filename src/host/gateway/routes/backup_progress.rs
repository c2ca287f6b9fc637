//! `GET /_svc/internal/backup`: backup progress, the last run's result, and the file-backup status.

use axum::Json;
use axum::extract::State;
use http::Method;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::auth::PLATFORM;
use crate::endpoint::{DEFAULT_MAX_BODY_BYTES, Endpoint, documented_json};
use svc_base::clock;
use svc_base::fsx;
use svc_host::files::status::FilesStatus;
use svc_host::snapshots::backup_progress::BackupProgress;
use svc_host::system::blocking::run_blocking;
use svc_host::system::layout::Layout;
use svc_host::system::lock::{Lock, LockError};
use svc_http::openapi::{Operation, boolean, count, object, string_enum, text, time};
use svc_http::problem::{Code, Problem};
use svc_store::key;

/// The last run's result, from `last-backup.json`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct LastRun {
    #[serde(with = "clock::wire")]
    timestamp: Timestamp,
    status: String,
    key: Option<String>,
    error: Option<String>,
    held: Option<HeldSnapshotView>,
}

/// A complete snapshot held back because the database lost many rows.
#[derive(Serialize, Deserialize)]
struct HeldSnapshotView {
    /// Key of the snapshot that remains the latest.
    latest: String,
    /// Describes the missing tables and rows.
    loss: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct LastRunView {
    status: String,
    #[serde(with = "clock::wire")]
    began_at: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none", with = "clock::wire_option")]
    taken_at: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    held: Option<HeldSnapshotView>,
}

/// File-backup status.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct FilesView {
    #[serde(skip_serializing_if = "Option::is_none", with = "clock::wire_option")]
    saved_until: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// Describes entries that the last save couldn't read.
    #[serde(skip_serializing_if = "Option::is_none")]
    unreadable: Option<String>,
}

/// `GET /_svc/internal/backup`.
pub async fn show(State(layout): State<Layout>) -> Result<Json<Value>, Problem> {
    Ok(Json(run_blocking(move || read_backup_status(&layout)).await?))
}

fn read_backup_status(layout: &Layout) -> Result<Value, LockError> {
    // Check the lock first: a run writes its result before releasing the lock.
    let is_running = Lock::is_held(&layout.backup_lock())?;
    let mut summary = json!({ "running": is_running });
    let progress = BackupProgress::read(layout)?.filter(|_| is_running);
    if let Some(progress) = progress {
        summary["beganAt"] = clock::rfc3339_ms(progress.began_at).into();
        summary["stage"] = progress.stage.into();
        summary["dumpedBytes"] = progress.dumped_bytes.into();
        summary["uploadedBytes"] = progress.uploaded_bytes.into();
        summary["updatedAt"] = clock::rfc3339_ms(progress.updated_at).into();
    }
    let last = fsx::read_if_exists(&layout.last_backup())?;
    if let Some(last) = last.and_then(|text| serde_json::from_slice::<LastRun>(&text).ok()) {
        let taken_at = last.key.as_deref().and_then(key::taken_at);
        let LastRun { timestamp, status, key, error, held } = last;
        let last = LastRunView { status, began_at: timestamp, taken_at, key, error, held };
        summary["last"] = serde_json::to_value(last).expect("the last run can be serialized");
    }
    if let Some(status) = FilesStatus::read(layout)? {
        let unreadable = status.describe_unreadable();
        let files = FilesView { saved_until: status.saved_until, error: status.error, unreadable };
        summary["files"] = serde_json::to_value(files).expect("the status can be serialized");
    }
    Ok(summary)
}

pub static BACKUP_PROGRESS: Endpoint = Endpoint {
    operation: Operation {
        id: "showBackup",
        method: Method::GET,
        path: "/_svc/internal/backup",
        summary: "The progress of the running backup, the result of the last one, and the state of the file backup.",
        credentials: &[PLATFORM],
        parameters: &[],
        body: None,
        responses: &[documented_json(200, "The progress, the last result and the state.", || {
            let last = object(
                &[("status", string_enum(&["success", "error"])), ("beganAt", time())],
                &[("takenAt", time()), ("key", text()), ("error", text()), ("held", held_schema())],
            );
            object(
                &[("running", boolean())],
                &[
                    ("beganAt", time()),
                    ("stage", text()),
                    ("dumpedBytes", count()),
                    ("uploadedBytes", count()),
                    ("updatedAt", time()),
                    ("last", last),
                    (
                        "files",
                        object(&[], &[("savedUntil", time()), ("error", text()), ("unreadable", text())]),
                    ),
                ],
            )
        })],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

fn held_schema() -> Value {
    object(&[("latest", text()), ("loss", text())], &[])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backup_status_includes_held_snapshot() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let last = json!({"timestamp": "2026-01-02T03:04:05.678Z", "status": "error", "key": null, "error": "shrunk",
            "held": {"latest": "k", "loss": "3 rows instead of 400"}});
        fsx::write_atomic(&layout.last_backup(), last.to_string().as_bytes(), 0o644).unwrap();
        assert_eq!(read_backup_status(&layout).unwrap()["last"]["held"], last["held"]);
    }
}
