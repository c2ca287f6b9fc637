//! How the machine is: gateway, database, disk, the last backup, the proof keys that it accepts.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::Settings;
use crate::clock;
use crate::fsx;
use crate::host::snapshots::check_log::{Check, CheckKind, Status};
use crate::host::snapshots::database_identity;
use crate::host::snapshots::held_snapshot::HeldSnapshot;
use crate::host::system::config;
use crate::host::system::probe;
use crate::host::system::probe::Gateway;
use crate::host::update::protocol::SnapshotWait;
use crate::http::proof::ProofKeys;
use crate::store::key;

const DATABASE_DEADLINE: Duration = Duration::from_secs(5);
/// The platform takes no more at one time.
const MOST_DAMAGED: usize = 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Ok,
    Failing,
}

impl From<bool> for State {
    fn from(ok: bool) -> Self {
        if ok { Self::Ok } else { Self::Failing }
    }
}

#[derive(Debug, Serialize)]
pub struct Health {
    pub gateway: State,
    pub database: State,
}

impl Health {
    pub fn is_ok(&self) -> bool {
        self.gateway == State::Ok && self.database == State::Ok
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Disk {
    pub total_bytes: u64,
    pub free_bytes: u64,
}

/// The last run of the backup, as far as the platform wants to know.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LastBackup {
    pub status: String,
    /// When the run began, by this machine's clock.
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

/// The last look of a kind at snapshots.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LastCheck {
    pub status: Status,
    #[serde(with = "clock::wire")]
    pub at: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The first of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub damaged: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Of every kind that there was one of.
pub fn checks(settings: &Settings) -> BTreeMap<&'static str, LastCheck> {
    let last = |kind: CheckKind| {
        let Check { status, timestamp, key, mut damaged, error, .. } =
            Check::last(&settings.layout, kind).ok()??;
        damaged.truncate(MOST_DAMAGED);
        Some((kind.as_str(), LastCheck { status, at: timestamp, key, damaged, error }))
    };
    CheckKind::ALL.into_iter().filter_map(last).collect()
}

/// Something that a person has to look at, in words for the fleet's list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Attention {
    pub code: &'static str,
    pub detail: String,
}

pub async fn health(settings: &Settings) -> (Health, Vec<Attention>) {
    let (gateway, database) = tokio::join!(gateway_is_ready(settings), database_is_ours(settings));
    let health = Health { gateway: gateway.into(), database: database.is_ok().into() };
    let mut attention: Vec<Attention> = database.err().flatten().into_iter().collect();
    attention.extend(held_snapshot(settings));
    attention.extend(waiting_update(settings));
    (health, attention)
}

/// A snapshot that did not become the latest.
fn held_snapshot(settings: &Settings) -> Option<Attention> {
    let held = HeldSnapshot::read(&settings.layout).ok()??;
    Some(Attention { code: "snapshot_held", detail: held.to_string() })
}

/// An update that is not made before a snapshot is.
fn waiting_update(settings: &Settings) -> Option<Attention> {
    let (version, SnapshotWait { since, why }) = SnapshotWait::read(&settings.layout).ok()??;
    if why.is_empty() {
        return None;
    }
    let since = clock::rfc3339_ms(since);
    let detail = format!("the update to {version} waits for a snapshot since {since}: {why}");
    Some(Attention { code: "update_waiting", detail })
}

async fn gateway_is_ready(settings: &Settings) -> bool {
    let Ok(Some(pin)) = probe::pin(&settings.layout) else { return false };
    match Gateway::new(settings.listen, pin) {
        Ok(gateway) => gateway.is_ready().await,
        Err(_) => false,
    }
}

/// The database answers, and is the one that was restored here; else what is to be said of it, if anything.
async fn database_is_ours(settings: &Settings) -> Result<(), Option<Attention>> {
    let asked = async {
        let database = settings.server.database();
        let client = settings.server.connect(database, "svc-sync-agent").await.map_err(|_| None)?;
        database_identity::check(&settings.layout, &client).await.map_err(Some)
    };
    match tokio::time::timeout(DATABASE_DEADLINE, asked).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(Some(error))) if error.is_mismatch() => {
            Err(Some(Attention { code: "database_mismatch", detail: error.to_string() }))
        }
        Ok(Err(_)) | Err(_) => Err(None),
    }
}

/// Of the file system that the owner's files lie on.
pub fn disk(settings: &Settings) -> Option<Disk> {
    let stats = fs4::statvfs(settings.layout.root()).ok()?;
    Some(Disk { total_bytes: stats.total_space(), free_bytes: stats.available_space() })
}

pub fn last_backup(settings: &Settings) -> Option<LastBackup> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Record {
        #[serde(default, with = "clock::wire_option")]
        timestamp: Option<Timestamp>,
        status: String,
        key: Option<String>,
        size_bytes: Option<u64>,
        error: Option<String>,
    }
    let text = fsx::read_if_there(&settings.layout.last_backup()).ok()??;
    let record: Record = serde_json::from_slice(&text).ok()?;
    Some(LastBackup {
        taken_at: record.key.as_deref().and_then(key::taken_at),
        status: record.status,
        began_at: record.timestamp,
        key: record.key,
        size_bytes: record.size_bytes,
        error: record.error,
    })
}

/// The keys that were delivered last, or the first ones of user-data.
pub fn proof_kids(settings: &Settings) -> Vec<String> {
    let delivered = fsx::read_if_there(&settings.layout.proof_keys()).ok().flatten();
    let delivered = delivered.and_then(|text| serde_json::from_slice::<ProofKeys>(&text).ok());
    let first = || config::first_proof_keys(&mut config::environment(&settings.layout));
    let keys = delivered.or_else(first).unwrap_or_default();
    keys.keys.into_iter().map(|key| key.kid).collect()
}
