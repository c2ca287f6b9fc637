//! `svc-code`: the release's code-server on `code.sock`, run by the release's Node.js.
//!
//! It asks for no password: its socket can be reached by the gateway alone, which knows who asks. It gets none of our
//! environment, and so none of our configuration.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, anyhow};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sd_notify::NotifyState;
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::applet::{self, Exit, Failure, OrExit};
use crate::host::system::config::begin_log;
use crate::host::system::layout::Layout;
use crate::host::system::{systemd, unix_socket};

pub const SOCKET: &str = "code.sock";

/// Until it accepts. A machine under its first load needs most of it.
const START: Duration = Duration::from_secs(90);
const LOOK_EACH: Duration = Duration::from_millis(100);
/// From SIGTERM to SIGKILL.
const END: Duration = Duration::from_secs(10);
const PROBE: Duration = Duration::from_secs(5);
/// What a terminal needs of the environment; the rest may be ours.
const PASSED_ON: [&str; 6] = ["LANG", "LC_ALL", "PATH", "TERM", "TZ", "USER"];
/// Where code-server begins: in its own archive, or as npm installs it.
const ENTRIES: [&str; 2] = ["out/node/entry.js", "node_modules/code-server/out/node/entry.js"];

#[derive(clap::Parser)]
#[command(
    name = "svc-code",
    version = applet::VERSION,
    about = "Starts the release's code-server for the gateway, on a unix socket",
    after_help = "It runs /opt/svc/runtime/code-server below SVC_ROOT with /opt/svc/runtime/node, on \
                  run/svc/owner/code.sock, and ends with 78 where the release has none."
)]
struct Args {}

/// What of the release is run.
#[derive(Debug, PartialEq, Eq)]
struct CodeServer {
    node: PathBuf,
    entry: PathBuf,
}

/// A release that has no code-server, or no Node.js for it.
#[derive(Debug, thiserror::Error)]
#[error(
    "the release has no {what} ({} is not there); build the bundle with --runtime {argument}=DIR, or do not start svc-code",
    .place.display()
)]
struct Missing {
    what: &'static str,
    place: PathBuf,
    argument: &'static str,
}

impl CodeServer {
    fn find(runtime: &Path) -> Result<Self, Missing> {
        let home = runtime.join("code-server");
        let entry = ENTRIES.iter().map(|entry| home.join(entry)).find(|entry| entry.is_file());
        let entry = entry.ok_or_else(|| Missing {
            what: "code-server",
            place: home.clone(),
            argument: "code-server",
        })?;
        // Its own archive brings a Node.js along.
        let nodes = [runtime.join("node/bin/node"), home.join("lib/node")];
        let node = nodes.iter().find(|node| node.is_file()).cloned();
        let [place, _] = nodes;
        let node = node.ok_or(Missing { what: "Node.js", place, argument: "node" })?;
        Ok(Self { node, entry })
    }

    fn command(&self, layout: &Layout, socket: &Path) -> Command {
        let home = layout.home();
        let user = home.parent().unwrap_or(&home);
        let runtime = layout.runtime();
        let mut path = OsString::from(runtime.join("node/bin"));
        path.push(":");
        path.push(runtime.join("agents/bin"));
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into()));
        let mut command = Command::new(&self.node);
        command.arg(&self.entry).args(["--auth", "none", "--socket"]).arg(socket);
        command.args(["--socket-mode", "660", "--disable-telemetry", "--disable-update-check"]);
        command.args(["--disable-workspace-trust", "--disable-getting-started-override"]);
        // The gateway refuses these paths too: see `gateway/proxy.rs`.
        command.arg("--disable-proxy");
        command.arg("--config").arg(user.join(".config/code-server/config.yaml"));
        command.arg("--user-data-dir").arg(user.join(".local/share/code-server"));
        command.arg(&home);
        command.env_clear();
        for name in PASSED_ON {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        command.env("PATH", path).env("HOME", user).env("SHELL", "/bin/bash");
        command.current_dir(&home).stdin(Stdio::null()).kill_on_drop(true);
        command
    }
}

/// The applet.
pub fn run(args: Vec<OsString>) -> ExitCode {
    if let Err(code) = applet::parse::<Args>(args) {
        return code;
    }
    let layout = Layout::from_process();
    begin_log("svc-code", &layout);
    applet::block_on("svc-code", serve(layout))
}

async fn serve(layout: Layout) -> Result<(), Failure> {
    let server = CodeServer::find(&layout.runtime()).or_exit(Exit::Config)?;
    std::fs::create_dir_all(layout.home()).context("the owner's home").or_exit(Exit::Unavailable)?;
    let socket =
        free_socket(&layout.owner_sockets()).context("the unix socket").or_exit(Exit::Unavailable)?;
    let mut signals = signals().context("signals").or_exit(Exit::Internal)?;
    let mut command = server.command(&layout, &socket);
    let mut child = command
        .spawn()
        .with_context(|| format!("start {}", server.node.display()))
        .or_exit(Exit::Unavailable)?;
    let pid = pid_of(&child);
    let end = tokio::select! {
        end = child.wait() => end.context("wait for code-server").or_exit(Exit::Internal)?,
        late = tended(&socket) => {
            stopped(&mut child).await.or_exit(Exit::Internal)?;
            return Err(Failure::new(Exit::Unavailable, late));
        }
        () = stop_asked(pid, &mut signals) => {
            systemd::tell(&[NotifyState::Stopping]);
            stopped(&mut child).await.or_exit(Exit::Internal)?;
            return Ok(());
        }
    };
    Err(Failure::new(Exit::Unavailable, anyhow!("code-server ended by itself: {end}")))
}

