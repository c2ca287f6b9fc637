//! The steps of a backup, ordered so that the pointer never names a missing object: snapshot, dump, object, sidecar,
//! pointer.
//!
//! The pointer moves only to a complete, verified snapshot, and no snapshot is ever pruned. Every attempt writes a
//! record unless it is killed. If the record cannot be written, the error is logged.

use std::future::Future;
use std::time::Instant;

use jiff::Timestamp;

use super::dump::{self, DumpError, VerifiedDump};
use super::open_uploads;
use super::progress_writer::{ProgressTracker, TrackedUpload};
use super::record::{self, BackupRecord};
use super::replaced_databases;
use super::row_loss::{EmptiedDatabaseError, count_owner_rows};
use super::settings::BackupSettings;
use super::shrink_guard::{self, HeldBackError, Trigger};
use super::snapshot::{Snapshot, SnapshotError};
use super::stage::Stage;
use crate::records::backup::{BackupKind, Status};
use crate::snapshots::database_identity;
use crate::snapshots::database_identity::IdentityError;
use crate::snapshots::held_snapshot::HeldSnapshot;
use crate::system::lock::Lock;
use crate::system::postgres::ConnectError;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::clock;
use svc_base::failpoint::{self, InjectedFailure};
use svc_base::fsx::FileError;
use svc_http::problem::format_chain;
use svc_store::StoreError;
use svc_store::key;
use svc_store::pointer::{FencedError, SnapshotRef};
use svc_store::pointer_io::{self, PointerError};
use svc_store::snapshot::{self as stored, DatabaseIdentity, Sidecar};
use svc_store::snapshot_with_sidecar::SnapshotWithSidecar;
use svc_store::upload::{PartLayout, Upload, UploadError};

/// Fail points of a run.
pub const FAILPOINTS: &[&str] = &[
    "backup.begin",
    "backup.snapshot",
    "backup.streaming",
    "backup.verified",
    "backup.completed",
    "backup.sidecar",
    "backup.pointer",
    "backup.cleaned",
    "backup.recorded",
];

/// Policy for a database that has lost rows since the previous snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossPolicy {
    /// Take no snapshot of an emptied database, and hold back the snapshot of a shrunken one. The previous snapshot
    /// stays the latest.
    Refuse,
    /// Make the snapshot the latest: a person has confirmed the loss.
    Accept,
}

/// Options of one backup run.
#[derive(Debug, Clone, Copy)]
pub struct RunOptions {
    pub loss: LossPolicy,
    pub trigger: Trigger,
}

