//! A watched home directory: the real `svc-watch`, and hooks started the way an agent's program starts them.

use std::cell::{Cell, RefCell};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kit::child::OwnedChild;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use svc::host::audit::protocol;
use svc::host::audit::protocol::{Message, Process};

const WATCHER_TIMEOUT: Duration = Duration::from_secs(60);

/// An agent in a separate session. Unless its name starts with `terminal`, it runs for a dispatch with that name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Agent(pub &'static str);

/// An agent's process, which runs the agent's hooks.
pub struct AgentProcess {
    shell: OwnedChild,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    /// Whether this process's dispatch has been announced to a watcher.
    is_announced: bool,
}

impl AgentProcess {
    pub fn pid(&self) -> u32 {
        self.shell.pid()
    }

    /// Runs a shell line and returns its exit code as text.
    pub fn run(&mut self, line: &str) -> Result<String> {
        writeln!(self.stdin, "{line}; echo $?")?;
        let mut code = String::new();
        self.stdout.read_line(&mut code)?;
        Ok(code.trim().to_owned())
    }

    pub fn kill(mut self) -> Result<()> {
        self.shell.kill()?;
        Ok(())
    }
}

pub const ADA: Agent = Agent("ada");
pub const BOB: Agent = Agent("bob");

pub struct AuditedHome {
    root: tempfile::TempDir,
    watcher: Option<OwnedChild>,
    pub failpoints: String,
    /// Whether hooks have their normal timeout. Otherwise, the timeout is extended for slow machines.
    pub has_normal_hook_timeout: bool,
    /// Maximum number of directories that the kernel watches; `None` for the system's limit.
    pub max_watches: Option<u32>,
    calls: AtomicU32,
    processes: RefCell<HashMap<Agent, AgentProcess>>,
    /// Number of the audit log's lines that `take_entries` has returned or skipped.
    lines_read: Cell<usize>,
}

/// Lines of the audit log.
pub type Entries = Vec<Value>;

/// The observed state of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PathState {
    Directory,
    /// The SHA-256 of the file's contents.
    File(Vec<u8>),
    Link(PathBuf),
    Other,
}
pub type PathStates = BTreeMap<Vec<u8>, PathState>;

impl AuditedHome {
    /// Creates a home directory that is watched from the start.
    pub fn new() -> Result<Self> {
        let mut home = Self::unwatched()?;
        home.start_watcher()?;
        Ok(home)
    }

    pub fn unwatched() -> Result<Self> {
        Self::with_failpoints("")
    }

    pub fn with_failpoints(failpoints: &str) -> Result<Self> {
        let root = tempfile::Builder::new().prefix("svc-audit-").tempdir()?;
        for dir in ["home/svc/home/system/logs", "home/svc/home/apps", "home/svc/out", "run/svc/hooks"] {
            fs::create_dir_all(root.path().join(dir))?;
        }
        Ok(Self {
            root,
            watcher: None,
            failpoints: failpoints.to_owned(),
            has_normal_hook_timeout: false,
            max_watches: None,
            calls: AtomicU32::new(0),
            processes: RefCell::default(),
            lines_read: Cell::new(0),
        })
    }

    pub fn path(&self, relative: &str) -> PathBuf {
        self.root.path().join(relative)
    }

    pub fn dir(&self) -> PathBuf {
        self.path("home/svc/home")
    }

    /// Starts the watcher, waits for its readiness message, and announces the dispatches of running agents that have
    /// not been announced yet.
    pub fn start_watcher(&mut self) -> Result<()> {
        let notify = self.path("notify.sock");
        let _ = fs::remove_file(&notify);
        let socket = UnixDatagram::bind(&notify)?;
        socket.set_read_timeout(Some(Duration::from_millis(50)))?;
        let log = fs::OpenOptions::new().create(true).append(true).open(self.path("watch.log"))?;
        let mut command = self.watcher_command();
        let long_timeout = if self.has_normal_hook_timeout { "" } else { "hook.long_timeout=return(error);" };
        command.env("NOTIFY_SOCKET", &notify);
        command.env("FAILPOINTS", format!("{long_timeout}{}", self.failpoints));
        let mut watcher = OwnedChild::spawn(command.stdout(log.try_clone()?).stderr(log))?;
        let (deadline, mut buffer) = (Instant::now() + WATCHER_TIMEOUT, [0_u8; 1024]);
        loop {
            if let Ok(size) = socket.recv(&mut buffer)
                && String::from_utf8_lossy(&buffer[..size]).contains("READY=1")
            {
                break;
            }
            if let Some(status) = watcher.status() {
                bail!("svc-watch ended with {status}: {}", self.watcher_log());
            }
            ensure!(Instant::now() < deadline, "svc-watch did not become ready: {}", self.watcher_log());
        }
        self.watcher = Some(watcher);
        let mut processes = self.processes.borrow_mut();
        processes.iter_mut().try_for_each(|(agent, process)| self.announce_dispatch(*agent, process))
    }

