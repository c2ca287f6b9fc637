//! Who writes the pointer: hosts after each backup, platforms before each new machine. They run the product's own code;
//! the careless ones, which break one rule each, are the test's.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use jiff::{SignedDuration, Timestamp};
use svc::machine::epoch::Epoch;
use svc::machine::id::MachineId;
use svc::machine::name::Slot;
use svc::store::Bucket;
use svc::store::bucket::Condition;
use svc::store::key::{SlotPrefix, snapshot_key};
use svc::store::pointer::{FORMAT, Fence, Pointer};
use svc::store::pointer_io::{self, PointerError, PointerRead};
use svc::store::snapshot::{self, Recorded, SideRecord, SnapshotUnusable};
use tokio::sync::watch;

use super::history::History;

/// How often somebody tries again what the store failed.
const PATIENCE: u32 = 12;

/// The rule that one actor does not keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Careless {
    /// A host that does not look at the fence.
    Fence,
    /// A host that names its snapshot before the side record is written.
    Order,
    /// A host that takes an error for a success.
    Success,
    /// A platform that puts the fence where its machine is, whatever stands there.
    Lowering,
    /// A platform that writes a tombstone over what is there.
    Tombstone,
}

pub fn slot() -> SlotPrefix {
    SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary())
}

/// What is known outside of the store.
pub struct Outside {
    /// The highest epoch whose fence stands, as its platform saw it.
    pub fenced: watch::Sender<u32>,
    clock: AtomicU32,
}

impl Outside {
    pub fn new() -> Arc<Self> {
        Arc::new(Self { fenced: watch::channel(0).0, clock: AtomicU32::new(0) })
    }
}

/// The machine of an epoch.
pub fn machine(epoch: u32) -> MachineId {
    MachineId(uuid::Uuid::from_u128(u128::from(epoch)))
}

/// What a backup leaves in the store before the pointer moves.
pub fn side_record(epoch: Epoch, at: Timestamp) -> SideRecord {
    SideRecord {
        version: snapshot::FORMAT,
        key: snapshot_key(at, epoch),
        size_bytes: 4,
        sha256: "ab".repeat(32),
        pg_version: "16.14".to_owned(),
        machine_id: machine(epoch.0),
        epoch,
        taken_at: at,
        verified_at: at,
        roles: Vec::new(),
        tables: Vec::new(),
        database: None,
        database_identity: None,
    }
}

/// A platform that prepares the machine of `epoch`, asked again until the fence stands or a later one does.
pub async fn platform(bucket: Bucket, outside: Arc<Outside>, epoch: u32, careless: Option<Careless>) {
    let _ = outside.fenced.subscribe().wait_for(|fenced| *fenced + 1 >= epoch).await;
    for _ in 0..PATIENCE {
        let end = match careless {
            Some(Careless::Lowering | Careless::Tombstone) => careless_fence(&bucket, epoch, careless).await,
            _ => pointer_io::fence(&bucket, &slot(), &Fence::unsigned(Epoch(epoch), machine(epoch))).await,
        };
        match end {
            Ok(()) => {
                outside.fenced.send_if_modified(|fenced| {
                    let later = epoch > *fenced;
                    *fenced = epoch.max(*fenced);
                    later
                });
                return;
            }
            Err(PointerError::Fenced(_)) => return,
            Err(_) => {}
        }
    }
}

/// The machine of `epoch`, which runs once its fence stands, and backs up that often.
pub async fn host(
    bucket: Bucket,
    outside: Arc<Outside>,
    history: impl Fn(&mut dyn FnMut(&mut History)),
    (epoch, backups): (u32, u32),
    careless: Option<Careless>,
) {
    let _ = outside.fenced.subscribe().wait_for(|fenced| *fenced >= epoch).await;
    let mine = Epoch(epoch);
    for _ in 0..backups {
        let seconds = outside.clock.fetch_add(1, Relaxed);
        let at = Timestamp::UNIX_EPOCH + SignedDuration::from_secs(i64::from(seconds));
        let side = side_record(mine, at);
        let Ok(pointer) = pointer_io::read(&bucket, &slot()).await else { continue };
        let fenced = pointer.is_some_and(|pointer| pointer.value.admit(mine, machine(epoch)).is_err());
        if fenced && careless != Some(Careless::Fence) {
            return;
        }
        let object = slot().snapshot(&side.key).unwrap();
        if bucket.put(&object, &b"dump"[..]).await.is_err() {
            continue;
        }
        let end = match careless {
            Some(Careless::Fence | Careless::Order) => careless_advance(&bucket, &side, careless).await,
            _ => match snapshot::record(&bucket, &slot(), &side, None).await {
                Ok(recorded) => pointer_io::advance(&bucket, &slot(), &recorded).await,
                Err(error) => Err(error.into()),
            },
        };
        match end {
            Ok(()) => history(&mut |history| history.told_of_success(&side.key)),
            Err(PointerError::Fenced(_)) => return,
            Err(_) if careless == Some(Careless::Success) => {
                history(&mut |history| history.told_of_success(&side.key));
            }
            Err(_) => {}
        }
    }
}

