//! `svc-code`: runs the release's code-server on `code.sock`, with the release's Node.js.
//!
//! code-server runs without a password: its socket is reachable only by the gateway, which authenticates every request,
//! and by the owner's own programs. It doesn't inherit any of svc's configuration.

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

use crate::system::config::init_log;
use crate::system::layout::Layout;
use crate::system::{systemd, unix_socket};
use svc_base::applet::{self, Exit, Failure, OrExit};

pub const SOCKET: &str = "code.sock";

/// Timeout for the first accepted connection. A new machine under load uses most of it.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(90);
const PROBE_INTERVAL: Duration = Duration::from_millis(100);
/// Grace period between SIGTERM and SIGKILL.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// Environment variables passed through to code-server: only what a terminal needs, as others may contain svc's
/// configuration.
const PASSED_VARIABLES: [&str; 6] = ["LANG", "LC_ALL", "PATH", "TERM", "TZ", "USER"];
/// Entry point locations: in the standalone archive, and in an npm install.
const ENTRY_POINTS: [&str; 2] = ["out/node/entry.js", "node_modules/code-server/out/node/entry.js"];

#[derive(clap::Parser)]
#[command(
    name = "svc-code",
    version = applet::version(),
    about = "Starts the release's code-server for the gateway, on a Unix socket",
    after_help = "svc-code runs /opt/svc/runtime/code-server below SVC_ROOT, with /opt/svc/runtime/node or else the \
                  Node.js that code-server includes, on run/svc/owner/code.sock. It exits with 78 if the release \
                  has no code-server or no Node.js."
)]
struct Args {}

/// Paths to the release's code-server and the Node.js to run it with.
#[derive(Debug, PartialEq, Eq)]
struct CodeServer {
    node: PathBuf,
    entry: PathBuf,
}

/// The release doesn't include code-server, or a Node.js to run it.
#[derive(Debug, thiserror::Error)]
#[error(
    "the release has no {component} ({} is missing); build the bundle with --runtime {argument}=DIR, or do not start svc-code",
    .path.display()
)]
struct MissingRuntime {
    component: &'static str,
    path: PathBuf,
    argument: &'static str,
}

impl CodeServer {
    fn find(runtime: &Path) -> Result<Self, MissingRuntime> {
        let dir = runtime.join("code-server");
        let entry = ENTRY_POINTS.iter().map(|entry| dir.join(entry)).find(|entry| entry.is_file());
        let entry = entry.ok_or_else(|| MissingRuntime {
            component: "code-server",
            path: dir.clone(),
            argument: "code-server",
        })?;
        // The standalone archive bundles its own Node.js.
        let node_paths = [runtime.join("node/bin/node"), dir.join("lib/node")];
        let node = node_paths.iter().find(|path| path.is_file()).cloned();
        let [path, _] = node_paths;
        let node = node.ok_or(MissingRuntime { component: "Node.js", path, argument: "node" })?;
        Ok(Self { node, entry })
    }

