//! `svc-shell`: serves the release's browser UI (the shell) as static files on `shell.sock`.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Context;
use sd_notify::NotifyState;

use super::site::{Site, router};
use crate::system::config::init_log;
use crate::system::layout::Layout;
use crate::system::{systemd, unix_socket};
use svc_base::applet::{self, Exit, Failure, OrExit};
use svc_http::server;

pub const SOCKET: &str = "shell.sock";

#[derive(clap::Parser)]
#[command(
    name = "svc-shell",
    version = applet::version(),
    about = "Serves the static files of the release's browser UI (the shell) to the gateway, on a Unix socket",
    after_help = "svc-shell serves /opt/svc/app/shell below SVC_ROOT on run/svc/owner/shell.sock."
)]
struct Args {}

/// Returns the clap command, from which the reference pages are generated.
pub fn command() -> clap::Command {
    <Args as clap::CommandFactory>::command()
}

pub fn run(args: Vec<OsString>) -> ExitCode {
    if let Err(code) = applet::parse::<Args>(args) {
        return code;
    }
    let layout = Layout::from_process();
    init_log("svc-shell", &layout);
    applet::block_on("svc-shell", serve(layout))
}

async fn serve(layout: Layout) -> Result<(), Failure> {
    let site = Site::read(&layout.shell()).or_exit(Exit::Config)?;
    let bound = unix_socket::bind(&layout.owner_sockets(), SOCKET);
    let listener = bound.context("cannot listen on the Unix socket").or_exit(Exit::Unavailable)?;
    let stop = server::stop_on_signal().context("cannot handle signals").or_exit(Exit::Internal)?;
    tokio::spawn(systemd::feed_watchdog(stop.clone(), async || true));
    let status = format!("serving {} files", site.file_count());
    tracing::info!(files = site.file_count(), bytes = site.total_bytes(), "serving the shell");
    systemd::notify(&[NotifyState::Ready, NotifyState::Status(&status)]);
    unix_socket::serve(listener, router(site), stop).await;
    systemd::notify(&[NotifyState::Stopping]);
    Ok(())
}
