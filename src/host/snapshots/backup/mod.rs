//! `svc-db-backup`: verified snapshots of the owner's database in the object store, the pointer to the latest, and
//! checks of stored snapshots.
//!
//! This module owns the command line, the configuration, the locks, the request file and the exit code. Backups are in
//! `job`, checks in `verify` and `drill`.

mod drill;
mod dump;
pub mod dump_check;
mod export;
mod job;
pub mod open_uploads;
pub mod progress_writer;
mod record;
pub mod replaced_databases;
mod request;
mod retry;
pub mod row_loss;
mod settings;
mod shrink_guard;
mod side;
mod snapshot;
mod stage;
mod toc;
mod verify;
pub mod verify_object;
pub mod verify_schedule;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::Shared;
use jiff::Timestamp;
use tokio::signal::unix::{SignalKind, signal};

use super::backup_progress::BackupProgress;
use super::side_database::{CopyMode, SideAction, SnapshotChoice, TableCopy};
use crate::system::config::init_log;
use crate::system::layout::Layout;
use crate::system::lock::{Lock, LockError};
use crate::system::store_credentials::OutagePolicy;
use crate::system::user;
use job::{RunOptions, UnpublishedSnapshot};
use request::RequestFile;
use retry::RetrySchedule;
use settings::BackupSettings;
use shrink_guard::Trigger;
use svc_base::applet::{self, Exit, Failure, OrExit};
use svc_base::error_chain::format_chain;
use svc_http::request_id;
use svc_store::key::SnapshotKey;
use verify::VerifyTargets;

pub use drill::FAILPOINTS as DRILL_FAILPOINTS;
pub use export::FAILPOINTS as EXPORT_FAILPOINTS;
pub use job::FAILPOINTS;
pub use side::FAILPOINTS as SIDE_FAILPOINTS;
#[cfg(feature = "fuzzing")]
pub use toc::count_entries as count_dump_entries;
pub use verify::FAILPOINTS as VERIFY_FAILPOINTS;

/// Maximum time that a request, an acceptance, or the snapshot before an import or a copy waits for a run that was
/// started before it.
const REQUEST_LOCK_TIMEOUT: Duration = Duration::from_secs(600);
/// Maximum time that any other backup waits. The gateway holds the lock briefly while it checks for a running backup.
const PROBE_LOCK_TIMEOUT: Duration = Duration::from_millis(400);
const CHECK_LOCK_HELD_MESSAGE: &str =
    "another check of snapshots, or an action on the side database, is running";

#[derive(clap::Parser)]
#[command(
    name = "svc-db-backup",
    version = applet::version(),
    about = "Takes a snapshot of the database, verifies it, uploads it and moves the pointer to it",
    args_conflicts_with_subcommands = true
)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Take a snapshot now (the default)
    Run(RunArgs),
    /// The snapshot that an import takes of the database that it replaces
    #[command(hide = true)]
    RunBeforeImport,
    /// Make the held-back snapshot the latest, and accept its loss of rows since the previous one
    Accept,
    /// Verify stored snapshots by reading them in full: by default, today's share of them
    #[command(after_help = "Examples:\n  svc-db-backup verify\n  svc-db-backup verify --latest\n  \
                            svc-db-backup verify system/db/snapshots/2026-01-02T03-04-05.678Z-1.dump")]
    Verify(VerifyArgs),
    /// Restore the latest snapshot into a scratch database, compare it with its sidecar, and drop it
    Drill {
        /// Process the request file: wait for a running check, and remove the file when done
        #[arg(long)]
        request: bool,
    },
    /// Write all of the owner's data into one archive: database, home, records, manifest
    #[command(
        after_help = "Run this command as root. Any `tar` can read the archive, a stock pg_restore its database.dump, and \
`svc-restore import` all of it.\n\nExample:\n  svc-db-backup export --output /var/backups/ada.tar"
    )]
    Export {
        /// The archive; it appears only when complete
        #[arg(long, short, value_name = "FILE")]
        output: PathBuf,
    },
    /// The part of an export that runs as the gateway's user
    #[command(hide = true)]
    ExportArchive,
    /// The part of an export that runs as the owner's user
    #[command(hide = true)]
    ExportHome {
        /// Files to leave out
        #[arg(long, value_name = "FILE")]
        except: Vec<PathBuf>,
    },
    /// Load an earlier snapshot next to the owner's database, to inspect it and copy tables back
    #[command(subcommand)]
    Side(SideCommand),
}