    /// Announces the agent's dispatch once, if a watcher is running.
    fn announce_dispatch(&self, agent: Agent, process: &mut AgentProcess) -> Result<()> {
        if process.is_announced || self.watcher.is_none() || agent.0.starts_with("terminal") {
            return Ok(());
        }
        process.is_announced = true;
        let runner = Process::from_pid(i32::try_from(process.pid())?);
        self.send_to_watcher(&Message::dispatch_begin(agent.0, agent.0, runner))
    }

    /// Sends a message as the gateway does.
    pub fn send_to_watcher(&self, message: &Message) -> Result<()> {
        Ok(protocol::send(&self.path("run/svc/watch/watch.sock"), message, Duration::from_secs(20))?)
    }

    /// Runs `action` with an agent's process. If necessary, starts the process and announces its dispatch.
    pub fn with_process<T>(
        &self,
        agent: Agent,
        action: impl FnOnce(&mut AgentProcess) -> Result<T>,
    ) -> Result<T> {
        let mut processes = self.processes.borrow_mut();
        let process = match processes.entry(agent) {
            Entry::Occupied(process) => process.into_mut(),
            Entry::Vacant(entry) => entry.insert(self.start_process(agent)?),
        };
        self.announce_dispatch(agent, process)?;
        action(process)
    }

