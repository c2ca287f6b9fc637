//! The steps of a restore. The old database is untouched until the swap, which is one transaction; the marker comes
//! last. A run that was killed anywhere is simply run again.

use super::journal::{self, Journal};
use super::swap::{self, SwapError};
use super::{Mode, Settings};
use crate::applet::{Exit, Failure};
use crate::failpoint::{self, Injected};
use crate::fsx::{self, FileError};
use crate::host;
use crate::host::snapshots::database_identity;
use crate::host::snapshots::database_identity::IdentityError;
use crate::host::snapshots::restore_marker::Marker;
use crate::host::snapshots::row_counts;
use crate::host::snapshots::staging;
use crate::host::snapshots::staging::{DownloadError, LoadError, Roles, Scratch};
use crate::host::system::backoff::Backoff;
use crate::host::system::lock::Lock;
use crate::host::system::postgres;
use crate::host::system::postgres::ConnectError;
use crate::http::request_id;
use crate::store::StoreError;
use crate::store::pointer::SnapshotRef;
use crate::store::snapshot::{self, SideRecord, Unusable};

/// The places of a run where a test can stop it.
pub const POINTS: &[&str] = &[
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

/// Why the gate stays shut.
#[derive(Debug, thiserror::Error)]
enum RestoreError {
    #[error("there is no snapshot, and SVC_RESTORE_MODE is required")]
    Absent,
    #[error("the snapshot is not usable: {key}: {why}")]
    Damaged { key: String, why: String },
    #[error(
        "the database {database} holds rows of the owner's ({table}) and no marker says that it was restored: it may be newer \
         than the snapshot, and is not replaced\n  next: `svc-restore adopt` serves it as it is; `svc-restore replace` \
         restores the snapshot and keeps it as svc_before_<n>"
    )]
    HoldsRows { database: String, table: String },
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error("the object store could not be read in time; nothing is known about the snapshot")]
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
    Injected(#[from] Injected),
}

/// The gate is what the machine does by itself: there is nobody whose wish is refused.
fn never_refused(exit: Exit) -> Exit {
    if exit == Exit::Refused { Exit::Internal } else { exit }
}

impl RestoreError {
    fn exit(&self) -> Exit {
        match self {
            Self::Store(error) => host::system::store::exit(error),
            Self::Download(error) => never_refused(error.exit()),
            Self::Connect(_) => Exit::Unavailable,
            Self::Load(error) => never_refused(error.exit()),
            Self::Swap(error) => error.exit(),
            Self::HoldsRows { .. } => Exit::Refused,
            Self::Identity(error) => error.exit(),
            Self::Absent | Self::Damaged { .. } | Self::File(_) | Self::Injected(_) => Exit::Internal,
        }
    }
}

/// What a restore does to a database that holds rows of the owner's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Local {
    /// Nothing: it may be newer than the snapshot, under a marker that was lost.
    Refused,
    /// A person says so: it is kept as `svc_before_<n>`.
    Replaced,
}

/// Restores what there is to restore and sets the marker.
///
/// # Errors
/// [`Failure`]; the gate is then shut and the old database as it was.
pub async fn open(_lock: &Lock, settings: &Settings, local: Local) -> Result<(), Failure> {
    restore(settings, local).await.map_err(|error| Failure::new(error.exit(), error))
}

/// Keeps the database that is there, whatever it is, as this machine's.
///
/// # Errors
/// [`Failure`].
pub async fn adopt(_lock: &Lock, settings: &Settings) -> Result<(), Failure> {
    set_marker(settings, None).await.map_err(|error| Failure::new(error.exit(), error))
}

/// Finishes or undoes the swap of a run that was cut off: at every boot, marker or not, for an import has a marker.
///
/// # Errors
/// [`Failure`].
pub async fn settle(_lock: &Lock, settings: &Settings) -> Result<(), Failure> {
    settle_swap(settings).await.map_err(|error| Failure::new(error.exit(), error))
}

