//! Restore steps. The old database isn't touched until the swap, a single transaction, and the marker is written last.
//! A killed run can be retried.

use anyhow::anyhow;

use super::journal::{self, Journal};
use super::settings::RestoreSettings;
use super::swap::{self, SwapError};
use crate::snapshots::database_identity;
use crate::snapshots::database_identity::IdentityError;
use crate::snapshots::restore_marker::RestoreMarker;
use crate::snapshots::row_counts;
use crate::snapshots::staging;
use crate::snapshots::staging::{DownloadError, LoadError, ScratchDatabase, ScratchPurpose};
use crate::system::backoff::Backoff;
use crate::system::layout::Layout;
use crate::system::lock::Lock;
use crate::system::postgres;
use crate::system::postgres::ConnectError;
use svc_base::applet::{Exit, Failure};
use svc_base::error_chain::format_chain;
use svc_base::failpoint::{self, InjectedFailure};
use svc_base::fsx::{self, FileError};
use svc_http::request_id;
use svc_machine::event::RestoreMode;
use svc_store::StoreError;
use svc_store::key::SnapshotKey;
use svc_store::pointer::SnapshotRef;
use svc_store::snapshot::{self, Sidecar, SnapshotUnusable};
use svc_wire::registration::RestoreFailureCode;

/// Fail points of a run.
pub const FAILPOINTS: &[&str] = &[
    "restore.begin",
    "restore.named",
    "restore.downloading",
    "restore.downloaded",
    "restore.roles",
    "restore.created",
    "restore.loaded",
    "restore.applied",
    "restore.counted",
    "restore.journal",
    "restore.closed",
    "restore.renamed",
    "restore.opened",
    "restore.marker",
];

