//! `/metrics` of a host, on its unix socket alone: what the gateway has counted, and what it finds when it is asked.

use std::path::Path;
use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header;
use jiff::Timestamp;
use serde::Deserialize;

use crate::host::gateway::state::Gateway;
use crate::host::records::files::RecordKind;
use crate::host::records::page::{self, Verdict};
use crate::host::snapshots::check_log::{Check, CheckKind, Status};
use crate::host::system::layout::Layout;
use crate::http::problem::Problem;
use crate::metrics::{
    APPS, BACKUP_OK, CHECK_AT, CHECK_OK, LISTENERS, MEDIA_TYPE, POOL_CONNECTIONS, RECORDS_STUCK,
    RECORDS_WAITING, SNAPSHOT_TAKEN, Scrape,
};
use crate::store::key;

/// `GET /metrics`.
pub async fn metrics(State(gateway): State<Arc<Gateway>>, Extension(scrape): Extension<Scrape>) -> Response {
    let apps = gateway.apps.known();
    APPS.set([], apps.apps.len() as f64);
    LISTENERS.set([], gateway.changes.streams() as f64);
    let (open, busy) = apps.apps.values().fold((0, 0), |(open, busy), app| {
        let pool = app.pool.in_use();
        (open + pool.0, busy + pool.1)
    });
    POOL_CONNECTIONS.set(["open"], open as f64);
    POOL_CONNECTIONS.set(["idle"], (open - busy) as f64);
    let records = gateway.kernel.records();
    RECORDS_STUCK.set([], f64::from(u8::from(records.is_stuck())));
    RECORDS_WAITING.set([], records.waiting_bytes() as f64);
    let layout = gateway.config.layout.clone();
    // Records are read, and so is /proc.
    let told = tokio::task::spawn_blocking(move || {
        measure_backups(&layout.logs());
        measure_checks(&layout);
        scrape.text()
    });
    match told.await {
        Ok(text) => ([(header::CONTENT_TYPE, MEDIA_TYPE)], text).into_response(),
        Err(error) => Problem::internal(&error).into_response(),
    }
}

/// Nothing is said before the first backup.
fn measure_backups(logs: &Path) {
    #[derive(Deserialize)]
    struct Run {
        status: String,
        key: Option<String>,
    }
    let newest = page::newest(RecordKind::Backups, logs, None, MOST_FAILURES, |_| Verdict::Take);
    let lines = newest.map(|page| page.lines).unwrap_or_default();
    let runs: Vec<Run> = lines.iter().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let has_succeeded = |run: &Run| run.status == "success";
    if let Some(last) = runs.first() {
        BACKUP_OK.set([], f64::from(u8::from(has_succeeded(last))));
    }
    let taken = |run: &Run| -> Option<Timestamp> { key::taken_at(run.key.as_deref()?) };
    if let Some(taken) = runs.iter().find(|run| has_succeeded(run)).and_then(taken) {
        SNAPSHOT_TAKEN.set([], taken.as_second() as f64);
    }
}

/// Nothing is said of a kind before its first.
fn measure_checks(layout: &Layout) {
    for kind in CheckKind::ALL {
        if let Ok(Some(check)) = Check::last(layout, kind) {
            CHECK_OK.set([kind.as_str()], f64::from(u8::from(check.status == Status::Success)));
            CHECK_AT.set([kind.as_str()], check.timestamp.as_second() as f64);
        }
    }
}

/// How far back a good backup is looked for: hourly ones, ten days.
const MOST_FAILURES: usize = 240;