async fn settle_swap(settings: &Settings) -> Result<(), RestoreError> {
    let Some(journal) = Journal::read(&settings.layout)? else { return Ok(()) };
    let client = staging::connect_patiently(&settings.means, postgres::MAINTENANCE).await?;
    staging::end_sessions_of(&client, settings.means.name).await.map_err(SwapError::from)?;
    let database = settings.means.server.database();
    let was_swapped =
        staging::oid(&client, database).await.map_err(SwapError::from)? == Some(journal.scratch_oid);
    swap::allow_connections(&client, database).await?;
    if was_swapped {
        set_marker(settings, Some(&journal.key)).await?;
        tracing::warn!(key = journal.key, "finished the swap of databases that was cut off");
    } else {
        staging::drop_scratches(&client).await.map_err(SwapError::from)?;
        tracing::warn!(key = journal.key, "undid the swap of databases that was cut off");
    }
    Ok(journal::remove(&settings.layout)?)
}

async fn restore(settings: &Settings, local: Local) -> Result<(), RestoreError> {
    failpoint::pass("restore.begin")?;
    fsx::remove_torn_in(&settings.layout.restore_state(), |_| true)?;
    let Some(snapshot) = latest(settings).await? else {
        tracing::info!("there is no snapshot: this machine begins with an empty database");
        return set_marker(settings, None).await;
    };
    failpoint::pass("restore.named")?;
    let was_cut_off = is_unserved_restore(settings).await?;
    if swapped_before(settings, &snapshot).await? {
        tracing::info!(key = snapshot.key, "an earlier run had swapped the databases");
    } else {
        if local == Local::Refused && !was_cut_off {
            refuse_rows(settings).await?;
        }
        let side = side_record(settings, &snapshot).await?;
        staging::refuse_newer(&settings.means, &side).await?;
        let dump =
            staging::fetch(&settings.means, &settings.layout.restore_state(), &snapshot, &side).await?;
        failpoint::pass("restore.downloaded")?;
        let loaded = staging::into_scratch(&settings.means, &dump, &side, Roles::Stay).await?;
        stamp(settings, &loaded).await?;
        settings.means.progress.at("putting the snapshot in place");
        let journal = Journal::new(&snapshot, &loaded);
        let swapped = async {
            journal.write(&settings.layout)?;
            failpoint::pass("restore.journal")?;
            swap::swap(&settings.means.server, &loaded).await?;
            Ok(())
        };
        if let Err(error) = swapped.await {
            swap::undo(&settings.means.server, &loaded).await;
            return Err(error);
        }
    }
    if settings.chosen.is_some() {
        // The pointer names another: until the first backup, that is what a recovery would take.
        let request = serde_json::json!({"requestId": request_id::current()}).to_string();
        fsx::write_atomic(&settings.layout.request("backup"), request.as_bytes(), 0o600)?;
    }
    set_marker(settings, Some(&snapshot.key)).await?;
    clean(settings);
    tracing::info!(key = snapshot.key, "restored");
    Ok(())
}

/// The snapshot to restore; `None` where an empty start is allowed and there is confirmed to be nothing.
async fn latest(settings: &Settings) -> Result<Option<SnapshotRef>, RestoreError> {
    let mut patience = Backoff::new(settings.means.deadline);
    loop {
        let found = match &settings.chosen {
            None => snapshot::latest(&settings.means.bucket, &settings.means.slot).await,
            Some(key) => {
                let chosen =
                    snapshot::by_key(&settings.means.bucket, &settings.means.slot, key.as_str()).await;
                chosen.map(|side| side.named())
            }
        };
        match (found, settings.mode) {
            (Ok(snapshot), _) => return Ok(Some(snapshot)),
            (Err(Unusable::Absent), Mode::Empty) => return Ok(None),
            (Err(Unusable::Absent), Mode::Required) => return Err(RestoreError::Absent),
            (Err(Unusable::Damaged { key, why }), _) => return Err(RestoreError::Damaged { key, why }),
            (Err(Unusable::Store(error)), _) => bear(&mut patience, error).await?,
        }
    }
}

