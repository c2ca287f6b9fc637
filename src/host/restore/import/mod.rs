//! `svc-restore import`: an owner's archive (`host::archive`) onto this machine: its database in the place of the one that is
//! there, its home's entries in the place of those of the same name.
//!
//! Nothing is touched before every byte was compared with the manifest. Of a database that holds
//! rows a snapshot is taken first. What is replaced stays: the database for seven days, the home's entries in a directory that is named at the end. A run that was killed is run again.

mod archived;
mod home;
mod snapshot_first;

use std::path::Path;

use super::Settings;
use super::journal::Journal;
use super::swap::{self, SwapError};
use crate::applet::{Exit, Failure};
use crate::failpoint::{self, Injected};
use crate::fsx::{self, FileError};
use crate::host::database_identity::{self, IdentityError};
use crate::host::lock::Lock;
use crate::host::marker::Marker;
use crate::host::pgconn::{self, ConnectError};
use crate::host::scratch::{self, DownloadError, Dump, LoadError, Roles};
use crate::host::systemd;
use crate::http::problem::chain;
use crate::http::request_id;
use archived::{ArchiveError, Archived};
use home::{give_as, give_as_beside};
use snapshot_first::SnapshotFirstError;

/// The places of a run where a test can stop it.
pub const POINTS: &[&str] = &[
    "import.begin",
    "import.checked",
    "import.staged",
    "import.loaded",
    "import.swapped",
    "import.placed",
    "import.done",
];

#[derive(Debug, thiserror::Error)]
enum ImportError {
    #[error(
        "the restore gate is shut: `svc-restore` brings this machine's own snapshot first, and an import comes after it"
    )]
    GateShut,
    #[error("this machine has been replaced (superseded.json)")]
    Superseded,
    #[error(
        "the archive is {of}'s, and this machine is {here}'s\n  next: `--of-another-user` says that it is meant"
    )]
    Anothers { of: String, here: String },
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    #[error(transparent)]
    Download(#[from] DownloadError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    SnapshotFirst(#[from] SnapshotFirstError),
    #[error("look for what an earlier run left")]
    Query(#[from] tokio_postgres::Error),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Swap(#[from] SwapError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Injected(#[from] Injected),
}

impl ImportError {
    fn exit(&self) -> Exit {
        match self {
            Self::Superseded => Exit::Permission,
            Self::GateShut => Exit::TryAgain,
            Self::Anothers { .. } | Self::Archive(_) | Self::Download(DownloadError::NoSpace { .. }) => {
                Exit::Refused
            }
            Self::Download(error) => error.exit(),
            Self::SnapshotFirst(error) => error.exit(),
            Self::Connect(_) => Exit::Unavailable,
            Self::Load(error) => error.exit(),
            Self::Query(error) => pgconn::exit(error),
            Self::Identity(error) => error.exit(),
            Self::Swap(error) => error.exit(),
            Self::File(_) | Self::Injected(_) => Exit::Internal,
        }
    }
}

/// How an archive is imported.
pub struct Wanted<'a> {
    pub archive: &'a Path,
    /// Looked at, and nothing is changed.
    pub check: bool,
    /// It may be another user's.
    pub of_another: bool,
    pub first: First,
}

/// What is done with the database that is here before it is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum First {
    /// A snapshot of it is taken.
    Snapshot,
    /// A person says that it is not needed.
    Nothing,
}

/// Imports it.
///
/// # Errors
/// [`Failure`]; before the databases are swapped, everything is as it was.
pub async fn run(_lock: &Lock, settings: &Settings, wanted: &Wanted<'_>) -> Result<(), Failure> {
    import(settings, wanted).await.map_err(|error| Failure::new(error.exit(), error))
}

