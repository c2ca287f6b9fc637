//! `/metrics`: gateway counters, and gauges sampled on each request. Only served on the Unix socket for the machine's
//! own users.

use std::path::Path;
use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header;
use jiff::Timestamp;
use serde::Deserialize;

use crate::apps::Registry;
use crate::bridge::ChangeFeed;
use svc_base::metrics::{
    APPS, BACKUP_OK, CHANGE_LISTENERS, FILES_CHECK_AT, FILES_CHECK_OK, FILES_PENDING_BYTES,
    FILES_PENDING_SINCE, FILES_SAVED_UNTIL, MEDIA_TYPE, MetricsHandle, POOL_CONNECTIONS, RECORDS_STUCK,
    SNAPSHOT_CHECK_AT, SNAPSHOT_CHECK_OK, SNAPSHOT_TAKEN_AT, UNWRITTEN_RECORD_BYTES,
};
use svc_host::agents::kernel::Kernel;
use svc_host::files::checks::FileChecks;
use svc_host::files::status::FilesStatus;
use svc_host::records::backup::{BackupKind, Status};
use svc_host::records::files::LogKind;
use svc_host::records::page::{self, Verdict};
use svc_host::snapshots::check_log::{CheckKind, CheckRecord};
use svc_host::system::layout::Layout;
use svc_http::problem::Problem;
use svc_store::key;

/// `GET /metrics`.
pub async fn render_metrics(
    State(registry): State<Arc<Registry>>,
    State(changes): State<Arc<ChangeFeed>>,
    State(kernel): State<Arc<Kernel>>,
    State(layout): State<Layout>,
    State(metrics): State<MetricsHandle>,
) -> Response {
    let apps = registry.snapshot();
    APPS.set([], apps.apps.len() as f64);
    CHANGE_LISTENERS.set([], changes.open_streams() as f64);
    let (open, busy) = apps.apps.values().fold((0, 0), |(open, busy), app| {
        let (pool_open, pool_busy) = app.pool.connection_counts();
        (open + pool_open, busy + pool_busy)
    });
    POOL_CONNECTIONS.set(["open"], open as f64);
    POOL_CONNECTIONS.set(["idle"], (open - busy) as f64);
    let records = kernel.records();
    RECORDS_STUCK.set([], f64::from(u8::from(records.is_write_failing())));
    UNWRITTEN_RECORD_BYTES.set([], records.unwritten_bytes() as f64);
    // Reading records and /proc is blocking.
    let rendered = tokio::task::spawn_blocking(move || {
        set_backup_metrics(&layout.logs());
        set_check_metrics(&layout);
        set_file_metrics(&layout);
        metrics.render()
    });
    match rendered.await {
        Ok(text) => ([(header::CONTENT_TYPE, MEDIA_TYPE)], text).into_response(),
        Err(error) => Problem::internal(&error).into_response(),
    }
}

/// Sets the database-backup metrics, leaving those without data untouched.
fn set_backup_metrics(logs: &Path) {
    #[derive(Deserialize)]
    struct Run {
        #[serde(default)]
        kind: BackupKind,
        status: Status,
        key: Option<String>,
    }
    let mut runs: Vec<Run> = Vec::new();
    let newest = page::read_newest(LogKind::Backups, logs, None, MAX_SEARCHED_RUNS, |line| {
        let run = serde_json::from_str(line).ok().filter(|run: &Run| run.kind == BackupKind::Database);
        let verdict = if run.is_some() { Verdict::Take } else { Verdict::Skip };
        runs.extend(run);
        verdict
    });
    if newest.is_err() {
        return;
    }
    let has_succeeded = |run: &Run| run.status == Status::Success;
    if let Some(last) = runs.first() {
        BACKUP_OK.set([], f64::from(u8::from(has_succeeded(last))));
    }
    let parse_taken_at = |run: &Run| -> Option<Timestamp> { key::taken_at(run.key.as_deref()?) };
    if let Some(taken_at) = runs.iter().find(|run| has_succeeded(run)).and_then(parse_taken_at) {
        SNAPSHOT_TAKEN_AT.set([], taken_at.as_second() as f64);
    }
}

/// Sets the metrics for each kind of check that has run.
fn set_check_metrics(layout: &Layout) {
    for &kind in CheckKind::ALL {
        if let Ok(Some(check)) = CheckRecord::read_last(layout, kind) {
            SNAPSHOT_CHECK_OK.set([kind.as_str()], f64::from(u8::from(check.status == Status::Success)));
            SNAPSHOT_CHECK_AT.set([kind.as_str()], check.timestamp.as_second() as f64);
        }
    }
}

/// Sets the file-backup metrics known so far. A missing pending value in the status counts as 0.
fn set_file_metrics(layout: &Layout) {
    let seconds = |at: Timestamp| at.as_second() as f64;
    if let Ok(Some(status)) = FilesStatus::read(layout) {
        if let Some(at) = status.saved_until {
            FILES_SAVED_UNTIL.set([], seconds(at));
        }
        FILES_PENDING_BYTES.set([], status.pending_bytes.unwrap_or(0) as f64);
        FILES_PENDING_SINCE.set([], status.changed_since.map_or(0.0, seconds));
    }
    let checks = FileChecks::read(layout).unwrap_or_default();
    if let Some((verify, at)) = checks.verify.as_ref().and_then(|verify| Some((verify, verify.at?))) {
        let is_intact = verify.error.is_none() && checks.damaged.is_empty();
        FILES_CHECK_OK.set(["verify"], f64::from(u8::from(is_intact)));
        FILES_CHECK_AT.set(["verify"], seconds(at));
    }
    if let Some((drill, at)) = checks.drill.as_ref().and_then(|drill| Some((drill, drill.at?))) {
        let is_intact = drill.error.is_none() && drill.differing.is_empty();
        FILES_CHECK_OK.set(["drill"], f64::from(u8::from(is_intact)));
        FILES_CHECK_AT.set(["drill"], seconds(at));
    }
}

/// Maximum number of backup runs searched for a successful one: ten days of hourly backups.
const MAX_SEARCHED_RUNS: usize = 240;
