//! The existing copies of a slot's data: the serving server, the kept servers with their retention, the newest
//! snapshot, and what a loss of the serving machine would cost now.
//!
//! The newest snapshot is the one that the store's pointer names. Reports from hosts are used only if the store is
//! unavailable.

use std::time::Duration;

use deadpool_postgres::GenericClient;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::config::Timing;
use super::db::kept_servers::KeptServerRow;
use super::db::machine_row::MachineRow;
use super::db::{self, DbError};
use svc_base::clock::rfc3339_ms;
use svc_http::problem::chain;
use svc_machine::epoch::Epoch;
use svc_machine::id::MachineId;
use svc_machine::name::{IdpUserId, Slot};
use svc_store::Bucket;
use svc_store::key::{self, SlotPrefix};
use svc_store::newer_snapshot;
use svc_store::pointer::SnapshotRef;
use svc_store::snapshot::{self, SideRecord, SnapshotUnusable};

/// Timeout of finding the newest snapshot in the store.
const STORE_TIMEOUT: Duration = Duration::from_secs(2);

/// The copies of a slot that the database knows.
pub struct Copies {
    user: IdpUserId,
    slot: Slot,
    live: Option<MachineRow>,
    /// The last machine that has served the slot, even if it has no server.
    holder: Option<(MachineId, Epoch)>,
    /// A snapshot of an earlier machine that is newer than the restored one.
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

/// The copies of the machine's slot.
///
/// # Errors
/// [`DbError`].
pub async fn of_slot(
    client: &impl GenericClient,
    machine: &MachineRow,
    timing: &Timing,
) -> Result<Copies, DbError> {
    let (user, slot) = (&machine.user, &machine.slot);
    let machines = db::machines::newest_of_slot(client, user, slot).await?;
    let reported = machines.iter().filter_map(reported_by).max_by_key(|newest| newest.taken_at);
    let served = machines.iter().filter(|one| one.registered_at.is_some());
    let last = served.max_by_key(|one| one.epoch);
    let holder = last.map(|one| (one.id, one.epoch));
    let unrestored = last.and_then(|one| one.unrestored_snapshot.clone());
    Ok(Copies {
        kept: db::kept_servers::of_slot(client, user, slot, &timing.server_retention()).await?,
        now: db::servers::now(client).await?,
        live: machines.into_iter().find(|one| {
            // A machine whose server is gone holds no data.
            one.is_active() && one.registered_at.is_some() && one.server_exists()
        }),
        holder,
        unrestored,
        reported,
        user: user.clone(),
        slot: slot.clone(),
    })
}

fn reported_by(machine: &MachineRow) -> Option<NewestSnapshot> {
    let taken_at = machine.backup_taken_at.max(machine.final_backup_at)?;
    Some(NewestSnapshot { taken_at, machine: machine.id, key: None })
}

impl Copies {
    /// The copies with the store's newest snapshot or, after a timeout, the newest reported one.
    pub async fn with_snapshot(&self, bucket: &Bucket) -> Value {
        let slot = SlotPrefix::new(&self.user, &self.slot);
        let deadline = tokio::time::Instant::now() + STORE_TIMEOUT;
        let named = tokio::time::timeout_at(deadline, snapshot::latest(bucket, &slot)).await;
        let mut newer = None;
        let (newest, problem) = match named {
            Ok(Ok(named)) => {
                if let Some(holder) = self.holder {
                    newer = find_newer(bucket, &slot, holder, &named, deadline).await;
                }
                let (taken_at, machine) = (named.taken_at, named.machine_id);
                (Some(NewestSnapshot { taken_at, machine, key: Some(named.key) }), None)
            }
            Ok(Err(SnapshotUnusable::Absent)) => (None, self.reported.as_ref().map(no_snapshot_in_store)),
            Ok(Err(SnapshotUnusable::Damaged { key, why })) => {
                (self.reported.clone(), Some(format!("{key} is not usable: {why}")))
            }
            Ok(Err(SnapshotUnusable::Store(error))) => {
                tracing::warn!(error = %chain(&error), "cannot find the newest snapshot");
                (self.reported.clone(), Some(STORE_UNAVAILABLE.to_owned()))
            }
            Err(_) => (self.reported.clone(), Some(STORE_UNAVAILABLE.to_owned())),
        };
        let mut record = self.record(newest.as_ref(), problem.as_deref());
        record["newerSnapshot"] = newer.as_ref().map_or(Value::Null, newer_record);
        record["unrestoredSnapshot"] = self
            .unrestored
            .as_deref()
            .map_or(Value::Null, |key| json!({"key": key, "takenAt": key::taken_at(key).map(rfc3339_ms)}));
        record
    }

