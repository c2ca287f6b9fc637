//! Socket services that handle each connection in its own process.
//!
//! systemd accepts connections and passes each one to a unit instance as standard input (`Accept=yes`). [`listen`] does
//! the same without systemd.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::error_chain::format_chain;
use svc_http::server;
use tokio::process::{Child, Command};
use tokio_util::sync::CancellationToken;

use crate::system::{systemd, unix_socket};

/// Delay after a failed accept.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// A socket and the program that serves its connections.
pub struct SocketService {
    pub directory: PathBuf,
    pub socket: &'static str,
    /// Arguments that make this executable serve the connection on standard input.
    pub arguments: &'static [&'static str],
    pub max_processes: usize,
}

/// Returns the connection passed as standard input.
///
/// # Errors
/// `Usage` if standard input isn't a connected socket.
pub fn stdin_connection() -> Result<UnixStream, Failure> {
    let connection = std::io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from);
    let connection = connection.context("cannot use standard input").or_exit(Exit::Usage)?;
    let connected = connection.set_nonblocking(true).and_then(|()| connection.peer_addr().map(drop));
    connected
        .context("standard input is not a socket; use --listen to accept connections")
        .or_exit(Exit::Usage)?;
    Ok(connection)
}

/// Accepts connections until this process receives a stop signal, then terminates the processes serving them.
///
/// # Errors
/// `Unavailable` if the socket can't be bound; `Internal` if signal handlers can't be installed or the executable path
/// is unknown.
pub async fn listen(service: &SocketService) -> Result<(), Failure> {
    let bound = unix_socket::bind(&service.directory, service.socket);
    let listener = bound.context("cannot listen on the Unix socket").or_exit(Exit::Unavailable)?;
    let stop = server::stop_on_signal().context("cannot handle signals").or_exit(Exit::Internal)?;
    let program =
        std::env::current_exe().context("cannot determine the executable path").or_exit(Exit::Internal)?;
    systemd::notify(&[sd_notify::NotifyState::Ready]);
    let mut processes = tokio::task::JoinSet::new();
    while let Some(accepted) = stop.run_until_cancelled(listener.accept()).await {
        while processes.try_join_next().is_some() {}
        match accepted.and_then(|(connection, _)| connection.into_std()) {
            Ok(connection) if processes.len() < service.max_processes => {
                match spawn(&program, service.arguments, connection) {
                    Ok(child) => drop(processes.spawn(wait_or_terminate(child, stop.clone()))),
                    Err(error) => tracing::error!(error = %format_chain(&error), "cannot spawn process"),
                }
            }
            // Closing the connection without a response tells the client that its request wasn't processed.
            Ok(_) => tracing::warn!(service.max_processes, "connection rejected: too many processes"),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_RETRY_INTERVAL).await;
            }
        }
    }
    while processes.join_next().await.is_some() {}
    Ok(())
}

fn spawn(program: &Path, arguments: &[&str], connection: UnixStream) -> std::io::Result<Child> {
    connection.set_nonblocking(false)?;
    let stdin = Stdio::from(std::os::fd::OwnedFd::from(connection));
    Command::new(program).args(arguments).stdin(stdin).spawn()
}

/// Waits for a process to exit, or terminates it on `stop`.
async fn wait_or_terminate(mut child: Child, stop: CancellationToken) {
    if stop.run_until_cancelled(child.wait()).await.is_none() {
        if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) {
            // The process may already have exited.
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::SIGTERM);
        }
        let _ = child.wait().await;
    }
}
