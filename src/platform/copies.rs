//! Finds the copies of a slot's data: the live server, the kept servers with their retention, and the newest snapshot.
//! Also computes how much data would be lost with the live server.
//!
//! The newest snapshot is the one that the store's pointer names. If the store is unavailable or that snapshot is
//! damaged, it is the newest snapshot that a host has reported.

use std::time::Duration;

use deadpool_postgres::GenericClient;
use jiff::Timestamp;

use super::config::Timing;
use super::db::kept_servers::KeptServerRow;
use super::db::machine_row::MachineRow;
use super::db::{self, DbError};
use svc_base::clock::rfc3339_ms;
use svc_http::problem::format_chain;
use svc_machine::epoch::Epoch;
use svc_machine::id::MachineId;
use svc_machine::name::{IdpUserId, Slot};
use svc_store::Bucket;
use svc_store::key::{self, SlotPrefix};
use svc_store::newer_snapshot;
use svc_store::pointer::SnapshotRef;
use svc_store::snapshot::{self, Sidecar, SnapshotUnusable};
use svc_wire::copies::{self as wire, KeptReason, SnapshotSource, UnsavedData};
use svc_wire::text::WireString;

/// Timeout for finding snapshots in the store.
const STORE_TIMEOUT: Duration = Duration::from_secs(2);

