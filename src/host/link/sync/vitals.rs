//! The health of the machine: gateway, database, disk, last backup, and accepted proof keys.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::config::SyncConfig;
use crate::snapshots::check_log::{Check, CheckKind, Status};
use crate::snapshots::database_identity;
use crate::snapshots::held_snapshot::HeldSnapshot;
use crate::system::config;
use crate::system::probe;
use crate::system::probe::Gateway;
use crate::update::protocol::SnapshotWait;
use svc_base::clock;
use svc_base::fsx;
use svc_http::proof::ProofKeys;
use svc_store::key;

const DATABASE_TIMEOUT: Duration = Duration::from_secs(5);
/// The platform accepts at most this number.
const MAX_DAMAGED_KEYS: usize = 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ComponentHealth {
    Ok,
    Failing,
}

impl From<bool> for ComponentHealth {
    fn from(ok: bool) -> Self {
        if ok { Self::Ok } else { Self::Failing }
    }
}

#[derive(Debug, Serialize)]
pub struct Health {
    pub gateway: ComponentHealth,
    pub database: ComponentHealth,
}

impl Health {
    pub fn is_ok(&self) -> bool {
        self.gateway == ComponentHealth::Ok && self.database == ComponentHealth::Ok
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Disk {
    pub total_bytes: u64,
    pub free_bytes: u64,
}

/// The fields of the last backup run that the platform needs.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LastBackup {
    pub status: String,
    /// The start of the run, by this machine's clock.
    #[serde(skip_serializing_if = "Option::is_none", with = "clock::wire_option")]
    pub began_at: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none", with = "clock::wire_option")]
    pub taken_at: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The last check of snapshots of one kind.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LastCheck {
    pub status: Status,
    #[serde(with = "clock::wire")]
    pub at: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// At most `MAX_DAMAGED_KEYS` damaged snapshots.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub damaged: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The last check of every kind that has run.
pub fn checks(config: &SyncConfig) -> BTreeMap<&'static str, LastCheck> {
    let last = |kind: CheckKind| {
        let Check { status, timestamp, key, mut damaged, error, .. } =
            Check::last(&config.layout, kind).ok()??;
        damaged.truncate(MAX_DAMAGED_KEYS);
        Some((kind.as_str(), LastCheck { status, at: timestamp, key, damaged, error }))
    };
    CheckKind::ALL.iter().copied().filter_map(last).collect()
}

/// A condition that needs a person, as text for the fleet's list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Attention {
    pub code: &'static str,
    pub detail: String,
}

pub async fn health(config: &SyncConfig) -> (Health, Vec<Attention>) {
    let (gateway, database) = tokio::join!(gateway_is_ready(config), check_database(config));
    let health = Health { gateway: gateway.into(), database: database.is_ok().into() };
    let mut attention: Vec<Attention> = database.err().flatten().into_iter().collect();
    attention.extend(held_snapshot(config));
    attention.extend(waiting_update(config));
    (health, attention)
}

/// A snapshot that did not become the latest.
fn held_snapshot(config: &SyncConfig) -> Option<Attention> {
    let held = HeldSnapshot::read(&config.layout).ok()??;
    Some(Attention { code: "snapshot_held", detail: held.to_string() })
}

/// An update that is waiting for a snapshot.
fn waiting_update(config: &SyncConfig) -> Option<Attention> {
    let (version, SnapshotWait { since, why }) = SnapshotWait::read(&config.layout).ok()??;
    if why.is_empty() {
        return None;
    }
    let since = clock::rfc3339_ms(since);
    let detail = format!("the update to {version} waits for a snapshot since {since}: {why}");
    Some(Attention { code: "update_waiting", detail })
}

async fn gateway_is_ready(config: &SyncConfig) -> bool {
    let Ok(Some(pin)) = probe::pin(&config.layout) else { return false };
    match Gateway::new(config.listen, pin) {
        Ok(gateway) => gateway.is_ready().await,
        Err(_) => false,
    }
}

/// Checks that the database is reachable and is the one restored here. The error holds a mismatch, if that is the
/// reason.
async fn check_database(config: &SyncConfig) -> Result<(), Option<Attention>> {
    let check = async {
        let database = config.server.database();
        let client = config.server.connect(database, "svc-sync-agent").await.map_err(|_| None)?;
        database_identity::check(&config.layout, &client).await.map_err(Some)
    };
    match tokio::time::timeout(DATABASE_TIMEOUT, check).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(Some(error))) if error.is_mismatch() => {
            Err(Some(Attention { code: "database_mismatch", detail: error.to_string() }))
        }
        Ok(Err(_)) | Err(_) => Err(None),
    }
}

/// The space of the owner's file system.
pub fn disk(config: &SyncConfig) -> Option<Disk> {
    let stats = fs4::statvfs(config.layout.root()).ok()?;
    Some(Disk { total_bytes: stats.total_space(), free_bytes: stats.available_space() })
}

pub fn last_backup(config: &SyncConfig) -> Option<LastBackup> {
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
        taken_at: record.key.as_deref().and_then(key::taken_at),
        status: record.status,
        began_at: record.timestamp,
        key: record.key,
        size_bytes: record.size_bytes,
        error: record.error,
    })
}

/// The ids of the proof keys that were delivered last, or those of user-data.
pub fn proof_kids(config: &SyncConfig) -> Vec<String> {
    let delivered = fsx::read_if_exists(&config.layout.proof_keys()).ok().flatten();
    let delivered = delivered.and_then(|text| serde_json::from_slice::<ProofKeys>(&text).ok());
    let first = || config::first_proof_keys(&mut config::environment(&config.layout));
    let keys = delivered.or_else(first).unwrap_or_default();
    keys.keys.into_iter().map(|key| key.kid).collect()
}
