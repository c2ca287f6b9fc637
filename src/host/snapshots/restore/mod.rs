//! `svc-restore`: the gate before the gateway. It opens only on a whole restored snapshot, on a database that was
//! restored before, or where there is confirmed to be nothing to restore and that is allowed.
//!
//! Here: the command line, the configuration, the exit code. The steps are in `gate`; `import` brings an owner's archive onto a
//! machine whose gate is open.

mod gate;
mod import;
mod journal;
mod swap;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use super::staging;
use super::staging::Means;
use crate::applet::{self, Exit, Failure, OrExit};
use crate::host::system::boot_progress::BootReporter;
use crate::host::system::config;
use crate::host::system::config::{DatabaseUrl, Identity, begin_log};
use crate::host::system::layout::Layout;
use crate::host::system::lock::{Lock, LockError};
use crate::host::system::postgres::Server;
use crate::host::system::postgres_tools::PgTools;
use crate::host::system::store::StoreLink;
use crate::host::system::user;
use crate::http::request_id;
use crate::machine::name::IdpUserId;
use crate::store::key::{SlotPrefix, SnapshotKey};

use gate::Local;
use journal::Journal;

pub use gate::POINTS;
pub use import::POINTS as IMPORT_POINTS;
#[cfg(feature = "fuzzing")]
pub use import::fuzzing as import_fuzzing;

#[derive(clap::Parser)]
#[command(
    name = "svc-restore",
    version = applet::VERSION,
    about = "Restores the latest snapshot before the gateway may start"
)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Serve the database that is here as this machine's own, although the marker names another or is lost
    Adopt,
    /// Restore the latest snapshot in place of the database that is here, which is kept as svc_before_<n>
    Replace,
    /// Bring an archive of `svc-db-backup export` onto this machine: its database and its files
    #[command(
        after_help = "Run it as root. Every byte is compared with the archive's manifest first. What it replaces \
stays: the database as svc_before_<n> for seven days, and as a snapshot that is taken first; files in ~/.before-import-<n> and ~/system/.before-import-<n>.\n\n\
Examples:\n  svc-restore import ada.tar --check\n  svc-restore import ada.tar"
    )]
    Import {
        /// The archive
        #[arg(value_name = "FILE")]
        archive: PathBuf,
        #[command(flatten)]
        options: import::Options,
    },
    /// A step of an import, as the user whose files it works on
    #[command(hide = true)]
    ImportStep(import::StepArgs),
}

/// What a confirmed absence of a snapshot means. It rules nothing else: a snapshot that is there is restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// There must be one.
    Required,
    /// A new or intentionally empty user begins with an empty database.
    Empty,
}

impl std::str::FromStr for Mode {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "required" => Ok(Self::Required),
            "empty" => Ok(Self::Empty),
            _ => Err("must be required or empty"),
        }
    }
}

struct Settings {
    layout: Layout,
    /// Whose machine this is.
    user: IdpUserId,
    means: Means,
    mode: Mode,
    /// The snapshot to restore; `None`: the one that the pointer names.
    chosen: Option<SnapshotKey>,
}

impl Settings {
    fn read(layout: Layout) -> Result<Self, Failure> {
        let mut env = config::environment(&layout);
        let identity = Identity::read(&mut env);
        let store = StoreLink::read(&mut env, &layout);
        let database = DatabaseUrl::read(&mut env);
        let tools = PgTools::locate(&mut env, &layout);
        let mode = env.required::<Mode>("SVC_RESTORE_MODE");
        let chosen = env.optional::<SnapshotKey>("SVC_RESTORE_SNAPSHOT");
        let deadline = staging::deadline(&mut env);
        let parts = identity.zip(store).zip(database).zip(mode);
        let (((identity, store), database), mode) = env.finish(parts)?;
        let means = Means {
            name: "svc-restore",
            slot: SlotPrefix::new(&identity.user, &identity.slot),
            bucket: store.open().or_exit(Exit::Config)?,
            server: Server::new(database.config()?),
            tools,
            deadline,
            progress: Arc::default(),
        };
        Ok(Self { layout, user: identity.user, means, mode, chosen })
    }
}

pub fn run(args: Vec<OsString>) -> ExitCode {
    let args = match applet::parse::<Args>(args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    let layout = Layout::from_process();
    let stepped_down = match &args.command {
        // An import starts a process for each of the users whose files it writes.
        Some(Command::Import { .. }) => Ok(()),
        Some(Command::ImportStep(step)) if step.step.is_owners() => Ok(()),
        Some(Command::ImportStep(_)) => user::become_gateway(&layout),
        _ => user::step_down(&layout),
    };
    if let Err(error) = stepped_down {
        return applet::report("svc-restore", &Failure::new(Exit::Internal, error));
    }
    begin_log("svc-restore", &layout);
    applet::block_on(
        "svc-restore",
        request_id::own(async {
            match args.command {
                None => open_gate(layout).await,
                Some(Command::Adopt) => {
                    let settings = Settings::read(layout)?;
                    gate::adopt(&lock(&settings)?, &settings).await
                }
                Some(Command::Replace) => {
                    let settings = Settings::read(layout)?;
                    gate::open(&lock(&settings)?, &settings, Local::Replaced).await
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
            let settings = Settings::read(layout)?;
            return gate::settle(&lock(&settings)?, &settings).await;
        }
        tracing::info!("the database of this machine is in use already; nothing is restored over it");
        return Ok(());
    }
    let settings = Settings::read(layout)?;
    let lock = lock(&settings)?;
    let _reporter = BootReporter::start(&settings.layout, settings.means.progress.subscribe());
    gate::open(&lock, &settings, Local::Refused).await
}

fn lock(settings: &Settings) -> Result<Lock, Failure> {
    Lock::take(&settings.layout.restore_state().join("lock")).map_err(|error| match error {
        LockError::Held => Failure::new(Exit::TryAgain, anyhow::anyhow!("another restore is under way")),
        error @ LockError::File(_) => Failure::new(Exit::Internal, error),
    })
}