#[derive(clap::Subcommand)]
enum SideCommand {
    /// Load a snapshot into the database svc_side, replacing the one there
    #[command(
        after_help = "Examples:\n  svc-db-backup side open\n  svc-db-backup side open --at 2026-01-02T03:00:00Z"
    )]
    Open {
        /// As shown by `svcctl backup list` and backup.jsonl; default: the latest
        #[arg(value_name = "KEY")]
        key: Option<SnapshotKey>,
        /// The last snapshot taken at or before this time
        #[arg(long, value_name = "TIME", conflicts_with = "key")]
        at: Option<Timestamp>,
    },
    /// Show the side database's tables and the result of the last copy
    Show,
    /// Copy rows from these tables back into the owner's database; a missing table is recreated
    #[command(after_help = "Example:\n  svc-db-backup side copy app_notes.notes --dry-run")]
    Copy {
        /// As listed by `side show`
        #[arg(value_name = "TABLE", required = true)]
        tables: Vec<String>,
        #[arg(long, value_enum, default_value_t = CopyMode::Missing)]
        mode: CopyMode,
        /// Copy, count, and roll back
        #[arg(long)]
        dry_run: bool,
        /// Do not take a snapshot of the current database first
        #[arg(long)]
        no_backup: bool,
    },
    /// Drop the side database
    Close,
    /// Serve the gateway's request, if there is one
    #[command(hide = true)]
    Serve,
}

#[derive(clap::Args)]
struct RunArgs {
    /// Process the request file: wait for a running backup, and remove the file when done
    #[arg(long)]
    request: bool,
    /// If the backup fails, retry it for up to 45 minutes, unless the failure is permanent
    #[arg(long, conflicts_with = "request")]
    retry: bool,
    /// Accept the loss of rows since the previous snapshot, even if no rows remain
    #[arg(long, visible_alias = "accept-loss")]
    allow_empty: bool,
    /// Maximum time that a run without a request waits for another one
    #[arg(skip = PROBE_LOCK_TIMEOUT)]
    lock_timeout: Duration,
}

#[derive(clap::Args)]
struct VerifyArgs {
    /// Keys of snapshots, as shown by backup.jsonl and `svcctl backup list`
    #[arg(value_name = "KEY", conflicts_with_all = ["latest", "all"])]
    keys: Vec<String>,
    /// The snapshot that a recovery would restore
    #[arg(long, conflicts_with = "all")]
    latest: bool,
    /// Every stored snapshot
    #[arg(long)]
    all: bool,
}

impl VerifyArgs {
    fn targets(self) -> VerifyTargets {
        match self {
            Self { latest: true, .. } => VerifyTargets::Latest,
            Self { all: true, .. } => VerifyTargets::All,
            Self { keys, .. } if !keys.is_empty() => VerifyTargets::Named(keys),
            _ => VerifyTargets::DailyShare,
        }
    }
}

/// Returns the command-line definition, from which the reference pages are generated.
pub fn command() -> clap::Command {
    <Args as clap::CommandFactory>::command()
}

