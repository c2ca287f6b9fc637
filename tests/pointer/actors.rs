//! The actors: hosts write the pointer after each backup, platforms before each new machine, and readers read it. They
//! run the product's code, except that each faulty writer breaks one rule.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use jiff::{SignedDuration, Timestamp};
use svc::machine::epoch::Epoch;
use svc::machine::id::MachineId;
use svc::machine::name::Slot;
use svc::store::Bucket;
use svc::store::bucket::Condition;
use svc::store::key::{SlotPrefix, snapshot_key};
use svc::store::pointer::{FORMAT_VERSION, Fence, Pointer};
use svc::store::pointer_io::{self, PointerError, PointerRead};
use svc::store::snapshot::{self, Sidecar, SnapshotUnusable};
use svc::store::snapshot_with_sidecar::SnapshotWithSidecar;
use tokio::sync::watch;

use super::history::History;

/// Maximum number of attempts to write a fence or to advance the pointer, while the store fails.
const MAX_ATTEMPTS: u32 = 12;

/// The rule that a faulty actor breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BrokenRule {
    /// A host checks the fence before it writes.
    FenceCheck,
    /// A host writes the sidecar before it advances the pointer.
    WriteOrder,
    /// A host does not treat an error as a success.
    ErrorReporting,
    /// A platform never lowers the fence.
    MonotonicFence,
    /// A platform keeps the pointer's snapshot.
    SnapshotRetention,
}

pub fn slot() -> SlotPrefix {
    SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary())
}

/// State that the actors share outside the store.
pub struct ExternalState {
    /// The highest epoch whose fence a platform has written.
    pub fenced: watch::Sender<u32>,
    clock: AtomicU32,
}

impl ExternalState {
    pub fn new() -> Arc<Self> {
        Arc::new(Self { fenced: watch::channel(0).0, clock: AtomicU32::new(0) })
    }
}

/// Returns the machine for an epoch.
pub fn machine(epoch: u32) -> MachineId {
    MachineId(uuid::Uuid::from_u128(u128::from(epoch)))
}

/// Returns the sidecar of a backup, written before the pointer advances.
pub fn sidecar(epoch: Epoch, taken_at: Timestamp) -> Sidecar {
    Sidecar {
        version: snapshot::FORMAT_VERSION,
        key: snapshot_key(taken_at, epoch),
        size_bytes: 4,
        sha256: "ab".repeat(32),
        pg_version: "16.14".to_owned(),
        machine_id: machine(epoch.0),
        epoch,
        taken_at,
        verified_at: taken_at,
        roles: Vec::new(),
        tables: Vec::new(),
        database: None,
        database_identity: None,
    }
}

/// Runs a platform that prepares the machine for `epoch`, once the previous epoch's fence has been written. It makes up
/// to [`MAX_ATTEMPTS`] attempts, until that machine's fence or a later one has been written.
pub async fn run_platform(
    bucket: Bucket,
    external: Arc<ExternalState>,
    epoch: u32,
    broken_rule: Option<BrokenRule>,
) {
    let _ = external.fenced.subscribe().wait_for(|fenced| *fenced + 1 >= epoch).await;
    for _ in 0..MAX_ATTEMPTS {
        let result = match broken_rule {
            Some(BrokenRule::MonotonicFence | BrokenRule::SnapshotRetention) => {
                write_faulty_fence(&bucket, epoch, broken_rule).await
            }
            _ => pointer_io::fence(&bucket, &slot(), &Fence::unsigned(Epoch(epoch), machine(epoch))).await,
        };
        match result {
            Ok(()) => {
                external.fenced.send_if_modified(|fenced| {
                    let is_later = epoch > *fenced;
                    *fenced = epoch.max(*fenced);
                    is_later
                });
                return;
            }
            Err(PointerError::Fenced(_)) => return,
            Err(_) => {}
        }
    }
}

/// Runs the host for `epoch`, which starts once its fence has been written. It attempts the given number of backups,
/// and stops early if it is fenced.
pub async fn run_host(
    bucket: Bucket,
    external: Arc<ExternalState>,
    with_history: impl Fn(&mut dyn FnMut(&mut History)),
    (epoch, backups): (u32, u32),
    broken_rule: Option<BrokenRule>,
) {
    let _ = external.fenced.subscribe().wait_for(|fenced| *fenced >= epoch).await;
    let own_epoch = Epoch(epoch);
    for _ in 0..backups {
        let seconds = external.clock.fetch_add(1, Relaxed);
        let taken_at = Timestamp::UNIX_EPOCH + SignedDuration::from_secs(i64::from(seconds));
        let sidecar = sidecar(own_epoch, taken_at);
        let Ok(pointer) = pointer_io::read(&bucket, &slot()).await else { continue };
        let is_fenced =
            pointer.is_some_and(|pointer| pointer.value.admit(own_epoch, machine(epoch)).is_err());
        if is_fenced && broken_rule != Some(BrokenRule::FenceCheck) {
            return;
        }
        let object = slot().snapshot(&sidecar.key).unwrap();
        if bucket.put(&object, &b"dump"[..]).await.is_err() {
            continue;
        }
        let result = match broken_rule {
            Some(BrokenRule::FenceCheck | BrokenRule::WriteOrder) => {
                advance_faultily(&bucket, &sidecar, broken_rule).await
            }
            _ => match snapshot::write_sidecar(&bucket, &slot(), &sidecar, None).await {
                Ok(recorded) => pointer_io::advance(&bucket, &slot(), &recorded).await,
                Err(error) => Err(error.into()),
            },
        };
        match result {
            Ok(()) => with_history(&mut |history| history.record_success(&sidecar.key)),
            Err(PointerError::Fenced(_)) => return,
            Err(_) if broken_rule == Some(BrokenRule::ErrorReporting) => {
                with_history(&mut |history| history.record_success(&sidecar.key));
            }
            Err(_) => {}
        }
    }
}

