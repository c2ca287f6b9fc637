//! What an agent's hook tells the watcher of the home's files, and where it leaves what it could tell nobody.
//!
//! One JSON line there, one line back, on `watch.sock`. No content of a file and no output of a tool is ever part of it.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use nix::fcntl::OFlag;
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::host::records::entry::Why;

pub const SOCKET: &str = "watch.sock";
/// A message is no longer.
pub const LONGEST: u64 = 64 << 10;
/// What could not be told takes no more than this; who finds it full knows that there is a gap already.
const MOST_GAPS: u64 = 64 << 10;
const LOCK_TRIES: u32 = 8;
/// How long the dispatcher waits for the watcher.
const OF_DISPATCH: Duration = Duration::from_secs(2);
/// No process has more above it that is worth asking.
const MAX_ABOVE: usize = 64;

/// Tools that change files, by the names of Claude Code and Codex. Of a command, it may be any file.
pub const COMMANDS: [&str; 2] = ["Bash", "apply_patch"];
/// And those that name the one file that they write.
pub const WRITERS: [&str; 4] = ["Write", "Edit", "MultiEdit", "NotebookEdit"];

/// Where a tool call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Phase {
    /// It is about to begin.
    Pre,
    /// It has succeeded.
    Post,
    /// It has failed, which a command may have done after changing files.
    Failed,
    /// The agent, or one below it, has ended its turn: of its calls only those in the background go on.
    TurnEnd,
    SessionEnd,
    /// The dispatcher's word that what is below `process` is of a dispatch.
    DispatchBegin,
    /// The dispatcher's word that nothing of a dispatch runs any more.
    DispatchEnd,
}

/// A process, told apart from later ones of its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: i32,
    /// In clock ticks since the machine booted; 0 where that is not known.
    pub started: u64,
}

impl Process {
    pub fn of(pid: i32) -> Self {
        Self { pid, started: Stat::of(pid).map_or(0, |stat| stat.started) }
    }

    /// It, its parent, and so on, up to the first of all; empty where it has ended.
    pub fn with_those_above(pid: i32) -> Vec<Self> {
        let (mut all, mut next) = (Vec::new(), pid);
        while next > 1
            && all.len() < MAX_ABOVE
            && let Some(stat) = Stat::of(next)
        {
            all.push(Self { pid: next, started: stat.started });
            next = stat.parent;
        }
        all
    }

    /// Whether it runs. Others' processes may be hidden, but that there is one can always be asked.
    pub fn is_gone(self) -> bool {
        let asked = nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.pid), None);
        if asked == Err(nix::errno::Errno::ESRCH) {
            return true;
        }
        Stat::of(self.pid)
            .is_some_and(|stat| stat.is_zombie || (self.started != 0 && stat.started != self.started))
    }
}

/// What is used of `/proc/PID/stat`.
struct Stat {
    parent: i32,
    started: u64,
    is_zombie: bool,
}

impl Stat {
    fn of(pid: i32) -> Option<Self> {
        Self::parse(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(stat: &str) -> Option<Self> {
        // The name stands in brackets and may hold anything.
        let (_, rest) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        Some(Self {
            is_zombie: *fields.first()? == "Z",
            parent: fields.get(1)?.parse().ok()?,
            started: fields.get(19)?.parse().ok()?,
        })
    }
}

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
    /// The agents' program: `claude-code`, `codex`.
    #[serde(default)]
    pub actor: String,
    #[serde(default)]
    pub agent_name: String,
    /// The agent below the session's own that this is of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subagent: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dispatch_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// The one file that the tool writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// What the tool began goes on after its end.
    #[serde(default)]
    pub is_background: bool,
    /// Of [`Phase::DispatchBegin`]. Whose call it is that a hook tells of, the kernel says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<Process>,
    /// Of [`Phase::DispatchEnd`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen: Option<SeenCalls>,
}

/// Tool calls of a dispatch that may have changed files, as its agent's own output had them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SeenCalls {
    pub ids: Vec<String>,
    /// Beside these, where there are too many for a message.
    pub more: u64,
    /// Whether the program's hooks have the same ids.
    pub is_by_id: bool,
}

impl SeenCalls {
    const MAX_IDS: usize = 1000;
    const MAX_ID_BYTES: usize = 40;

    pub fn add(&mut self, id: &str) {
        // What the agent prints is not to make the message longer than it may be.
        let is_plain = id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.:".contains(&byte));
        if is_plain && !id.is_empty() && self.ids.len() < Self::MAX_IDS && id.len() <= Self::MAX_ID_BYTES {
            self.ids.push(id.to_owned());
        } else {
            self.more += 1;
        }
    }
}

impl Message {
    pub const VERSION: u32 = 1;

