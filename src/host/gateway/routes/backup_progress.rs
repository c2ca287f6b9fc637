//! `GET /_svc/internal/backup`: the backup under way, and how the last one ended.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::routing::get;
use http::Method;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::clock;
use crate::fsx;
use crate::host::gateway::endpoint::{Endpoint, OWN_BODY, PLATFORM, told};
use crate::host::gateway::state::Gateway;
use crate::host::snapshots::backup_progress::BackupProgress;
use crate::host::system::blocking::blocking;
use crate::host::system::layout::Layout;
use crate::host::system::lock::{Lock, LockError};
use crate::http::openapi::{Operation, boolean, count, object, one_of, text, time};
use crate::http::problem::{Code, Problem};
use crate::store::key;

/// The end of the last run, as `last-backup.json` has it.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct LastRun {
    #[serde(with = "clock::wire")]
    timestamp: Timestamp,
    status: String,
    key: Option<String>,
    error: Option<String>,
    held: Option<HeldBack>,
}

/// A whole snapshot that did not become the latest, because its database has shrunk.
#[derive(Serialize, Deserialize)]
struct HeldBack {
    latest: String,
    loss: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ShownRun {
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
    held: Option<HeldBack>,
}

async fn show(State(gateway): State<Arc<Gateway>>) -> Result<Json<Value>, Problem> {
    let layout = gateway.config.layout.clone();
    Ok(Json(blocking(move || shown(&layout)).await?))
}

fn shown(layout: &Layout) -> Result<Value, LockError> {
    // The lock first: a run that ends meanwhile has then written its end before that is read.
    let is_running = Lock::is_held(&layout.backup_lock())?;
    let mut shown = json!({ "running": is_running });
    let progress = BackupProgress::read(layout)?.filter(|_| is_running);
    if let Some(progress) = progress {
        shown["beganAt"] = clock::rfc3339_ms(progress.began_at).into();
        shown["stage"] = progress.stage.into();
        shown["dumpedBytes"] = progress.dumped_bytes.into();
        shown["uploadedBytes"] = progress.uploaded_bytes.into();
        shown["updatedAt"] = clock::rfc3339_ms(progress.updated_at).into();
    }
    let last = fsx::read_if_exists(&layout.last_backup())?;
    if let Some(last) = last.and_then(|text| serde_json::from_slice::<LastRun>(&text).ok()) {
        let taken_at = last.key.as_deref().and_then(key::taken_at);
        let LastRun { timestamp, status, key, error, held } = last;
        let last = ShownRun { status, began_at: timestamp, taken_at, key, error, held };
        shown["last"] = serde_json::to_value(last).expect("plain fields are JSON");
    }
    Ok(shown)
}

pub static BACKUP_PROGRESS: Endpoint = Endpoint {
    operation: Operation {
        id: "showBackup",
        method: Method::GET,
        path: "/_svc/internal/backup",
        summary: "How far the backup under way is, and how the last one ended.",
        credentials: &[PLATFORM],
        parameters: &[],
        body: None,
        answers: &[told(200, "What is known of it.", || {
            let last = object(
                &[("status", one_of(&["success", "error"])), ("beganAt", time())],
                &[("takenAt", time()), ("key", text()), ("error", text()), ("held", held())],
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
                ],
            )
        })],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    largest_body: OWN_BODY,
    serve: || get(show),
};

fn held() -> Value {
    object(&[("latest", text()), ("loss", text())], &[])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shows_why_a_snapshot_was_held_back() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let last = json!({"timestamp": "2026-01-02T03:04:05.678Z", "status": "error", "key": null, "error": "shrunk",
            "held": {"latest": "k", "loss": "3 rows instead of 400"}});
        fsx::write_atomic(&layout.last_backup(), last.to_string().as_bytes(), 0o644).unwrap();
        assert_eq!(shown(&layout).unwrap()["last"]["held"], last["held"]);
    }
}
