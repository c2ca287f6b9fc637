//! One run: an order, what the agent prints, and its end.
//!
//! The agent ends by itself, or because the gateway says so or is gone, or because this process is told to end. It is
//! asked first, for an agent's tools may be in sessions of their own, which it ends itself; then all that is left is
//! killed.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
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

use super::output::{Line, Lines, Said};
use super::process_tree;
use crate::chain::chain;
use crate::host::agents::adapters::codex_sessions;
use crate::host::agents::adapters::codex_sessions::Used;
use crate::host::agents::adapters::launch::Asked;
use crate::host::agents::adapters::{Exit, codex};
use crate::host::agents::protocol::{Ended, FromRunner, GRACE, Order, ToRunner};
use crate::host::system::layout::Layout;

/// How long the order may take to come, and the word to start after it.
const ORDER: Duration = Duration::from_secs(10);
/// How long the output may stay open after the agent has ended: something that it left has it still.
const LEFT_OPEN: Duration = Duration::from_secs(1);
/// How long the gateway may take to hear something: one that does not is as good as gone.
const HEARING: Duration = Duration::from_secs(30);
/// How long it may take to read what a program has written of its run.
const READING: Duration = Duration::from_secs(5);
/// How often processes that an agent has left behind are looked for that have ended.
const REAP: Duration = Duration::from_secs(1);
/// The search path of an agent, below the release's own.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// What a run has of this process's own environment.
const KEPT: [&str; 5] = ["HOME", "USER", "LOGNAME", "LANG", "TZ"];

/// # Errors
/// The connection's, before the agent is started.
pub async fn serve(layout: &Layout, connection: UnixStream, stop: CancellationToken) -> io::Result<()> {
    let (mut from, mut to) = connection.into_split();
    let order = tokio::time::timeout(ORDER, ToRunner::read(&mut from)).await;
    let Some(ToRunner::Order(order)) = order.map_err(|_| io::ErrorKind::TimedOut)?? else {
        return Ok(());
    };
    if ![Order::WITHOUT_READY, Order::VERSION].contains(&order.version) {
        let why = format!("svc-agent does not know orders of version {}", order.version);
        return FromRunner::Refused(why).write(&mut to).await;
    }
    if let Err(error) = process_tree::adopt_orphans() {
        tracing::warn!(%error, "what an agent leaves behind is left to systemd");
    }
    if order.version != Order::WITHOUT_READY && !is_told_to_go(&mut from, &mut to).await? {
        return FromRunner::Refused("it was cancelled before it ran".to_owned()).write(&mut to).await;
    }
    let child = match start(layout, &order) {
        Ok(child) => child,
        Err(error) => {
            let program = order.command.first().map_or("", String::as_str);
            let why = format!("the agent's program {program:?} cannot be started: {}", chain(&error));
            return FromRunner::Refused(why).write(&mut to).await;
        }
    };
    let record = order.adapter.sessions(&own_home(layout), &order.environment).map(Record::new);
    let run = Run { to, stop, cancelled: heard(from), is_told: false, record };
    run.play(child).await;
    Ok(())
}

/// Says which process this is, and waits for the gateway's word.
async fn is_told_to_go(from: &mut OwnedReadHalf, to: &mut OwnedWriteHalf) -> io::Result<bool> {
    FromRunner::Ready { pid: std::process::id() }.write(to).await?;
    let go = tokio::time::timeout(ORDER, ToRunner::read(from)).await;
    Ok(matches!(go.map_err(|_| io::ErrorKind::TimedOut)??, Some(ToRunner::Go)))
}