    fn build_command(&self, layout: &Layout, socket: &Path) -> Command {
        let home = layout.home();
        let user_home = home.parent().unwrap_or(&home);
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
        // The gateway also rejects code-server's proxy paths: see `gateway/proxy.rs`.
        command.arg("--disable-proxy");
        command.arg("--config").arg(user_home.join(".config/code-server/config.yaml"));
        command.arg("--user-data-dir").arg(user_home.join(".local/share/code-server"));
        command.arg(&home);
        command.env_clear();
        for name in PASSED_VARIABLES {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        command.env("PATH", path).env("HOME", user_home).env("SHELL", "/bin/bash");
        command.current_dir(&home).stdin(Stdio::null()).kill_on_drop(true);
        command
    }
}

/// Returns the clap command, from which the reference pages are generated.
pub fn command() -> clap::Command {
    <Args as clap::CommandFactory>::command()
}

pub fn run(args: Vec<OsString>) -> ExitCode {
    if let Err(code) = applet::parse::<Args>(args) {
        return code;
    }
    let layout = Layout::from_process();
    init_log("svc-code", &layout);
    applet::block_on("svc-code", serve(layout))
}

async fn serve(layout: Layout) -> Result<(), Failure> {
    let server = CodeServer::find(&layout.runtime()).or_exit(Exit::Config)?;
    std::fs::create_dir_all(layout.home())
        .context("cannot create the owner's home directory")
        .or_exit(Exit::Unavailable)?;
    let socket = claim_socket(&layout.owner_sockets())
        .context("cannot claim the Unix socket")
        .or_exit(Exit::Unavailable)?;
    let mut signals = receive_signals().context("cannot handle signals").or_exit(Exit::Internal)?;
    let mut command = server.build_command(&layout, &socket);
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot start {}", server.node.display()))
        .or_exit(Exit::Unavailable)?;
    let pid = pid_of(&child);
    let status = tokio::select! {
        waited = child.wait() => waited.context("cannot wait for code-server").or_exit(Exit::Internal)?,
        error = supervise(&socket) => {
            stop_child(&mut child).await.or_exit(Exit::Internal)?;
            return Err(Failure::new(Exit::Unavailable, error));
        }
        () = forward_signals(pid, &mut signals) => {
            systemd::notify(&[NotifyState::Stopping]);
            stop_child(&mut child).await.or_exit(Exit::Internal)?;
            return Ok(());
        }
    };
    Err(Failure::new(Exit::Unavailable, anyhow!("code-server exited: {status}")))
}

/// Notifies systemd once code-server accepts connections, then feeds the watchdog for as long as it does. Only returns
/// if code-server isn't up within [`STARTUP_TIMEOUT`].
async fn supervise(socket: &Path) -> anyhow::Error {
    let accepting = async {
        while !is_accepting(socket).await {
            sleep(PROBE_INTERVAL).await;
        }
    };
    if timeout(STARTUP_TIMEOUT, accepting).await.is_err() {
        return anyhow!(
            "code-server did not accept connections within {} seconds",
            STARTUP_TIMEOUT.as_secs()
        );
    }
    tracing::info!("code-server is accepting connections");
    systemd::notify(&[NotifyState::Ready, NotifyState::Status("code-server is accepting connections")]);
    systemd::feed_watchdog(CancellationToken::new(), async || is_accepting(socket).await).await;
    std::future::pending().await
}

/// Forwards signals to code-server; returns on SIGTERM or SIGINT.
async fn forward_signals(pid: Option<Pid>, signals: &mut mpsc::Receiver<Signal>) {
    while let Some(signal) = signals.recv().await {
        if matches!(signal, Signal::SIGTERM | Signal::SIGINT) {
            return;
        }
        send_signal(pid, signal);
    }
}

/// Returns the socket path, removing any stale socket left by a killed process. Fails if a process is still listening
/// on it.
fn claim_socket(dir: &Path) -> io::Result<PathBuf> {
    unix_socket::ensure_dir(dir)?;
    let socket = dir.join(SOCKET);
    match std::os::unix::net::UnixStream::connect(&socket) {
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, format!("{} is in use", socket.display()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(socket),
        Err(_) => std::fs::remove_file(&socket).map(|()| socket),
    }
}

async fn is_accepting(socket: &Path) -> bool {
    matches!(timeout(PROBE_TIMEOUT, UnixStream::connect(socket)).await, Ok(Ok(_)))
}

/// Returns a channel yielding the signals sent to this process.
fn receive_signals() -> io::Result<mpsc::Receiver<Signal>> {
    let (sender, receiver) = mpsc::channel(8);
    let kinds = [
        (SignalKind::terminate(), Signal::SIGTERM),
        (SignalKind::interrupt(), Signal::SIGINT),
        (SignalKind::hangup(), Signal::SIGHUP),
        (SignalKind::user_defined1(), Signal::SIGUSR1),
        (SignalKind::user_defined2(), Signal::SIGUSR2),
    ];
    for (kind, nix_signal) in kinds {
        let (mut signals, sender) = (signal(kind)?, sender.clone());
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                if sender.send(nix_signal).await.is_err() {
                    return;
                }
            }
        });
    }
    Ok(receiver)
}

fn pid_of(child: &Child) -> Option<Pid> {
    child.id().and_then(|pid| i32::try_from(pid).ok()).map(Pid::from_raw)
}

fn send_signal(pid: Option<Pid>, signal: Signal) {
    let Some(pid) = pid else { return };
    if let Err(error) = kill(pid, signal) {
        tracing::warn!(%error, %signal, "could not signal code-server");
    }
}

/// Sends SIGTERM, followed by SIGKILL after [`SHUTDOWN_TIMEOUT`].
async fn stop_child(child: &mut Child) -> io::Result<ExitStatus> {
    send_signal(pid_of(child), Signal::SIGTERM);
    match timeout(SHUTDOWN_TIMEOUT, child.wait()).await {
        Ok(status) => status,
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
    fn find_accepts_archive_and_npm_layouts() {
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
        let included_node = runtime.join("code-server/lib/node");
        touch(&included_node);
        assert_eq!(CodeServer::find(runtime).unwrap(), CodeServer { node: included_node, entry: npm });
        let (node, entry) = (runtime.join("node/bin/node"), runtime.join("code-server/out/node/entry.js"));
        touch(&node);
        touch(&entry);
        assert_eq!(CodeServer::find(runtime).unwrap(), CodeServer { node, entry });
    }

    #[test]
    fn claim_socket_removes_only_stale_sockets() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(SOCKET);
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert_eq!(claim_socket(dir.path()).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        assert_eq!(claim_socket(dir.path()).unwrap(), path);
        assert!(!path.exists());
    }
}