    pub fn new(phase: Phase) -> Self {
        Self {
            version: Self::VERSION,
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

    /// What the dispatcher tells before an agent is started: all of it will run below this process.
    pub fn dispatch_begin(dispatch_id: &str, agent_name: &str, runner: Process) -> Self {
        Self {
            dispatch_id: Some(dispatch_id.to_owned()),
            agent_name: agent_name.to_owned(),
            process: Some(runner),
            ..Self::new(Phase::DispatchBegin)
        }
    }

    /// What the dispatcher tells when a dispatch has ended.
    pub fn dispatch_end(dispatch_id: &str, seen: SeenCalls) -> Self {
        Self { dispatch_id: Some(dispatch_id.to_owned()), seen: Some(seen), ..Self::new(Phase::DispatchEnd) }
    }
}

/// Tells the watcher, and waits until it has seen all that happened before.
///
/// # Errors
/// When nobody listens, or not in time.
pub fn tell(socket: &Path, message: &Message, within: Duration) -> io::Result<()> {
    let end = Instant::now() + within;
    let left = || {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::Error::from(io::ErrorKind::TimedOut)) } else { Ok(Some(left)) }
    };
    let mut stream = UnixStream::connect(socket)?;
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    stream.set_write_timeout(left()?)?;
    stream.write_all(&line)?;
    stream.set_read_timeout(left()?)?;
    let mut answer = Vec::new();
    BufReader::new(stream).take(LONGEST).read_until(b'\n', &mut answer)?;
    if answer.ends_with(b"\n") { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Tells the watcher what the dispatcher has to say. Without a watcher there is no audit, and nothing to tell.
pub async fn tell_of_dispatch(socket: &Path, message: Message) {
    let (socket, phase) = (socket.to_owned(), message.phase);
    let told = tokio::task::spawn_blocking(move || tell(&socket, &message, OF_DISPATCH));
    if let Ok(Err(error)) = told.await {
        tracing::debug!(%error, ?phase, "svc-watch did not hear of a dispatch");
    }
}

/// A message that nobody got.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Untold {
    pub version: u32,
    #[serde(with = "clock::wire")]
    pub at: Timestamp,
    pub why: Why,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<Message>,
}

impl Untold {
    pub fn new(why: Why, message: Option<Message>) -> Self {
        Self { version: 1, at: clock::now_ms(), why, message }
    }

    /// Leaves it for the watcher.
    ///
    /// # Errors
    /// The file's.
    pub fn leave(&self, file: &Path) -> io::Result<()> {
        let mut line = serde_json::to_vec(self)?;
        line.push(b'\n');
        let mut options = File::options();
        options.create(true).append(true).mode(0o660).custom_flags(OFlag::O_NOFOLLOW.bits());
        for _ in 0..LOCK_TRIES {
            let mut left = options.open(file)?;
            if left.try_lock().is_err() {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            let meta = left.metadata()?;
            // One that was just collected has no name any more.
            if meta.nlink() > 0 {
                return if meta.len() < MOST_GAPS { left.write_all(&line) } else { Ok(()) };
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// All that was left, which is then gone. What cannot be read, somebody else put there.
    pub fn collect(file: &Path) -> Vec<Self> {
        Self::read(file).unwrap_or_default()
    }

    fn read(path: &Path) -> io::Result<Vec<Self>> {
        // The owner's programs may put anything there: a pipe keeps nobody waiting.
        let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        let file = File::options().read(true).custom_flags(flags.bits()).open(path)?;
        let meta = file.metadata()?;
        if !meta.is_file() || meta.len() == 0 || file.try_lock().is_err() {
            return Ok(Vec::new());
        }
        let mut text = Vec::new();
        (&file).take(2 * MOST_GAPS).read_to_end(&mut text)?;
        // The directory is the group's; the file may be its owner's alone.
        std::fs::remove_file(path)?;
        let lines = text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
        Ok(lines.filter_map(|line| serde_json::from_slice(line).ok()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_ids_an_agent_prints_the_message_is_heard() {
        let mut seen = SeenCalls::default();
        for id in ["\u{1}".repeat(36), "\"".repeat(40), "x".repeat(40), "é".repeat(20), String::new()] {
            (0..2000).for_each(|_| seen.add(&id));
        }
        assert_eq!((seen.ids.len() as u64 + seen.more, seen.ids.len()), (10_000, SeenCalls::MAX_IDS));
        let message = Message::dispatch_end(&"d".repeat(200), seen);
        assert!((serde_json::to_vec(&message).unwrap().len() as u64) < LONGEST);
    }

    #[test]
    fn what_was_left_is_collected_once_and_takes_a_bounded_place() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("gaps");
        assert!(Untold::collect(&file).is_empty());
        let untold = Untold::new(Why::Unheard, Some(Message::dispatch_end("d", SeenCalls::default())));
        for _ in 0..2 {
            untold.leave(&file).unwrap();
        }
        assert_eq!(Untold::collect(&file), [untold.clone(), untold.clone()]);
        assert!(Untold::collect(&file).is_empty());
        for _ in 0..1000 {
            untold.leave(&file).unwrap();
        }
        let bytes = std::fs::metadata(&file).unwrap().len();
        assert!(bytes < MOST_GAPS + 1000, "{bytes}");
        assert!(Untold::collect(&file).len() > 100);
        std::os::unix::fs::symlink("/etc/hostname", &file).unwrap();
        assert!(untold.leave(&file).is_err() && Untold::collect(&file).is_empty());
    }

    #[test]
    fn a_process_is_known_by_its_start() {
        let own = Process::of(i32::try_from(std::process::id()).unwrap());
        assert!(own.started > 0 && !own.is_gone());
        assert!(Process { started: own.started + 1, ..own }.is_gone());
        assert!(Process { pid: i32::MAX, started: 0 }.is_gone());
        let stat = Stat::parse("7 (a) b) (c) S 3 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4242 0").unwrap();
        assert_eq!((stat.parent, stat.started), (3, 4242));
    }
}
