//! `svc-db-backup`: one verified snapshot of the owner's database at the object store, and the pointer moved to it.
//!
//! Here: the command line, the configuration, the lock, the request file and the exit code. The work is in `job`.

mod dump;
mod job;
mod record;
mod replaced;
mod request;
mod snapshot;
mod toc;

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};

use super::config::{self, DatabaseUrl, Identity, begin_log};
use super::layout::Layout;
use super::lock::{Lock, LockError};
use super::pgconn::Server;
use super::pgtools::PgTools;
use super::store::StoreLink;
use crate::applet::{self, Exit, Failure, OrExit};
use crate::http::request_id;
use crate::store::Bucket;
use crate::store::key::SlotPrefix;
use request::Request;

pub use job::POINTS;

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
}

#[derive(clap::Args)]
struct RunArgs {
    /// Serve the request file: wait for a run under way, and remove the file when done
    #[arg(long)]
    request: bool,
}

/// What a run needs.
pub(crate) struct Settings {
    pub layout: Layout,
    pub identity: Identity,
    pub slot: SlotPrefix,
    pub bucket: Bucket,
    pub server: Server,
    pub tools: PgTools,
}

impl Settings {
    fn read(layout: Layout) -> Result<Self, Failure> {
        let mut env = config::environment(&layout);
        let identity = Identity::read(&mut env);
        let store = StoreLink::read(&mut env, &layout);
        let database = DatabaseUrl::read(&mut env);
        let tools = PgTools::locate(&mut env, &layout);
        let parts = identity.zip(store).zip(database);
        let ((identity, store), database) = env.finish(parts)?;
        Ok(Self {
            slot: SlotPrefix::new(&identity.user, &identity.slot),
            bucket: store.open().or_exit(Exit::Config)?,
            server: Server::new(database.config()?),
            layout,
            identity,
            tools,
        })
    }
}

pub fn run(args: Vec<OsString>) -> ExitCode {
    let args: Args = match applet::parse(args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    begin_log("svc-db-backup", &Layout::from_process());
    let Command::Run(args) = args.command.unwrap_or(Command::Run(args.run));
    applet::block_on("svc-db-backup", async move {
        let layout = Layout::from_process();
        let request = args.request.then(|| Request::new(&layout));
        let id = request.as_ref().and_then(Request::id).unwrap_or_else(request_id::fresh);
        let end = match Settings::read(layout) {
            Ok(settings) => request_id::under(id, take_turn(&settings, request.as_ref())).await,
            Err(failure) => Err(failure),
        };
        // A request that failed is over, too: the failure is on record, and the path unit would start us at once.
        if let Some(request) = request {
            request.done();
        }
        end
    })
}

async fn take_turn(settings: &Settings, request: Option<&Request>) -> Result<(), Failure> {
    let wait = if request.is_some() { REQUEST_WAIT } else { Duration::ZERO };
    let lock = Lock::wait(&settings.layout.backup_lock(), wait).await.map_err(|error| match error {
        LockError::Held => Failure::new(Exit::TryAgain, anyhow::anyhow!("another backup is under way")),
        error @ LockError::File(_) => Failure::new(Exit::Internal, error),
    })?;
    if let Some(request) = request {
        request.begin();
    }
    let mut stop = signal(SignalKind::terminate()).or_exit(Exit::Internal)?;
    job::run(&lock, settings, async move {
        stop.recv().await;
    })
    .await
}
