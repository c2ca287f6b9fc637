//! `svc-restore`: the restore gate, which must open before the gateway starts. It only opens after a complete restore,
//! for a previously restored or operator-adopted database, or when an empty start is allowed and the store confirms
//! that there is no snapshot.
//!
//! This module owns the command line, configuration and exit code. The steps are in `gate`; `import` imports an owner's
//! archive once the gate is open.

mod gate;
mod import;
mod journal;
mod settings;
mod swap;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::system::activity;
use crate::system::boot_progress::BootReporter;
use crate::system::config::init_log;
use crate::system::layout::Layout;
use crate::system::lock::{Lock, LockError};
use crate::system::user;
use svc_base::applet::{self, Exit, Failure};
use svc_http::request_id;

use gate::{ExistingRows, OpenedWith};
use journal::Journal;
use settings::RestoreSettings;

pub use gate::FAILPOINTS;
pub use import::FAILPOINTS as IMPORT_FAILPOINTS;
#[cfg(feature = "fuzzing")]
pub use import::fuzzing as import_fuzzing;

#[derive(clap::Parser)]
#[command(
    name = "svc-restore",
    version = applet::version(),
    about = "Restores the latest snapshot before the gateway may start"
)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Adopt the existing database as this machine's, even if the marker names another one or is lost
    Adopt,
    /// Restore the latest snapshot in place of the existing database, which is kept as svc_before_<n>
    Replace,
    /// Import an archive written by `svc-db-backup export`: its database and its files
    #[command(
        after_help = "Run this command as root. The archive is verified against its manifest first. Replaced data \
is kept: the database as svc_before_<n> for seven days, and as a snapshot that is taken first; files in /home/svc/home/.before-import-<n> and /home/svc/home/system/.before-import-<n>.\n\n\
Examples:\n  svc-restore import ada.tar --check\n  svc-restore import ada.tar"
    )]
    Import {
        /// The archive
        #[arg(value_name = "FILE")]
        archive: PathBuf,
        #[command(flatten)]
        options: import::ImportOptions,
    },
    /// A step of an import, run as the user who owns the files
    #[command(hide = true)]
    ImportStep(import::StepArgs),
}

/// Returns the clap definition that the reference pages are generated from.
pub fn command() -> clap::Command {
    <Args as clap::CommandFactory>::command()
}

pub fn run(args: Vec<OsString>) -> ExitCode {
    let args = match applet::parse::<Args>(args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    let layout = Layout::from_process();
    let user_switch = match &args.command {
        // An import spawns a process for each user whose files it writes.
        Some(Command::Import { .. }) => Ok(()),
        Some(Command::ImportStep(step)) if step.step.is_run_as_owner() => Ok(()),
        Some(Command::ImportStep(_)) => user::switch_to_gateway_user(&layout),
        _ => user::switch_user_for_database_tools(&layout),
    };
    if let Err(error) = user_switch {
        return applet::report("svc-restore", &Failure::new(Exit::Internal, error));
    }
    init_log("svc-restore", &layout);
    applet::block_on(
        "svc-restore",
        request_id::run_with_new_id(async {
            match args.command {
                None => open_gate(layout).await,
                Some(Command::Adopt) => {
                    let settings = RestoreSettings::read(layout)?;
                    gate::adopt(&acquire_lock(&settings)?, &settings).await
                }
                Some(Command::Replace) => {
                    let settings = RestoreSettings::read(layout)?;
                    let lock = acquire_lock(&settings)?;
                    let restored = gate::open(&lock, &settings, ExistingRows::Replace).await;
                    record_outcome(&settings.layout, &restored);
                    restored.map(drop)
                }
                Some(Command::Import { archive, options }) => import::run(&layout, &archive, options).await,
                Some(Command::ImportStep(step)) => import::run_step(layout, step).await,
            }
        }),
    )
}

async fn open_gate(layout: Layout) -> Result<(), Failure> {
    if layout.restore_complete().exists() {
        if Journal::is_open(&layout) {
            let settings = RestoreSettings::read(layout)?;
            return gate::finish_interrupted_swap(&acquire_lock(&settings)?, &settings).await;
        }
        tracing::info!("restore gate already open; nothing to restore");
        return Ok(());
    }
    let settings = RestoreSettings::read(layout)?;
    let lock = acquire_lock(&settings)?;
    let _reporter = BootReporter::start(&settings.layout, settings.context.progress.subscribe());
    let restored = gate::open(&lock, &settings, ExistingRows::Refuse).await;
    record_outcome(&settings.layout, &restored);
    restored.map(drop)
}

/// Records the restore outcome in `activity.log`.
fn record_outcome(layout: &Layout, restored: &Result<OpenedWith, Failure>) {
    let text = match restored {
        Ok(OpenedWith::Snapshot(key)) => format!("the database was restored from {key}"),
        Ok(OpenedWith::ExistingRows) => "there is no snapshot: kept the existing database".to_owned(),
        Ok(OpenedWith::EmptyDatabase) => "the machine starts with an empty database".to_owned(),
        Err(failure) => format!("the restore of the database failed: {:#}", failure.error),
    };
    activity::note(layout, &text);
}

fn acquire_lock(settings: &RestoreSettings) -> Result<Lock, Failure> {
    Lock::acquire(&settings.layout.restore_state().join("lock")).map_err(|error| match error {
        LockError::Held => {
            Failure::new(Exit::TryAgain, anyhow::anyhow!("another restore or import is running"))
        }
        error @ LockError::File(_) => Failure::new(Exit::Internal, error),
    })
}