/// Performs the last step of a backup whose dump and sidecar are stored.
pub async fn run_advance(
    bucket: Bucket,
    with_history: impl Fn(&mut dyn FnMut(&mut History)),
    recorded: SnapshotWithSidecar,
) {
    for _ in 0..MAX_ATTEMPTS {
        match pointer_io::advance(&bucket, &slot(), &recorded).await {
            Ok(()) => {
                return with_history(&mut |history| history.record_success(&recorded.snapshot_ref().key));
            }
            Err(PointerError::Fenced(_)) => return,
            Err(_) => {}
        }
    }
}

/// Reads the latest snapshot as a recovery does. A read must see every log entry written before it started. If the last
/// entry named a snapshot then, a usable snapshot must be found.
pub async fn run_reader(bucket: Bucket, with_history: impl Fn(&mut dyn FnMut(&mut History)), reads: u32) {
    for _ in 0..reads {
        let (mut seq, mut names_snapshot) = (0, false);
        with_history(&mut |history| (seq, names_snapshot) = (history.seq(), history.names_snapshot()));
        if let Ok(read) = pointer_io::read(&bucket, &slot()).await
            && read.map_or(0, |read| read.value.seq) < seq
        {
            with_history(&mut History::record_stale_read);
        }
        match snapshot::find_latest(&bucket, &slot()).await {
            Err(SnapshotUnusable::Damaged { .. } | SnapshotUnusable::Absent) if names_snapshot => {
                with_history(&mut History::record_damaged_read);
            }
            _ => {}
        }
    }
}

async fn write_faulty_fence(
    bucket: &Bucket,
    epoch: u32,
    broken_rule: Option<BrokenRule>,
) -> Result<(), PointerError> {
    let current = pointer_io::read(bucket, &slot()).await?;
    let old = current.as_ref().map(|current| current.value.clone());
    let fence_epoch = match broken_rule {
        Some(BrokenRule::MonotonicFence) => Epoch(epoch),
        _ => old.as_ref().map_or(Epoch(epoch), |old| old.fence_epoch.max(Epoch(epoch))),
    };
    let snapshot = old.as_ref().and_then(|old| old.snapshot.clone());
    let snapshot = snapshot.filter(|_| broken_rule != Some(BrokenRule::SnapshotRetention));
    let next = Pointer {
        version: FORMAT_VERSION,
        fence_epoch,
        fence_machine_id: Some(machine(epoch)),
        fence_proof: None,
        seq: old.map_or(0, |old| old.seq) + 1,
        snapshot,
        emptied_at: None,
    };
    write(bucket, current, &next).await
}

/// Writes in the same order as the product: the log entry, then `latest`.
async fn write(bucket: &Bucket, current: Option<PointerRead>, next: &Pointer) -> Result<(), PointerError> {
    bucket.put_json_if(&slot().pointer_entry(next.seq), next, Condition::Absent).await?;
    let condition = current.map_or(Condition::Absent, |current| current.condition());
    Ok(bucket.put_json_if(&slot().pointer(), next, condition).await?)
}

async fn advance_faultily(
    bucket: &Bucket,
    sidecar: &Sidecar,
    broken_rule: Option<BrokenRule>,
) -> Result<(), PointerError> {
    let current = pointer_io::read(bucket, &slot()).await?;
    let old = current.as_ref().map(|current| &current.value);
    let next = Pointer {
        version: FORMAT_VERSION,
        fence_epoch: old.map_or(sidecar.epoch, |old| old.fence_epoch.max(sidecar.epoch)),
        fence_machine_id: Some(sidecar.machine_id),
        fence_proof: None,
        seq: old.map_or(0, |old| old.seq) + 1,
        snapshot: Some(sidecar.snapshot_ref()),
        emptied_at: None,
    };
    if broken_rule == Some(BrokenRule::FenceCheck) {
        snapshot::write_sidecar(bucket, &slot(), sidecar, None).await?;
    }
    write(bucket, current, &next).await?;
    if broken_rule == Some(BrokenRule::WriteOrder) {
        snapshot::write_sidecar(bucket, &slot(), sidecar, None).await?;
    }
    Ok(())
}