    fn start_process(&self, agent: Agent) -> Result<AgentProcess> {
        let mut command = self.isolated_command("bash", &["--norc"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).env("SVC_AGENT_NAME", agent.0);
        let mut shell = OwnedChild::spawn(command.env("SVC_DISPATCH_ID", agent.0))?;
        let stdin = shell.take_stdin().context("the shell has no stdin")?;
        let stdout = BufReader::new(shell.take_stdout().context("the shell has no stdout")?);
        Ok(AgentProcess { shell, stdin, stdout, is_announced: false })
    }

    /// Ends an agent's process.
    pub fn kill_process(&self, agent: Agent) -> Result<()> {
        self.processes.borrow_mut().remove(&agent).context("the agent has no process")?.kill()
    }

    pub fn watcher_log(&self) -> String {
        fs::read_to_string(self.path("watch.log")).unwrap_or_default()
    }

    pub fn watcher_pid(&self) -> u32 {
        self.watcher.as_ref().map_or(0, OwnedChild::pid)
    }

    /// Waits up to ten seconds for the watcher to exit; returns whether it did.
    pub fn wait_for_watcher_exit(&mut self) -> Result<bool> {
        let watcher = self.watcher.as_mut().context("no watcher was started")?;
        Ok(watcher.wait(Duration::from_secs(10)).is_some())
    }

    pub fn kill_watcher(&mut self) -> Result<()> {
        if let Some(mut watcher) = self.watcher.take() {
            watcher.kill()?;
        }
        Ok(())
    }

    pub fn terminate_watcher(&mut self) -> Result<()> {
        let Some(mut watcher) = self.watcher.take() else { return Ok(()) };
        watcher.signal(Signal::SIGTERM)?;
        let status = watcher.wait(WATCHER_TIMEOUT);
        ensure!(status.is_some_and(|status| status.success()), "{status:?}: {}", self.watcher_log());
        Ok(())
    }

    fn command(&self, args: &[&str]) -> Command {
        self.isolated_command(env!("CARGO_BIN_EXE_svc"), args)
    }

    /// Builds the watcher's command. If `max_watches` is set, it uses a user namespace, which has its own kernel
    /// limits.
    fn watcher_command(&self) -> Command {
        let Some(max) = self.max_watches else { return self.command(&["svc-watch"]) };
        let script = format!(
            "echo {max} >/proc/sys/user/max_inotify_watches && exec {} svc-watch",
            env!("CARGO_BIN_EXE_svc")
        );
        self.isolated_command("unshare", &["--user", "--map-root-user", "sh", "-c", &script])
    }

    fn isolated_command(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(args).env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("SVC_ROOT", self.root.path()).stdin(Stdio::null());
        command
    }

    /// Runs the hook as an agent's program does, and checks its output and exit code. Returns its duration. Unless
    /// `has_normal_hook_timeout` is set, the hook's timeout is extended, so that it receives the watcher's response.
    pub fn run_hook(&self, agent: Agent, input: &[u8]) -> Result<Duration> {
        let (input_file, output_file) = (self.path("hook.json"), self.path("hook.txt"));
        fs::write(&input_file, input)?;
        let failpoints =
            if self.has_normal_hook_timeout { "" } else { "FAILPOINTS='hook.long_timeout=return(error)' " };
        let hook = concat!(env!("CARGO_BIN_EXE_svc"), " svc-hook claude-code");
        let line = format!("{failpoints}{hook} <{} >{} 2>&1", input_file.display(), output_file.display());
        let (code, duration) = self.with_process(agent, |process| {
            let start = Instant::now();
            Ok((process.run(&line)?, start.elapsed()))
        })?;
        let output = fs::read_to_string(output_file)?;
        ensure!(code == "0" && output.is_empty(), "the hook exited with {code} and printed {output:?}");
        Ok(duration)
    }

    #[expect(clippy::needless_pass_by_value, reason = "most callers build it in place")]
    pub fn run_hook_event(&self, agent: Agent, event: &str, call: &str, fields: Value) -> Result<Duration> {
        let mut message = json!({
            "session_id": format!("session-{}", agent.0), "transcript_path": "/h/.claude/projects/p/s.jsonl",
            "cwd": self.dir(), "hook_event_name": event, "permission_mode": "default", "tool_use_id": call,
        });
        for (name, value) in fields.as_object().into_iter().flatten() {
            message[name] = value.clone();
        }
        self.run_hook(agent, message.to_string().as_bytes())
    }

    fn next_call_id(&self) -> String {
        format!("toolu_{}", self.calls.fetch_add(1, Ordering::Relaxed))
    }

    /// Begins a command and returns its call id.
    pub fn begin_command(&self, agent: Agent) -> Result<String> {
        let call = self.next_call_id();
        self.run_hook_event(
            agent,
            "PreToolUse",
            &call,
            json!({ "tool_name": "Bash", "tool_input": { "command": "x" } }),
        )?;
        Ok(call)
    }

    pub fn end_command(&self, agent: Agent, call: &str) -> Result<()> {
        let fields = json!({ "tool_name": "Bash", "tool_input": { "command": "x" }, "tool_response": { "stdout": "" } });
        self.run_hook_event(agent, "PostToolUse", call, fields).map(drop)
    }

    /// Runs a shell script in the home directory.
    pub fn shell(&self, script: &str) -> Result<()> {
        let mut command = Command::new("bash");
        command.args(["-c", script]).current_dir(self.dir()).stdin(Stdio::null());
        let output = command.output()?;
        ensure!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// Runs an agent's command and returns its entries in the audit log.
    pub fn run(&self, agent: Agent, script: &str) -> Result<Entries> {
        let call = self.begin_command(agent)?;
        let result = self.shell(script);
        self.end_command(agent, &call)?;
        result?;
        self.take_entries()
    }

    /// Simulates a tool call that writes one file; `action` writes it.
    pub fn run_write_tool(
        &self,
        agent: Agent,
        path: &str,
        action: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let call = self.next_call_id();
        let input = json!({ "tool_name": "Write", "tool_input": { "file_path": path, "content": "SECRET" } });
        self.run_hook_event(agent, "PreToolUse", &call, input.clone())?;
        action()?;
        self.run_hook_event(agent, "PostToolUse", &call, input).map(drop)
    }

    /// Returns the entries since the previous call. First reports the write of a marker file: the marker's entry proves
    /// that the audit log contains all earlier changes.
    pub fn take_entries(&self) -> Result<Entries> {
        let marker = format!("apps/marker-{}", self.calls.fetch_add(1, Ordering::Relaxed));
        let path = self.dir().join(&marker).display().to_string();
        let input = json!({ "tool_name": "Write", "tool_input": { "file_path": path } });
        self.run_hook_event(Agent("marker"), "PostToolUse", &marker, input)?;
        let deadline = Instant::now() + WATCHER_TIMEOUT;
        loop {
            let lines = self.lines()?;
            if let Some(marker_index) = lines.iter().position(|line| line["path"] == *marker) {
                let new = lines[self.lines_read.get()..marker_index].to_vec();
                self.lines_read.set(marker_index + 1);
                return Ok(new);
            }
            ensure!(Instant::now() < deadline, "the marker was not recorded: {}", self.watcher_log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Reads every complete line of the audit log.
    pub fn lines(&self) -> Result<Vec<Value>> {
        let text = fs::read_to_string(self.dir().join("system/logs/audit.jsonl")).unwrap_or_default();
        let complete = text.rfind('\n').map_or("", |end| &text[..end]);
        complete.lines().map(|line| serde_json::from_str(line).context("a line is not JSON")).collect()
    }

    /// Waits until a line in the audit log satisfies the condition.
    pub fn wait_for_line(&self, description: &str, matches: impl Fn(&Value) -> bool) -> Result<Value> {
        let deadline = Instant::now() + WATCHER_TIMEOUT;
        loop {
            if let Some(found) = self.lines()?.into_iter().find(|line| matches(line)) {
                return Ok(found);
            }
            ensure!(
                Instant::now() < deadline,
                "timeout: no line with {description}: {:?}\n{}",
                self.lines()?,
                self.watcher_log()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Observes the home directory's contents independently of the watcher.
    pub fn states(&self) -> Result<PathStates> {
        let mut states = PathStates::new();
        observe(&self.dir(), &self.dir(), &mut states)?;
        states.retain(|path, _| path != b"system" && !path.starts_with(b"system/"));
        Ok(states)
    }
}

impl Drop for AuditedHome {
    fn drop(&mut self) {
        let _ = self.kill_watcher();
        self.processes.borrow_mut().drain().for_each(|(_, process)| drop(process.kill()));
    }
}

fn observe(root: &Path, dir: &Path, states: &mut PathStates) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let kind = fs::symlink_metadata(&path)?.file_type();
        let state = if kind.is_dir() {
            observe(root, &path, states)?;
            PathState::Directory
        } else if kind.is_symlink() {
            PathState::Link(fs::read_link(&path)?)
        } else if kind.is_file() {
            PathState::File(Sha256::digest(fs::read(&path)?).to_vec())
        } else {
            PathState::Other
        };
        states.insert(path.strip_prefix(root)?.as_os_str().as_bytes().to_vec(), state);
    }
    Ok(())
}

/// Returns the differences between two observations, as the audit log must contain them.
pub fn differences(before: &PathStates, after: &PathStates) -> BTreeMap<Vec<u8>, &'static str> {
    let mut operations = BTreeMap::new();
    for path in before.keys().filter(|path| !after.contains_key(*path)) {
        operations.insert(path.clone(), "delete");
    }
    for (path, state) in after.iter().filter(|(path, state)| before.get(*path) != Some(state)) {
        operations.insert(path.clone(), if *state == PathState::Directory { "mkdir" } else { "write" });
    }
    operations
}

/// Returns the operation recorded for each path, which must appear only once.
pub fn recorded_operations(entries: &[Value]) -> Result<BTreeMap<Vec<u8>, String>> {
    let mut operations = BTreeMap::new();
    for entry in entries {
        let op = entry["op"].as_str().with_context(|| format!("not an entry: {entry}"))?.to_owned();
        let path = path_of(entry)?;
        ensure!(operations.insert(path, op).is_none(), "path recorded twice: {entry}");
    }
    Ok(operations)
}

/// Returns the original bytes of an entry's path.
pub fn path_of(entry: &Value) -> Result<Vec<u8>> {
    let text = entry["path"].as_str().context("the entry has no path")?;
    if entry["escaped"] != true {
        return Ok(text.as_bytes().to_vec());
    }
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((&first, after)) = rest.split_first() {
        match (first, after) {
            (b'\\', [b'x', high, low, ..]) => {
                bytes.push(u8::from_str_radix(std::str::from_utf8(&[*high, *low])?, 16)?);
                rest = &after[3..];
            }
            (b'\\', [b'\\', ..]) => {
                bytes.push(b'\\');
                rest = &after[1..];
            }
            _ => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    Ok(bytes)
}

/// Formats each entry as `op path`, in the order of the audit log.
pub fn summarize(entries: &[Value]) -> Vec<String> {
    let field = |entry: &Value, name: &str| entry[name].as_str().unwrap_or_default().to_owned();
    entries.iter().map(|entry| format!("{} {}", field(entry, "op"), field(entry, "path"))).collect()
}

pub fn to_os_str(bytes: &[u8]) -> &OsStr {
    OsStr::from_bytes(bytes)
}
