//! Decides whether a verified snapshot becomes the latest. A snapshot of a shrunken database is held back until a
//! person accepts it, or three hourly snapshots in a row show the loss. Either way, it is stored.

use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};

use super::record::{self, BackupRecord, HeldBackReason};
use super::row_loss;
use super::settings::BackupSettings;
use super::stage::Stage;
use crate::records::backup::{BackupKind, Status};
use crate::snapshots::held_snapshot::HeldSnapshot;
use crate::system::layout::Layout;
use crate::system::lock::Lock;
use svc_base::applet::{Exit, Failure};
use svc_base::clock;
use svc_base::error_chain::format_chain;
use svc_base::fsx::FileError;
use svc_store::pointer_io::{self, PointerError};
use svc_store::snapshot::{self as stored, DatabaseIdentity, Sidecar, SnapshotUnusable};

/// Number of hourly snapshots in a row that confirm the loss.
const MIN_AGREEING_SNAPSHOTS: u32 = 3;

/// Why a snapshot is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trigger {
    /// The hourly run.
    Schedule,
    /// A person or a program requested it. Such snapshots may follow each other within seconds, so they do not count as
    /// agreeing.
    Request,
}

/// The new snapshot is stored, but held back: it does not become the latest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0}\n  next: if the loss is intended, run `svc-db-backup accept`; otherwise load the latest snapshot \
     with `svc-db-backup side open` and copy the rows back, or restore it with `svcctl recover USER`"
)]
pub struct HeldBackError(HeldSnapshot);

impl HeldBackError {
    /// Returns the entry for the run's record.
    pub fn to_reason(&self) -> HeldBackReason {
        HeldBackReason { latest: self.0.latest.clone(), loss: self.0.loss.clone() }
    }
}

/// Compares the snapshot `taken` with the latest, `previous`, which is of the same database. If `taken` is held back,
/// records that and returns an error to report.
///
/// If the record cannot be read or written, the error is only logged, and the snapshot is still held back: if the error
/// failed the run, each retry would upload another complete snapshot. Without a record, agreeing snapshots are not
/// counted.
pub fn check_shrinkage(
    layout: &Layout,
    trigger: Trigger,
    previous: &Sidecar,
    taken: &Sidecar,
) -> Option<HeldBackError> {
    let loss = row_loss::describe_loss(&previous.tables, &taken.tables)?;
    let earlier = HeldSnapshot::read(layout).unwrap_or_else(|error| {
        tracing::error!(error = %format_chain(&error), "could not read the record of the held-back snapshot");
        None
    });
    let earlier = earlier.filter(|held| held.latest == previous.key);
    let held = match earlier {
        Some(held) => held.with_next_snapshot(taken.key.clone(), loss),
        None => HeldSnapshot::new(taken.key.clone(), previous.key.clone(), loss),
    };
    let held = match trigger {
        Trigger::Schedule => held.count_agreement(read_uptime()),
        Trigger::Request => held,
    };
    if held.agreeing >= MIN_AGREEING_SNAPSHOTS {
        tracing::warn!(%held, "{MIN_AGREEING_SNAPSHOTS} hourly snapshots in a row agree: accepting the newest");
        return None;
    }
    if let Err(error) = held.write(layout) {
        tracing::error!(error = %format_chain(&error), "could not record that the snapshot is held back");
    }
    Some(HeldBackError(held))
}

/// Returns the time since boot; zero if the clock cannot be read.
fn read_uptime() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
}

/// Returns whether the previous snapshot is of the current database. A database that was restored, imported or adopted
/// in between may legitimately be smaller, or empty. If an identity is unknown, the databases count as the same.
pub fn is_same_database(previous: Option<&DatabaseIdentity>, current: Option<&DatabaseIdentity>) -> bool {
    match (previous, current) {
        (Some(previous), Some(current)) => previous.restore_id == current.restore_id,
        _ => true,
    }
}

#[derive(Debug, thiserror::Error)]
enum AcceptError {
    #[error("no snapshot is held back")]
    NothingHeld,
    #[error(transparent)]
    Unusable(#[from] SnapshotUnusable),
    #[error(transparent)]
    Pointer(#[from] PointerError),
    #[error(transparent)]
    File(#[from] FileError),
}

impl AcceptError {
    fn exit(&self) -> Exit {
        match self {
            Self::Unusable(SnapshotUnusable::Store(error)) | Self::Pointer(PointerError::Store(error)) => {
                crate::system::store::to_exit(error)
            }
            Self::Pointer(PointerError::Fenced(_)) => Exit::Permission,
            Self::Pointer(_) => Exit::Unavailable,
            Self::NothingHeld | Self::Unusable(_) => Exit::Refused,
            Self::File(_) => Exit::Internal,
        }
    }
}

/// Makes the held-back snapshot the latest.
///
/// # Errors
/// `Refused` if no snapshot is held back, or the one that is held back is unusable; `Permission` if this machine has
/// been replaced, or its access to the store has been withdrawn; `Unavailable` if the store is unavailable or the
/// pointer could not be moved; otherwise `Internal`.
pub async fn accept(_lock: &Lock, settings: &BackupSettings) -> Result<(), Failure> {
    let (started, timestamp) = (Instant::now(), clock::now_ms());
    let sidecar = accept_held_snapshot(settings).await.map_err(|error| Failure::new(error.exit(), error))?;
    println!("{} is now the latest snapshot", sidecar.key);
    let record = BackupRecord {
        timestamp,
        kind: BackupKind::Database,
        status: Status::Success,
        stage: Stage::Done,
        key: Some(sidecar.key),
        size_bytes: Some(sidecar.size_bytes),
        sha256: Some(sidecar.sha256),
        duration_ms: u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
        error: None,
        held: None,
        is_acceptance: true,
    };
    record::write(&settings.layout, &record);
    Ok(())
}

async fn accept_held_snapshot(settings: &BackupSettings) -> Result<Sidecar, AcceptError> {
    let held = HeldSnapshot::read(&settings.layout)?.ok_or(AcceptError::NothingHeld)?;
    let (sidecar, snapshot) = stored::load_with_sidecar(&settings.bucket, &settings.slot, &held.key).await?;
    pointer_io::advance(&settings.bucket, &settings.slot, &snapshot).await?;
    HeldSnapshot::clear(&settings.layout)?;
    Ok(sidecar)
}
