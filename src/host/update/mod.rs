//! `svc-update`: fetches a release and makes it the current one.
//!
//! `boot` trusts the digest given in user-data; every later release needs a signed manifest. An update's states are
//! written to a journal, so that the next run resumes an interrupted update. An unhealthy release is rolled back
//! automatically.

mod apply;
mod boot;
mod database;
mod download;
mod error;
pub mod fetch;
mod health;
pub mod history;
mod journal;
pub mod policy;
pub mod protocol;
pub mod releases;
mod request;
mod services;
pub mod smoke_test;
mod snapshot;
mod state;
mod status;
mod trust;
pub mod trusted_keys;
mod units;
mod unpack;
mod updater;

use std::ffi::OsString;
use std::process::ExitCode;

use super::system::config::init_log;
use super::system::layout::Layout;
use svc_base::applet::{self, Exit, Failure, OrExit};
use svc_http::request_id;
use svc_machine::name::ImageVersion;

pub use apply::{APPLY_FAILPOINTS, ROLLBACK_FAILPOINTS};
pub use boot::BOOT_FAILPOINTS;
pub use trust::KEY_FAILPOINTS;
pub use unpack::{UnpackError, UnpackLimits, unpack};

use apply::UpdateTarget;
use journal::Allowances;

#[derive(clap::Parser)]
#[command(
    name = "svc-update",
    version = applet::version(),
    about = "Fetches, verifies and unpacks a release of the host software, and switches to it"
)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Install the first release, which user-data names, unless a release is already current
    Boot,
    /// Fetch a release by its signed manifest and make it current; roll back if it is not healthy
    Apply(ApplyArgs),
    /// Make the previous release current again
    Rollback,
    /// Finish an interrupted update
    Resume,
    /// Print the installed releases, the update in progress and the last update
    Status(PrintArgs),
    /// Print the updates that ended on this machine
    History(PrintArgs),
}

#[derive(clap::Args)]
struct ApplyArgs {
    #[command(flatten)]
    target: TargetArg,
    /// Allow a release that is older than the current one
    #[arg(long, conflicts_with = "request")]
    allow_downgrade: bool,
    /// Allow a release that is quarantined on this machine
    #[arg(long, conflicts_with = "request")]
    allow_quarantined: bool,
    /// Allow a release that lacks this part of the current one; repeat the option for each part
    #[arg(long, value_name = "PART", conflicts_with = "request")]
    allow_removal: Vec<String>,
    /// Do not wait for a snapshot of the database, even if this update is already waiting for one; if the release
    /// damages data, all changes since the last snapshot are lost
    #[arg(long, conflicts_with = "request")]
    without_snapshot: bool,
}

#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct TargetArg {
    /// Version of the release to apply
    #[arg(long, value_name = "VERSION")]
    version: Option<ImageVersion>,
    /// Finish an interrupted update, then apply the release named by the request file, if any
    #[arg(long)]
    request: bool,
}

impl ApplyArgs {
    /// Waives the snapshot for an update that is in progress in another run, if `--without-snapshot` is given.
    fn waive_snapshot(&self, layout: &Layout) -> Result<(), Failure> {
        let Some(version) = self.target.version.as_ref().filter(|_| self.without_snapshot) else {
            return Ok(());
        };
        snapshot::waive(layout, version).or_exit(Exit::Internal)
    }

    fn into_target(self) -> UpdateTarget {
        let allow = Allowances {
            downgrade: self.allow_downgrade,
            quarantined: self.allow_quarantined,
            removal: self.allow_removal,
            without_snapshot: self.without_snapshot,
        };
        self.target.version.map_or(UpdateTarget::Requested, |version| UpdateTarget::Version(version, allow))
    }
}

#[derive(clap::Args)]
struct PrintArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl PrintArgs {
    fn format(&self) -> status::Format {
        if self.json { status::Format::Json } else { status::Format::Table }
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
    init_log("svc-update", &layout);
    applet::block_on(
        "svc-update",
        request_id::run_with_new_id(async move {
            match args.command {
                Command::Boot => boot::run(layout).await,
                Command::Apply(apply) => {
                    apply.waive_snapshot(&layout)?;
                    apply::run(layout, apply.into_target()).await
                }
                Command::Rollback => apply::run(layout, UpdateTarget::Previous).await,
                Command::Resume => apply::run(layout, UpdateTarget::Resume).await,
                Command::Status(print) => status::print_status(&layout, print.format()),
                Command::History(print) => status::print_history(&layout, print.format()),
            }
        }),
    )
}
