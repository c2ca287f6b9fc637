//! `svc-watch`: the audit of the home's files. What agents' tools change becomes lines of `audit.jsonl`.
//!
//! Here: the command line, the socket on which hooks tell of tool calls, the life as a service. It runs as a user whom
//! the owner's programs can neither end nor imitate, and reads names and sizes, never contents.

mod calls;
pub mod diff;
mod dispatches;
pub mod home_watcher;
pub mod peer;
pub mod state_file;
pub mod thread;
pub mod tool_paths;
mod tree;
mod windows;

use std::convert::Infallible;
use std::ffi::OsString;
use std::io::Write;
use std::os::unix::net::UnixStream as StdStream;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, oneshot};
use tokio_util::sync::CancellationToken;

use self::peer::Speaker;
use self::thread::{Told, Watcher};
use super::protocol::{LONGEST, Message, SOCKET};
use crate::applet::{self, Exit, Failure, OrExit};
use crate::host::records::writer::Writer;
use crate::host::system::config::begin_log;
use crate::host::system::layout::Layout;
use crate::host::system::systemd;
use crate::host::system::unix_socket;
use crate::host::system::unix_socket::PeerCredentials;

/// Hooks that tell something at once.
const MOST_AT_ONCE: usize = 128;
/// A hook says all it has to say within this; it waits for no longer than a tenth of it.
const PATIENCE: Duration = Duration::from_secs(1);
/// A look through a home of a million names takes some seconds.
const STUCK: Duration = Duration::from_secs(20);

/// The places of the watcher where a test can stop it.
pub const POINTS: &[&str] = &["watch.look"];

#[derive(clap::Parser)]
#[command(
    name = "svc-watch",
    version = applet::VERSION,
    about = "Records what agents' tools change in the owner's home",
    after_help = "Agents' hooks (svc-hook) tell it when a tool call begins and ends; entries go to system/logs/audit.jsonl."
)]
struct Args {}

pub fn run(args: Vec<OsString>) -> ExitCode {
    if let Err(code) = applet::parse::<Args>(args) {
        return code;
    }
    begin_log("svc-watch", &Layout::from_process());
    applet::block_on("svc-watch", watch(Layout::from_process()))
}

async fn watch(layout: Layout) -> Result<(), Failure> {
    let mut term = signal(SignalKind::terminate()).or_exit(Exit::Internal)?;
    let mut int = signal(SignalKind::interrupt()).or_exit(Exit::Internal)?;
    let state = layout.tool_calls();
    if let Some(dir) = state.parent() {
        unix_socket::ensure_dir(dir).or_exit(Exit::Internal)?;
    }
    unix_socket::ensure_dir(&layout.hook_notes()).or_exit(Exit::Internal)?;
    let writer = Writer::start(layout.logs()).or_exit(Exit::Internal)?;
    let records = writer.records();
    let of_watcher = layout.clone();
    let begun = tokio::task::spawn_blocking(move || Watcher::begin(&of_watcher, records));
    let watcher = begun.await.or_exit(Exit::Internal)?.or_exit(Exit::Internal)?;
    let Started { teller, alive, thread, ended } = start(watcher).or_exit(Exit::Internal)?;
    let listener = unix_socket::bind(&layout.watch_sockets(), SOCKET).or_exit(Exit::Internal)?;
    systemd::notify(&[NotifyState::Ready]);
    let is_told_to_end = tokio::select! {
        () = listen(listener, teller) => false,
        // Its thread has ended: by a panic, which has told of itself.
        _ = ended => false,
        never = feed_watchdog(alive) => match never {},
        _ = term.recv() => true,
        _ = int.recv() => true,
    };
    systemd::notify(&[NotifyState::Stopping]);
    // The tellers are gone with the listener; hooks that are still being heard hold theirs for a moment.
    let ended = tokio::task::spawn_blocking(move || thread.join());
    // What it did not get to end in time ends with the process.
    let _ = tokio::time::timeout(PATIENCE * 2, ended).await;
    drop(writer);
    is_told_to_end.then_some(()).ok_or_else(|| anyhow::anyhow!("the watcher has ended by itself").into())
}

/// While the thread comes by.
async fn feed_watchdog(alive: Arc<AtomicBool>) -> Infallible {
    let is_well = async || {
        let end = tokio::time::Instant::now() + STUCK;
        while !alive.swap(false, Ordering::Relaxed) {
            if tokio::time::Instant::now() > end {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        true
    };
    systemd::feed_watchdog(CancellationToken::new(), is_well).await;
    // Nobody asks.
    std::future::pending().await
}

/// By which the watcher's thread is told something.
#[derive(Clone)]
struct Teller {
    orders: Sender<Told>,
    waker: Arc<StdStream>,
}

struct Started {
    teller: Teller,
    /// Set whenever the thread comes by.
    alive: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<()>,
    /// Ends with the thread.
    ended: oneshot::Receiver<()>,
}

fn start(watcher: Watcher) -> std::io::Result<Started> {
    let (orders, told) = channel();
    let (waker, woken) = StdStream::pair()?;
    waker.set_nonblocking(true)?;
    woken.set_nonblocking(true)?;
    let (alive, (ends, ended)) = (Arc::new(AtomicBool::new(true)), oneshot::channel());
    let seen = Arc::clone(&alive);
    let work = move || {
        watcher.run(&told, &woken, &seen);
        drop(ends);
    };
    let thread = std::thread::Builder::new().name("watcher".to_owned()).spawn(work)?;
    Ok(Started { teller: Teller { orders, waker: Arc::new(waker) }, alive, thread, ended })
}

impl Teller {
    async fn tell(&self, message: Message, speaker: Speaker) -> bool {
        let (heard, hears) = oneshot::channel();
        if self.orders.send(Told { message, speaker, heard }).is_err() {
            return false;
        }
        // Where it is full, the thread has been woken.
        let _ = (&*self.waker).write(&[1]);
        hears.await.is_ok()
    }
}

async fn listen(listener: UnixListener, teller: Teller) {
    let room = Arc::new(Semaphore::new(MOST_AT_ONCE));
    loop {
        let Ok(place) = Arc::clone(&room).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let teller = teller.clone();
                tokio::spawn(async move {
                    // Whoever says nothing is not waited for; whoever let go needs no answer.
                    let _ = tokio::time::timeout(PATIENCE, hear(stream, teller)).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::error!(%error, "cannot accept a hook");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn hear(mut stream: UnixStream, teller: Teller) -> std::io::Result<()> {
    // At once: it may let go and end.
    let speaker = Speaker::of(PeerCredentials::of(&stream));
    let mut line = Vec::new();
    let (read, mut write) = stream.split();
    BufReader::new(read).take(LONGEST).read_until(b'\n', &mut line).await?;
    match serde_json::from_slice::<Message>(&line) {
        Ok(message) if message.version == Message::VERSION => {
            if teller.tell(message, speaker).await {
                write.write_all(b"{\"heard\":true}\n").await?;
            }
            Ok(())
        }
        Ok(message) => {
            tracing::warn!(version = message.version, "a hook of another release");
            Ok(())
        }
        Err(error) => {
            tracing::warn!(%error, "a hook that cannot be understood");
            Ok(())
        }
    }
}
