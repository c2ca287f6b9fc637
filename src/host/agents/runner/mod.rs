//! `svc-agent`: runs one agent for the gateway, as the owner's user, and leaves no process behind.
//!
//! Each connection is one run. systemd accepts it and starts one instance of the unit per run (`svc-agent@.service`),
//! so that each run has its own control group; `--listen` works without systemd, with one process per run.

mod output;
pub mod process_tree;
mod run;

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use tokio_util::sync::CancellationToken;

use super::protocol;
use crate::system::config::init_log;
use crate::system::layout::Layout;
use crate::system::{systemd, unix_socket};
use svc_base::applet::{self, Exit, Failure, OrExit};
use svc_base::chain::format_chain;
use svc_http::server;

/// Maximum concurrent runs without systemd, whose socket unit has its own limit.
const MAX_RUNS: usize = 128;
/// Time to wait after a connection could not be accepted.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Parser)]
#[command(
    name = "svc-agent",
    version = applet::version(),
    about = "Runs one agent for the gateway, as the owner's user",
    after_help = "Without --listen, standard input is the gateway's connection, as systemd passes it to \
                  svc-agent@.service. Example: svc-agent --listen"
)]
struct Args {
    /// Accept connections on agent.sock and run each in a separate process
    #[arg(long)]
    listen: bool,
}

/// The command-line definition, from which the reference pages are generated.
pub fn command() -> clap::Command {
    <Args as clap::CommandFactory>::command()
}

/// Entry point of the applet.
pub fn run(args: Vec<OsString>) -> ExitCode {
    let args = match applet::parse::<Args>(args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    let layout = Layout::from_process();
    init_log("svc-agent", &layout);
    if args.listen {
        applet::block_on("svc-agent", listen(layout))
    } else {
        applet::block_on("svc-agent", serve_stdin(layout))
    }
}

/// Serves the connection on standard input until its run has ended.
async fn serve_stdin(layout: Layout) -> Result<(), Failure> {
    let connection = std::io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from);
    let connection = connection.context("cannot use standard input").or_exit(Exit::Usage)?;
    let connected = connection.set_nonblocking(true).and_then(|()| connection.peer_addr().map(drop));
    connected
        .context("standard input is not a socket; use --listen to accept connections")
        .or_exit(Exit::Usage)?;
    let connection = tokio::net::UnixStream::from_std(connection).context("cannot use the connection")?;
    let stop = server::stop_on_signal().context("cannot handle signals").or_exit(Exit::Internal)?;
    run::serve(&layout, connection, stop).await.context("the run failed").or_exit(Exit::Unavailable)
}

async fn listen(layout: Layout) -> Result<(), Failure> {
    let bound = unix_socket::bind(&layout.owner_sockets(), protocol::SOCKET);
    let listener = bound.context("cannot listen on the Unix socket").or_exit(Exit::Unavailable)?;
    let stop = server::stop_on_signal().context("cannot handle signals").or_exit(Exit::Internal)?;
    let program =
        std::env::current_exe().context("cannot find the path of this program").or_exit(Exit::Internal)?;
    systemd::notify(&[sd_notify::NotifyState::Ready]);
    let mut runs = tokio::task::JoinSet::new();
    while let Some(accepted) = stop.run_until_cancelled(listener.accept()).await {
        while runs.try_join_next().is_some() {}
        match accepted.and_then(|(connection, _)| connection.into_std()) {
            Ok(connection) if runs.len() < MAX_RUNS => match spawn_run(&program, connection) {
                Ok(child) => {
                    runs.spawn(wait_for_run(child, stop.clone()));
                }
                Err(error) => tracing::error!(error = %format_chain(&error), "cannot start a run"),
            },
            // Dropping the connection makes the gateway report that no run took place.
            Ok(_) => tracing::warn!(MAX_RUNS, "too many concurrent runs"),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_RETRY_INTERVAL).await;
            }
        }
    }
    while runs.join_next().await.is_some() {}
    Ok(())
}

fn spawn_run(program: &Path, connection: UnixStream) -> std::io::Result<tokio::process::Child> {
    connection.set_nonblocking(false)?;
    let stdin = Stdio::from(std::os::fd::OwnedFd::from(connection));
    tokio::process::Command::new(program).arg("svc-agent").stdin(stdin).spawn()
}

/// Waits for a run to end, and terminates it on `stop`.
async fn wait_for_run(mut child: tokio::process::Child, stop: CancellationToken) {
    if stop.run_until_cancelled(child.wait()).await.is_none() {
        if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) {
            // It is not an error if the process has already ended.
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::SIGTERM);
        }
        // The child reports its exit to the gateway.
        let _ = child.wait().await;
    }
}
