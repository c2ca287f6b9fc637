//! Watcher protocol for hooks and the dispatcher, plus the file for undelivered hook messages.
//!
//! Each side sends one JSON line on `watch.sock`. Messages never contain file contents or tool results.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use nix::fcntl::OFlag;
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, UnixAddr};
use serde::{Deserialize, Serialize};

use crate::records::entry::GapReason;
use crate::system::process_stat::ProcessStat;
use svc_base::clock;
use svc_base::failpoint;

/// Name of the watcher's socket.
pub const SOCKET: &str = "watch.sock";
/// Maximum message size.
pub const MAX_MESSAGE_BYTES: u64 = 64 << 10;
/// Approximate size limit of the undelivered-message file. Further messages are dropped: those in the file already
/// cause a gap to be recorded.
const MAX_GAP_FILE_BYTES: u64 = 64 << 10;
/// Maximum number of attempts to open and lock the undelivered-message file.
const MAX_LOCK_ATTEMPTS: u32 = 8;
/// Timeout for dispatcher messages.
const DISPATCH_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of processes listed by [`Process::with_ancestors`].
const MAX_ANCESTORS: usize = 64;

/// Claude Code and Codex tools that may change any file.
pub const COMMAND_TOOLS: [&str; 2] = ["Bash", "apply_patch"];
/// Tools that change only the file they name.
pub const WRITER_TOOLS: [&str; 4] = ["Write", "Edit", "MultiEdit", "NotebookEdit"];

/// The phase of a tool call, session or dispatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Phase {
    /// The call is about to start.
    Pre,
    /// The call succeeded.
    Post,
    /// The call failed; a command may still have changed files.
    Failed,
    /// An agent or subagent finished a turn: only its background calls keep running.
    TurnEnd,
    SessionEnd,
    /// From the dispatcher: the descendants of `process` belong to a dispatch.
    DispatchBegin,
    /// From the dispatcher: all processes of the dispatch are gone.
    DispatchEnd,
}

/// A process. Its start time distinguishes it from later processes with the same pid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: i32,
    /// Start time in clock ticks since boot, or 0 if unknown.
    pub started: u64,
}

impl Process {
    pub fn from_pid(pid: i32) -> Self {
        Self { pid, started: ProcessStat::from_pid(pid).map_or(0, |stat| stat.start_ticks) }
    }

    /// Lists the process and its ancestors, excluding init. Empty if the process has exited.
    pub fn with_ancestors(pid: i32) -> Vec<Self> {
        let (mut all, mut next) = (Vec::new(), pid);
        while next > 1
            && all.len() < MAX_ANCESTORS
            && let Ok(stat) = ProcessStat::from_pid(next)
        {
            all.push(Self { pid: next, started: stat.start_ticks });
            next = stat.parent_pid;
        }
        all
    }

    /// Whether the process has exited. `kill` also finds processes hidden from `/proc`.
    pub fn has_ended(self) -> bool {
        let probed = nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.pid), None);
        if probed == Err(nix::errno::Errno::ESRCH) {
            return true;
        }
        ProcessStat::from_pid(self.pid)
            .is_ok_and(|stat| stat.is_zombie || (self.started != 0 && stat.start_ticks != self.started))
    }
}

/// A message from a hook or the dispatcher.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Message {
    pub version: u32,
    pub phase: Phase,
    #[serde(with = "clock::wire")]
    pub sent_at: Timestamp,
    #[serde(default)]
    pub session_id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_use_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool: Option<String>,
    /// Agent program, such as `claude-code` or `codex`; empty in dispatcher messages.
    #[serde(default)]
    pub actor: String,
    #[serde(default)]
    pub agent_name: String,
    /// The subagent that made the call, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subagent: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dispatch_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// File written by the tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Whether the command keeps running in the background after the call.
    #[serde(default)]
    pub is_background: bool,
    /// The dispatch's runner, only for [`Phase::DispatchBegin`]. In hook messages, the watcher sets it to the agent
    /// process as identified by the kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<Process>,
    /// Calls seen in the agent's output, only for [`Phase::DispatchEnd`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen: Option<SeenCalls>,
}