/// Tells systemd once it accepts, then for as long as it does; an error where it never did.
async fn tended(socket: &Path) -> anyhow::Error {
    let accepting = async {
        while !accepts(socket).await {
            sleep(LOOK_EACH).await;
        }
    };
    if timeout(START, accepting).await.is_err() {
        return anyhow!("code-server did not accept within {} seconds", START.as_secs());
    }
    tracing::info!("code-server accepts");
    systemd::tell(&[NotifyState::Ready, NotifyState::Status("code-server accepts")]);
    systemd::feed_watchdog(CancellationToken::new(), async || accepts(socket).await).await;
    std::future::pending().await
}

/// Returns at SIGTERM or SIGINT; the other signals are code-server's.
async fn stop_asked(pid: Option<Pid>, signals: &mut mpsc::Receiver<Signal>) {
    while let Some(signal) = signals.recv().await {
        if matches!(signal, Signal::SIGTERM | Signal::SIGINT) {
            return;
        }
        forward(pid, signal);
    }
}

/// The socket's path, free of one that a kill left behind.
fn free_socket(dir: &Path) -> io::Result<PathBuf> {
    unix_socket::ensure_dir(dir)?;
    let socket = dir.join(SOCKET);
    match std::os::unix::net::UnixStream::connect(&socket) {
        Ok(_) => {
            Err(io::Error::new(io::ErrorKind::AddrInUse, format!("{} is served already", socket.display())))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(socket),
        Err(_) => std::fs::remove_file(&socket).map(|()| socket),
    }
}

async fn accepts(socket: &Path) -> bool {
    matches!(timeout(PROBE, UnixStream::connect(socket)).await, Ok(Ok(_)))
}

/// What comes to us, for code-server.
fn signals() -> io::Result<mpsc::Receiver<Signal>> {
    let (tell, told) = mpsc::channel(8);
    let kinds = [
        (SignalKind::terminate(), Signal::SIGTERM),
        (SignalKind::interrupt(), Signal::SIGINT),
        (SignalKind::hangup(), Signal::SIGHUP),
        (SignalKind::user_defined1(), Signal::SIGUSR1),
        (SignalKind::user_defined2(), Signal::SIGUSR2),
    ];
    for (kind, name) in kinds {
        let (mut comes, tell) = (signal(kind)?, tell.clone());
        tokio::spawn(async move {
            while comes.recv().await.is_some() {
                if tell.send(name).await.is_err() {
                    return;
                }
            }
        });
    }
    Ok(told)
}

fn pid_of(child: &Child) -> Option<Pid> {
    child.id().and_then(|pid| i32::try_from(pid).ok()).map(Pid::from_raw)
}

fn forward(pid: Option<Pid>, signal: Signal) {
    let Some(pid) = pid else { return };
    if let Err(error) = kill(pid, signal) {
        tracing::warn!(%error, %signal, "code-server was not told");
    }
}

/// SIGTERM, then, where that is not heard, SIGKILL.
async fn stopped(child: &mut Child) -> io::Result<ExitStatus> {
    forward(pid_of(child), Signal::SIGTERM);
    match timeout(END, child.wait()).await {
        Ok(ended) => ended,
        Err(_) => {
            child.kill().await?;
            child.wait().await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "").unwrap();
    }

    #[test]
    fn code_server_is_found_as_its_archive_and_as_npm_lay_it_out() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = dir.path();
        let missing = CodeServer::find(runtime).unwrap_err().to_string();
        assert!(
            missing.contains("no code-server") && missing.contains("--runtime code-server="),
            "{missing}"
        );
        let npm = runtime.join("code-server/node_modules/code-server/out/node/entry.js");
        touch(&npm);
        let missing = CodeServer::find(runtime).unwrap_err().to_string();
        assert!(missing.contains("no Node.js") && missing.contains("--runtime node="), "{missing}");
        let own = runtime.join("code-server/lib/node");
        touch(&own);
        assert_eq!(CodeServer::find(runtime).unwrap(), CodeServer { node: own, entry: npm });
        let (node, entry) = (runtime.join("node/bin/node"), runtime.join("code-server/out/node/entry.js"));
        touch(&node);
        touch(&entry);
        assert_eq!(CodeServer::find(runtime).unwrap(), CodeServer { node, entry });
    }

    #[test]
    fn a_socket_that_is_served_is_left_alone_and_a_dead_one_removed() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join(SOCKET);
        let listener = std::os::unix::net::UnixListener::bind(&place).unwrap();
        assert_eq!(free_socket(dir.path()).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        assert_eq!(free_socket(dir.path()).unwrap(), place);
        assert!(!place.exists());
    }
}