/// The copies of a slot's data that the database records.
pub struct Copies {
    user: IdpUserId,
    slot: Slot,
    live: Option<MachineRow>,
    /// The slot's last registered machine, even if it no longer has a server.
    last_registered: Option<(MachineId, Epoch)>,
    /// An earlier machine's snapshot that is newer than the restored one.
    unrestored: Option<String>,
    kept: Vec<KeptServerRow>,
    reported: Option<NewestSnapshot>,
    now: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct NewestSnapshot {
    taken_at: Timestamp,
    machine: MachineId,
    /// `None` if a host reported it.
    key: Option<String>,
}

/// Loads the copies of the machine's slot.
pub async fn load_copies(
    client: &impl GenericClient,
    machine: &MachineRow,
    timing: &Timing,
) -> Result<Copies, DbError> {
    let (user, slot) = (&machine.user, &machine.slot);
    let machines = db::machines::list_newest_in_slot(client, user, slot).await?;
    let reported = machines.iter().filter_map(reported_snapshot).max_by_key(|newest| newest.taken_at);
    let registered = machines.iter().filter(|machine| machine.registered_at.is_some());
    let last = registered.max_by_key(|machine| machine.epoch);
    let last_registered = last.map(|machine| (machine.id, machine.epoch));
    let unrestored = last.and_then(|machine| machine.unrestored_snapshot.clone());
    Ok(Copies {
        kept: db::kept_servers::list_in_slot(client, user, slot, &timing.server_retention()).await?,
        now: db::servers::now(client).await?,
        live: machines.into_iter().find(|machine| {
            // A machine whose server no longer exists holds no data.
            machine.is_active() && machine.registered_at.is_some() && machine.has_server()
        }),
        last_registered,
        unrestored,
        reported,
        user: user.clone(),
        slot: slot.clone(),
    })
}

fn reported_snapshot(machine: &MachineRow) -> Option<NewestSnapshot> {
    let taken_at = machine.backup_taken_at.max(machine.final_backup_at)?;
    Some(NewestSnapshot { taken_at, machine: machine.id, key: None })
}

impl Copies {
    /// Returns the copies with the store's newest snapshot or, if the store is unavailable or that snapshot is damaged,
    /// the newest snapshot that a host reported. If the store has no snapshot, no newest snapshot is returned, even if
    /// a host reported one.
    pub async fn with_snapshot(&self, bucket: &Bucket) -> wire::Copies {
        let slot = SlotPrefix::new(&self.user, &self.slot);
        let deadline = tokio::time::Instant::now() + STORE_TIMEOUT;
        let result = tokio::time::timeout_at(deadline, snapshot::find_latest(bucket, &slot)).await;
        let mut newer = None;
        let (newest, problem) = match result {
            Ok(Ok(latest)) => {
                if let Some(machine) = self.last_registered {
                    newer = find_newer(bucket, &slot, machine, &latest, deadline).await;
                }
                let (taken_at, machine) = (latest.taken_at, latest.machine_id);
                (Some(NewestSnapshot { taken_at, machine, key: Some(latest.key) }), None)
            }
            Ok(Err(SnapshotUnusable::Absent)) => (None, self.reported.as_ref().map(missing_snapshot_problem)),
            Ok(Err(SnapshotUnusable::Damaged { key, reason })) => {
                (self.reported.clone(), Some(format!("{key} is not usable: {reason}")))
            }
            Ok(Err(SnapshotUnusable::Store(error))) => {
                tracing::warn!(error = %format_chain(&error), "cannot find the newest snapshot");
                (self.reported.clone(), Some("the object store cannot be read".to_owned()))
            }
            Err(_) => (self.reported.clone(), Some("the object store is not responding".to_owned())),
        };
        wire::Copies {
            live: self.live.as_ref().map(to_live_server),
            kept: self.kept.iter().map(to_kept_server).collect(),
            newest_snapshot_at: newest.as_ref().map(|newest| newest.taken_at.into()),
            newest_snapshot: newest.as_ref().map(to_newest_snapshot),
            snapshot_problem: problem,
            exposed_seconds: self.live.as_ref().map(|live| unsaved_seconds(live, newest.as_ref(), self.now)),
            newer_snapshot: newer.as_ref().map(to_newer_snapshot),
            unrestored_snapshot: self.unrestored.as_deref().map(to_unrestored_snapshot),
        }
    }
}

fn to_newest_snapshot(newest: &NewestSnapshot) -> wire::NewestSnapshot {
    let source = if newest.key.is_some() { SnapshotSource::Store } else { SnapshotSource::Reported };
    wire::NewestSnapshot {
        taken_at: newest.taken_at.into(),
        machine_id: newest.machine.into(),
        key: newest.key.clone(),
        source: source.into(),
    }
}

fn to_unrestored_snapshot(key: &str) -> wire::UnrestoredSnapshot {
    wire::UnrestoredSnapshot { key: key.to_owned(), taken_at: key::taken_at(key).map(Into::into) }
}

/// Returns the API representation of a complete snapshot that is newer than the pointer's snapshot or, in a recovery,
/// than the snapshot to restore.
pub fn to_newer_snapshot(sidecar: &Sidecar) -> wire::NewerSnapshot {
    wire::NewerSnapshot {
        taken_at: sidecar.taken_at.into(),
        machine_id: sidecar.machine_id.into(),
        key: sidecar.key.clone(),
    }
}

/// Like [`newer_snapshot::find`], but with a deadline. Also returns `None` after the deadline, or if the store is
/// unavailable.
async fn find_newer(
    bucket: &Bucket,
    slot: &SlotPrefix,
    machine: (MachineId, Epoch),
    current: &SnapshotRef,
    deadline: tokio::time::Instant,
) -> Option<Sidecar> {
    let result =
        tokio::time::timeout_at(deadline, newer_snapshot::find(bucket, slot, machine, current)).await;
    match result {
        Ok(Ok(newer)) => newer,
        Ok(Err(error)) => {
            tracing::warn!(error = %format_chain(&error), "cannot find a newer snapshot");
            None
        }
        Err(_) => {
            tracing::warn!("finding a newer snapshot timed out");
            None
        }
    }
}

/// Finds a complete snapshot of this machine that is newer than `current`, the snapshot to restore. The response to a
/// recovery request warns the operator about it. Also returns `None` if the store is unavailable or slow.
pub async fn find_newer_for_machine(
    bucket: &Bucket,
    machine: &MachineRow,
    current: &SnapshotRef,
) -> Option<Sidecar> {
    let slot = SlotPrefix::new(&machine.user, &machine.slot);
    let deadline = tokio::time::Instant::now() + STORE_TIMEOUT;
    find_newer(bucket, &slot, (machine.id, machine.epoch), current, deadline).await
}

fn missing_snapshot_problem(reported: &NewestSnapshot) -> String {
    format!(
        "the object store has no snapshot, although a host reported one taken at {}",
        rfc3339_ms(reported.taken_at)
    )
}

fn to_live_server(machine: &MachineRow) -> wire::LiveServer {
    wire::LiveServer {
        machine_id: machine.id.into(),
        provider_server_id: machine.provider_server_id.map(|id| id.to_string()),
        missing_since: machine.server_missing_since.map(Into::into),
    }
}

/// Returns which data may exist only on a server: the owner's files if `is_files_only`, otherwise any changes. Returns
/// `None` if `since` is `None`.
pub fn to_unsaved_data(since: Option<Timestamp>, is_files_only: bool) -> Option<WireString<UnsavedData>> {
    let data = if is_files_only { UnsavedData::Files } else { UnsavedData::Changes };
    since.map(|_| data.into())
}

fn to_kept_server(row: &KeptServerRow) -> wire::KeptServer {
    let reason = if row.is_deleted { KeptReason::Deleted } else { KeptReason::Replaced };
    wire::KeptServer {
        machine_id: row.machine.into(),
        provider_server_id: Some(row.server.to_string()),
        reason: reason.into(),
        // Retention does not apply to a server that is already being deleted.
        until: row.until.filter(|_| row.deleted_by.is_none()).map(Into::into),
        deleted_by: row.deleted_by.map(Into::into),
        unsaved_since: row.unsaved_since.map(Into::into),
        unsaved_data: to_unsaved_data(row.unsaved_since, row.has_unsaved_files_only),
        missing_since: row.missing_since.map(Into::into),
        removal_abandoned_at: row.removal_abandoned_at.map(Into::into),
    }
}

/// Returns how many seconds of the live machine's writes may be missing from every snapshot. If the newest snapshot is
/// another machine's, it may lack everything that the live machine has written since its own last snapshot.
fn unsaved_seconds(live: &MachineRow, newest: Option<&NewestSnapshot>, now: Timestamp) -> u64 {
    let since = match newest {
        Some(newest) if newest.machine == live.id => Some(newest.taken_at),
        // A machine writes nothing before its registration, even if it restored a much older snapshot.
        Some(newest) => live.registered_at.map(|registered_at| {
            let own_backup_at = live.backup_taken_at.unwrap_or(registered_at);
            own_backup_at.min(newest.taken_at.max(registered_at))
        }),
        None => live.registered_at,
    };
    now.duration_since(since.unwrap_or(now)).as_secs().max(0).unsigned_abs()
}
