//! Performs a single run: reads the request, forwards the agent's output, and reports its exit.
//!
//! A run ends when the agent exits, when the gateway cancels or disconnects, or when this process is stopped. In the
//! last two cases, the agent's process group gets SIGINT first, so that the agent can still report its cost, and then
//! SIGTERM, so that it can terminate its tools, which may run in other process groups. Any remaining processes are
//! killed at the end in all cases.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use jiff::Timestamp;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::process::{Child, ChildStdin, Command};
use tokio_util::sync::CancellationToken;

use super::output::{LineReader, OutputLine, StderrTail};
use super::process_tree;
use crate::agents::adapters::codex_sessions;
use crate::agents::adapters::codex_sessions::SessionUsage;
use crate::agents::adapters::launch::{LaunchRequest, StateLocation};
use crate::agents::adapters::preview::Secrets;
use crate::agents::adapters::{AdapterKind, Exit, codex};
use crate::agents::protocol::{
    GatewayFrame, INTERRUPT_GRACE, RunRequest, RunResult, RunnerFrame, TERMINATE_GRACE,
};
use crate::system::layout::Layout;
use svc_base::error_chain::format_chain;

/// Timeout for reading the request, and again for the go-ahead.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the output may stay open after the agent exits: a child may have inherited it.
const OUTPUT_CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout for a single write to the gateway, after which the run is cancelled.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout for reading the program's session files.
const USAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval for reaping the agent's orphans.
const REAP_INTERVAL: Duration = Duration::from_secs(1);
/// The agent's `PATH`, after the release's own directories.
const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Environment variables inherited from this process.
const INHERITED_VARIABLES: [&str; 5] = ["HOME", "USER", "LOGNAME", "LANG", "TZ"];

/// Serves one connection from the gateway.
///
/// # Errors
/// Fails if, before the agent starts, the connection breaks, a frame is invalid, or the request or go-ahead doesn't
/// arrive within `REQUEST_TIMEOUT`.
pub async fn serve(layout: &Layout, connection: UnixStream, stop: CancellationToken) -> io::Result<()> {
    let (mut from_gateway, mut to_gateway) = connection.into_split();
    let request = tokio::time::timeout(REQUEST_TIMEOUT, GatewayFrame::read(&mut from_gateway)).await;
    let Some(GatewayFrame::Run(request)) = request.map_err(|_| io::ErrorKind::TimedOut)?? else {
        return Ok(());
    };
    if ![RunRequest::PROTOCOL_VERSION_WITHOUT_READY, RunRequest::PROTOCOL_VERSION].contains(&request.version)
    {
        let reason = format!("svc-agent does not support request version {}", request.version);
        return RunnerFrame::Refused(reason).write(&mut to_gateway).await;
    }
    if let Err(error) = process_tree::adopt_orphans() {
        tracing::warn!(%error, "cannot adopt orphans; systemd will kill them");
    }
    if request.version != RunRequest::PROTOCOL_VERSION_WITHOUT_READY
        && !wait_for_go(&mut from_gateway, &mut to_gateway).await?
    {
        let reason = "the gateway never sent a go-ahead";
        return RunnerFrame::Refused(reason.to_owned()).write(&mut to_gateway).await;
    }
    let (child, is_resumed) = match start_agent(layout, &request) {
        Ok(started) => started,
        Err(error) => {
            let program = request.command.first().map_or("", String::as_str);
            let reason = format!("cannot start the agent program {program:?}: {}", format_chain(&error));
            return RunnerFrame::Refused(reason).write(&mut to_gateway).await;
        }
    };
    let (home, working_dir) = (user_home(layout), layout.home());
    let location =
        StateLocation { home: &home, working_dir: &working_dir, environment: &request.environment };
    let session = request.adapter.sessions_dir(&location).map(SessionFiles::new);
    let run = AgentRun {
        session,
        to_gateway: Some(to_gateway),
        stop,
        cancelled: watch_cancellation(from_gateway),
        is_interrupted: false,
        is_resumed,
        secrets: Secrets::from_environment(&request.environment),
    };
    run.drive(child).await;
    Ok(())
}

/// Reports our pid and waits for the gateway's go-ahead. Returns `false` if the gateway cancels or disconnects.
async fn wait_for_go(from_gateway: &mut OwnedReadHalf, to_gateway: &mut OwnedWriteHalf) -> io::Result<bool> {
    RunnerFrame::Ready { pid: std::process::id() }.write(to_gateway).await?;
    let go = tokio::time::timeout(REQUEST_TIMEOUT, GatewayFrame::read(from_gateway)).await;
    Ok(matches!(go.map_err(|_| io::ErrorKind::TimedOut)??, Some(GatewayFrame::Go)))
}

