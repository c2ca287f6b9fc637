//! `svc-db-backup drill`: restores the latest snapshot into a scratch database, checks that database against the
//! snapshot's sidecar, and drops it. This detects an unrestorable snapshot before a recovery needs it.

use std::path::Path;
use std::time::Instant;

use super::settings::BackupSettings;
use crate::records::backup::Status;
use crate::snapshots::check_log::{CheckKind, CheckRecord};
use crate::snapshots::staging;
use crate::snapshots::staging::{DownloadError, LoadError, RestoreContext, ScratchPurpose};
use crate::system::lock::Lock;
use crate::system::postgres;
use crate::system::postgres::ConnectError;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::clock;
use svc_base::failpoint::{self, InjectedFailure};
use svc_base::fsx::FileError;
use svc_base::quantity::pluralize;
use svc_http::problem::format_chain;
use svc_store::StoreError;
use svc_store::pointer::SnapshotRef;
use svc_store::snapshot::{self, Sidecar, SnapshotUnusable};

/// Fail points in a run.
pub const FAILPOINTS: &[&str] =
    &["drill.begin", "drill.cleaned", "drill.downloaded", "drill.loaded", "drill.dropped", "drill.recorded"];

#[derive(Debug, thiserror::Error)]
enum DatabaseDrillError {
    #[error("{key} is not usable: {reason}")]
    Damaged { key: String, reason: String },
    #[error("the object store could not be read")]
    Store(#[source] StoreError),
    #[error(transparent)]
    Download(#[from] DownloadError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error("cannot drop scratch databases")]
    Query(#[from] tokio_postgres::Error),
    #[error(transparent)]
    File(#[from] FileError),
    #[error("stopped by a signal")]
    Stopped,
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

impl DatabaseDrillError {
    fn exit(&self) -> Exit {
        match self {
            // `Refused` prevents a retry: there won't be more free space a minute later.
            Self::Damaged { .. } | Self::Download(DownloadError::NoSpace { .. }) => Exit::Refused,
            Self::Store(error) => crate::system::store::to_exit(error),
            Self::Download(error) => error.exit(),
            Self::Connect(_) => Exit::Unavailable,
            Self::Load(error) => error.exit(),
            Self::Query(error) => postgres::to_exit(error),
            Self::Stopped => Exit::TryAgain,
            Self::File(_) | Self::Injected(_) => Exit::Internal,
        }
    }
}

/// Runs the drill and records the result. `stop` aborts it; the next drill removes its temporary data.
///
/// # Errors
/// `Refused` if the snapshot is corrupt or cannot be loaded, the loaded database doesn't match the snapshot's sidecar,
/// or there isn't enough disk space; `Unavailable` if the store or the database server is unavailable; `Permission` if
/// this machine's access to the store was revoked; `TryAgain` if `stop` aborted the run; otherwise `Internal`.
pub async fn run(
    _lock: &Lock,
    settings: &BackupSettings,
    stop: impl Future<Output = ()>,
) -> Result<(), Failure> {
    let started = Instant::now();
    let mut snapshot = None;
    let result = tokio::select! {
        result = drill(settings, &mut snapshot) => result,
        () = stop => Err(DatabaseDrillError::Stopped),
    };
    if result.is_ok() && snapshot.is_none() {
        println!("there is no snapshot yet");
        return Ok(());
    }
    let size_bytes = snapshot.as_ref().map_or(0, |snapshot: &SnapshotRef| snapshot.size_bytes);
    let check = CheckRecord {
        version: CheckRecord::FORMAT_VERSION,
        timestamp: clock::now_ms(),
        check: CheckKind::Drill,
        status: if result.is_ok() { Status::Success } else { Status::Error },
        snapshots: u64::from(result.is_ok()),
        size_bytes,
        duration_ms: u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
        key: snapshot.map(|snapshot| snapshot.key),
        damaged: Vec::new(),
        error: result.as_ref().err().map(|error| format_chain(error)),
    };
    if result.as_ref().err().is_some_and(|error| error.exit() == Exit::Refused)
        && let Err(error) = staging::remove_dumps(&settings.layout.drill_state())
    {
        // The next drill removes the dump.
        tracing::warn!(error = %format_chain(&error), "cannot remove drill dump");
    }
    let recorded = check.write(&settings.layout);
    failpoint::trigger("drill.recorded").or_exit(Exit::Internal)?;
    let summary = result.map_err(|error| Failure::new(error.exit(), error))?;
    recorded.or_exit(Exit::Internal)?;
    println!("{} was restored and matches its sidecar: {summary}", check.key.unwrap_or_default());
    Ok(())
}

async fn drill(
    settings: &BackupSettings,
    drilled: &mut Option<SnapshotRef>,
) -> Result<String, DatabaseDrillError> {
    failpoint::trigger("drill.begin")?;
    let (context, dir) = (settings.restore_context(), settings.layout.drill_state());
    remove_leftovers(&context, &dir).await?;
    failpoint::trigger("drill.cleaned")?;
    let Some((snapshot, sidecar)) = find_latest(settings, drilled).await? else { return Ok(String::new()) };
    staging::check_postgres_version(&context, &sidecar).await?;
    let dump = staging::fetch_dump(&context, &dir, &snapshot, &sidecar).await?;
    failpoint::trigger("drill.downloaded")?;
    let loaded = staging::load_into_scratch(&context, &dump, &sidecar, ScratchPurpose::Check).await?;
    failpoint::trigger("drill.loaded")?;
    let client = context.server.connect(postgres::MAINTENANCE_DATABASE, "svc-db-backup").await?;
    staging::drop_scratch(&client, &loaded.name).await;
    failpoint::trigger("drill.dropped")?;
    remove_leftovers(&context, &dir).await?;
    let rows: u64 = sidecar.tables.iter().map(|table| table.rows).sum();
    Ok(format!("{}, {}", pluralize(sidecar.tables.len() as u64, "table"), pluralize(rows, "row")))
}

/// Finds the latest snapshot, setting `drilled` even if the sidecar cannot be read.
async fn find_latest(
    settings: &BackupSettings,
    drilled: &mut Option<SnapshotRef>,
) -> Result<Option<(SnapshotRef, Sidecar)>, DatabaseDrillError> {
    let snapshot = match snapshot::find_latest(&settings.bucket, &settings.slot).await {
        Ok(snapshot) => snapshot,
        Err(SnapshotUnusable::Absent) => return Ok(None),
        Err(SnapshotUnusable::Damaged { key, reason }) => {
            return Err(DatabaseDrillError::Damaged { key, reason });
        }
        Err(SnapshotUnusable::Store(error)) => return Err(DatabaseDrillError::Store(error)),
    };
    *drilled = Some(snapshot.clone());
    let sidecar = snapshot::read_sidecar(&settings.bucket, &settings.slot, &snapshot).await;
    Ok(Some((snapshot, sidecar.map_err(DatabaseDrillError::Store)?)))
}

/// Removes scratch databases, dumps and roles left by this drill or a killed run.
async fn remove_leftovers(context: &RestoreContext, dir: &Path) -> Result<(), DatabaseDrillError> {
    let client = context.server.connect(postgres::MAINTENANCE_DATABASE, "svc-db-backup").await?;
    staging::drop_scratch_databases(&client, ScratchPurpose::Check).await?;
    staging::drop_temporary_roles(&client).await?;
    Ok(staging::remove_dumps(dir)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drill_is_not_retried_on_low_disk_space() {
        let no_space = DownloadError::NoSpace { path: "/var/lib/svc".into(), needed: 2, free: 1 };
        assert_eq!(DatabaseDrillError::from(no_space).exit(), Exit::Refused);
    }
}
