//! `svc-sync-agent`: sends heartbeats to the platform, applies the responses (for example new proof keys, or notice
//! that this machine has been replaced or deleted), and writes machine metadata to the object store. Subcommands save
//! and restore the owner's files ([`crate::files`]).

mod apply_response;
mod code_probe;
mod config;
mod heartbeat;
mod meta;
mod server;
mod vitals;

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::anyhow;
use sd_notify::NotifyState;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::MissedTickBehavior;

use crate::files;
use crate::system::config::init_log;
use crate::system::heartbeat_failure::FailureRecorder;
use crate::system::layout::Layout;
use crate::system::quiesce::Quiesce;
use crate::system::user;
use apply_response::SupersededRecord;
use config::SyncConfig;
use heartbeat::HeartbeatClient;
use svc_base::applet::{self, Exit, Failure, OrExit};
use svc_base::error_chain::format_chain;
use svc_http::request_id;

#[derive(clap::Parser)]
#[command(
    name = "svc-sync-agent",
    version = applet::version(),
    about = "Sends this machine's heartbeats, and saves and restores the owner's files",
    after_help = "Without a command, sends heartbeats to the platform and the machine's metadata to the object store."
)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Save the owner's files until stopped
    Files,
    /// Show the state of the owner's file backup
    #[command(
        after_help = "Exit codes: 0 saved, 69 changes have not been saved for ten minutes, the file backup is \
not running, or the files were not restored."
    )]
    Status,
    /// Save the owner's files now, and wait until they are saved
    Now,
    /// List the versions of a file or directory
    #[command(
        after_help = "Relative paths start at /home/svc/home.\n\nExample: svc-sync-agent versions projects/app/main.rs"
    )]
    Versions {
        /// A path below /home/svc; relative paths start at /home/svc/home
        path: String,
        /// Only versions before this time (RFC 3339)
        #[arg(long)]
        before: Option<String>,
    },
    /// List an earlier version of a directory
    #[command(after_help = "Relative paths start at /home/svc/home.\n\n\
Example: svc-sync-agent list projects --time 2026-11-27T18:00:00Z")]
    List {
        /// A path below /home/svc; relative paths start at /home/svc/home
        #[arg(default_value = ".")]
        path: String,
        /// Use the last snapshot at or before this time, in RFC 3339 format (default: the latest snapshot)
        #[arg(long)]
        time: Option<String>,
    },
    /// Restore an earlier version of a file or directory, and wait until the restore has ended
    #[command(
        after_help = "The entry is restored to its original path or, if that path exists, next to it under a new name. With --replace, \
an existing file or directory is saved first and kept under a new name.\n\n\
Example: svc-sync-agent restore projects/app --time 2026-11-27T18:00:00Z\n\n\
Exit codes: 0 restored, 64 invalid path or time, 65 refused, 69 not restored, 77 not permitted."
    )]
    Restore {
        /// A path below /home/svc; relative paths start at /home/svc/home
        path: String,
        /// Use the last snapshot at or before this time, in RFC 3339 format (default: the latest snapshot)
        #[arg(long)]
        time: Option<String>,
        /// Restore to this path, which must not exist
        #[arg(long)]
        into: Option<String>,
        /// Replace an existing file or directory
        #[arg(long)]
        replace: bool,
    },
    /// Serve one file history request from the socket on standard input
    #[command(after_help = "Used by svc-files-history@.service. Example: svc-sync-agent history --listen")]
    History {
        /// Accept connections on history.sock and serve each in a separate process
        #[arg(long)]
        listen: bool,
    },
    /// Perform the requested restore of a file or directory
    #[command(
        after_help = "Used by svc-files-request.service. If root starts this command, it switches to that service's user."
    )]
    ServeRestore,
    /// Verify part of the file backup
    #[command(
        after_help = "Reads the parts that are due, so that everything is verified within VERIFY_WITHIN_DAYS, and requests a save if \
packs are damaged. Once a week, also compares a sample with the files on this machine.\n\nExample: svc-sync-agent verify --all\n\n\
Exit codes: 0 intact, 65 damaged or different, 69 not completed, 75 another verification is still running."
    )]
    Verify {
        /// Verify everything
        #[arg(long)]
        all: bool,
    },
    /// Restore the owner's files on a new machine
    #[command(
        after_help = "A machine that is already in use restores nothing, because its files are newer. If the restore at its \
first boot failed or never ran, --retry runs it now; files from the snapshot then replace files with the same name, \
and the replaced ones are kept in /home/svc/home/home.replaced-TIME.\n\n--skip-damaged is the last resort if damaged content \
cannot be repaired: the damaged files are left out, damaged directories are restored empty, and the output and \
activity.log name the first 20. The machine then saves files again. The new snapshots do not contain what was left out, as if it had \
been deleted; the previous machine's last snapshot, which does, is kept until it is 90 days old.\n\n--give-up restores nothing: the machine keeps its current files and saves them again. The previous machine's last \
snapshot is kept until it is 90 days old: files in it can be restored one by one.\n\nExample: svc-sync-agent restore-home --retry\n\n\
Exit codes: 0 restored, or nothing to restore; 65 the backup is damaged (with --retry), the disk is too small, there is no \
failed restore to abandon, or an interrupted restore must be completed with --retry; 69 the store or the platform is unreachable; 75 another restore is still running; \
77 the platform refused to send the key; 78 a setting is invalid."
    )]
    RestoreHome {
        /// Run the restore if it failed or never ran, even if the machine is already in use
        #[arg(long)]
        retry: bool,
        /// Leave out damaged files and the content of damaged directories, and restore everything else
        #[arg(long, requires = "retry")]
        skip_damaged: bool,
        /// Keep the machine's current files and save them again, instead of repeating a failed restore
        #[arg(long, conflicts_with_all = ["retry", "skip_damaged"])]
        give_up: bool,
    },
}