pub fn run(args: Vec<OsString>) -> ExitCode {
    let args: Args = match applet::parse(args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    let layout = Layout::from_process();
    let command = args.command.unwrap_or(Command::Run(args.run));
    let user_switch = match command {
        // An export starts a process for each user whose files it reads.
        Command::Export { .. } | Command::ExportHome { .. } => Ok(()),
        Command::ExportArchive => user::switch_to_gateway_user(&layout),
        _ => user::switch_user_for_database_tools(&layout),
    };
    if let Err(error) = user_switch {
        return applet::report("svc-db-backup", &Failure::new(Exit::Internal, error));
    }
    init_log("svc-db-backup", &layout);
    applet::block_on("svc-db-backup", async move {
        match command {
            Command::Run(args) => run_backup(layout, &args).await,
            Command::RunBeforeImport => run_backup_before_import(layout).await,
            Command::Accept => request_id::run_with_new_id(accept(layout)).await,
            Command::Verify(args) => {
                let (targets, stop) = (Some(args.targets()), watch_stop_signal()?.shared());
                request_id::run_with_new_id(run_check(layout, targets, Duration::ZERO, stop)).await
            }
            Command::Drill { request: false } => {
                let stop = watch_stop_signal()?.shared();
                request_id::run_with_new_id(run_check(layout, None, Duration::ZERO, stop)).await
            }
            Command::Drill { request: true } => serve_drill_request(layout).await,
            Command::Export { output } => export::run(&layout, &output, watch_stop_signal()?).await,
            Command::ExportArchive => {
                request_id::run_with_new_id(async {
                    let settings = BackupSettings::read(layout, OutagePolicy::RequirePlatform)?;
                    export::write_archive(&settings).await
                })
                .await
            }
            Command::ExportHome { except } => tokio::task::block_in_place(|| {
                let (start, to) = (std::io::stdin(), std::io::stdout());
                export::send_home(&layout.home(), &except, start.lock(), to.lock())
            }),
            Command::Side(command) => request_id::run_with_new_id(run_side_command(layout, command)).await,
        }
    })
}

async fn accept(layout: Layout) -> Result<(), Failure> {
    let settings = BackupSettings::read(layout, OutagePolicy::RequirePlatform)?;
    let lock = Lock::wait(&settings.layout.backup_lock(), REQUEST_LOCK_TIMEOUT).await;
    let lock = lock.map_err(|error| lock_failure(error, "another backup is running"))?;
    if let Err(error) = tokio::task::block_in_place(|| BackupProgress::remove(&settings.layout)) {
        tracing::warn!(error = %format_chain(&error), "could not remove the progress of the last backup");
    }
    shrink_guard::accept(&lock, &settings).await
}

/// Serves a request to accept the held-back snapshot. A request for a backup may be pending at the same time.
async fn serve_accept_request(layout: &Layout, request: &RequestFile) -> Result<(), Failure> {
    let id = request.id().unwrap_or_else(request_id::generate);
    let result = request_id::run_with_id(id, accept(layout.clone())).await;
    // After a transient failure, the service is restarted and serves the request again.
    if !result.as_ref().is_err_and(retry::is_transient) {
        request.complete();
    }
    result
}

async fn run_backup(layout: Layout, args: &RunArgs) -> Result<(), Failure> {
    let accept_request = RequestFile::new(&layout, "accept");
    let mut accept_result = Ok(());
    if args.request && accept_request.is_pending() {
        accept_result = serve_accept_request(&layout, &accept_request).await;
        // A requested backup is taken even if the acceptance failed: only the acceptance needs the platform. Without a
        // request, each restart of the service would take one more snapshot.
        if !RequestFile::new(&layout, "backup").is_pending() {
            return accept_result;
        }
    }
    let request = args.request.then(|| RequestFile::new(&layout, "backup"));
    let id = request.as_ref().and_then(RequestFile::id).unwrap_or_else(request_id::generate);
    let result = match BackupSettings::read(layout, OutagePolicy::UseOutageSession) {
        Ok(settings) => {
            request_id::run_with_id(id, back_up_with_retries(&settings, args, request.as_ref())).await
        }
        Err(failure) => Err(failure),
    };
    // A failed request is removed too: after a failure that systemd does not retry, the path unit would restart this
    // program immediately. After any other failure, systemd restarts the service after a delay. If the acceptance
    // failed too, the restarted service takes a backup only for a request, which is therefore kept.
    let is_retried = accept_result.is_err() && result.as_ref().is_err_and(retry::is_transient);
    if let Some(request) = request.filter(|_| !is_retried) {
        request.complete();
    }
    if let (Err(_), Err(failure)) = (&accept_result, &result) {
        let error = format_chain(failure.error.as_ref());
        tracing::error!(%error, "the requested backup failed, as did the acceptance before it");
    }
    accept_result.and(result)
}

/// Takes a snapshot of the database that an import replaces. A held-back snapshot suffices, because it is stored, and
/// an emptied database needs none.
async fn run_backup_before_import(layout: Layout) -> Result<(), Failure> {
    // An interrupted import may have been completed before this one. Its completion requests a backup, which may be
    // running now.
    let lock_timeout = REQUEST_LOCK_TIMEOUT;
    let args = RunArgs { request: false, retry: false, allow_empty: false, lock_timeout };
    match run_backup(layout, &args).await {
        Err(failure) if job::is_refused_for_loss(&failure) => {
            let error = format_chain(failure.error.as_ref());
            tracing::warn!(%error, "the import continues, although the latest snapshot has not changed");
            Ok(())
        }
        result => result,
    }
}

async fn back_up_with_retries(
    settings: &BackupSettings,
    args: &RunArgs,
    request: Option<&RequestFile>,
) -> Result<(), Failure> {
    let mut retry = RetrySchedule::new(settings.first_retry_delay);
    // A signal also ends the run if it arrives between two attempts, or during one that fails for another reason.
    let stop = watch_stop_signal()?.shared();
    let mut unpublished = None;
    loop {
        let result = back_up(settings, args, request, &mut unpublished, &stop).await;
        let is_stopped = stop.clone().now_or_never().is_some();
        // Nothing else would take this backup after a reboot: systemd does not restart a service that it stops.
        if let Some(request) = request.filter(|_| is_stopped && result.is_err()) {
            request.postpone();
        }
        let failure = match result {
            Err(failure) if args.retry && !is_stopped => failure,
            result => return result,
        };
        let Some(delay) = retry.next_delay(&failure) else { return Err(failure) };
        let (seconds, error) = (delay.as_secs(), format_chain(failure.error.as_ref()));
        tracing::warn!(%error, seconds, "the backup failed and will be retried");
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            () = stop.clone() => return Err(failure),
        }
    }
}

