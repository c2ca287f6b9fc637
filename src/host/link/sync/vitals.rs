//! Collects the machine state for heartbeats: gateway and database health, problems needing an operator, disk space,
//! the last backup, update and checks, the file backup, and accepted proof keys.

use std::time::Duration;

use jiff::Timestamp;
use serde::Deserialize;

use super::config::SyncConfig;
use crate::files::checks::FileChecks;
use crate::files::restore_outcome::RestoreOutcome;
use crate::files::status::FilesStatus;
use crate::records::backup::Status;
use crate::snapshots::check_log::{CheckKind, CheckRecord};
use crate::snapshots::database_identity;
use crate::snapshots::held_snapshot::HeldSnapshot;
use crate::system::config;
use crate::system::probe;
use crate::system::probe::GatewayClient;
use crate::update::protocol::{self, SnapshotWait, UpdateResult};
use svc_base::clock;
use svc_base::fsx;
use svc_http::openapi::MAX_SAFE_INTEGER;
use svc_http::proof::ProofKeys;
use svc_store::key;
use svc_wire::heartbeat::{
    ComponentHealth, FILES_DAMAGED, FILES_NOT_RESTORED, FILES_UNREADABLE, FILES_UNSAVED,
};
use svc_wire::host::{
    ComponentStatus, FileBackupReport, LastBackup, LastUpdate, MAX_DAMAGED_KEYS, Outcome, SnapshotCheck,
    SnapshotChecks, UpdateOutcome,
};
use svc_wire::machine::{Attention, Disk};
use svc_wire::text::WireString;

const DATABASE_TIMEOUT: Duration = Duration::from_secs(5);

/// Reads the last check of each kind, or returns `None` if there haven't been any.
pub fn read_checks(config: &SyncConfig) -> Option<SnapshotChecks> {
    let read_last = |kind: CheckKind| {
        let CheckRecord { status, timestamp, key, mut damaged, error, .. } =
            CheckRecord::read_last(&config.layout, kind).ok()??;
        damaged.truncate(MAX_DAMAGED_KEYS);
        Some(SnapshotCheck { status: to_outcome(status).into(), at: timestamp.into(), key, damaged, error })
    };
    let checks = SnapshotChecks { verify: read_last(CheckKind::Verify), drill: read_last(CheckKind::Drill) };
    (checks.verify.is_some() || checks.drill.is_some()).then_some(checks)
}

fn to_outcome(status: Status) -> Outcome {
    match status {
        Status::Success => Outcome::Success,
        Status::Error => Outcome::Error,
    }
}

pub fn read_last_update(config: &SyncConfig) -> Option<LastUpdate> {
    let protocol::Outcome { version, outcome, stage, error, at } =
        protocol::read_last(&config.layout).ok()??.outcome;
    let outcome = match outcome {
        UpdateResult::Updated => UpdateOutcome::Updated,
        UpdateResult::RolledBack => UpdateOutcome::RolledBack,
        UpdateResult::Refused => UpdateOutcome::Refused,
        UpdateResult::Failed => UpdateOutcome::Failed,
    };
    Some(LastUpdate { version: version.into(), outcome: outcome.into(), stage, at: at.into(), error })
}

fn attention_item(code: &str, detail: impl Into<String>) -> Attention {
    Attention { code: code.to_owned(), detail: detail.into() }
}

/// Checks the gateway and the database, and collects items for the fleet's attention list. Leaves out code-server,
/// whose health depends on earlier probes: see `code_probe`.
pub async fn check_health(config: &SyncConfig) -> (ComponentHealth, Vec<Attention>) {
    let (gateway, database) = tokio::join!(is_gateway_ready(config), check_database(config));
    let health = ComponentHealth {
        gateway: to_status(gateway).into(),
        database: to_status(database.is_ok()).into(),
        code: None,
    };
    let mut attention: Vec<Attention> = database.err().flatten().into_iter().collect();
    attention.extend(held_snapshot_item(config));
    attention.extend(waiting_update_item(config));
    attention.extend(unsaved_files_item(config));
    attention.extend(damaged_files_item(config));
    attention.extend(unreadable_files_item(config));
    (health, attention)
}

fn to_status(is_ok: bool) -> ComponentStatus {
    if is_ok { ComponentStatus::Ok } else { ComponentStatus::Failing }
}

/// Reports a held-back snapshot.
fn held_snapshot_item(config: &SyncConfig) -> Option<Attention> {
    let held = HeldSnapshot::read(&config.layout).ok()??;
    Some(attention_item("snapshot_held", held.to_string()))
}

/// Reports an update waiting for a snapshot.
fn waiting_update_item(config: &SyncConfig) -> Option<Attention> {
    let (version, wait) = SnapshotWait::read(&config.layout).ok()??;
    if wait.why.is_empty() {
        return None;
    }
    let detail = format!("the update to {version} {}", wait.describe());
    Some(attention_item("update_waiting", detail))
}

