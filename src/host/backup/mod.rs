//! `svc-db-backup`: verified snapshots of the owner's database at the object store, the pointer to the latest, and the
//! looks at them that show that they are what they were.
//!
//! Here: the command line, the configuration, the locks, the request file and the exit code. A backup is in `job`, the
//! looks are in `verify` and `drill`.

mod drill;
mod dump;
mod job;
mod loss;
mod read_through;
mod record;
mod replaced;
mod request;
mod reread;
mod share;
mod snapshot;
mod toc;
mod unfinished;
mod verify;

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};

use super::config::{self, DatabaseUrl, Identity, begin_log};
use super::layout::Layout;
use super::lock::{Lock, LockError};
use super::pgconn::Server;
use super::pgtools::PgTools;
use super::scratch::{self, Means};
use super::store::StoreLink;
use super::user;
use crate::applet::{self, Exit, Failure, OrExit};
use crate::config::Env;
use crate::http::request_id;
use crate::store::Bucket;
use crate::store::key::SlotPrefix;
use request::Request;
use verify::Which;

pub use drill::POINTS as DRILL_POINTS;
pub use job::POINTS;
pub use verify::POINTS as VERIFY_POINTS;

/// How long a request waits for a run that began before it was made.
const REQUEST_WAIT: Duration = Duration::from_secs(600);

#[derive(clap::Parser)]
#[command(
    name = "svc-db-backup",
    version = applet::VERSION,
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
    /// Read snapshots again from the store, in full: today's share of all, or those that are named
    #[command(after_help = "Examples:\n  svc-db-backup verify\n  svc-db-backup verify --latest\n  \
                            svc-db-backup verify system/db/snapshots/2026-01-02T03-04-05.678Z-1.dump")]
    Verify(VerifyArgs),
    /// Restore the latest snapshot into a database of its own, compare it with its record, and drop it
    Drill,
}

#[derive(clap::Args)]
struct RunArgs {
    /// Serve the request file: wait for a run under way, and remove the file when done
    #[arg(long)]
    request: bool,
    /// The database may hold no rows where the snapshot before does
    #[arg(long)]
    allow_empty: bool,
}

#[derive(clap::Args)]
struct VerifyArgs {
    /// Keys of snapshots, as backup.jsonl and `svcctl backup list` show them
    #[arg(value_name = "KEY", conflicts_with_all = ["latest", "all"])]
    keys: Vec<String>,
    /// The one that a recovery would take
    #[arg(long, conflicts_with = "all")]
    latest: bool,
    /// Every snapshot there is
    #[arg(long)]
    all: bool,
}

impl VerifyArgs {
    fn which(self) -> Which {
        match self {
            Self { latest: true, .. } => Which::Latest,
            Self { all: true, .. } => Which::All,
            Self { keys, .. } if !keys.is_empty() => Which::Named(keys),
            _ => Which::Share,
        }
    }
}

/// What a run needs.
pub(crate) struct Settings {
    pub layout: Layout,
    pub identity: Identity,
    pub slot: SlotPrefix,
    pub bucket: Bucket,
    pub server: Server,
    pub tools: PgTools,
    /// Each snapshot is read again within so many days.
    pub verify_within_days: u32,
    /// How long the store may be away from a look at snapshots, counted from the last progress.
    pub store_deadline: Duration,
}

impl Settings {
    fn read(layout: Layout) -> Result<Self, Failure> {
        let mut env = config::environment(&layout);
        let identity = Identity::read(&mut env);
        let store = StoreLink::read(&mut env, &layout);
        let database = DatabaseUrl::read(&mut env);
        let tools = PgTools::locate(&mut env, &layout);
        let verify_within_days = verify_within_days(&mut env);
        let store_deadline = scratch::deadline(&mut env);
        let parts = identity.zip(store).zip(database);
        let ((identity, store), database) = env.finish(parts)?;
        Ok(Self {
            slot: SlotPrefix::new(&identity.user, &identity.slot),
            bucket: store.open().or_exit(Exit::Config)?,
            server: Server::new(database.config()?),
            layout,
            identity,
            tools,
            verify_within_days,
            store_deadline,
        })
    }

    /// The same, for a snapshot in a database beside the owner's.
    fn means(&self) -> Means {
        Means {
            name: "svc-db-backup",
            slot: self.slot.clone(),
            bucket: self.bucket.clone(),
            server: self.server.clone(),
            tools: self.tools.clone(),
            deadline: self.store_deadline,
            progress: Arc::default(),
        }
    }
}

fn verify_within_days(env: &mut Env) -> u32 {
    let days = env.or("VERIFY_WITHIN_DAYS", 30);
    if days == 0 {
        env.mistake("VERIFY_WITHIN_DAYS", "must be at least 1");
    }
    days
}

pub fn run(args: Vec<OsString>) -> ExitCode {
    let args: Args = match applet::parse(args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    let layout = Layout::from_process();
    if let Err(error) = user::step_down(&layout) {
        return applet::report("svc-db-backup", &Failure::new(Exit::Internal, error));
    }
    begin_log("svc-db-backup", &layout);
    let command = args.command.unwrap_or(Command::Run(args.run));
    applet::block_on("svc-db-backup", async move {
        match command {
            Command::Run(args) => take_turn(layout, &args).await,
            Command::Verify(args) => request_id::own(look(layout, Some(args.which()))).await,
            Command::Drill => request_id::own(look(layout, None)).await,
        }
    })
}

async fn take_turn(layout: Layout, args: &RunArgs) -> Result<(), Failure> {
    let request = args.request.then(|| Request::new(&layout));
    let id = request.as_ref().and_then(Request::id).unwrap_or_else(request_id::fresh);
    let end = match Settings::read(layout) {
        Ok(settings) => request_id::under(id, back_up(&settings, args, request.as_ref())).await,
        Err(failure) => Err(failure),
    };
    // A request that failed is over, too: the failure is on record, and the path unit would start us at once.
    if let Some(request) = request {
        request.done();
    }
    end
}

async fn back_up(settings: &Settings, args: &RunArgs, request: Option<&Request>) -> Result<(), Failure> {
    let wait = if request.is_some() { REQUEST_WAIT } else { Duration::ZERO };
    let lock = Lock::wait(&settings.layout.backup_lock(), wait).await;
    let lock = lock.map_err(|error| held(error, "another backup is under way"))?;
    if let Some(request) = request {
        request.begin();
    }
    let empty = if args.allow_empty { job::Empty::Meant } else { job::Empty::Refused };
    job::run(&lock, settings, empty, stopped()?).await
}

/// A look at snapshots: they are read, or with `None`, the latest is restored.
async fn look(layout: Layout, which: Option<Which>) -> Result<(), Failure> {
    let settings = Settings::read(layout)?;
    let lock = Lock::take(&settings.layout.drill_state().join("lock"));
    let lock = lock.map_err(|error| held(error, "another check of snapshots is under way"))?;
    match which {
        Some(which) => verify::run(&lock, &settings, &which, stopped()?).await,
        None => drill::run(&lock, &settings, stopped()?).await,
    }
}

fn held(error: LockError, what: &'static str) -> Failure {
    match error {
        LockError::Held => Failure::new(Exit::TryAgain, anyhow::anyhow!(what)),
        error @ LockError::File(_) => Failure::new(Exit::Internal, error),
    }
}

fn stopped() -> Result<impl Future<Output = ()>, Failure> {
    let mut stop = signal(SignalKind::terminate()).or_exit(Exit::Internal)?;
    Ok(async move {
        stop.recv().await;
    })
}
