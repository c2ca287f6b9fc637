//! `svc-agent`: runs one agent for the gateway, as the owner's user, and leaves no process behind.
//!
//! One run per connection. systemd accepts each connection and starts a separate unit instance (`svc-agent@.service`)
//! for it, so every run has its own cgroup. Without systemd, `--listen` starts one process per run.

mod output;
pub mod process_tree;
mod run;

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;

use super::protocol;
use crate::system::config::init_log;
use crate::system::layout::Layout;
use crate::system::socket_service::{self, SocketService};
use svc_base::applet::{self, Exit, Failure, OrExit};
use svc_http::server;

/// Maximum number of concurrent runs with `--listen`. The systemd socket unit has its own limit.
const MAX_CONCURRENT_RUNS: usize = 128;

#[derive(Parser)]
#[command(
    name = "svc-agent",
    version = applet::version(),
    about = "Runs one agent for the gateway, as the owner's user",
    after_help = "Without --listen, standard input is the gateway's connection, as systemd passes it to \
                  svc-agent@.service. Example: svc-agent --listen"
)]
struct Args {
    /// Accept connections on agent.sock and serve each in a separate process
    #[arg(long)]
    listen: bool,
}

/// Returns the clap command, from which the reference pages are generated.
pub fn command() -> clap::Command {
    <Args as clap::CommandFactory>::command()
}

/// Applet entry point.
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

/// Serves the connection on stdin until the run ends.
async fn serve_stdin(layout: Layout) -> Result<(), Failure> {
    let connection = socket_service::stdin_connection()?;
    let connection = tokio::net::UnixStream::from_std(connection).context("cannot use the connection")?;
    let stop = server::stop_on_signal().context("cannot handle signals").or_exit(Exit::Internal)?;
    run::serve(&layout, connection, stop).await.context("run failed").or_exit(Exit::Unavailable)
}

async fn listen(layout: Layout) -> Result<(), Failure> {
    let service = SocketService {
        directory: layout.owner_sockets(),
        socket: protocol::SOCKET,
        arguments: &["svc-agent"],
        max_processes: MAX_CONCURRENT_RUNS,
    };
    socket_service::listen(&service).await
}