/// Returns the clap command, from which the reference pages are generated.
pub fn command() -> clap::Command {
    <Args as clap::CommandFactory>::command()
}

pub fn run(args: Vec<OsString>) -> ExitCode {
    let args = match applet::parse::<Args>(args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    let layout = Layout::from_process();
    // When started by root, these commands switch to the gateway user, keeping the capabilities of their units.
    if matches!(args.command, Some(Command::RestoreHome { .. } | Command::ServeRestore))
        && let Err(error) = user::switch_to_gateway_user_with(&layout, files::restore_home::CAPABILITIES)
    {
        return applet::report("svc-sync-agent", &Failure::new(Exit::Internal, error));
    }
    // When started by root, these commands switch to the gateway user, so the services running as that user can remove
    // the commands' requests and replace their results.
    if matches!(args.command, Some(Command::Now | Command::Verify { .. }))
        && let Err(error) = user::switch_to_gateway_user(&layout)
    {
        return applet::report("svc-sync-agent", &Failure::new(Exit::Internal, error));
    }
    init_log("svc-sync-agent", &layout);
    match args.command {
        None => applet::block_on("svc-sync-agent", run_agent()),
        Some(Command::Files) => applet::block_on("svc-sync-agent", files::service::run(layout)),
        Some(Command::Status) => {
            applet::block_on("svc-sync-agent", async { files::command::show_status(&layout) })
        }
        Some(Command::Now) => applet::block_on("svc-sync-agent", files::command::save_now(&layout)),
        Some(Command::Versions { path, before }) => applet::block_on(
            "svc-sync-agent",
            files::client::print_versions(&layout, &path, before.as_deref()),
        ),
        Some(Command::List { path, time }) => {
            applet::block_on("svc-sync-agent", files::client::print_listing(&layout, &path, time.as_deref()))
        }
        Some(Command::Restore { path, time, into, replace }) => {
            let request = json!({"path": path, "time": time, "into": into, "replace": replace});
            applet::block_on("svc-sync-agent", files::client::restore(&layout, &request))
        }
        Some(Command::History { listen: true }) => {
            applet::block_on("svc-sync-agent", files::history::listen(layout))
        }
        Some(Command::History { listen: false }) => {
            applet::block_on("svc-sync-agent", files::history::serve_stdin(layout))
        }
        Some(Command::Verify { all }) => {
            let verification = request_id::run_with_new_id(files::verify::run(layout, all));
            applet::block_on("svc-sync-agent", verification)
        }
        Some(Command::ServeRestore) => {
            let restore = request_id::run_with_new_id(files::restore_entry::serve(layout));
            applet::block_on("svc-sync-agent", restore)
        }
        Some(Command::RestoreHome { give_up: true, .. }) => {
            applet::block_on("svc-sync-agent", async { files::restore_home::give_up(&layout) })
        }
        Some(Command::RestoreHome { retry, skip_damaged, give_up: false }) => {
            let restore = request_id::run_with_new_id(files::restore_home::run(layout, retry, skip_damaged));
            applet::block_on("svc-sync-agent", restore)
        }
    }
}

async fn run_agent() -> Result<(), Failure> {
    let config = SyncConfig::read(Layout::from_process())?;
    if config.layout.superseded().exists() {
        let error = anyhow!("this machine has been replaced or deleted, so the sync agent does not run here");
        return Err(Failure::new(Exit::Permission, error));
    }
    config.platform.upgrade_token.make_durable().or_exit(Exit::Internal)?;
    let heartbeats = HeartbeatClient::new(&config).or_exit(Exit::Config)?;
    let mut term = signal(SignalKind::terminate()).or_exit(Exit::Internal)?;
    let mut int = signal(SignalKind::interrupt()).or_exit(Exit::Internal)?;
    // No-op without systemd. Errors aren't fatal.
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    tokio::select! {
        superseded = run_heartbeats(&config, &heartbeats) => {
            superseded.write(&config.layout).or_exit(Exit::Internal)?;
            tracing::warn!(epoch = ?superseded.epoch, "this machine has been replaced or deleted; stopping");
        }
        never = run_meta_writer(&config) => match never {},
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    Ok(())
}

/// Maximum time to delay the first heartbeat while the host is starting up.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(10);

/// Sends heartbeats until the platform reports that this machine has been replaced or deleted. Failed heartbeats aren't
/// retried, as the next one carries the same data.
async fn run_heartbeats(config: &SyncConfig, heartbeats: &HeartbeatClient<'_>) -> SupersededRecord {
    wait_until_healthy(config).await;
    let mut interval = new_interval(config.heartbeat_interval);
    let mut failures = FailureRecorder::open(&config.layout);
    loop {
        interval.tick().await;
        let quiesced = Quiesce::read(&config.layout).ok().flatten();
        match request_id::run_with_new_id(heartbeats.send_heartbeat()).await {
            Ok(reply) => {
                failures.record_success();
                let response = &reply.response;
                if let Some(quiesce) = quiesced.filter(|_| !response.superseded)
                    && let Err(error) =
                        apply_response::resume_writers(config, &quiesce, response.quiesce.as_deref()).await
                {
                    tracing::error!(error = %format_chain(&error), "could not resume writers");
                }
                match apply_response::apply_response(config, reply) {
                    Ok(None) => {}
                    Ok(Some(superseded)) => return superseded,
                    Err(error) => {
                        tracing::error!(error = %format_chain(&error), "could not store heartbeat response");
                    }
                }
            }
            Err(error) => {
                let message = svc_http::problem::format_chain(&error);
                tracing::warn!(error = message, "heartbeat failed");
                failures.record_failure(message, error.is_refusal());
            }
        }
    }
}

/// Waits up to [`STARTUP_TIMEOUT`] for the gateway and the database to become healthy. They may still be starting, and
/// the platform retains the health from the first heartbeat until the second.
async fn wait_until_healthy(config: &SyncConfig) {
    let healthy = async {
        while !vitals::check_health(config).await.0.is_ok() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    // On timeout, the first heartbeat reports the health as is.
    let _ = tokio::time::timeout(config.heartbeat_interval.min(STARTUP_TIMEOUT), healthy).await;
}

async fn run_meta_writer(config: &SyncConfig) -> std::convert::Infallible {
    let mut interval = new_interval(config.meta_interval);
    let mut last_write = meta::LastWrite::default();
    loop {
        interval.tick().await;
        if let Some(credentials) = &config.credentials
            && let Err(error) = credentials.refresh().await
        {
            tracing::warn!(%error, "could not renew the credentials for the object store");
        }
        if let Err(error) = meta::write_if_due(config, &mut last_write).await {
            tracing::warn!(error = %svc_http::problem::format_chain(&error), "could not write vps-meta.json");
        }
    }
}

fn new_interval(period: Duration) -> tokio::time::Interval {
    let mut interval = tokio::time::interval(period);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}