/// Errors from restoring or adopting a database.
#[derive(Debug, thiserror::Error)]
enum RestoreError {
    #[error("there is no snapshot, and SVC_RESTORE_MODE does not allow an empty start")]
    Absent,
    #[error("{key} is not usable: {reason}")]
    Damaged { key: String, reason: String },
    #[error(
        "the database {database} contains the owner's rows (in {table}), but no marker shows that it was \
         restored: it may be newer than the snapshot, and is not replaced\n  next: `svc-restore adopt` keeps \
         and serves it; `svc-restore replace` restores the snapshot and keeps this database as svc_before_<n>"
    )]
    HoldsRows { database: String, table: String },
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error("the object store could not be read; the state of the snapshot is unknown")]
    Store(#[source] StoreError),
    #[error(transparent)]
    Download(#[from] DownloadError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Swap(#[from] SwapError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

/// Maps `Refused` to `Internal`: a restore usually runs at boot, where there is no request to refuse.
fn map_refused(exit: Exit) -> Exit {
    if exit == Exit::Refused { Exit::Internal } else { exit }
}

impl RestoreError {
    /// Returns the code that selects the operator advice.
    fn code(&self) -> Option<RestoreFailureCode> {
        let download_code = |error: &DownloadError| match error {
            DownloadError::Store(_) => Some(RestoreFailureCode::StoreUnavailable),
            DownloadError::NoSpace { .. } => Some(RestoreFailureCode::NoSpace),
            _ => None,
        };
        match self {
            Self::Store(_) => Some(RestoreFailureCode::StoreUnavailable),
            Self::Download(error) | Self::Load(LoadError::Download(error)) => download_code(error),
            Self::Load(LoadError::NewerPostgres { .. }) => Some(RestoreFailureCode::NewerPostgres),
            _ => None,
        }
    }

    /// Returns a failure whose last line includes the code, because a failed boot reports only the last line of the
    /// log.
    fn into_failure(self) -> Failure {
        let exit = self.exit();
        match self.code() {
            Some(code) => Failure::new(exit, anyhow!("{} ({})", format_chain(&self), code.marker())),
            None => Failure::new(exit, self),
        }
    }

    fn exit(&self) -> Exit {
        match self {
            Self::Store(error) => crate::system::store::to_exit(error),
            Self::Download(error) => map_refused(error.exit()),
            Self::Connect(_) => Exit::Unavailable,
            Self::Load(error) => map_refused(error.exit()),
            Self::Swap(error) => error.exit(),
            Self::HoldsRows { .. } => Exit::Refused,
            Self::Identity(error) => error.exit(),
            Self::Absent | Self::Damaged { .. } | Self::File(_) | Self::Injected(_) => Exit::Internal,
        }
    }
}

/// Policy for an existing database that contains the owner's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExistingRows {
    /// Refuse to replace it: if only the marker was lost, the database may be newer than the snapshot.
    Refuse,
    /// Replace it for `svc-restore replace`, keeping the old one as `svc_before_<n>`.
    Replace,
}

/// The database that the gate opened with.
#[derive(Debug, PartialEq, Eq)]
pub enum OpenedWith {
    /// The snapshot with this key.
    Snapshot(String),
    /// The existing database, which holds the owner's rows; there's no snapshot.
    ExistingRows,
    /// A database without the owner's rows; there's no snapshot.
    EmptyDatabase,
}

/// Restores the snapshot, if any, and writes the marker.
///
/// # Errors
/// If a step fails. The marker is then not written and, unless the databases were swapped, the old database is
/// unchanged.
pub async fn open(
    _lock: &Lock,
    settings: &RestoreSettings,
    existing_rows: ExistingRows,
) -> Result<OpenedWith, Failure> {
    restore(settings, existing_rows).await.map_err(RestoreError::into_failure)
}

/// Adopts the existing database and writes its marker.
pub async fn adopt(_lock: &Lock, settings: &RestoreSettings) -> Result<(), Failure> {
    adopt_and_write_marker(settings, None).await.map_err(|error| Failure::new(error.exit(), error))
}

/// Finishes or rolls back a swap that was interrupted while the gate was open, such as during an import. No-op without
/// a journal.
pub async fn finish_interrupted_swap(_lock: &Lock, settings: &RestoreSettings) -> Result<(), Failure> {
    finish_or_undo_swap(settings).await.map_err(|error| Failure::new(error.exit(), error))
}

async fn finish_or_undo_swap(settings: &RestoreSettings) -> Result<(), RestoreError> {
    let Some(journal) = Journal::read(&settings.layout)? else { return Ok(()) };
    let client = staging::connect_with_retries(&settings.context, postgres::MAINTENANCE_DATABASE).await?;
    staging::end_application_sessions(&client, settings.context.name).await.map_err(SwapError::from)?;
    let database = settings.context.server.database();
    let was_swapped =
        staging::find_oid(&client, database).await.map_err(SwapError::from)? == Some(journal.scratch_oid);
    swap::open_databases(&client, database).await?;
    if was_swapped {
        adopt_and_write_marker(settings, Some(&journal.key)).await?;
        request_backup(&settings.layout)?;
        tracing::warn!(key = journal.key, "finished an interrupted database swap");
    } else {
        staging::drop_scratch_databases(&client, ScratchPurpose::Restore).await.map_err(SwapError::from)?;
        tracing::warn!(key = journal.key, "rolled back an interrupted database swap");
    }
    journal::remove(&settings.layout)?;
    remove_temporary_data(settings);
    Ok(())
}

async fn restore(
    settings: &RestoreSettings,
    existing_rows: ExistingRows,
) -> Result<OpenedWith, RestoreError> {
    failpoint::trigger("restore.begin")?;
    fsx::remove_leftover_temps_in(&settings.layout.restore_state(), |_| true)?;
    let chosen = find_chosen_snapshot(settings);
    let Some(snapshot) = find_snapshot(settings, chosen).await? else {
        let opened_with = match find_table_with_rows(settings).await? {
            Some(table) => {
                tracing::warn!(table, "there is no snapshot: kept the existing database, which holds rows");
                OpenedWith::ExistingRows
            }
            None => {
                tracing::info!("there is no snapshot: this machine starts with an empty database");
                OpenedWith::EmptyDatabase
            }
        };
        adopt_and_write_marker(settings, None).await?;
        return Ok(opened_with);
    };
    failpoint::trigger("restore.named")?;
    let was_never_served = is_restored_but_never_served(settings).await?;
    let is_swapped = clean_up_earlier_run(settings, &snapshot).await?;
    if is_swapped {
        tracing::info!(key = snapshot.key, "databases already swapped by an earlier run");
    } else {
        if existing_rows == ExistingRows::Refuse && !was_never_served {
            ensure_no_owner_rows(settings).await?;
        }
        let sidecar = read_sidecar(settings, &snapshot).await?;
        staging::check_postgres_version(&settings.context, &sidecar).await?;
        let dump =
            staging::fetch_dump(&settings.context, &settings.layout.restore_state(), &snapshot, &sidecar)
                .await?;
        failpoint::trigger("restore.downloaded")?;
        let loaded =
            staging::load_into_scratch(&settings.context, &dump, &sidecar, ScratchPurpose::Restore).await?;
        assign_restore_id(settings, &loaded).await?;
        settings.context.progress.start_phase("swapping the databases");
        let journal = Journal::new(&snapshot, &loaded);
        let swap_databases = async {
            journal.write(&settings.layout)?;
            failpoint::trigger("restore.journal")?;
            swap::swap(&settings.context.server, &loaded).await?;
            Ok(())
        };
        if let Err(error) = swap_databases.await {
            swap::clean_up(&settings.context.server, &loaded).await;
            return Err(error);
        }
    }
    if chosen.is_some() {
        request_backup(&settings.layout)?;
    }
    adopt_and_write_marker(settings, Some(&snapshot.key)).await?;
    remove_temporary_data(settings);
    tracing::info!(key = snapshot.key, "restored");
    Ok(OpenedWith::Snapshot(snapshot.key))
}

/// Requests a backup, since the pointer may reference a snapshot of another database, which a recovery would restore
/// until the backup completes. While the gate is open, the marker must already identify the new database; otherwise the
/// backup would be refused and the request removed.
pub fn request_backup(layout: &Layout) -> Result<(), FileError> {
    let request = serde_json::json!({"requestId": request_id::current()}).to_string();
    fsx::write_atomic(&layout.request("backup"), request.as_bytes(), 0o600)
}

/// Returns the operator-chosen snapshot, or `None` once the machine has been restored. `boot.env` names it for the
/// lifetime of the machine, but a later restore needs the latest snapshot: the chosen one lacks all rows written since.
fn find_chosen_snapshot(settings: &RestoreSettings) -> Option<&SnapshotKey> {
    settings.chosen_snapshot.as_ref().filter(|_| !settings.layout.restore_complete().exists())
}

/// Returns the snapshot to restore: the chosen one, or else the latest. `None` if none exists and an empty start is
/// allowed.
async fn find_snapshot(
    settings: &RestoreSettings,
    chosen: Option<&SnapshotKey>,
) -> Result<Option<SnapshotRef>, RestoreError> {
    let mut backoff = Backoff::new(settings.context.outage_timeout);
    loop {
        let result = match chosen {
            None => snapshot::find_latest(&settings.context.bucket, &settings.context.slot).await,
            Some(key) => {
                let chosen =
                    snapshot::load(&settings.context.bucket, &settings.context.slot, key.as_str()).await;
                chosen.map(|sidecar| sidecar.snapshot_ref())
            }
        };
        match (result, settings.mode) {
            (Ok(snapshot), _) => return Ok(Some(snapshot)),
            (Err(SnapshotUnusable::Absent), RestoreMode::Empty) => return Ok(None),
            (Err(SnapshotUnusable::Absent), RestoreMode::Required) => return Err(RestoreError::Absent),
            (Err(SnapshotUnusable::Damaged { key, reason }), _) => {
                return Err(RestoreError::Damaged { key, reason });
            }
            (Err(SnapshotUnusable::Store(error)), _) => wait_to_retry(&mut backoff, error).await?,
        }
    }
}

async fn read_sidecar(settings: &RestoreSettings, snapshot: &SnapshotRef) -> Result<Sidecar, RestoreError> {
    let mut backoff = Backoff::new(settings.context.outage_timeout);
    loop {
        match snapshot::read_sidecar(&settings.context.bucket, &settings.context.slot, snapshot).await {
            Ok(sidecar) => return Ok(sidecar),
            Err(StoreError::Corrupt { key, reason }) => return Err(RestoreError::Damaged { key, reason }),
            Err(StoreError::NotFound { key }) => {
                return Err(RestoreError::Damaged { key, reason: "it is missing".to_owned() });
            }
            Err(error) => wait_to_retry(&mut backoff, error).await?,
        }
    }
}

async fn wait_to_retry(backoff: &mut Backoff, error: StoreError) -> Result<(), RestoreError> {
    if !error.is_transient() {
        return Err(RestoreError::Store(error));
    }
    tracing::warn!(error = %format_chain(&error), "the object store does not respond");
    backoff.pause().await.map_err(|_| RestoreError::Store(error))
}

/// Cleans up after an earlier run. Returns whether that run restored the same snapshot and swapped the databases, but
/// didn't write the marker.
async fn clean_up_earlier_run(
    settings: &RestoreSettings,
    snapshot: &SnapshotRef,
) -> Result<bool, RestoreError> {
    let client = staging::connect_with_retries(&settings.context, postgres::MAINTENANCE_DATABASE).await?;
    staging::end_application_sessions(&client, settings.context.name).await.map_err(SwapError::from)?;
    let database = settings.context.server.database();
    let live_oid = staging::find_oid(&client, database).await.map_err(SwapError::from)?;
    let swap_journal =
        Journal::read(&settings.layout)?.filter(|journal| live_oid == Some(journal.scratch_oid));
    if swap_journal.as_ref().is_some_and(|journal| journal.is_for(snapshot)) {
        swap::open_databases(&client, database).await?;
        return Ok(true);
    }
    // Keep the live database's journal until the next swap: if this run fails, the next one needs it to determine that
    // the database was never served.
    if swap_journal.is_none() {
        journal::remove(&settings.layout)?;
    }
    staging::drop_scratch_databases(&client, ScratchPurpose::Restore).await.map_err(SwapError::from)?;
    swap::open_databases(&client, database).await?;
    Ok(false)
}

/// Returns whether an earlier run restored the database but never opened the gate, which means there are no new rows.
async fn is_restored_but_never_served(settings: &RestoreSettings) -> Result<bool, RestoreError> {
    let Some(journal) = Journal::read(&settings.layout)? else { return Ok(false) };
    let client = staging::connect_with_retries(&settings.context, postgres::MAINTENANCE_DATABASE).await?;
    let live_oid =
        staging::find_oid(&client, settings.context.server.database()).await.map_err(SwapError::from)?;
    Ok(live_oid == Some(journal.scratch_oid))
}

/// Refuses to replace rows that may be newer than the snapshot. If only the marker was lost, `adopt` keeps the
/// database.
async fn ensure_no_owner_rows(settings: &RestoreSettings) -> Result<(), RestoreError> {
    let database = settings.context.server.database();
    match find_table_with_rows(settings).await? {
        None => Ok(()),
        Some(table) => Err(RestoreError::HoldsRows { database: database.to_owned(), table }),
    }
}

/// Returns a table in the existing database that holds the owner's rows, if any.
async fn find_table_with_rows(settings: &RestoreSettings) -> Result<Option<String>, RestoreError> {
    let maintenance =
        staging::connect_with_retries(&settings.context, postgres::MAINTENANCE_DATABASE).await?;
    let database = settings.context.server.database();
    if staging::find_oid(&maintenance, database).await.map_err(SwapError::from)?.is_none() {
        return Ok(None);
    }
    let client = staging::connect_with_retries(&settings.context, database).await?;
    Ok(row_counts::find_table_with_rows(&client).await.map_err(SwapError::from)?)
}

/// Assigns the restore id before the swap, so that the live database always has one.
async fn assign_restore_id(settings: &RestoreSettings, loaded: &ScratchDatabase) -> Result<(), RestoreError> {
    let client = staging::connect_with_retries(&settings.context, postgres::MAINTENANCE_DATABASE).await?;
    database_identity::assign_restore_id(&client, &loaded.name).await?;
    Ok(())
}

/// Adopts the existing database and writes its marker.
async fn adopt_and_write_marker(
    settings: &RestoreSettings,
    snapshot: Option<&str>,
) -> Result<(), RestoreError> {
    let client = staging::connect_with_retries(&settings.context, postgres::MAINTENANCE_DATABASE).await?;
    let identity = database_identity::adopt(&client, settings.context.server.database()).await?;
    fsx::remove_leftover_temps(&fsx::resolve_link(&settings.layout.restore_complete()))?;
    RestoreMarker::new(snapshot.map(str::to_owned), identity).write(&settings.layout)?;
    failpoint::trigger("restore.marker")?;
    Ok(())
}

/// Removes temporary data once the gate is open. Best effort: a failure only wastes space.
fn remove_temporary_data(settings: &RestoreSettings) {
    let state = settings.layout.restore_state();
    if let Err(error) = journal::remove(&settings.layout).and_then(|()| staging::remove_dumps(&state)) {
        tracing::warn!(error = %format_chain(&error), "could not clean up after the restore");
    }
}