async fn import(settings: &Settings, wanted: &Wanted<'_>) -> Result<(), ImportError> {
    failpoint::pass("import.begin")?;
    let layout = &settings.layout;
    let archived = tokio::task::block_in_place(|| Archived::read(wanted.archive))?;
    let rows: u64 = archived.side.tables.iter().map(|table| table.rows).sum();
    println!(
        "{}'s, of {}: {} tables with {rows} rows, {} entries of the home; every byte is as it was written",
        archived.about.idp_user_id,
        crate::clock::rfc3339_ms(archived.about.created_at),
        archived.side.tables.len(),
        archived.of_home(),
    );
    if wanted.check {
        return Ok(());
    }
    let here = settings.user.as_str();
    if archived.about.idp_user_id.as_str() != here && !wanted.of_another {
        let of = archived.about.idp_user_id.as_str().to_owned();
        return Err(ImportError::Anothers { of, here: here.to_owned() });
    }
    if layout.superseded().exists() {
        return Err(ImportError::Superseded);
    }
    if !layout.restore_complete().exists() {
        return Err(ImportError::GateShut);
    }
    failpoint::pass("import.checked")?;

    if wanted.first == First::Snapshot {
        snapshot_first::take(settings).await?;
    }
    let snapshot = archived.side.named();
    scratch::refuse_newer(&settings.means, &archived.side).await?;
    let client = scratch::connect_patiently(&settings.means, pgconn::MAINTENANCE).await?;
    scratch::end_sessions_of(&client, settings.means.name).await?;
    scratch::drop_scratches(&client).await?;
    drop(client);
    let state = layout.restore_state();
    scratch::ensure_room(&state, &snapshot, &archived.side, 0)?;
    home::remove_staged(&layout.home())?;
    let staged = tokio::task::block_in_place(|| archived.unpack(&state, &layout.home()))?;
    failpoint::pass("import.staged")?;
    let dump = Dump::File(staged.dump.clone());
    let loaded = scratch::into_scratch(&settings.means, &dump, &archived.side, Roles::Stay).await?;
    failpoint::pass("import.loaded")?;
    let client = scratch::connect_patiently(&settings.means, pgconn::MAINTENANCE).await?;
    database_identity::stamp(&client, &loaded.name).await?;
    Journal::new(&snapshot, &loaded).write(layout)?;
    // After a power cut the gate reads it, which is not root.
    give_as_beside(&super::journal::path(layout))?;
    if let Err(error) = swap::swap(&settings.means.server, &loaded).await {
        swap::undo(&settings.means.server, &loaded).await;
        return Err(error.into());
    }
    failpoint::pass("import.swapped")?;
    let identity = database_identity::adopt(&client, settings.means.server.database()).await?;
    Marker::new(Some(snapshot.key.clone()), identity).write(layout)?;
    // Where it lies, only its owner may replace it: the services' user, whose directory this is.
    give_as(&fsx::through_link(&layout.restore_complete()), &layout.restore_state())?;
    drop(client);
    let before = tokio::task::block_in_place(|| home::place(layout, &staged))?;
    failpoint::pass("import.placed")?;
    // Until then the pointer names what was here before.
    let request = serde_json::json!({"requestId": request_id::current()}).to_string();
    let request_file = layout.request("backup");
    fsx::write_atomic(&request_file, request.as_bytes(), 0o600)?;
    give_as_beside(&request_file)?;
    super::journal::remove(layout)?;
    scratch::remove_dumps(&state)?;
    failpoint::pass("import.done")?;
    println!(
        "imported; the database that was here stays as svc_before_{} for seven days, or until space is short",
        loaded.number
    );
    if let Some(before) = before {
        println!("what had the same names in the home is in {}", before.display());
    }
    restart(settings).await;
    Ok(())
}

/// The gateway gives the database's roles their passwords when it starts.
async fn restart(settings: &Settings) {
    let Some(systemctl) = systemd::systemctl(&settings.layout) else {
        println!("next: restart svc-gateway");
        return;
    };
    let mut command = tokio::process::Command::new(systemctl);
    command.args(["try-restart", "svc-gateway.service", "svc-sync-agent.service"]);
    match tokio::time::timeout(std::time::Duration::from_secs(120), command.status()).await {
        Ok(Ok(status)) if status.success() => println!("restarted svc-gateway"),
        Ok(Err(error)) => {
            tracing::warn!(error = %chain(&error), "could not restart the gateway");
            println!("next: systemctl restart svc-gateway");
        }
        _ => println!("next: systemctl restart svc-gateway"),
    }
}