/// Tool calls seen in a dispatched agent's output that may have changed files.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SeenCalls {
    pub ids: Vec<String>,
    /// Number of further calls, whose ids aren't listed.
    #[serde(rename = "more")]
    pub further_calls: u64,
    /// Whether the program's hooks use the same ids.
    #[serde(rename = "isById")]
    pub has_shared_call_ids: bool,
}

impl SeenCalls {
    const MAX_IDS: usize = 1000;
    const MAX_ID_BYTES: usize = 40;

    pub fn add(&mut self, id: &str) {
        // Agent output is untrusted, so bound the message.
        let is_plain = id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.:".contains(&byte));
        if is_plain && !id.is_empty() && self.ids.len() < Self::MAX_IDS && id.len() <= Self::MAX_ID_BYTES {
            self.ids.push(id.to_owned());
        } else {
            self.further_calls += 1;
        }
    }
}

impl Message {
    pub const PROTOCOL_VERSION: u32 = 1;

    pub fn new(phase: Phase) -> Self {
        Self {
            version: Self::PROTOCOL_VERSION,
            phase,
            sent_at: clock::now_ms(),
            session_id: String::new(),
            tool_use_id: None,
            tool: None,
            actor: String::new(),
            agent_name: String::new(),
            subagent: None,
            dispatch_id: None,
            cwd: None,
            path: None,
            is_background: false,
            process: None,
            seen: None,
        }
    }

    /// Builds the message sent before an agent starts. All agent processes will be descendants of `runner`.
    pub fn dispatch_begin(dispatch_id: &str, agent_name: &str, runner: Process) -> Self {
        Self {
            dispatch_id: Some(dispatch_id.to_owned()),
            agent_name: agent_name.to_owned(),
            process: Some(runner),
            ..Self::new(Phase::DispatchBegin)
        }
    }

    /// Builds the message sent after a dispatch ends.
    pub fn dispatch_end(dispatch_id: &str, seen: SeenCalls) -> Self {
        Self { dispatch_id: Some(dispatch_id.to_owned()), seen: Some(seen), ..Self::new(Phase::DispatchEnd) }
    }
}

/// Returns a time limit for the hook or the watcher. Tests on slow machines extend both through the `hook.long_timeout`
/// fail point.
pub fn time_limit(normal: Duration) -> Duration {
    if failpoint::trigger("hook.long_timeout").is_err() { normal * 60 } else { normal }
}

