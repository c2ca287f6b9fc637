//! `svc-db-backup side`: an earlier snapshot in a database beside the owner's, to look into and to take tables back from.
//!
//! Here: one action at a time, whoever asked for it, and its state in a file. An action that was cut off is done again: a
//! copy that was committed is known by its request.

mod catalog;
mod copy;
mod dependents;
mod plan;
pub mod state;

use std::path::PathBuf;

use tokio_postgres::Client;

use super::Settings;
use super::job::{self, Empty, Mandate};
use super::shrink_guard::Trigger;
use crate::applet::{Exit, Failure, OrExit};
use crate::failpoint::{self, Injected};
use crate::fsx::FileError;
use crate::host;
use crate::host::snapshots::side_database::{Action, Chosen, Copied, Copy, DATABASE, Request, State, Status};
use crate::host::snapshots::staging;
use crate::host::snapshots::staging::{DownloadError, LoadError, Roles};
use crate::host::system::layout::Layout;
use crate::host::system::lock::Lock;
use crate::host::system::postgres;
use crate::host::system::postgres::{ConnectError, ident};
use crate::host::system::quiesce::Quiesce;
use crate::http::problem::chain;
use crate::store::StoreError;
use crate::store::key;
use crate::store::snapshot::{self, SideRecord, Unusable};
use crate::store::snapshots;
use copy::CopyError;

/// The places of a run where a test can stop it.
pub const POINTS: &[&str] = &[
    "side.begin",
    "side.cleaned",
    "side.downloaded",
    "side.loaded",
    "side.renamed",
    "side.opened",
    "side.saved",
    "side.made",
    "side.dependents",
    "side.fetched",
    "side.copied",
    "side.committed",
    "side.told",
    "side.dropped",
];

/// The gateway's own tables are not shown: they are not the owner's to bring back.
const OURS: &str = "svc.";

