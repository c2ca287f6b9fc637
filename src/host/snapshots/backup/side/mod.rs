//! `svc-db-backup side`: loads an earlier snapshot next to the owner's database, to inspect it and copy tables back.
//!
//! This module runs one action at a time and keeps its state in a file. An interrupted action is retried; a committed
//! copy is recognized by its request id.

mod catalog;
mod copy;
mod dependents;
mod plan;
mod recreate;

use std::path::PathBuf;

use tokio_postgres::Client;

use super::job::{self, LossPolicy, RunOptions};
use super::settings::BackupSettings;
use super::shrink_guard::Trigger;
use crate::snapshots::side_database::{
    CopyResult, SIDE_DATABASE, SideAction, SideRequest, SideState, SideStatus, SnapshotChoice, TableCopy,
};
use crate::snapshots::staging;
use crate::snapshots::staging::{DownloadError, LoadError, ScratchPurpose};
use crate::system::layout::Layout;
use crate::system::lock::Lock;
use crate::system::postgres;
use crate::system::postgres::{ConnectError, quote_ident};
use crate::system::quiesce::Quiesce;
use copy::CopyError;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::failpoint::{self, InjectedFailure};
use svc_base::fsx::FileError;
use svc_http::problem::format_chain;
use svc_store::StoreError;
use svc_store::key;
use svc_store::snapshot::{self, Sidecar, SnapshotUnusable};
use svc_store::snapshots;

/// Fail points of a run.
pub const FAILPOINTS: &[&str] = &[
    "side.begin",
    "side.cleaned",
    "side.downloaded",
    "side.loaded",
    "side.renamed",
    "side.opened",
    "side.saved",
    "side.recreated",
    "side.fetched",
    "side.copied",
    "side.committed",
    "side.dependents",
    "side.recorded",
    "side.dropped",
];

/// The gateway's own tables are not shown, because they cannot be copied back.
const GATEWAY_SCHEMA_PREFIX: &str = "svc.";