    fn record(&self, newest: Option<&NewestSnapshot>, problem: Option<&str>) -> Value {
        let snapshot = newest.map(|newest| {
            json!({
                "takenAt": rfc3339_ms(newest.taken_at),
                "machineId": newest.machine,
                "key": newest.key,
                "source": if newest.key.is_some() { "store" } else { "reported" },
            })
        });
        json!({
            "live": self.live.as_ref().map(live_record),
            "kept": self.kept.iter().map(kept_record).collect::<Vec<_>>(),
            "newestSnapshotAt": newest.map(|newest| rfc3339_ms(newest.taken_at)),
            "newestSnapshot": snapshot,
            "snapshotProblem": problem,
            "exposedSeconds": self.live.as_ref().map(|live| unsaved_seconds(live, newest, self.now)),
        })
    }
}

/// `newerSnapshot` in the API's format.
pub fn newer_record(side: &SideRecord) -> Value {
    json!({"takenAt": rfc3339_ms(side.taken_at), "machineId": side.machine_id, "key": side.key})
}

/// [`newer_snapshot::find`] with a deadline; `None` also if the store is unavailable.
async fn find_newer(
    bucket: &Bucket,
    slot: &SlotPrefix,
    holder: (MachineId, Epoch),
    named: &SnapshotRef,
    deadline: tokio::time::Instant,
) -> Option<SideRecord> {
    let found = tokio::time::timeout_at(deadline, newer_snapshot::find(bucket, slot, holder, named)).await;
    match found {
        Ok(Ok(newer)) => newer,
        Ok(Err(error)) => {
            tracing::warn!(error = %chain(&error), "cannot list snapshots newer than the latest one");
            None
        }
        Err(_) => {
            tracing::warn!("timeout while listing snapshots newer than the latest one");
            None
        }
    }
}

/// The newer snapshot that an operator is warned about before a recovery of the machine.
pub async fn newer_than(bucket: &Bucket, machine: &MachineRow, named: &SnapshotRef) -> Option<SideRecord> {
    let slot = SlotPrefix::new(&machine.user, &machine.slot);
    let deadline = tokio::time::Instant::now() + STORE_TIMEOUT;
    find_newer(bucket, &slot, (machine.id, machine.epoch), named, deadline).await
}

const STORE_UNAVAILABLE: &str = "the object store does not answer";

fn no_snapshot_in_store(reported: &NewestSnapshot) -> String {
    format!(
        "the object store has no snapshot, although a host reported one of {}",
        rfc3339_ms(reported.taken_at)
    )
}

fn live_record(machine: &MachineRow) -> Value {
    json!({
        "machineId": machine.id,
        "providerServerId": machine.provider_server_id.map(|id| id.to_string()),
        "missingSince": machine.server_missing_since.map(rfc3339_ms),
    })
}

fn kept_record(row: &KeptServerRow) -> Value {
    json!({
        "machineId": row.machine,
        "providerServerId": row.server.to_string(),
        "reason": if row.is_deleted { "deleted" } else { "replaced" },
        // Its retention does not apply: it is deleted when that operation has switched it off.
        "until": row.until.filter(|_| row.deleted_by.is_none()).map(rfc3339_ms),
        "deletedBy": row.deleted_by,
        "unsavedSince": row.unsaved_since.map(rfc3339_ms),
        "missingSince": row.missing_since.map(rfc3339_ms),
        "removalAbandonedAt": row.removal_abandoned_at.map(rfc3339_ms),
    })
}

/// Seconds of writes to the serving machine that no snapshot may hold. A snapshot of another machine may lack what
/// this one wrote since its own last one.
fn unsaved_seconds(live: &MachineRow, newest: Option<&NewestSnapshot>, now: Timestamp) -> i64 {
    let own = live.backup_taken_at.or(live.registered_at);
    let since = match newest {
        Some(newest) if newest.machine == live.id => Some(newest.taken_at),
        Some(newest) => own.map(|own| own.min(newest.taken_at)).or(Some(newest.taken_at)),
        None => live.registered_at,
    };
    now.duration_since(since.unwrap_or(now)).as_secs().max(0)
}