/// Why a backup failed.
#[derive(Debug, thiserror::Error)]
enum BackupError {
    #[error("this machine has been replaced or deleted (superseded.json): it no longer takes backups")]
    Superseded,
    #[error("{prefix}{0}", prefix = if .0.is_implausible() { "" } else { "this machine has been replaced: " })]
    Fenced(FencedError),
    /// Until the restore is complete, the database's content must never replace the latest snapshot.
    #[error("the restore gate is closed: no backup is taken until it opens")]
    GateClosed,
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the snapshot {key} is stored but is not the latest, because the pointer could not be moved")]
    Unpublished { key: String, source: PointerError },
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(transparent)]
    Dump(#[from] DumpError),
    #[error(transparent)]
    Upload(#[from] UploadError),
    #[error(transparent)]
    Emptied(#[from] EmptiedDatabaseError),
    #[error(transparent)]
    HeldBack(#[from] HeldBackError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error("stopped by a signal")]
    Stopped,
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

/// Returns whether a backup was refused because the database has lost rows: it was emptied, or its snapshot is held
/// back.
pub fn is_refused_for_loss(failure: &Failure) -> bool {
    matches!(
        failure.error.downcast_ref::<BackupError>(),
        Some(BackupError::Emptied(_) | BackupError::HeldBack(_))
    )
}

impl BackupError {
    fn exit(&self) -> Exit {
        match self {
            Self::Superseded | Self::Fenced(_) => Exit::Permission,
            Self::Store(error)
            | Self::Unpublished { source: PointerError::Store(error), .. }
            | Self::Upload(UploadError::Store(error)) => crate::system::store::to_exit(error),
            Self::Unpublished { .. } => Exit::Unavailable,
            Self::Snapshot(error) => error.exit(),
            Self::Dump(error) => error.exit(),
            Self::Connect(_) => Exit::Unavailable,
            Self::Identity(error) => error.exit(),
            Self::Emptied(_) | Self::HeldBack(_) => Exit::Refused,
            Self::GateClosed | Self::Stopped => Exit::TryAgain,
            Self::Upload(_) | Self::File(_) | Self::Injected(_) => Exit::Internal,
        }
    }
}

/// A snapshot that an attempt stored, but could not make the latest. The run's next attempt moves the pointer to it,
/// instead of taking another snapshot.
pub struct UnpublishedSnapshot {
    snapshot: SnapshotWithSidecar,
    /// Key of the snapshot that the pointer named when this one was taken. If the pointer names neither of the two now,
    /// it names a newer one.
    previous_key: Option<String>,
}

/// The state of a run, for its record.
struct RunProgress {
    stage: Stage,
    key: Option<String>,
    dump: Option<VerifiedDump>,
    /// Set once the snapshot may become the latest.
    unpublished: Option<UnpublishedSnapshot>,
    tracker: ProgressTracker,
}

impl RunProgress {
    fn enter(&mut self, stage: Stage) {
        self.stage = stage;
        self.tracker.enter(stage);
    }
}

/// Takes one backup and records the result. While the dump is being uploaded, `stop` aborts the upload and ends the
/// run.
///
/// # Errors
/// `Permission` if this machine has been replaced or deleted, or its access to the store has been withdrawn; `Refused`
/// if the database is not this machine's, has lost rows, or has more roles or tables than a sidecar may list;
/// `TryAgain` if the restore gate is closed, a table stays locked, or `stop` ended the run; `Unavailable` if the
/// database or the store is unavailable, or the pointer could not be moved; otherwise `Internal`.
pub async fn run(
    lock: &Lock,
    settings: &BackupSettings,
    options: RunOptions,
    stop: impl Future<Output = ()>,
) -> Result<(), Failure> {
    attempt(lock, settings, options, &mut None, stop).await
}

/// Like [`run`], for a caller that retries: `unpublished` is passed from one attempt to the next.
///
/// # Errors
/// The same as for [`run`].
pub async fn attempt(
    _lock: &Lock,
    settings: &BackupSettings,
    options: RunOptions,
    unpublished: &mut Option<UnpublishedSnapshot>,
    stop: impl Future<Output = ()>,
) -> Result<(), Failure> {
    let started = Instant::now();
    let timestamp = clock::now_ms();
    let mut progress = RunProgress {
        stage: Stage::Gate,
        key: None,
        dump: None,
        unpublished: unpublished.take(),
        tracker: ProgressTracker::begin(&settings.layout, timestamp),
    };
    let result = back_up(settings, options, &mut progress, stop).await;
    let record = build_record(timestamp, started, &progress, result.as_ref().err());
    if result.is_err() {
        *unpublished = progress.unpublished;
    }
    record::write(&settings.layout, &record);
    match result {
        Ok(()) => {
            failpoint::trigger("backup.recorded").or_exit(Exit::Internal)?;
            tracing::info!(
                key = progress.key,
                size = record.size_bytes,
                ms = record.duration_ms,
                "backed up the database"
            );
            Ok(())
        }
        Err(error) => Err(Failure::new(error.exit(), error)),
    }
}

fn build_record(
    timestamp: Timestamp,
    started: Instant,
    progress: &RunProgress,
    error: Option<&BackupError>,
) -> BackupRecord {
    // Without a key, the attempt failed before it reached the snapshot that an earlier one had stored.
    let unpublished = progress.unpublished.as_ref().filter(|_| progress.key.is_some());
    let stored = unpublished.map(|stored| stored.snapshot.snapshot_ref());
    let dump = progress.dump.as_ref();
    BackupRecord {
        timestamp,
        kind: BackupKind::Database,
        status: if error.is_none() { Status::Success } else { Status::Error },
        stage: progress.stage,
        key: progress.key.clone(),
        size_bytes: dump.map(|dump| dump.size_bytes).or(stored.map(|stored| stored.size_bytes)),
        sha256: dump.map(|dump| &dump.sha256).or(stored.map(|stored| &stored.sha256)).cloned(),
        duration_ms: u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
        error: error.map(|error| format_chain(error)),
        held: match error {
            Some(BackupError::HeldBack(held)) => Some(held.to_reason()),
            _ => None,
        },
        is_acceptance: false,
    }
}

async fn back_up(
    settings: &BackupSettings,
    options: RunOptions,
    progress: &mut RunProgress,
    stop: impl Future<Output = ()>,
) -> Result<(), BackupError> {
    failpoint::trigger("backup.begin")?;
    if settings.layout.superseded().exists() {
        return Err(BackupError::Superseded);
    }
    if !settings.layout.restore_complete().exists() {
        return Err(BackupError::GateClosed);
    }
    let identity = check_database(settings).await?;
    let latest = read_latest(settings).await?;
    if keep_publishable(progress, latest.as_ref()) {
        return publish(settings, progress).await;
    }
    // The snapshot with which the new one is compared.
    let previous = match &latest {
        Some(latest) => read_sidecar(settings, latest).await?.filter(|previous| {
            options.loss == LossPolicy::Refuse
                && shrink_guard::is_same_database(previous.database_identity.as_ref(), identity.as_ref())
        }),
        None => None,
    };
    open_uploads::abort_all(&settings.layout, &settings.bucket).await;

    progress.enter(Stage::Snapshot);
    let snapshot = Snapshot::open(&settings.server).await?;
    failpoint::trigger("backup.snapshot")?;

    progress.enter(Stage::Dump);
    let mut uploaded = upload(settings, progress, &snapshot, previous.as_ref(), stop).await?;
    uploaded.sidecar.database_identity = identity;
    drop(snapshot);
    failpoint::trigger("backup.completed")?;

    progress.enter(Stage::Sidecar);
    let snapshot =
        stored::write_sidecar(&settings.bucket, &settings.slot, &uploaded.sidecar, uploaded.etag).await?;
    failpoint::trigger("backup.sidecar")?;

    progress.enter(Stage::Pointer);
    if let Some(previous) = &previous
        && let Some(held) =
            shrink_guard::check_shrinkage(&settings.layout, options.trigger, previous, &uploaded.sidecar)
    {
        return Err(held.into());
    }
    progress.unpublished =
        Some(UnpublishedSnapshot { snapshot, previous_key: latest.map(|latest| latest.key) });
    publish(settings, progress).await
}

/// Discards the snapshot that an earlier attempt stored, if the pointer names a newer one. Returns whether an
/// unpublished snapshot remains.
fn keep_publishable(progress: &mut RunProgress, latest: Option<&SnapshotRef>) -> bool {
    let latest = latest.map(|latest| &latest.key);
    let is_newest = |stored: &UnpublishedSnapshot| {
        latest == stored.previous_key.as_ref() || latest == Some(&stored.snapshot.snapshot_ref().key)
    };
    progress.unpublished = progress.unpublished.take().filter(is_newest);
    progress.key = progress.unpublished.as_ref().map(|stored| stored.snapshot.snapshot_ref().key.clone());
    progress.unpublished.is_some()
}

/// Makes the stored snapshot the latest. Then removes the record of a held-back snapshot, and drops replaced databases.
async fn publish(settings: &BackupSettings, progress: &mut RunProgress) -> Result<(), BackupError> {
    progress.enter(Stage::Pointer);
    if let Some(stored) = &progress.unpublished {
        let moved = pointer_io::advance(&settings.bucket, &settings.slot, &stored.snapshot).await;
        moved.map_err(|error| match error {
            PointerError::Fenced(fenced) => BackupError::Fenced(fenced),
            source => BackupError::Unpublished { key: stored.snapshot.snapshot_ref().key.clone(), source },
        })?;
    }
    failpoint::trigger("backup.pointer")?;
    HeldSnapshot::clear(&settings.layout)?;

    progress.enter(Stage::Done);
    replaced_databases::drop_replaced_databases(&settings.server, settings.layout.root()).await;
    failpoint::trigger("backup.cleaned")?;
    Ok(())
}

/// Refuses a database other than the one that the restore marker names: its snapshot would replace the owner's. Adopts
/// the database if the marker names none. Returns the identity of the database.
async fn check_database(settings: &BackupSettings) -> Result<Option<DatabaseIdentity>, BackupError> {
    let client = settings.server.connect(settings.server.database(), "svc-db-backup").await?;
    Ok(database_identity::check_or_adopt(&settings.layout, &client).await?)
}

/// Returns the snapshot that the new one replaces.
///
/// This detects a replaced machine before the dump; the conditional write of the pointer remains authoritative.
async fn read_latest(settings: &BackupSettings) -> Result<Option<SnapshotRef>, BackupError> {
    let Some(pointer) = pointer_io::read(&settings.bucket, &settings.slot).await? else { return Ok(None) };
    let identity = &settings.identity;
    pointer.value.admit(identity.epoch, identity.machine).map_err(BackupError::Fenced)?;
    Ok(pointer.value.snapshot)
}

async fn read_sidecar(
    settings: &BackupSettings,
    latest: &SnapshotRef,
) -> Result<Option<Sidecar>, BackupError> {
    match stored::read_sidecar(&settings.bucket, &settings.slot, latest).await {
        Ok(sidecar) => Ok(Some(sidecar)),
        // An unusable snapshot must not block its replacement.
        Err(error @ (StoreError::Corrupt { .. } | StoreError::NotFound { .. })) => {
            tracing::warn!(error = %format_chain(&error), "the previous snapshot has no usable sidecar; the new one is not compared with it");
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// A completely uploaded object and its sidecar.
struct UploadedSnapshot {
    sidecar: Sidecar,
    etag: Option<String>,
}

/// Uploads the dump, and counts the rows in the same snapshot. The upload is completed only if the dump is verified and
/// the database was not emptied; otherwise it is aborted.
async fn upload(
    settings: &BackupSettings,
    progress: &mut RunProgress,
    snapshot: &Snapshot,
    previous: Option<&Sidecar>,
    stop: impl Future<Output = ()>,
) -> Result<UploadedSnapshot, BackupError> {
    let key = key::snapshot_key(snapshot.taken_at, settings.identity.epoch);
    progress.key = Some(key.clone());
    let object = settings.slot.snapshot(&key).expect("generated keys are valid");
    let growth = settings.compression.max_growth_factor();
    let parts = PartLayout::for_max_bytes(snapshot.database_bytes.saturating_mul(growth));
    let mut upload = Upload::begin(&settings.bucket, &object, parts).await?;
    let open_upload = upload.open_upload().cloned();
    if let Some(open_upload) = &open_upload {
        open_uploads::record(&settings.layout, open_upload);
    }
    let result = tokio::select! {
        result = dump_to_upload(settings, progress, snapshot, &key, previous, &mut upload) => result,
        () = stop => Err(BackupError::Stopped),
    };
    let is_closed = result.is_ok() || upload.abort().await;
    if let Some(open_upload) = open_upload.filter(|_| is_closed) {
        open_uploads::remove(&settings.layout, &open_upload);
    }
    result
}

async fn dump_to_upload(
    settings: &BackupSettings,
    progress: &mut RunProgress,
    snapshot: &Snapshot,
    key: &str,
    previous: Option<&Sidecar>,
    upload: &mut Upload,
) -> Result<UploadedSnapshot, BackupError> {
    let mut sink = TrackedUpload { upload, tracker: &progress.tracker };
    let dumped = dump::dump_snapshot(settings, snapshot, &mut sink).await?;
    if let Some(previous) = previous
        .filter(|sidecar| count_owner_rows(&sidecar.tables) > 0 && count_owner_rows(&dumped.tables) == 0)
    {
        let previous_rows = count_owner_rows(&previous.tables);
        return Err(EmptiedDatabaseError { previous_key: previous.key.clone(), previous_rows }.into());
    }
    failpoint::trigger("backup.verified")?;
    progress.enter(Stage::Upload);
    progress.dump = Some(dumped.dump.clone());
    let sidecar = dumped.into_sidecar(key, &settings.identity, snapshot);
    // An object without a sidecar is unusable, and each retry would store another one.
    sidecar.check_limits()?;
    let meta = upload.complete().await?;
    Ok(UploadedSnapshot { etag: meta.e_tag, sidecar })
}