async fn side_record(settings: &Settings, snapshot: &SnapshotRef) -> Result<SideRecord, RestoreError> {
    let mut patience = Backoff::new(settings.means.deadline);
    loop {
        match snapshot::side_record(&settings.means.bucket, &settings.means.slot, snapshot).await {
            Ok(side) => return Ok(side),
            Err(StoreError::Corrupt { key, why }) => return Err(RestoreError::Damaged { key, why }),
            Err(StoreError::NotFound { key }) => {
                return Err(RestoreError::Damaged { key, why: "it is missing".to_owned() });
            }
            Err(error) => bear(&mut patience, error).await?,
        }
    }
}

async fn bear(patience: &mut Backoff, error: StoreError) -> Result<(), RestoreError> {
    if !error.is_transient() {
        return Err(RestoreError::Store(error));
    }
    tracing::warn!(error = %crate::http::problem::chain(&error), "the object store does not answer");
    patience.pause().await.map_err(|_| RestoreError::Store(error))
}

/// An earlier run may have been killed between the swap and the marker.
async fn swapped_before(settings: &Settings, snapshot: &SnapshotRef) -> Result<bool, RestoreError> {
    let client = staging::connect_patiently(&settings.means, postgres::MAINTENANCE).await?;
    staging::end_sessions_of(&client, settings.means.name).await.map_err(SwapError::from)?;
    let journal = Journal::read(&settings.layout)?;
    let database = settings.means.server.database();
    if let Some(journal) = journal.filter(|journal| journal.is_for(snapshot))
        && staging::oid(&client, database).await.map_err(SwapError::from)? == Some(journal.scratch_oid)
    {
        swap::allow_connections(&client, database).await?;
        return Ok(true);
    }
    journal::remove(&settings.layout)?;
    staging::drop_scratches(&client).await.map_err(SwapError::from)?;
    swap::allow_connections(&client, database).await?;
    Ok(false)
}

/// Whether the database is what an earlier run restored, before its gate opened: nobody has written to it.
async fn is_unserved_restore(settings: &Settings) -> Result<bool, RestoreError> {
    let Some(journal) = Journal::read(&settings.layout)? else { return Ok(false) };
    let client = staging::connect_patiently(&settings.means, postgres::MAINTENANCE).await?;
    let found = staging::oid(&client, settings.means.server.database()).await.map_err(SwapError::from)?;
    Ok(found == Some(journal.scratch_oid))
}

/// The owner's rows are never replaced by what may be older. Whoever lost the marker alone keeps them with `adopt`.
async fn refuse_rows(settings: &Settings) -> Result<(), RestoreError> {
    let maintenance = staging::connect_patiently(&settings.means, postgres::MAINTENANCE).await?;
    let database = settings.means.server.database();
    if staging::oid(&maintenance, database).await.map_err(SwapError::from)?.is_none() {
        return Ok(());
    }
    let client = staging::connect_patiently(&settings.means, database).await?;
    match row_counts::first_with_rows(&client).await.map_err(SwapError::from)? {
        None => Ok(()),
        Some(table) => Err(RestoreError::HoldsRows { database: database.to_owned(), table }),
    }
}

/// The restored database gets its id before the swap, so that there is no moment in which it has none.
async fn stamp(settings: &Settings, loaded: &Scratch) -> Result<(), RestoreError> {
    let client = staging::connect_patiently(&settings.means, postgres::MAINTENANCE).await?;
    database_identity::stamp(&client, &loaded.name).await?;
    Ok(())
}

/// Marks the database that is there as this machine's.
async fn set_marker(settings: &Settings, snapshot: Option<&str>) -> Result<(), RestoreError> {
    let client = staging::connect_patiently(&settings.means, postgres::MAINTENANCE).await?;
    let identity = database_identity::adopt(&client, settings.means.server.database()).await?;
    fsx::remove_torn(&fsx::through_link(&settings.layout.restore_complete()))?;
    Marker::new(snapshot.map(str::to_owned), identity).write(&settings.layout)?;
    failpoint::pass("restore.marker")?;
    Ok(())
}

/// The gate is open: what is left of the way here only takes room.
fn clean(settings: &Settings) {
    let state = settings.layout.restore_state();
    if let Err(error) = journal::remove(&settings.layout).and_then(|()| staging::remove_dumps(&state)) {
        tracing::warn!(%error, "could not clean up after the restore");
    }
}