fn start(layout: &Layout, order: &Order) -> io::Result<Child> {
    let own_home = own_home(layout);
    let asked = Asked {
        agent_name: &order.agent_name,
        prompt: &order.prompt,
        model: order.model.as_deref(),
        conversation_id: order.conversation_id.as_deref(),
    };
    let is_known = order.conversation_id.as_deref().is_some_and(|id| is_known(order, &own_home, id));
    let launch = order.adapter.launch(&asked, is_known);
    let (program, first) = order.command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let runtime = layout.runtime();
    let path =
        format!("{}:{}:{PATH}", runtime.join("agents/bin").display(), runtime.join("node/bin").display());
    let mut command = Command::new(program);
    command.args(first).args(&launch.arguments).current_dir(layout.home());
    command.env_clear().env("PATH", path).env("SHELL", "/bin/bash").env("TERM", "dumb");
    command.envs(KEPT.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
    command.envs(launch.environment).envs(&order.environment);
    command.env("SVC_DISPATCH_ID", &order.id).env("SVC_AGENT_NAME", &order.agent_name);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.process_group(0).kill_on_drop(true).spawn()?;
    if let Some(stdin) = child.stdin.take() {
        tokio::spawn(feed(stdin, launch.stdin));
    }
    Ok(child)
}

fn own_home(layout: &Layout) -> PathBuf {
    std::env::var_os("HOME").map_or_else(|| layout.home(), PathBuf::from)
}

/// Whether the program has this conversation: one directory below that of its transcripts, or as a thread.
fn is_known(order: &Order, home: &Path, conversation_id: &str) -> bool {
    if let Some(sessions) = order.adapter.sessions(home, &order.environment) {
        return codex_sessions::has(&sessions, conversation_id);
    }
    let Some((below, name)) = order.adapter.transcripts(home, conversation_id) else { return false };
    let projects = std::fs::read_dir(below).into_iter().flatten().flatten();
    projects.into_iter().any(|project| project.path().join(&name).exists())
}

async fn feed(mut stdin: ChildStdin, prompt: Vec<u8>) {
    // An agent that does not read its prompt says by its end what was wrong.
    let _ = stdin.write_all(&prompt).await;
}

/// What a program writes of its runs itself.
struct Record {
    sessions: PathBuf,
    since: Timestamp,
    /// Known once the program has said it.
    thread: Option<String>,
}

impl Record {
    fn new(sessions: PathBuf) -> Self {
        Self { sessions, since: Timestamp::now(), thread: None }
    }

    async fn used(self) -> Option<Used> {
        let Self { sessions, since, thread } = self;
        let thread = thread?;
        let read = tokio::task::spawn_blocking(move || codex_sessions::used(&sessions, &thread, since));
        tokio::time::timeout(READING, read).await.ok()?.ok()?
    }
}

struct Run {
    record: Option<Record>,
    to: OwnedWriteHalf,
    stop: CancellationToken,
    /// The gateway wants no more of it, or is gone.
    cancelled: CancellationToken,
    /// The agent was told to end.
    is_told: bool,
}

impl Run {
    async fn play(mut self, mut child: Child) {
        let pid = child.id().unwrap_or_default();
        let mut out = child.stdout.take().map(BufReader::new);
        let said = child.stderr.take().map(|mut stderr| {
            tokio::spawn(async move {
                let mut said = Said::default();
                // What came before it broke is worth telling.
                let _ = said.hear(&mut stderr).await;
                said
            })
        });
        self.say(&FromRunner::Started { pid }).await;
        let (cancelled, stop) = (self.cancelled.clone(), self.stop.clone());
        let mut lines = Lines::default();
        let mut kill_at = None;
        let mut reaped = tokio::time::interval(REAP);
        let status = loop {
            let told = async {
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
            let late = async {
                match kill_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                line = line => match line {
                    Ok(Some(line)) => self.tell(line).await,
                    Ok(None) | Err(_) => out = None,
                },
                status = child.wait() => break status,
                () = told, if !self.is_told => {
                    self.is_told = true;
                    signal(pid, Signal::SIGTERM);
                    kill_at = Some(tokio::time::Instant::now() + GRACE);
                }
                _ = reaped.tick() => process_tree::reap(pid),
                () = late => {
                    kill_at = None;
                    // Its orphans come to this process, and are ended below.
                    let _ = child.start_kill();
                }
            }
        };
        self.rest(&mut lines, &mut out, LEFT_OPEN).await;
        process_tree::end().await;
        // Nobody has the pipes any more.
        self.rest(&mut lines, &mut out, LEFT_OPEN).await;
        let said = match said {
            Some(said) => tokio::time::timeout(LEFT_OPEN, said).await.ok().and_then(Result::ok),
            None => None,
        };
        let said = said.map(Said::text).unwrap_or_default();
        let exit = status.map_or(Exit::Signal(Signal::SIGKILL as i32), exit);
        let used = match self.record.take() {
            Some(record) => record.used().await,
            None => None,
        };
        self.say(&FromRunner::Ended(Ended { exit, said, used })).await;
    }

    /// What is printed already, or comes within this time.
    async fn rest(
        &mut self,
        lines: &mut Lines,
        out: &mut Option<BufReader<tokio::process::ChildStdout>>,
        within: Duration,
    ) {
        let Some(pipe) = out else { return };
        let end = tokio::time::Instant::now() + within;
        // There may be a line each time: the time is what ends it.
        while tokio::time::Instant::now() < end
            && let Ok(Ok(Some(line))) = tokio::time::timeout_at(end, lines.next(pipe)).await
        {
            self.tell(line).await;
        }
    }

    async fn tell(&mut self, line: Line) {
        if let (Some(record @ Record { thread: None, .. }), Line::Whole(line)) = (&mut self.record, &line) {
            record.thread = codex::thread(line);
        }
        let frame = match line {
            Line::Whole(line) => FromRunner::Line(line),
            Line::TooLong => FromRunner::LongLine,
        };
        self.say(&frame).await;
    }

    async fn say(&mut self, frame: &FromRunner) {
        let said = tokio::time::timeout(HEARING, frame.write(&mut self.to)).await;
        if !matches!(said, Ok(Ok(()))) {
            tracing::debug!("the gateway does not listen any more");
            self.cancelled.cancel();
        }
    }
}

/// Cancelled when the gateway says so, or is gone.
fn heard(mut from: OwnedReadHalf) -> CancellationToken {
    let token = CancellationToken::new();
    let cancel = token.clone();
    drop(tokio::spawn(async move {
        // Whatever it is: nothing but a cancellation can come while it runs.
        let _ = ToRunner::read(&mut from).await;
        cancel.cancel();
    }));
    token
}

/// To the agent's group.
fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().filter(|pid| *pid > 1) {
        // One that has ended meanwhile needs none.
        let _ = nix::sys::signal::killpg(Pid::from_raw(pid), signal);
    }
}

fn exit(status: ExitStatus) -> Exit {
    match (status.code(), status.signal()) {
        (Some(code), _) => Exit::Code(code),
        (None, signal) => Exit::Signal(signal.unwrap_or_default()),
    }
}