#[derive(Debug, thiserror::Error)]
enum SideError {
    #[error("there is no snapshot{}", .when)]
    NoSnapshot { when: String },
    #[error("{0}")]
    Unusable(String),
    #[error("the object store could not be read")]
    Store(#[source] StoreError),
    #[error("no side database is open\n  next: run `svc-db-backup side open`")]
    NotOpen,
    #[error(transparent)]
    Download(#[from] DownloadError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error("could not create or drop the side database")]
    Query(#[from] tokio_postgres::Error),
    #[error(
        "the preliminary snapshot of the current database failed: {reason}\n  next: retry, or copy without \
         it (--no-backup)"
    )]
    PreliminarySnapshot { exit: Exit, reason: String },
    #[error("the platform has stopped this machine's writers for a final backup; nothing was copied")]
    Quiesced,
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(
        "stopped by a signal\n  next: svc-db-side.service resumes the action; `svc-db-backup side show` shows its \
         progress"
    )]
    Stopped,
    #[error(transparent)]
    Injected(#[from] InjectedFailure),
}

impl SideError {
    fn exit(&self) -> Exit {
        match self {
            Self::NoSnapshot { .. }
            | Self::Unusable(_)
            | Self::NotOpen
            | Self::Download(DownloadError::NoSpace { .. }) => Exit::Refused,
            Self::Store(error) => crate::system::store::to_exit(error),
            Self::Download(error) => error.exit(),
            Self::Connect(_) => Exit::Unavailable,
            Self::Load(error) => error.exit(),
            Self::Query(error) => postgres::to_exit(error),
            Self::Copy(error) => error.exit(),
            Self::PreliminarySnapshot { exit, .. } => *exit,
            Self::Stopped | Self::Quiesced => Exit::TryAgain,
            Self::File(_) | Self::Injected(_) => Exit::Internal,
        }
    }
}

/// Returns the directory that holds the dump while the side database is being opened.
fn dump_dir(layout: &Layout) -> PathBuf {
    layout.drill_state()
}

/// Serves the pending request, if there is one.
///
/// # Errors
/// The action's exit code if it fails, or `Refused` if the request cannot be parsed; the request is removed. `TryAgain`
/// if `stop` ends the run; the request is kept, and the next start repeats it. `Internal` if the request file cannot be
/// read or removed.
pub async fn serve(
    _lock: &Lock,
    settings: &BackupSettings,
    stop: impl Future<Output = ()>,
) -> Result<(), Failure> {
    tokio::select! {
        result = serve_pending(settings) => result,
        () = stop => Err(Failure::new(SideError::Stopped.exit(), SideError::Stopped)),
    }
}

async fn serve_pending(settings: &BackupSettings) -> Result<(), Failure> {
    let Some(request) = SideRequest::read(&settings.layout).or_exit(Exit::Internal)? else { return Ok(()) };
    let request = match request {
        Ok(request) => request,
        Err(error) => {
            SideRequest::remove(&settings.layout).or_exit(Exit::Internal)?;
            let error = anyhow::Error::new(error).context("the request cannot be parsed and was removed");
            return Err(Failure::new(Exit::Refused, error));
        }
    };
    let result = serve_action(settings, &request).await;
    SideRequest::remove(&settings.layout).or_exit(Exit::Internal)?;
    result.map_err(|error| Failure::new(error.exit(), error))
}

/// Requests an action, serves it, and prints the result. The request file is the same as the gateway's, so
/// `svc-db-side.service` resumes the action if this run ends early. A request that is already pending is served first.
///
/// # Errors
/// The same as for [`serve`].
pub async fn run(
    lock: &Lock,
    settings: &BackupSettings,
    action: SideAction,
    stop: impl Future<Output = ()>,
) -> Result<(), Failure> {
    let request = SideRequest::new(action);
    let submission = async {
        while !request.submit(&settings.layout).or_exit(Exit::Internal)? {
            if let Err(earlier) = serve_pending(settings).await {
                let error = format_chain(earlier.error.as_ref());
                tracing::warn!(%error, "an earlier request for the side database failed");
            }
        }
        Ok(())
    };
    tokio::pin!(stop);
    tokio::select! {
        submitted = submission => submitted,
        () = &mut stop => Err(Failure::new(SideError::Stopped.exit(), SideError::Stopped)),
    }?;
    let result = serve(lock, settings, stop).await;
    let printed = show(&settings.layout);
    result.and(printed)
}

/// Prints the state of the side database, and the result of the last copy.
pub fn show(layout: &Layout) -> Result<(), Failure> {
    let state = SideState::read(layout).or_exit(Exit::Internal)?;
    let state = state.unwrap_or_else(|| SideState::new(SideStatus::Closed, ""));
    let status = serde_json::to_value(state.status).unwrap_or_default();
    let key = state.key.as_deref().map(|key| format!(": {key} in the database {SIDE_DATABASE}"));
    println!("{}{}", status.as_str().unwrap_or_default(), key.unwrap_or_default());
    if let Some(error) = &state.error {
        println!("  {error}");
    }
    for table in &state.tables {
        println!("  {:<48} {:>12} rows", table.name, table.rows);
    }
    if let Some(copy) = &state.last_copy {
        let kind = if copy.dry_run { "dry run" } else { "copy" };
        println!("last {kind} at {}:", svc_base::clock::rfc3339_ms(copy.at));
        if let Some(error) = &copy.error {
            println!("  {error}");
        }
        for table in &copy.tables {
            let recreated = if table.was_recreated { ", recreated" } else { "" };
            println!(
                "  {:<48} {} inserted, {} updated, {} deleted, {} skipped{recreated}",
                table.name, table.inserted, table.updated, table.deleted, table.skipped
            );
            if !table.left_out.is_empty() {
                println!(
                    "    columns left out, because the table no longer has them: {}",
                    table.left_out.join(", ")
                );
            }
            for name in &table.recreated {
                println!("    recreated with the table: {name}");
            }
            for name in &table.not_recreated {
                println!("    NOT recreated: {name}");
            }
        }
    }
    Ok(())
}

async fn serve_action(settings: &BackupSettings, request: &SideRequest) -> Result<(), SideError> {
    failpoint::trigger("side.begin")?;
    let id = &request.request_id;
    match &request.action {
        SideAction::Open(choice) => open(settings, choice, id).await,
        SideAction::Copy(copy) => copy_back(settings, copy, id).await,
        SideAction::Close => close(settings, id).await,
    }
}

async fn open(settings: &BackupSettings, choice: &SnapshotChoice, request_id: &str) -> Result<(), SideError> {
    let mut state = SideState::new(SideStatus::Opening, request_id);
    state.key.clone_from(&choice.key);
    state.write(&settings.layout)?;
    let result = load_side_database(settings, choice, &mut state).await;
    state.status = SideStatus::Open;
    if let Err(error) = &result {
        (state.status, state.error) = (SideStatus::Failed, Some(format_chain(error)));
        state.tables.clear();
        if let Err(error) = drop_side_database(settings).await {
            tracing::warn!(error = %format_chain(&error), "could not drop the unusable side database; the next open or close request drops it");
        }
    }
    state.write(&settings.layout)?;
    result
}

async fn load_side_database(
    settings: &BackupSettings,
    choice: &SnapshotChoice,
    state: &mut SideState,
) -> Result<(), SideError> {
    let context = settings.restore_context();
    drop_side_database(settings).await?;
    failpoint::trigger("side.cleaned")?;
    let sidecar = find_snapshot(settings, choice).await?;
    state.key = Some(sidecar.key.clone());
    state.write(&settings.layout)?;
    staging::check_postgres_version(&context, &sidecar).await?;
    let dump =
        staging::fetch_dump(&context, &dump_dir(&settings.layout), &sidecar.snapshot_ref(), &sidecar).await?;
    failpoint::trigger("side.downloaded")?;
    let loaded = staging::load_into_scratch(&context, &dump, &sidecar, ScratchPurpose::Check).await?;
    failpoint::trigger("side.loaded")?;
    let client = context.server.connect(postgres::MAINTENANCE_DATABASE, context.name).await?;
    let from = quote_ident(&loaded.name);
    revoke_privileges(&client, &loaded.name).await?;
    client.batch_execute(&format!("ALTER DATABASE {from} RENAME TO {SIDE_DATABASE}")).await?;
    failpoint::trigger("side.renamed")?;
    staging::remove_dumps(&dump_dir(&settings.layout))?;
    state.tables =
        sidecar.tables.into_iter().filter(|table| !table.name.starts_with(GATEWAY_SCHEMA_PREFIX)).collect();
    state.tables.sort();
    failpoint::trigger("side.opened")?;
    Ok(())
}

/// Revokes the privileges on a loaded database, which were restored from the snapshot: apps must not be able to read
/// data here that they may no longer read in the live database.
async fn revoke_privileges(client: &Client, database: &str) -> Result<(), tokio_postgres::Error> {
    let query = "
        SELECT DISTINCT r.rolname::text FROM pg_database d CROSS JOIN aclexplode(d.datacl) a
          JOIN pg_roles r ON r.oid = a.grantee WHERE d.datname = $1";
    let mut names = vec!["PUBLIC".to_owned()];
    for row in client.query(query, &[&database]).await? {
        names.push(quote_ident(row.try_get(0)?));
    }
    let (database, names) = (quote_ident(database), names.join(", "));
    client.batch_execute(&format!("REVOKE ALL ON DATABASE {database} FROM {names}")).await
}

/// Loads the sidecar of the snapshot that `choice` selects.
async fn find_snapshot(settings: &BackupSettings, choice: &SnapshotChoice) -> Result<Sidecar, SideError> {
    let (bucket, slot) = (&settings.bucket, &settings.slot);
    let to_side_error = |error| match error {
        SnapshotUnusable::Store(error) => SideError::Store(error),
        error => SideError::Unusable(error.to_string()),
    };
    let key = match (&choice.key, choice.at) {
        (Some(key), _) => Some(key.clone()),
        (None, None) => match snapshot::find_latest(bucket, slot).await {
            Ok(latest) => Some(latest.key),
            Err(SnapshotUnusable::Absent) => None,
            Err(error) => return Err(to_side_error(error)),
        },
        (None, Some(at)) => {
            let keys = snapshots::list_keys(bucket, slot).await.map_err(SideError::Store)?;
            let taken = keys.into_iter().filter_map(|key| Some((key::taken_at(&key)?, key)));
            taken.filter(|(taken, _)| *taken <= at).max().map(|(_, key)| key)
        }
    };
    let when = choice.at.map(|at| format!(" taken at or before {}", svc_base::clock::rfc3339_ms(at)));
    let key = key.ok_or_else(|| SideError::NoSnapshot { when: when.unwrap_or_default() })?;
    snapshot::load(bucket, slot, &key).await.map_err(to_side_error)
}

async fn copy_back(settings: &BackupSettings, copy: &TableCopy, request_id: &str) -> Result<(), SideError> {
    let state = SideState::read(&settings.layout)?;
    let open_state = state.filter(|state| matches!(state.status, SideStatus::Open | SideStatus::Copying));
    let mut state = open_state.ok_or(SideError::NotOpen)?;
    let is_complete =
        |last: &CopyResult| !last.dry_run && last.error.is_none() && last.request_id == request_id;
    if !copy.dry_run && state.last_copy.as_ref().is_some_and(is_complete) {
        // The previous run was killed before it removed the request. The log of copies is not sufficient, because it
        // omits copies that only recreated tables, and rows may have been written to those tables since.
        return Ok(());
    }
    if state.status != SideStatus::Copying || state.request_id != request_id {
        // The recreated tables belong to another request, which was abandoned.
        state.recreating.clear();
    }
    request_id.clone_into(&mut state.request_id);
    state.status = SideStatus::Copying;
    state.write(&settings.layout)?;
    let mut tables = Vec::new();
    let snapshot_and_copy = async {
        // Checked after the state is written: either a quiesce waits for this copy, or this copy sees the quiesce.
        if Quiesce::read(&settings.layout)?.is_some() {
            return Err(SideError::Quiesced);
        }
        // An interrupted run of this request took its snapshot before it recreated tables. If a second snapshot failed,
        // the dependents of these tables would never be added.
        if copy.backup && !copy.dry_run && state.recreating.is_empty() {
            take_preliminary_snapshot(settings).await?;
            failpoint::trigger("side.saved")?;
        }
        copy::copy(settings, copy, &mut state, &mut tables).await?;
        Ok(())
    };
    let result: Result<(), SideError> = snapshot_and_copy.await;
    state.status = SideStatus::Open;
    state.recreating.clear();
    state.last_copy = Some(CopyResult {
        request_id: request_id.to_owned(),
        at: svc_base::clock::now_ms(),
        mode: copy.mode,
        dry_run: copy.dry_run,
        error: result.as_ref().err().map(|error| format_chain(error)),
        tables,
    });
    state.write(&settings.layout)?;
    failpoint::trigger("side.recorded")?;
    result
}

/// Takes a snapshot of the current database, so that a copy can be undone. An emptied database needs none, and a
/// held-back snapshot suffices.
async fn take_preliminary_snapshot(settings: &BackupSettings) -> Result<(), SideError> {
    let snapshot_error = |exit, reason: String| SideError::PreliminarySnapshot { exit, reason };
    let lock = Lock::wait(&settings.layout.backup_lock(), super::REQUEST_LOCK_TIMEOUT).await;
    let lock = lock.map_err(|error| snapshot_error(Exit::TryAgain, format_chain(&error)))?;
    let options = RunOptions { loss: LossPolicy::Refuse, trigger: Trigger::Request };
    match job::run(&lock, settings, options, std::future::pending()).await {
        Err(failure) if !job::is_refused_for_loss(&failure) => {
            Err(snapshot_error(failure.exit, format_chain(failure.error.as_ref())))
        }
        _ => Ok(()),
    }
}

async fn close(settings: &BackupSettings, request_id: &str) -> Result<(), SideError> {
    drop_side_database(settings).await?;
    failpoint::trigger("side.dropped")?;
    let last_copy = SideState::read(&settings.layout)?.and_then(|state| state.last_copy);
    let mut state = SideState { last_copy, ..SideState::new(SideStatus::Closed, request_id) };
    Ok(state.write(&settings.layout)?)
}

/// Drops the side database, the scratch databases and dumps of earlier runs, and the temporary roles that nothing else
/// uses.
async fn drop_side_database(settings: &BackupSettings) -> Result<(), SideError> {
    let client: Client = settings.server.connect(postgres::MAINTENANCE_DATABASE, "svc-db-backup").await?;
    client.batch_execute(&format!("DROP DATABASE IF EXISTS {SIDE_DATABASE} WITH (FORCE)")).await?;
    staging::drop_scratch_databases(&client, ScratchPurpose::Check).await?;
    staging::drop_temporary_roles(&client).await?;
    Ok(staging::remove_dumps(&dump_dir(&settings.layout))?)
}
