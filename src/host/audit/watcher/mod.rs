//! `svc-watch`: audits the home directory and records changes made by agents' tools in `audit.jsonl`.
//!
//! This module has the command line, the sockets and the service lifecycle. The watcher runs as a user whose processes
//! the owner's programs can't kill or impersonate. It reads names and metadata, never contents.

mod call_windows;
mod calls;
mod change_log;
pub mod diff;
mod dispatches;
pub mod home_watcher;
pub mod peer;
pub mod request;
pub mod state_file;
pub mod thread;
pub mod tool_paths;
mod tree;

use std::convert::Infallible;
use std::ffi::OsString;
use std::io::Write;
use std::os::unix::net::UnixStream as StdStream;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use sd_notify::NotifyState;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, oneshot};
use tokio_util::sync::CancellationToken;

use self::peer::Peer;
use self::request::{HookRequest, Request};
use self::thread::Watcher;
use super::file_changes::{self, ChangesReply, ChangesRequest};
use super::protocol::{self, MAX_MESSAGE_BYTES, Message, SOCKET};
use crate::records::writer::Writer;
use crate::system::config::init_log;
use crate::system::layout::Layout;
use crate::system::systemd;
use crate::system::unix_socket;
use crate::system::unix_socket::PeerCredentials;
use svc_base::applet::{self, Exit, Failure, OrExit};

/// Maximum number of concurrent hook connections.
const MAX_CONNECTIONS: usize = 128;
/// Timeout for a hook connection; longer than the hook itself waits.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(1);
/// Time without progress after which the watcher thread is considered stuck and the systemd watchdog is no longer fed.
/// A full check of a million names takes several seconds.
const STUCK_TIMEOUT: Duration = Duration::from_secs(20);

/// The watcher's fail points.
pub const FAILPOINTS: &[&str] = &["watch.check"];

#[derive(clap::Parser)]
#[command(
    name = "svc-watch",
    version = applet::version(),
    about = "Records what agents' tools change in the owner's home directory",
    after_help = "Agents' hooks (svc-hook) report the start and end of tool calls; entries go to system/logs/audit.jsonl."
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
    init_log("svc-watch", &Layout::from_process());
    applet::block_on("svc-watch", watch(Layout::from_process()))
}

async fn watch(layout: Layout) -> Result<(), Failure> {
    let mut term = signal(SignalKind::terminate()).or_exit(Exit::Internal)?;
    let mut int = signal(SignalKind::interrupt()).or_exit(Exit::Internal)?;
    let state = layout.tool_calls();
    if let Some(dir) = state.parent() {
        unix_socket::ensure_dir(dir).or_exit(Exit::Internal)?;
    }
    unix_socket::ensure_dir(&layout.undelivered_hooks_dir()).or_exit(Exit::Internal)?;
    let writer = Writer::start(layout.logs()).or_exit(Exit::Internal)?;
    let records = writer.records();
    let thread_layout = layout.clone();
    let start_task = tokio::task::spawn_blocking(move || Watcher::start(&thread_layout, records));
    let watcher = start_task.await.or_exit(Exit::Internal)?.or_exit(Exit::Internal)?;
    let WatcherThread { handle, has_progressed, thread, exited } =
        spawn_watcher_thread(watcher).or_exit(Exit::Internal)?;
    let listener = unix_socket::bind(&layout.watch_sockets(), SOCKET).or_exit(Exit::Internal)?;
    let change_listener =
        unix_socket::bind(&layout.watch_sockets(), file_changes::SOCKET).or_exit(Exit::Internal)?;
    systemd::notify(&[NotifyState::Ready]);
    let is_stop_requested = tokio::select! {
        () = listen_for_hooks(listener, handle.clone()) => false,
        () = listen_for_changes(change_listener, handle) => false,
        // The thread panicked; the panic hook has logged it.
        _ = exited => false,
        never = feed_watchdog(has_progressed) => match never {},
        _ = term.recv() => true,
        _ = int.recv() => true,
    };
    systemd::notify(&[NotifyState::Stopping]);
    // The listeners have dropped their handles; open connections hold theirs until they time out.
    let join_task = tokio::task::spawn_blocking(move || thread.join());
    // After the timeout, the thread dies with the process.
    let _ = tokio::time::timeout(CONNECTION_TIMEOUT * 2, join_task).await;
    drop(writer);
    is_stop_requested
        .then_some(())
        .ok_or_else(|| anyhow::anyhow!("watcher thread exited unexpectedly").into())
}