/// Sends a message to the socket at `path` and waits until the watcher has processed it and all earlier file changes.
///
/// # Errors
/// The watcher is unreachable, didn't reply within `timeout`, or rejected the message by closing the connection.
pub fn send(path: &Path, message: &Message, timeout: Duration) -> io::Result<()> {
    let deadline = Instant::now() + timeout;
    let remaining = || {
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() { Err(io::Error::from(io::ErrorKind::TimedOut)) } else { Ok(Some(remaining)) }
    };
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    let unconnected = socket::socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let mut stream = UnixStream::from(unconnected);
    // The write timeout also limits `connect`, which blocks while the listener's backlog is full.
    stream.set_write_timeout(remaining()?)?;
    socket::connect(stream.as_raw_fd(), &UnixAddr::new(path)?)?;
    stream.set_write_timeout(remaining()?)?;
    stream.write_all(&line)?;
    stream.set_read_timeout(remaining()?)?;
    let mut reply = Vec::new();
    BufReader::new(stream).take(MAX_MESSAGE_BYTES).read_until(b'\n', &mut reply)?;
    if reply.ends_with(b"\n") { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Sends a dispatcher message. Failures are only logged: without a watcher, nothing is audited anyway.
pub async fn send_from_dispatcher(socket: &Path, message: Message) {
    let (socket, phase) = (socket.to_owned(), message.phase);
    let send_task = tokio::task::spawn_blocking(move || send(&socket, &message, DISPATCH_TIMEOUT));
    if let Ok(Err(error)) = send_task.await {
        tracing::debug!(%error, ?phase, "cannot report dispatch to svc-watch");
    }
}

/// A hook report that couldn't be delivered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UndeliveredHook {
    pub version: u32,
    #[serde(with = "clock::wire")]
    pub at: Timestamp,
    pub why: GapReason,
    /// `None` if the hook hadn't parsed its input yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<Message>,
}

impl UndeliveredHook {
    pub fn new(reason: GapReason, message: Option<Message>) -> Self {
        Self { version: 1, at: clock::now_ms(), why: reason, message }
    }

    /// Saves the message for the watcher, or drops it if the file is full.
    ///
    /// # Errors
    /// The file cannot be written or locked.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        let mut line = serde_json::to_vec(self)?;
        line.push(b'\n');
        // `O_NONBLOCK`: the owner's programs can create a FIFO by this name.
        let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        let mut options = File::options();
        options.create(true).append(true).mode(0o660).custom_flags(flags.bits());
        for _ in 0..MAX_LOCK_ATTEMPTS {
            let mut file = options.open(path)?;
            if file.try_lock().is_err() {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            let meta = file.metadata()?;
            if !meta.is_file() {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            // Without links, the file was concurrently collected by the watcher, so write to a new one.
            if meta.nlink() > 0 {
                return if meta.len() < MAX_GAP_FILE_BYTES { file.write_all(&line) } else { Ok(()) };
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Reads and removes all saved messages. Ignores invalid lines, since any of the owner's programs can write to the
    /// file.
    pub fn collect(file: &Path) -> Vec<Self> {
        Self::read_and_remove(file).unwrap_or_default()
    }

    fn read_and_remove(path: &Path) -> io::Result<Vec<Self>> {
        // `O_NONBLOCK`: the owner's programs can create a FIFO by this name.
        let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        let file = File::options().read(true).custom_flags(flags.bits()).open(path)?;
        let meta = file.metadata()?;
        if !meta.is_file() || meta.len() == 0 || file.try_lock().is_err() {
            return Ok(Vec::new());
        }
        let mut text = Vec::new();
        (&file).take(2 * MAX_GAP_FILE_BYTES).read_to_end(&mut text)?;
        // We can write to the directory, but maybe not to the file, so remove it instead of truncating it.
        std::fs::remove_file(path)?;
        let lines = text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
        Ok(lines.filter_map(|line| serde_json::from_slice(line).ok()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_with_any_ids_stays_below_max_message_bytes() {
        let mut seen = SeenCalls::default();
        for id in ["\u{1}".repeat(36), "\"".repeat(40), "x".repeat(40), "é".repeat(20), String::new()] {
            (0..2000).for_each(|_| seen.add(&id));
        }
        assert_eq!(
            (seen.ids.len() as u64 + seen.further_calls, seen.ids.len()),
            (10_000, SeenCalls::MAX_IDS)
        );
        let message = Message::dispatch_end(&"d".repeat(200), seen);
        assert!((serde_json::to_vec(&message).unwrap().len() as u64) < MAX_MESSAGE_BYTES);
    }

    #[test]
    fn send_times_out_if_connection_is_not_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(SOCKET);
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        socket::listen(&listener, socket::Backlog::new(0).unwrap()).unwrap();
        let _queued = UnixStream::connect(&path).unwrap();
        let result = send(&path, &Message::new(Phase::Pre), Duration::from_millis(20));
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn saved_messages_are_collected_once_and_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("gaps");
        assert!(UndeliveredHook::collect(&file).is_empty());
        let undelivered = UndeliveredHook::new(
            GapReason::Undelivered,
            Some(Message::dispatch_end("d", SeenCalls::default())),
        );
        for _ in 0..2 {
            undelivered.save(&file).unwrap();
        }
        assert_eq!(UndeliveredHook::collect(&file), [undelivered.clone(), undelivered.clone()]);
        assert!(UndeliveredHook::collect(&file).is_empty());
        for _ in 0..1000 {
            undelivered.save(&file).unwrap();
        }
        let bytes = std::fs::metadata(&file).unwrap().len();
        assert!(bytes < MAX_GAP_FILE_BYTES + 1000, "{bytes}");
        assert!(UndeliveredHook::collect(&file).len() > 100);
        std::os::unix::fs::symlink("/etc/hostname", &file).unwrap();
        assert!(undelivered.save(&file).is_err() && UndeliveredHook::collect(&file).is_empty());
    }

    #[test]
    fn process_is_identified_by_its_start_time() {
        let own = Process::from_pid(i32::try_from(std::process::id()).unwrap());
        assert!(own.started > 0 && !own.has_ended());
        assert!(Process { started: own.started + 1, ..own }.has_ended());
        assert!(Process { pid: i32::MAX, started: 0 }.has_ended());
    }
}
