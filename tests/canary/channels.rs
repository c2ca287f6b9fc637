//! Channels through which a secret could leak: logs, tables, command lines.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use kit::pg::PgBinaries;
use tokio_util::sync::CancellationToken;

/// Reads every log below the stack's directory, by path.
pub fn read_logs(dir: &Path) -> Result<BTreeMap<String, String>> {
    let mut logs = BTreeMap::new();
    let mut pending_dirs = vec![dir.to_owned()];
    while let Some(next) = pending_dirs.pop() {
        for entry in std::fs::read_dir(&next).with_context(|| next.display().to_string())? {
            // Files appear and disappear while hosts run.
            let Ok(entry) = entry else { continue };
            let path = entry.path();
            if path.is_symlink() {
                continue;
            }
            if path.is_dir() {
                pending_dirs.push(path);
            } else if is_log(&path) {
                let text = std::fs::read(&path).unwrap_or_default();
                logs.insert(path.display().to_string(), String::from_utf8_lossy(&text).into_owned());
            }
        }
    }
    Ok(logs)
}

fn is_log(path: &Path) -> bool {
    let is_in_log_dir =
        path.components().any(|part| ["log", "logs"].iter().any(|name| part.as_os_str() == *name));
    let has_log_extension = path
        .extension()
        .is_some_and(|extension| ["log", "jsonl", "err"].iter().any(|name| extension == *name));
    is_in_log_dir || has_log_extension
}

/// Dumps a database as text: every column of every table.
pub fn dump_tables(pg: &PgBinaries, url: &str) -> Result<String> {
    let config: tokio_postgres::Config = url.parse()?;
    let mut dump = pg.client_command("pg_dump");
    let url = url::Url::parse(url)?;
    let password = config.get_password().map(|password| String::from_utf8_lossy(password).into_owned());
    dump.env("PGPASSWORD", password.unwrap_or_default());
    dump.env("PGHOST", url.host_str().unwrap_or("127.0.0.1")).env("PGUSER", url.username());
    dump.env("PGPORT", url.port().unwrap_or(5432).to_string());
    dump.args(["--no-password", "--inserts", url.path().trim_start_matches('/')]);
    kit::child::run(dump, Duration::from_secs(60))
}

/// Records the command lines of this process and all its descendants.
pub struct ProcessWatch {
    command_lines: Arc<Mutex<BTreeSet<String>>>,
    stop: CancellationToken,
}

impl ProcessWatch {
    pub fn start() -> Self {
        let (command_lines, stop) = (Arc::<Mutex<BTreeSet<String>>>::default(), CancellationToken::new());
        let watch = Self { command_lines: command_lines.clone(), stop: stop.clone() };
        std::thread::spawn(move || {
            let mut processes = Descendants::default();
            while !stop.is_cancelled() {
                let lines = processes.list_command_lines();
                command_lines.lock().unwrap_or_else(PoisonError::into_inner).extend(lines);
                std::thread::sleep(Duration::from_millis(15));
            }
        });
        watch
    }

    pub fn command_lines(&self) -> BTreeSet<String> {
        self.command_lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for ProcessWatch {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// This process and its descendants.
#[derive(Default)]
struct Descendants {
    /// Whether each running process is a descendant. Only new processes are examined, because other tests run hundreds
    /// of processes at a time.
    processes: BTreeMap<u32, bool>,
}

impl Descendants {
    fn list_command_lines(&mut self) -> Vec<String> {
        let pids = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let running: BTreeSet<u32> =
            pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        self.processes.retain(|pid, _| running.contains(pid));
        let descendants: Vec<u32> = running.into_iter().filter(|pid| self.is_descendant(*pid)).collect();
        descendants
            .into_iter()
            .filter_map(|pid| std::fs::read(format!("/proc/{pid}/cmdline")).ok())
            .map(|line| String::from_utf8_lossy(&line).replace('\0', " "))
            .collect()
    }

    fn is_descendant(&mut self, pid: u32) -> bool {
        if pid <= 1 || pid == std::process::id() {
            return pid > 1;
        }
        if let Some(is_descendant) = self.processes.get(&pid) {
            return *is_descendant;
        }
        let is_descendant = parent_pid(pid).is_some_and(|parent| self.is_descendant(parent));
        self.processes.insert(pid, is_descendant);
        is_descendant
    }
}

fn parent_pid(pid: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The process's name, in parentheses, may itself contain `)`.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}
