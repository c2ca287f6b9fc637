//! Snapshots the database that an import is about to replace, by running `svc-db-backup run-before-import`.

use std::process::Stdio;
use std::time::Duration;

use super::print_line;
use crate::snapshots::database_identity;
use crate::snapshots::database_identity::IdentityError;
use crate::snapshots::restore::settings::RestoreSettings;
use crate::snapshots::row_counts;
use crate::snapshots::staging;
use crate::system::postgres;
use crate::system::postgres::ConnectError;
use svc_base::applet::Exit;

/// Matches `TimeoutStartSec` in `svc-db-backup.service`.
const BACKUP_TIMEOUT: Duration = Duration::from_secs(6 * 3600);

#[derive(Debug, thiserror::Error)]
pub enum PreImportSnapshotError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error("cannot check whether the current database has rows")]
    Query(#[from] tokio_postgres::Error),
    #[error("cannot start svc-db-backup")]
    Start(#[source] std::io::Error),
    #[error(
        "the preliminary snapshot of the current database failed ({status}); nothing was changed\n  next: see \
         the message above, or import without this snapshot (`--no-backup`)"
    )]
    Failed { status: String },
}

impl PreImportSnapshotError {
    pub fn exit(&self) -> Exit {
        match self {
            Self::Connect(_) => Exit::Unavailable,
            Self::Identity(error) => error.exit(),
            Self::Query(error) => postgres::to_exit(error),
            Self::Start(_) => Exit::Internal,
            Self::Failed { .. } => Exit::TryAgain,
        }
    }
}

/// Takes the snapshot, unless the database contains none of the owner's rows. A held-back snapshot is good enough,
/// since it's stored.
///
/// # Errors
/// [`PreImportSnapshotError`] if the database can't be read or isn't this machine's, or if the backup fails. The import
/// hasn't changed anything at that point.
pub async fn take_snapshot(settings: &RestoreSettings) -> Result<(), PreImportSnapshotError> {
    let server = &settings.context.server;
    let client = staging::connect_with_retries(&settings.context, server.database()).await?;
    if row_counts::find_table_with_rows(&client).await?.is_none() {
        return Ok(());
    }
    database_identity::check_or_adopt(&settings.layout, &client).await?;
    drop(client);
    print_line("taking a snapshot of the current database");
    let program = std::env::current_exe().map_err(PreImportSnapshotError::Start)?;
    let mut backup = tokio::process::Command::new(program);
    backup.args(["svc-db-backup", "run-before-import"]).stdin(Stdio::null()).kill_on_drop(true);
    let result = tokio::time::timeout(BACKUP_TIMEOUT, backup.status()).await;
    let status = match result {
        Ok(status) => status.map_err(PreImportSnapshotError::Start)?,
        Err(_) => return Err(PreImportSnapshotError::Failed { status: "timed out".to_owned() }),
    };
    if status.success() {
        return Ok(());
    }
    Err(PreImportSnapshotError::Failed { status: status.to_string() })
}