/// The last step of a backup whose dump and side record are in the store.
pub async fn advance(bucket: Bucket, history: impl Fn(&mut dyn FnMut(&mut History)), recorded: Recorded) {
    for _ in 0..PATIENCE {
        match pointer_io::advance(&bucket, &slot(), &recorded).await {
            Ok(()) => return history(&mut |history| history.told_of_success(&recorded.named().key)),
            Err(PointerError::Fenced(_)) => return,
            Err(_) => {}
        }
    }
}

/// Looks for the latest snapshot, as a recovery does. What was claimed before must be seen, and what was named before
/// must be usable.
pub async fn reader(bucket: Bucket, history: impl Fn(&mut dyn FnMut(&mut History)), looks: u32) {
    for _ in 0..looks {
        let (mut seq, mut named) = (0, false);
        history(&mut |history| (seq, named) = (history.seq(), history.names_snapshot()));
        if let Ok(read) = pointer_io::read(&bucket, &slot()).await
            && read.map_or(0, |read| read.value.seq) < seq
        {
            history(&mut History::saw_the_past);
        }
        match snapshot::latest(&bucket, &slot()).await {
            Err(SnapshotUnusable::Damaged { .. } | SnapshotUnusable::Absent) if named => {
                history(&mut History::saw_damage)
            }
            _ => {}
        }
    }
}

async fn careless_fence(bucket: &Bucket, epoch: u32, careless: Option<Careless>) -> Result<(), PointerError> {
    let now = pointer_io::read(bucket, &slot()).await?;
    let old = now.as_ref().map(|now| now.value.clone());
    let fence_epoch = match careless {
        Some(Careless::Lowering) => Epoch(epoch),
        _ => old.as_ref().map_or(Epoch(epoch), |old| old.fence_epoch.max(Epoch(epoch))),
    };
    let snapshot = old.as_ref().and_then(|old| old.snapshot.clone());
    let snapshot = snapshot.filter(|_| careless != Some(Careless::Tombstone));
    let next = Pointer {
        version: FORMAT,
        fence_epoch,
        fence_machine_id: Some(machine(epoch)),
        fence_proof: None,
        seq: old.map_or(0, |old| old.seq) + 1,
        snapshot,
        emptied_at: None,
    };
    write(bucket, now, &next).await
}

/// As the product writes: the entry of the log, then `latest`.
async fn write(bucket: &Bucket, now: Option<PointerRead>, next: &Pointer) -> Result<(), PointerError> {
    bucket.put_json_if(&slot().pointer_entry(next.seq), next, Condition::Absent).await?;
    let condition = now.map_or(Condition::Absent, |now| now.condition());
    Ok(bucket.put_json_if(&slot().pointer(), next, condition).await?)
}

async fn careless_advance(
    bucket: &Bucket,
    side: &SideRecord,
    careless: Option<Careless>,
) -> Result<(), PointerError> {
    let now = pointer_io::read(bucket, &slot()).await?;
    let old = now.as_ref().map(|now| &now.value);
    let next = Pointer {
        version: FORMAT,
        fence_epoch: old.map_or(side.epoch, |old| old.fence_epoch.max(side.epoch)),
        fence_machine_id: Some(side.machine_id),
        fence_proof: None,
        seq: old.map_or(0, |old| old.seq) + 1,
        snapshot: Some(side.named()),
        emptied_at: None,
    };
    if careless == Some(Careless::Fence) {
        snapshot::record(bucket, &slot(), side, None).await?;
    }
    write(bucket, now, &next).await?;
    if careless == Some(Careless::Order) {
        snapshot::record(bucket, &slot(), side, None).await?;
    }
    Ok(())
}