#[derive(Debug, thiserror::Error)]
enum SideError {
    #[error("there is no snapshot{}", .when)]
    NoSnapshot { when: String },
    #[error("the snapshot is not usable: {0}")]
    Unusable(String),
    #[error("the object store could not be read")]
    Store(#[source] StoreError),
    #[error("no side database is open\n  next: `svc-db-backup side open`")]
    NotOpen,
    #[error(transparent)]
    Download(#[from] DownloadError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error("make or drop the side database")]
    Query(#[from] tokio_postgres::Error),
    #[error(
        "the snapshot of what is there now, which is taken first, failed: {why}\n  next: copy without it (--no-backup)"
    )]
    Save { exit: Exit, why: String },
    #[error("the platform has stopped this machine's writers for a last backup; nothing is copied")]
    Quiesced,
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(
        "stopped by a signal\n  next: svc-db-side.service goes on with it; `svc-db-backup side show` tells how far it is"
    )]
    Stopped,
    #[error(transparent)]
    Injected(#[from] Injected),
}

impl SideError {
    fn exit(&self) -> Exit {
        match self {
            Self::NoSnapshot { .. }
            | Self::Unusable(_)
            | Self::NotOpen
            | Self::Download(DownloadError::NoSpace { .. }) => Exit::Refused,
            Self::Store(error) => host::system::store::exit(error),
            Self::Download(error) => error.exit(),
            Self::Connect(_) => Exit::Unavailable,
            Self::Load(error) => error.exit(),
            Self::Query(error) => postgres::exit(error),
            Self::Copy(error) => error.exit(),
            Self::Save { exit, .. } => *exit,
            Self::Stopped | Self::Quiesced => Exit::TryAgain,
            Self::File(_) | Self::Injected(_) => Exit::Internal,
        }
    }
}

/// Where its dump lies while it is opened.
fn dir(layout: &Layout) -> PathBuf {
    layout.drill_state()
}

/// Does what a request file asks, and nothing where there is none.
///
/// # Errors
/// [`Failure`]. The request is then over, too, unless it was stopped: then the next start does it again.
pub async fn serve(_lock: &Lock, settings: &Settings, stop: impl Future<Output = ()>) -> Result<(), Failure> {
    tokio::select! {
        end = serve_asked(settings) => end,
        () = stop => Err(Failure::new(SideError::Stopped.exit(), SideError::Stopped)),
    }
}

async fn serve_asked(settings: &Settings) -> Result<(), Failure> {
    let Some(request) = Request::read(&settings.layout).or_exit(Exit::Internal)? else { return Ok(()) };
    let request = match request {
        Ok(request) => request,
        Err(error) => {
            Request::remove(&settings.layout).or_exit(Exit::Internal)?;
            let error = anyhow::Error::new(error).context("the request cannot be read, and is dropped");
            return Err(Failure::new(Exit::Refused, error));
        }
    };
    let end = act(settings, &request).await;
    Request::remove(&settings.layout).or_exit(Exit::Internal)?;
    end.map_err(|error| Failure::new(error.exit(), error))
}

/// Asks for one thing, does it, and prints what came of it. It is asked as the gateway asks: whatever ends this run, the
/// unit goes on with it. What was asked before comes first.
///
/// # Errors
/// [`Failure`].
pub async fn run(
    lock: &Lock,
    settings: &Settings,
    action: Action,
    stop: impl Future<Output = ()>,
) -> Result<(), Failure> {
    let request = Request::new(action);
    let asked = async {
        while !request.ask(&settings.layout).or_exit(Exit::Internal)? {
            if let Err(earlier) = serve_asked(settings).await {
                let error = chain(earlier.error.as_ref());
                tracing::warn!(%error, "what was asked of the side database before has failed");
            }
        }
        Ok(())
    };
    tokio::pin!(stop);
    tokio::select! {
        asked = asked => asked,
        () = &mut stop => Err(Failure::new(SideError::Stopped.exit(), SideError::Stopped)),
    }?;
    let end = serve(lock, settings, stop).await;
    let shown = show(&settings.layout);
    end.and(shown)
}

/// Prints the state.
///
/// # Errors
/// [`Failure`].
pub fn show(layout: &Layout) -> Result<(), Failure> {
    let state = State::read(layout).or_exit(Exit::Internal)?;
    let state = state.unwrap_or_else(|| State::new(Status::Closed, ""));
    let word = serde_json::to_value(state.status).unwrap_or_default();
    let key = state.key.as_deref().map(|key| format!(": {key} in the database {DATABASE}"));
    println!("{}{}", word.as_str().unwrap_or_default(), key.unwrap_or_default());
    if let Some(error) = &state.error {
        println!("  {error}");
    }
    for table in &state.tables {
        println!("  {:<48} {:>12} rows", table.name, table.rows);
    }
    if let Some(copy) = &state.last_copy {
        let tried = if copy.dry_run { "tried" } else { "copied" };
        println!("last {tried} at {}:", crate::clock::rfc3339_ms(copy.at));
        if let Some(error) = &copy.error {
            println!("  {error}");
        }
        for table in &copy.tables {
            let made = if table.created { ", made again" } else { "" };
            println!(
                "  {:<48} {} inserted, {} updated, {} deleted, {} skipped{made}",
                table.name, table.inserted, table.updated, table.deleted, table.skipped
            );
            if !table.left_out.is_empty() {
                println!("    left out, for the table has them no more: {}", table.left_out.join(", "));
            }
            for name in &table.recreated {
                println!("    with it: {name}");
            }
            for name in &table.not_recreated {
                println!("    NOT made again: {name}");
            }
        }
    }
    Ok(())
}

async fn act(settings: &Settings, request: &Request) -> Result<(), SideError> {
    failpoint::pass("side.begin")?;
    let id = &request.request_id;
    match &request.action {
        Action::Open(chosen) => open(settings, chosen, id).await,
        Action::Copy(wanted) => take_back(settings, wanted, id).await,
        Action::Close => close(settings, id).await,
    }
}

async fn open(settings: &Settings, chosen: &Chosen, request_id: &str) -> Result<(), SideError> {
    let mut state = State::new(Status::Opening, request_id);
    state.key.clone_from(&chosen.key);
    state.write(&settings.layout)?;
    let opened = opened(settings, chosen, &mut state).await;
    state.status = Status::Open;
    if let Err(error) = &opened {
        (state.status, state.error) = (Status::Failed, Some(chain(error)));
        state.tables.clear();
        if let Err(error) = clean(settings).await {
            tracing::warn!(error = %chain(&error), "could not clean up; the next request does");
        }
    }
    state.write(&settings.layout)?;
    opened
}

async fn opened(settings: &Settings, chosen: &Chosen, state: &mut State) -> Result<(), SideError> {
    let means = settings.means();
    clean(settings).await?;
    failpoint::pass("side.cleaned")?;
    let side = find(settings, chosen).await?;
    state.key = Some(side.key.clone());
    state.write(&settings.layout)?;
    staging::refuse_newer(&means, &side).await?;
    let dump = staging::fetch(&means, &dir(&settings.layout), &side.named(), &side).await?;
    failpoint::pass("side.downloaded")?;
    let loaded = staging::into_scratch(&means, &dump, &side, Roles::OfADrill).await?;
    failpoint::pass("side.loaded")?;
    let client = means.server.connect(postgres::MAINTENANCE, means.name).await?;
    let from = ident(&loaded.name);
    // No app reads in it what it may not read here any more.
    client
        .batch_execute(&format!(
            "REVOKE ALL ON DATABASE {from} FROM PUBLIC; ALTER DATABASE {from} RENAME TO {DATABASE}"
        ))
        .await?;
    failpoint::pass("side.renamed")?;
    staging::remove_dumps(&dir(&settings.layout))?;
    state.tables = side.tables.into_iter().filter(|table| !table.name.starts_with(OURS)).collect();
    state.tables.sort();
    failpoint::pass("side.opened")?;
    Ok(())
}

/// The record of the snapshot that is meant.
async fn find(settings: &Settings, chosen: &Chosen) -> Result<SideRecord, SideError> {
    let (bucket, slot) = (&settings.bucket, &settings.slot);
    let unusable = |error| match error {
        Unusable::Store(error) => SideError::Store(error),
        error => SideError::Unusable(error.to_string()),
    };
    let key = match (&chosen.key, chosen.at) {
        (Some(key), _) => Some(key.clone()),
        (None, None) => match snapshot::latest(bucket, slot).await {
            Ok(latest) => Some(latest.key),
            Err(Unusable::Absent) => None,
            Err(error) => return Err(unusable(error)),
        },
        (None, Some(at)) => {
            let keys = snapshots::keys(bucket, slot).await.map_err(SideError::Store)?;
            let taken = keys.into_iter().filter_map(|key| Some((key::taken_at(&key)?, key)));
            taken.filter(|(taken, _)| *taken <= at).max().map(|(_, key)| key)
        }
    };
    let when = chosen.at.map(|at| format!(" of {} or before", crate::clock::rfc3339_ms(at)));
    let key = key.ok_or_else(|| SideError::NoSnapshot { when: when.unwrap_or_default() })?;
    snapshot::by_key(bucket, slot, &key).await.map_err(unusable)
}

async fn take_back(settings: &Settings, wanted: &Copy, request_id: &str) -> Result<(), SideError> {
    let state = State::read(&settings.layout)?;
    let there = state.filter(|state| matches!(state.status, Status::Open | Status::Copying));
    let mut state = there.ok_or(SideError::NotOpen)?;
    if state.status != Status::Copying || state.request_id != request_id {
        // Another one's, which was given up.
        state.making.clear();
    }
    request_id.clone_into(&mut state.request_id);
    state.status = Status::Copying;
    state.write(&settings.layout)?;
    let mut tables = Vec::new();
    let copied = async {
        // After the state says that a copy runs: a quiesce waits for it, or it sees the quiesce.
        if Quiesce::read(&settings.layout)?.is_some() {
            return Err(SideError::Quiesced);
        }
        if wanted.backup && !wanted.dry_run {
            save(settings).await?;
            failpoint::pass("side.saved")?;
        }
        copy::copy(settings, wanted, &mut state, &mut tables).await?;
        Ok(())
    };
    let end: Result<(), SideError> = copied.await;
    state.status = Status::Open;
    state.making.clear();
    state.last_copy = Some(Copied {
        request_id: request_id.to_owned(),
        at: crate::clock::now_ms(),
        mode: wanted.mode,
        dry_run: wanted.dry_run,
        error: end.as_ref().err().map(|error| chain(error)),
        tables,
    });
    state.write(&settings.layout)?;
    failpoint::pass("side.told")?;
    end
}

/// What is there now becomes a snapshot, so that a copy can be undone. A database without a row has none to lose.
async fn save(settings: &Settings) -> Result<(), SideError> {
    let failed = |exit, why: String| SideError::Save { exit, why };
    let lock = Lock::wait(&settings.layout.backup_lock(), super::REQUEST_WAIT).await;
    let lock = lock.map_err(|error| failed(Exit::TryAgain, chain(&error)))?;
    let mandate = Mandate { empty: Empty::Refused, trigger: Trigger::Request };
    match job::run(&lock, settings, mandate, std::future::pending()).await {
        Err(failure) if failure.exit != Exit::Refused => {
            Err(failed(failure.exit, chain(failure.error.as_ref())))
        }
        _ => Ok(()),
    }
}

async fn close(settings: &Settings, request_id: &str) -> Result<(), SideError> {
    clean(settings).await?;
    failpoint::pass("side.dropped")?;
    let last_copy = State::read(&settings.layout)?.and_then(|state| state.last_copy);
    let mut state = State { last_copy, ..State::new(Status::Closed, request_id) };
    Ok(state.write(&settings.layout)?)
}

/// What an earlier one, or one that was killed, leaves: databases, dumps, roles that nobody needs.
async fn clean(settings: &Settings) -> Result<(), SideError> {
    let client: Client = settings.server.connect(postgres::MAINTENANCE, "svc-db-backup").await?;
    client.batch_execute(&format!("DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")).await?;
    staging::drop_scratches(&client).await?;
    staging::drop_drills_roles(&client).await?;
    Ok(staging::remove_dumps(&dir(&settings.layout))?)
}
