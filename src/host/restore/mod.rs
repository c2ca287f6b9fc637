//! `svc-restore`: the gate before the gateway. It opens only on a whole restored snapshot, on a database that was
//! restored before, or where there is confirmed to be nothing to restore and that is allowed.
//!
//! Here: the command line, the configuration, the exit code. The steps are in `gate`.

mod gate;
mod journal;
mod swap;

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;

use super::config::{self, DatabaseUrl, Identity, begin_log};
use super::layout::Layout;
use super::lock::{Lock, LockError};
use super::pgconn::Server;
use super::pgtools::PgTools;
use super::scratch::{self, Means};
use super::store::StoreLink;
use super::user;
use crate::applet::{self, Exit, Failure, OrExit};
use crate::http::request_id;
use crate::store::key::{SlotPrefix, SnapshotKey};

pub use gate::POINTS;

#[derive(clap::Parser)]
#[command(
    name = "svc-restore",
    version = applet::VERSION,
    about = "Restores the latest snapshot before the gateway may start"
)]
struct Args {}

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
        let deadline = scratch::deadline(&mut env);
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
        Ok(Self { layout, means, mode, chosen })
    }
}

pub fn run(args: Vec<OsString>) -> ExitCode {
    if let Err(code) = applet::parse::<Args>(args) {
        return code;
    }
    let layout = Layout::from_process();
    if let Err(error) = user::step_down(&layout) {
        return applet::report("svc-restore", &Failure::new(Exit::Internal, error));
    }
    begin_log("svc-restore", &layout);
    applet::block_on(
        "svc-restore",
        request_id::own(async {
            if layout.restore_complete().exists() {
                tracing::info!("the database of this machine is in use already; nothing is restored over it");
                return Ok(());
            }
            let settings = Settings::read(layout)?;
            let lock =
                Lock::take(&settings.layout.restore_state().join("lock")).map_err(|error| match error {
                    LockError::Held => {
                        Failure::new(Exit::TryAgain, anyhow::anyhow!("another restore is under way"))
                    }
                    error @ LockError::File(_) => Failure::new(Exit::Internal, error),
                })?;
            gate::open(&lock, &settings).await
        }),
    )
}