/// Feeds the watchdog as long as the thread makes progress.
async fn feed_watchdog(has_progressed: Arc<AtomicBool>) -> Infallible {
    let is_alive = async || {
        let deadline = tokio::time::Instant::now() + STUCK_TIMEOUT;
        while !has_progressed.swap(false, Ordering::Relaxed) {
            if tokio::time::Instant::now() > deadline {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        true
    };
    systemd::feed_watchdog(CancellationToken::new(), is_alive).await;
    // The unit has no watchdog.
    std::future::pending().await
}

/// Sends requests to the watcher thread and wakes it.
#[derive(Clone)]
struct WatcherHandle {
    requests: Sender<Request>,
    waker: Arc<StdStream>,
}

struct WatcherThread {
    handle: WatcherHandle,
    /// Set on each iteration of the thread's loop, which processes at most one request, and before each tick.
    has_progressed: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<()>,
    /// Resolves when the thread exits.
    exited: oneshot::Receiver<()>,
}

fn spawn_watcher_thread(watcher: Watcher) -> std::io::Result<WatcherThread> {
    let (requests, receiver) = channel();
    let (waker, wakeups) = StdStream::pair()?;
    waker.set_nonblocking(true)?;
    wakeups.set_nonblocking(true)?;
    let (has_progressed, (exit_sender, exited)) = (Arc::new(AtomicBool::new(true)), oneshot::channel());
    let thread_has_progressed = Arc::clone(&has_progressed);
    let work = move || {
        watcher.run(&receiver, &wakeups, &thread_has_progressed);
        drop(exit_sender);
    };
    let thread = std::thread::Builder::new().name("watcher".to_owned()).spawn(work)?;
    Ok(WatcherThread {
        handle: WatcherHandle { requests, waker: Arc::new(waker) },
        has_progressed,
        thread,
        exited,
    })
}

impl WatcherHandle {
    /// Sends a message. Returns whether the thread has processed it.
    async fn send(&self, message: Message, peer: Peer) -> bool {
        let (done, completion) = oneshot::channel();
        let request = HookRequest { message, peer, received_at: Instant::now(), done };
        self.send_request(Request::Hook(Box::new(request))) && completion.await.is_ok()
    }

    /// Returns the changes since the reply identified by `last_saved_token`, or `None` if the thread has exited.
    async fn take_changes(&self, last_saved_token: Option<String>) -> Option<ChangesReply> {
        let (reply, changes) = oneshot::channel();
        if !self.send_request(Request::Changes { last_saved_token, reply }) {
            return None;
        }
        changes.await.ok()
    }

    fn send_request(&self, request: Request) -> bool {
        if self.requests.send(request).is_err() {
            return false;
        }
        // If the socket buffer is full, its unread bytes already wake the thread.
        let _ = (&*self.waker).write(&[1]);
        true
    }
}

async fn listen_for_hooks(listener: UnixListener, handle: WatcherHandle) {
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let time_limit = protocol::time_limit(CONNECTION_TIMEOUT);
    loop {
        let Ok(permit) = Arc::clone(&connections).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let handle = handle.clone();
                tokio::spawn(async move {
                    // A silent hook times out; a disconnected one doesn't need a reply.
                    let _ = tokio::time::timeout(time_limit, serve_hook(stream, handle)).await;
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::error!(%error, "cannot accept hook connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Serves changed-paths requests from the file backup, one connection at a time.
async fn listen_for_changes(listener: UnixListener, handle: WatcherHandle) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let served = serve_changes(stream, &handle);
                // Clients retry after a disconnect or timeout.
                let _ = tokio::time::timeout(file_changes::REQUEST_TIMEOUT, served).await;
            }
            Err(error) => {
                tracing::error!(%error, "cannot accept file-backup connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn serve_changes(mut stream: UnixStream, handle: &WatcherHandle) -> std::io::Result<()> {
    // Agents can connect to this socket too, but must not be able to mark changes as saved.
    let peer = PeerCredentials::from_stream(&stream).uid;
    if peer != Some(nix::unistd::geteuid().as_raw()) {
        tracing::warn!(uid = ?peer, "rejected changed-paths request from another user");
        return Ok(());
    }
    let mut line = Vec::new();
    let (read, mut write) = stream.split();
    BufReader::new(read).take(file_changes::MAX_REQUEST_BYTES).read_until(b'\n', &mut line).await?;
    let Ok(request) = serde_json::from_slice::<ChangesRequest>(&line) else {
        tracing::warn!("invalid request from the file backup");
        return Ok(());
    };
    if let Some(reply) = handle.take_changes(request.saved).await {
        write.write_all(&reply.encode()).await?;
    }
    Ok(())
}

async fn serve_hook(mut stream: UnixStream, handle: WatcherHandle) -> std::io::Result<()> {
    // Identify the peer first: the hook may exit during the read below.
    let peer = Peer::from_credentials(PeerCredentials::from_stream(&stream));
    let mut line = Vec::new();
    let (read, mut write) = stream.split();
    BufReader::new(read).take(MAX_MESSAGE_BYTES).read_until(b'\n', &mut line).await?;
    match serde_json::from_slice::<Message>(&line) {
        Ok(message) if message.version == Message::PROTOCOL_VERSION => {
            if handle.send(message, peer).await {
                write.write_all(b"{\"heard\":true}\n").await?;
            }
            Ok(())
        }
        Ok(message) => {
            tracing::warn!(version = message.version, "unsupported protocol version on watch.sock");
            Ok(())
        }
        Err(error) => {
            tracing::warn!(%error, "invalid message on watch.sock");
            Ok(())
        }
    }
}