async fn back_up(
    settings: &BackupSettings,
    args: &RunArgs,
    request: Option<&RequestFile>,
    unpublished: &mut Option<UnpublishedSnapshot>,
    stop: &Shared<impl Future<Output = ()>>,
) -> Result<(), Failure> {
    let lock_timeout = if request.is_some() { REQUEST_LOCK_TIMEOUT } else { args.lock_timeout };
    let lock_file = settings.layout.backup_lock();
    let lock = wait_for_lock(&lock_file, lock_timeout, "another backup is running", stop).await?;
    if let Some(request) = request {
        request.begin();
    }
    let loss = if args.allow_empty { job::LossPolicy::Accept } else { job::LossPolicy::Refuse };
    // Only the hourly unit passes `--retry`.
    let trigger = if args.retry { Trigger::Schedule } else { Trigger::Request };
    job::attempt(&lock, settings, RunOptions { loss, trigger }, unpublished, stop.clone()).await
}

async fn serve_drill_request(layout: Layout) -> Result<(), Failure> {
    let request = RequestFile::new(&layout, "drill");
    let id = request.id().unwrap_or_else(request_id::generate);
    let stop = watch_stop_signal()?.shared();
    let drill = run_check(layout, None, REQUEST_LOCK_TIMEOUT, stop.clone());
    let result = request_id::run_with_id(id, drill).await;
    // As for a backup, a failed drill's request is removed, but a stopped drill's request is kept.
    if result.is_err() && stop.now_or_never().is_some() {
        request.postpone();
    }
    request.complete();
    result
}

/// Checks snapshots: verifies the targets or, for `None`, runs a drill.
async fn run_check(
    layout: Layout,
    targets: Option<VerifyTargets>,
    lock_timeout: Duration,
    stop: Shared<impl Future<Output = ()>>,
) -> Result<(), Failure> {
    let settings = BackupSettings::read(layout, OutagePolicy::RequirePlatform)?;
    let lock_file = settings.layout.drill_state().join("lock");
    let lock = wait_for_lock(&lock_file, lock_timeout, CHECK_LOCK_HELD_MESSAGE, &stop).await?;
    match targets {
        Some(targets) => verify::run(&lock, &settings, &targets, stop).await,
        None => drill::run(&lock, &settings, stop).await,
    }
}

async fn run_side_command(layout: Layout, command: SideCommand) -> Result<(), Failure> {
    let action = match command {
        SideCommand::Show => return side::show(&layout),
        SideCommand::Open { key, at } => {
            Some(SideAction::Open(SnapshotChoice { key: key.map(|key| key.as_str().to_owned()), at }))
        }
        SideCommand::Copy { tables, mode, dry_run, no_backup } => {
            Some(SideAction::Copy(TableCopy { tables, mode, dry_run, backup: !no_backup }))
        }
        SideCommand::Close => Some(SideAction::Close),
        SideCommand::Serve => None,
    };
    let settings = BackupSettings::read(layout, OutagePolicy::RequirePlatform)?;
    // Drills use the same directory and databases, so they use the same lock.
    let lock_timeout = if action.is_none() { REQUEST_LOCK_TIMEOUT } else { Duration::ZERO };
    let lock = Lock::wait(&settings.layout.drill_state().join("lock"), lock_timeout).await;
    let lock = lock.map_err(|error| lock_failure(error, CHECK_LOCK_HELD_MESSAGE))?;
    match action {
        Some(action) => side::run(&lock, &settings, action, watch_stop_signal()?).await,
        None => side::serve(&lock, &settings, watch_stop_signal()?).await,
    }
}

/// Waits for the lock. If another run still holds it after the timeout, the failure has the message `held_message`.
async fn wait_for_lock(
    path: &Path,
    timeout: Duration,
    held_message: &'static str,
    stop: &Shared<impl Future<Output = ()>>,
) -> Result<Lock, Failure> {
    tokio::select! {
        lock = Lock::wait(path, timeout) => lock.map_err(|error| lock_failure(error, held_message)),
        () = stop.clone() => Err(Failure::new(Exit::TryAgain, anyhow::anyhow!("stopped by a signal"))),
    }
}

fn lock_failure(error: LockError, held_message: &'static str) -> Failure {
    match error {
        LockError::Held => Failure::new(Exit::TryAgain, anyhow::anyhow!(held_message)),
        error @ LockError::File(_) => Failure::new(Exit::Internal, error),
    }
}

/// Returns a future that completes on SIGTERM.
fn watch_stop_signal() -> Result<impl Future<Output = ()>, Failure> {
    let mut stop = signal(SignalKind::terminate()).or_exit(Exit::Internal)?;
    Ok(async move {
        stop.recv().await;
    })
}
