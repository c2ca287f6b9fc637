//! The steps of a restore. The old database is untouched until the swap, which is one transaction; the marker comes
//! last. A run that was killed anywhere is simply run again.

use serde::Serialize;

use super::journal::{self, Journal};
use super::swap::{self, SwapError};
use super::{Mode, Settings};
use crate::applet::{Exit, Failure};
use crate::clock;
use crate::failpoint::{self, Injected};
use crate::fsx::{self, FileError};
use crate::host;
use crate::host::lock::Lock;
use crate::host::patience::Patience;
use crate::host::pgconn::{self, ConnectError};
use crate::host::scratch::{self, DownloadError, LoadError, Roles};
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
            Self::Store(error) => host::store::exit(error),
            Self::Download(error) => never_refused(error.exit()),
            Self::Connect(_) => Exit::Unavailable,
            Self::Load(error) => never_refused(error.exit()),
            Self::Swap(error) => error.exit(),
            Self::Absent | Self::Damaged { .. } | Self::File(_) | Self::Injected(_) => Exit::Internal,
        }
    }
}

/// `opt/svc/restore-complete`: what opened the gate.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Marker<'a> {
    version: u32,
    completed_at: String,
    /// `null`: an empty start.
    snapshot: Option<&'a str>,
}

/// Restores what there is to restore and sets the marker.
///
/// # Errors
/// [`Failure`]; the gate is then shut and the old database as it was.
pub async fn open(_lock: &Lock, settings: &Settings) -> Result<(), Failure> {
    restore(settings).await.map_err(|error| Failure::new(error.exit(), error))
}

async fn restore(settings: &Settings) -> Result<(), RestoreError> {
    failpoint::pass("restore.begin")?;
    fsx::remove_torn_in(&settings.layout.restore_state(), |_| true)?;
    let Some(snapshot) = latest(settings).await? else {
        tracing::info!("there is no snapshot: this machine begins with an empty database");
        return set_marker(settings, None);
    };
    failpoint::pass("restore.named")?;
    if swapped_before(settings, &snapshot).await? {
        tracing::info!(key = snapshot.key, "an earlier run had swapped the databases");
    } else {
        let side = side_record(settings, &snapshot).await?;
        scratch::refuse_newer(&settings.means, &side).await?;
        let dump =
            scratch::fetch(&settings.means, &settings.layout.restore_state(), &snapshot, &side).await?;
        failpoint::pass("restore.downloaded")?;
        let loaded = scratch::into_scratch(&settings.means, &dump, &side, Roles::Stay).await?;
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
    set_marker(settings, Some(&snapshot))?;
    clean(settings);
    tracing::info!(key = snapshot.key, "restored");
    Ok(())
}

/// The snapshot to restore; `None` where an empty start is allowed and there is confirmed to be nothing.
async fn latest(settings: &Settings) -> Result<Option<SnapshotRef>, RestoreError> {
    let mut patience = Patience::new(settings.means.deadline);
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
    let mut patience = Patience::new(settings.means.deadline);
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

async fn bear(patience: &mut Patience, error: StoreError) -> Result<(), RestoreError> {
    if !error.is_transient() {
        return Err(RestoreError::Store(error));
    }
    tracing::warn!(error = %crate::http::problem::chain(&error), "the object store does not answer");
    patience.pause().await.map_err(|_| RestoreError::Store(error))
}

/// An earlier run may have been killed between the swap and the marker.
async fn swapped_before(settings: &Settings, snapshot: &SnapshotRef) -> Result<bool, RestoreError> {
    let client = scratch::connect_patiently(&settings.means, pgconn::MAINTENANCE).await?;
    scratch::end_sessions_of(&client, settings.means.name).await.map_err(SwapError::from)?;
    let journal = Journal::read(&settings.layout)?;
    let database = settings.means.server.database();
    if let Some(journal) = journal.filter(|journal| journal.is_for(snapshot))
        && scratch::oid(&client, database).await.map_err(SwapError::from)? == Some(journal.scratch_oid)
    {
        swap::allow_connections(&client, database).await?;
        return Ok(true);
    }
    journal::remove(&settings.layout)?;
    scratch::drop_scratches(&client).await.map_err(SwapError::from)?;
    swap::allow_connections(&client, database).await?;
    Ok(false)
}

fn set_marker(settings: &Settings, snapshot: Option<&SnapshotRef>) -> Result<(), RestoreError> {
    let marker = Marker {
        version: 1,
        completed_at: clock::rfc3339_ms(clock::now_ms()),
        snapshot: snapshot.map(|snapshot| snapshot.key.as_str()),
    };
    let text = serde_json::to_vec(&marker).expect("a marker of plain fields is JSON");
    // On a machine the directory is root's, and the marker a link to where this program may write.
    let place = fsx::through_link(&settings.layout.restore_complete());
    fsx::remove_torn(&place)?;
    fsx::write_atomic(&place, &text, 0o644)?;
    failpoint::pass("restore.marker")?;
    Ok(())
}

/// The gate is open: what is left of the way here only takes room.
fn clean(settings: &Settings) {
    let state = settings.layout.restore_state();
    if let Err(error) = journal::remove(&settings.layout).and_then(|()| scratch::remove_dumps(&state)) {
        tracing::warn!(%error, "could not clean up after the restore");
    }
}
