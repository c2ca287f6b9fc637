//! `svc-sync-agent history`: serves earlier versions of the owner's files.
//!
//! The gateway opens a `history.sock` connection for each request. systemd accepts it and starts a process for it
//! (`svc-files-history@.service`), so the index of a large repository uses memory only during requests. Without
//! systemd, `--listen` does the same.

mod archive;
mod handlers;
mod stall;

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use axum::routing::get;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::error_chain::format_chain;
use svc_http::observe::{self, Listener};
use svc_http::server;

use super::access::FilesSettings;
use crate::system::layout::Layout;
use crate::system::socket_service::{self, SocketService};
use stall::{StallTrackedStream, WriteStallTimer};

pub use handlers::DownloadFormat;

/// Socket name in [`Layout::history_sockets`].
pub const SOCKET: &str = "history.sock";
/// Maximum number of processes with `--listen`. With systemd, the socket unit sets the limit.
const MAX_PROCESSES: usize = 4;
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// Accepts connections and serves each in a separate process.
pub async fn listen(layout: Layout) -> Result<(), Failure> {
    let service = SocketService {
        directory: layout.history_sockets(),
        socket: SOCKET,
        arguments: &["svc-sync-agent", "history"],
        max_processes: MAX_PROCESSES,
    };
    socket_service::listen(&service).await
}

/// Serves one request from the connection on stdin.
pub async fn serve_stdin(layout: Layout) -> Result<(), Failure> {
    let connection = socket_service::stdin_connection()?;
    let settings = FilesSettings::read(layout)?;
    let stop = server::stop_on_signal().context("cannot handle signals").or_exit(Exit::Internal)?;
    match stop.run_until_cancelled(serve(settings, connection)).await {
        Some(result) => result,
        None => Ok(()),
    }
}

async fn serve(settings: FilesSettings, connection: UnixStream) -> Result<(), Failure> {
    let connection = tokio::net::UnixStream::from_std(connection)
        .context("cannot use the connection")
        .or_exit(Exit::Internal)?;
    let router = Router::new()
        .route("/api/files/versions", get(handlers::list_versions))
        .route("/api/files/at", get(handlers::list_entries))
        .route("/api/files/download", get(handlers::download))
        .layer(axum::middleware::from_fn_with_state(Listener::Socket, observe::layer))
        .with_state(Arc::new(settings));
    let stall_timer = WriteStallTimer::default();
    let connection = StallTrackedStream { stream: connection, stall_timer: stall_timer.clone() };
    let served = hyper::server::conn::http1::Builder::new()
        .keep_alive(false)
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(connection), TowerToHyperService::new(router));
    tokio::select! {
        // On error, the response is missing or incomplete: the client disconnected or didn't send a request within
        // `HEADER_TIMEOUT`, or the content of a file or archive couldn't be read completely.
        served = served => if let Err(error) = served {
            tracing::debug!(error = %format_chain(&error), "connection closed early");
        },
        () = stall_timer.wait_for_stall() => {
            tracing::warn!("the client has stopped reading; closing the connection");
        }
    }
    Ok(())
}