/// Spawns the agent. Also returns whether it resumes the conversation.
fn start_agent(layout: &Layout, request: &RunRequest) -> io::Result<(Child, bool)> {
    let (home, working_dir) = (user_home(layout), layout.home());
    let location =
        StateLocation { home: &home, working_dir: &working_dir, environment: &request.environment };
    let launch_request = LaunchRequest {
        agent_name: &request.agent_name,
        prompt: &request.prompt,
        model: request.model.as_deref(),
        conversation_id: request.conversation_id.as_deref(),
    };
    let conversation_id = request.conversation_id.as_deref();
    let has_conversation = conversation_id.is_some_and(|id| has_conversation(request.adapter, &location, id));
    let launch = request.adapter.build_launch(&launch_request, has_conversation);
    let (program, arguments) = request.command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let runtime = layout.runtime();
    let path = format!(
        "{}:{}:{SYSTEM_PATH}",
        runtime.join("agents/bin").display(),
        runtime.join("node/bin").display()
    );
    let mut command = Command::new(program);
    command.args(arguments).args(&launch.arguments).current_dir(layout.home());
    command.env_clear().env("PATH", path).env("SHELL", "/bin/bash").env("TERM", "dumb");
    command.envs(INHERITED_VARIABLES.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
    command.envs(launch.environment).envs(&request.environment);
    command.env("SVC_DISPATCH_ID", &request.id).env("SVC_AGENT_NAME", &request.agent_name);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.process_group(0).kill_on_drop(true).spawn()?;
    if let Some(stdin) = child.stdin.take() {
        tokio::spawn(write_prompt(stdin, launch.stdin));
    }
    Ok((child, has_conversation))
}

fn user_home(layout: &Layout) -> PathBuf {
    std::env::var_os("HOME").map_or_else(|| layout.home(), PathBuf::from)
}

/// Whether this conversation is stored on disk: as a transcript in a project directory for Claude Code, as a session
/// file for Codex.
fn has_conversation(adapter: AdapterKind, location: &StateLocation<'_>, conversation_id: &str) -> bool {
    if let Some(sessions) = adapter.sessions_dir(location) {
        return codex_sessions::has_thread(&sessions, conversation_id);
    }
    let Some((directory, name)) = adapter.transcript_location(location, conversation_id) else {
        return false;
    };
    let projects = std::fs::read_dir(directory).into_iter().flatten().flatten();
    projects.into_iter().any(|project| project.path().join(&name).exists())
}

async fn write_prompt(mut stdin: ChildStdin, prompt: Vec<u8>) {
    // If the agent doesn't read its prompt, its exit status reports the failure.
    let _ = stdin.write_all(&prompt).await;
}

/// Session files written by the agent program.
struct SessionFiles {
    sessions: PathBuf,
    since: Timestamp,
    /// Thread id, once the program has printed it.
    thread: Option<String>,
}

impl SessionFiles {
    fn new(sessions: PathBuf) -> Self {
        Self { sessions, since: Timestamp::now(), thread: None }
    }

    async fn read_usage(self) -> Option<SessionUsage> {
        let Self { sessions, since, thread } = self;
        let thread = thread?;
        let read = tokio::task::spawn_blocking(move || codex_sessions::read_usage(&sessions, &thread, since));
        tokio::time::timeout(USAGE_TIMEOUT, read).await.ok()?.ok()?
    }
}

struct AgentRun {
    session: Option<SessionFiles>,
    /// `None` after a failed write.
    to_gateway: Option<OwnedWriteHalf>,
    stop: CancellationToken,
    /// Cancelled when the gateway cancels the run or disconnects.
    cancelled: CancellationToken,
    /// Whether the agent has been sent SIGINT.
    is_interrupted: bool,
    is_resumed: bool,
    /// Secrets in the agent's environment.
    secrets: Secrets,
}

impl AgentRun {
    async fn drive(mut self, mut child: Child) {
        let pid = child.id().unwrap_or_default();
        let mut out = child.stdout.take().map(BufReader::new);
        let stderr_tail = child.stderr.take().map(|mut stderr| {
            let mut tail = StderrTail::new(&self.secrets);
            tokio::spawn(async move {
                // Still report the output before a read error.
                let _ = tail.read_from(&mut stderr).await;
                tail
            })
        });
        self.send(&RunnerFrame::Started { pid }).await;
        let (cancelled, stop) = (self.cancelled.clone(), self.stop.clone());
        let mut lines = LineReader::default();
        // Next signal and when to send it.
        let mut next_signal = None;
        let mut reap = tokio::time::interval(REAP_INTERVAL);
        let status = loop {
            let stopped = async {
                tokio::select! {
                    () = cancelled.cancelled() => {}
                    () = stop.cancelled() => {}
                }
            };
            let line = async {
                match &mut out {
                    Some(out) => lines.next(out).await,
                    None => std::future::pending().await,
                }
            };
            let signal_due = async {
                match next_signal {
                    Some((signal, at)) => {
                        tokio::time::sleep_until(at).await;
                        signal
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                line = line => match line {
                    Ok(Some(line)) => self.send_line(line).await,
                    Ok(None) | Err(_) => out = None,
                },
                status = child.wait() => break status,
                () = stopped, if !self.is_interrupted => {
                    self.is_interrupted = true;
                    send_signal(pid, Signal::SIGINT);
                    next_signal = Some((Signal::SIGTERM, tokio::time::Instant::now() + INTERRUPT_GRACE));
                }
                _ = reap.tick() => process_tree::reap_orphans(pid),
                signal = signal_due => if signal == Signal::SIGTERM {
                    send_signal(pid, signal);
                    next_signal = Some((Signal::SIGKILL, tokio::time::Instant::now() + TERMINATE_GRACE));
                } else {
                    next_signal = None;
                    // The agent's orphans are reparented to this process and killed below.
                    let _ = child.start_kill();
                }
            }
        };
        self.send_remaining_lines(&mut lines, &mut out, OUTPUT_CLOSE_TIMEOUT).await;
        process_tree::kill_descendants().await;
        // Every process holding the pipes open has been killed.
        self.send_remaining_lines(&mut lines, &mut out, OUTPUT_CLOSE_TIMEOUT).await;
        let stderr_tail = match stderr_tail {
            Some(tail) => tokio::time::timeout(OUTPUT_CLOSE_TIMEOUT, tail).await.ok().and_then(Result::ok),
            None => None,
        };
        let stderr_tail = stderr_tail.map(|tail| tail.into_text(&self.secrets)).unwrap_or_default();
        let exit = status.map_or(Exit::Signal(Signal::SIGKILL as i32), to_exit);
        let usage = match self.session.take() {
            Some(session) => session.read_usage().await,
            None => None,
        };
        self.send(&RunnerFrame::Ended(RunResult { exit, stderr_tail, usage, is_resumed: self.is_resumed }))
            .await;
    }

    /// Sends buffered lines, plus any that arrive before the timeout.
    async fn send_remaining_lines(
        &mut self,
        lines: &mut LineReader,
        out: &mut Option<BufReader<tokio::process::ChildStdout>>,
        timeout: Duration,
    ) {
        let Some(pipe) = out else { return };
        let deadline = tokio::time::Instant::now() + timeout;
        // Lines may keep arriving, so check the deadline after each one.
        while tokio::time::Instant::now() < deadline
            && let Ok(Ok(Some(line))) = tokio::time::timeout_at(deadline, lines.next(pipe)).await
        {
            self.send_line(line).await;
        }
    }

    async fn send_line(&mut self, line: OutputLine) {
        if let (Some(session @ SessionFiles { thread: None, .. }), OutputLine::Whole(line)) =
            (&mut self.session, &line)
        {
            session.thread = codex::parse_thread_id(line);
        }
        let frame = match line {
            OutputLine::Whole(line) => RunnerFrame::Line(line),
            OutputLine::TooLong => RunnerFrame::LongLine,
        };
        self.send(&frame).await;
    }

    async fn send(&mut self, frame: &RunnerFrame) {
        let Some(to_gateway) = &mut self.to_gateway else { return };
        let written = tokio::time::timeout(WRITE_TIMEOUT, frame.write(to_gateway)).await;
        if !matches!(written, Ok(Ok(()))) {
            tracing::debug!("gateway connection lost");
            // The frame may be partially written, so no other frame may follow.
            self.to_gateway = None;
            self.cancelled.cancel();
        }
    }
}

/// Returns a token that is cancelled once the gateway cancels the run or disconnects.
fn watch_cancellation(mut from_gateway: OwnedReadHalf) -> CancellationToken {
    let token = CancellationToken::new();
    let cancel = token.clone();
    drop(tokio::spawn(async move {
        // Any frame, error or EOF cancels the run: no other frame is valid at this point.
        let _ = GatewayFrame::read(&mut from_gateway).await;
        cancel.cancel();
    }));
    token
}

/// Signals the agent's process group.
fn send_signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().filter(|pid| *pid > 1) {
        // The group may be gone already.
        let _ = nix::sys::signal::killpg(Pid::from_raw(pid), signal);
    }
}

fn to_exit(status: ExitStatus) -> Exit {
    match (status.code(), status.signal()) {
        (Some(code), _) => Exit::Code(code),
        (None, signal) => Exit::Signal(signal.unwrap_or_default()),
    }
}