/// Reports files that couldn't be restored or have unsaved changes.
fn unsaved_files_item(config: &SyncConfig) -> Option<Attention> {
    let outcome = RestoreOutcome::read(&config.layout).ok().flatten();
    if let Some(error) = outcome.and_then(|outcome| outcome.error) {
        let detail = format!(
            "the previous machine's files have not been restored, and no files are being saved: {error}"
        );
        return Some(attention_item(FILES_NOT_RESTORED, detail));
    }
    let status = FilesStatus::read(&config.layout).ok()??;
    let now = Timestamp::now();
    if !status.is_unsaved(now) {
        return None;
    }
    let since = status.find_unsaved_since(now);
    let since = since.map_or_else(String::new, |since| format!(" since {}", clock::rfc3339_ms(since)));
    let reason = status.error.as_deref().unwrap_or("the file backup is not keeping up, or is not running");
    let detail = format!("changes to the owner's files{since} have not been saved: {reason}");
    Some(attention_item(FILES_UNSAVED, detail))
}

/// Reports a file backup that's corrupt, can't be opened with the platform's key, or has been failing its checks for a
/// long time.
fn damaged_files_item(config: &SyncConfig) -> Option<Attention> {
    let checks = FileChecks::read(&config.layout).ok()?;
    let status = FilesStatus::read(&config.layout).ok().flatten().unwrap_or_default();
    let detail = match checks.find_problem() {
        Some(problem) => format!("the file backup is damaged: {problem}"),
        None if status.key_problem.is_some() => {
            format!("the file backup cannot be restored: {}", status.key_problem?)
        }
        None => format!("the file backup may be damaged: {}", checks.find_failure(Timestamp::now())?),
    };
    Some(attention_item(FILES_DAMAGED, detail))
}

/// Reports files that can't be saved because they're unreadable.
fn unreadable_files_item(config: &SyncConfig) -> Option<Attention> {
    let status = FilesStatus::read(&config.layout).ok()??;
    Some(attention_item(FILES_UNREADABLE, status.describe_unreadable()?))
}

/// Reads the file backup state, or returns `None` if it hasn't started yet.
pub fn read_file_backup(config: &SyncConfig) -> Option<FileBackupReport> {
    let status = FilesStatus::read(&config.layout).ok()??;
    let outcome = RestoreOutcome::read(&config.layout).ok().flatten();
    let checks = FileChecks::read(&config.layout).unwrap_or_default();
    Some(FileBackupReport {
        saved_until: status.saved_until.map(Into::into),
        changed_since: status.changed_since.map(Into::into),
        // With sparse files, the sum can exceed what the platform accepts.
        pending_bytes: status.pending_bytes.map(|bytes| bytes.min(MAX_SAFE_INTEGER)),
        files: status.files,
        bytes: status.bytes.min(MAX_SAFE_INTEGER),
        restored_as_of: outcome.and_then(|outcome| outcome.taken_at).map(Into::into),
        error: status.error.clone(),
        verified_at: checks.verified_at().map(Into::into),
        drilled_at: checks.drilled_at().map(Into::into),
        damage: status.find_problem(&checks),
    })
}

async fn is_gateway_ready(config: &SyncConfig) -> bool {
    let Ok(Some(pin)) = probe::read_pin(&config.layout) else { return false };
    match GatewayClient::new(config.listen, pin) {
        Ok(gateway) => gateway.is_ready().await,
        Err(_) => false,
    }
}

/// Checks that the database is reachable and is the one restored on this machine. Only a mismatch yields an attention
/// item.
async fn check_database(config: &SyncConfig) -> Result<(), Option<Attention>> {
    let check = async {
        let database = config.server.database();
        let client = config.server.connect(database, "svc-sync-agent").await.map_err(|_| None)?;
        database_identity::check(&config.layout, &client).await.map_err(Some)
    };
    match tokio::time::timeout(DATABASE_TIMEOUT, check).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(Some(error))) if error.is_mismatch() => {
            Err(Some(attention_item("database_mismatch", error.to_string())))
        }
        Ok(Err(_)) | Err(_) => Err(None),
    }
}

/// Measures disk space on the host's file system, or returns `None` on error.
pub fn measure_disk(config: &SyncConfig) -> Option<Disk> {
    let stats = fs4::statvfs(config.layout.root());
    let stats = stats.inspect_err(|error| tracing::warn!(%error, "could not measure disk space")).ok()?;
    Some(Disk { total_bytes: stats.total_space(), free_bytes: stats.available_space() })
}

pub fn read_last_backup(config: &SyncConfig) -> Option<LastBackup> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct BackupRecord {
        #[serde(default, with = "clock::wire_option")]
        timestamp: Option<Timestamp>,
        status: String,
        key: Option<String>,
        size_bytes: Option<u64>,
        error: Option<String>,
    }
    let text = fsx::read_if_exists(&config.layout.last_backup()).ok()??;
    let record: BackupRecord = serde_json::from_slice(&text).ok()?;
    Some(LastBackup {
        taken_at: record.key.as_deref().and_then(key::taken_at).map(Into::into),
        status: WireString::from_stored(record.status),
        began_at: record.timestamp.map(Into::into),
        key: record.key,
        size_bytes: record.size_bytes,
        error: record.error,
    })
}

/// Reads the ids of the proof keys last delivered by the platform, or of those in user-data until the first delivery.
pub fn read_proof_kids(config: &SyncConfig) -> Vec<String> {
    let delivered = fsx::read_if_exists(&config.layout.proof_keys()).ok().flatten();
    let delivered = delivered.and_then(|text| serde_json::from_slice::<ProofKeys>(&text).ok());
    let initial = || config::read_initial_proof_keys(&mut config::environment(&config.layout));
    let keys = delivered.or_else(initial).unwrap_or_default();
    keys.keys.into_iter().map(|key| key.kid).collect()
}
