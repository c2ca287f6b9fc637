//! A PostgreSQL server: its data directory, its process, its termination.
//!
//! All connections require a password, as on an owner's machine; no connection uses `trust`.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio_postgres::Client;

use super::cluster::{self, PreparedCluster};
use super::{PgBinaries, PgConnectionInfo};
use crate::child::{self, AtExit};
use crate::disk::in_memory_dir;
use crate::net;

pub(super) const START_TIMEOUT: Duration = Duration::from_secs(60);
const STOP_TIMEOUT: Duration = Duration::from_secs(20);
/// Free memory required to keep a server's temporary data in memory.
const MIN_FREE_MEMORY_BYTES: u64 = 2 << 30;

/// Options for a server; the default is a temporary server on a free port.
#[derive(Clone, Debug, Default)]
pub struct PgOptions {
    /// Persistent data directory; by default a temporary one.
    pub data_dir: Option<PathBuf>,
    /// The loopback port; by default a free one, reserved until this process ends.
    pub port: Option<u16>,
    /// The superuser's password; by default the prepared cluster's, or a random one with [`Durability::FsyncOn`].
    pub password: Option<String>,
    pub durability: Durability,
    /// Additional `postgresql.conf` settings, which override the kit's.
    pub settings: Vec<(String, String)>,
}

/// Whether a commit waits until its WAL is on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// Commits survive a killed server, but not a power loss: for tests.
    #[default]
    FsyncOff,
    /// As in production: for benchmarks.
    FsyncOn,
}

/// A PostgreSQL 16 server on `127.0.0.1` and a Unix socket. Drop stops it immediately and deletes a temporary data
/// directory.
#[derive(Debug)]
pub struct PgServer {
    binaries: PgBinaries,
    data_dir: PathBuf,
    connection_info: PgConnectionInfo,
    settings: Vec<(String, String)>,
    process: Mutex<Option<Child>>,
    /// The directory with the log, socket and temporary data; removed last.
    temp_dir: TempDir,
}

impl PgServer {
    /// Creates a new cluster and starts it. The data directory must be missing or empty.
    ///
    /// With [`Durability::FsyncOff`] and no password in the options, the cluster is a copy of a prepared one.
    pub async fn start(binaries: &PgBinaries, options: PgOptions) -> Result<Self> {
        let may_change_port = options.port.is_none();
        let uses_prepared_cluster = options.password.is_none() && options.durability == Durability::FsyncOff;
        let mut server = Self::prepare(binaries, options)?;
        let (binaries, data_dir, password) =
            (binaries.clone(), server.data_dir.clone(), server.connection_info.password.clone());
        server.connection_info.password = tokio::task::spawn_blocking(move || -> Result<String> {
            if uses_prepared_cluster {
                let cluster = PreparedCluster::locate_or_create(&binaries)?;
                cluster.copy_to(&data_dir)?;
                return Ok(cluster.password);
            }
            fs::create_dir_all(&data_dir)?;
            cluster::initdb(&binaries, &data_dir, &password, &[])?;
            Ok(password)
        })
        .await??;
        loop {
            match server.restart().await {
                // Another process bound the port first.
                Err(error) if may_change_port && format!("{error:#}").contains("Address already in use") => {
                    server.connection_info.port = net::free_port()?;
                }
                result => return result.map(|()| server),
            }
        }
    }

    /// Starts a server on existing data, with its port and password.
    pub async fn open(binaries: &PgBinaries, data_dir: &Path, port: u16, password: &str) -> Result<Self> {
        let options = PgOptions {
            data_dir: Some(data_dir.to_owned()),
            port: Some(port),
            password: Some(password.to_owned()),
            ..PgOptions::default()
        };
        Self::open_with(binaries, options).await
    }

    /// Like [`Self::open`], with everything taken from the options. The data directory is required, and the password
    /// must match the data.
    pub async fn open_with(binaries: &PgBinaries, options: PgOptions) -> Result<Self> {
        let data_dir = options.data_dir.as_ref().filter(|dir| dir.join("PG_VERSION").exists());
        ensure!(data_dir.is_some(), "{:?} is not a PostgreSQL cluster", options.data_dir);
        let server = Self::prepare(binaries, options)?;
        server.restart().await?;
        Ok(server)
    }

    fn prepare(binaries: &PgBinaries, options: PgOptions) -> Result<Self> {
        let temp_dir = tempfile::Builder::new()
            .prefix("kit-pg-")
            .tempdir_in(in_memory_dir(MIN_FREE_MEMORY_BYTES).unwrap_or(Path::new("/tmp")))?;
        child::remove_on_exit(temp_dir.path());
        let mut settings = vec![
            ("shared_buffers".to_owned(), "32MB".to_owned()),
            ("max_connections".to_owned(), "200".to_owned()),
            ("jit".to_owned(), "off".to_owned()),
            // Overrides the prepared cluster's value, which is intended only for the superuser's password.
            ("scram_iterations".to_owned(), "4096".to_owned()),
        ];
        if options.durability == Durability::FsyncOff {
            // `synchronous_commit` stays on: otherwise a killed server would lose acknowledged commits.
            settings.extend(["fsync", "full_page_writes"].map(|s| (s.to_owned(), "off".to_owned())));
        }
        settings.extend(options.settings);
        Ok(Self {
            binaries: binaries.clone(),
            data_dir: options.data_dir.unwrap_or_else(|| temp_dir.path().join("data")),
            connection_info: PgConnectionInfo {
                port: options.port.map_or_else(net::free_port, Ok)?,
                password: options.password.unwrap_or_else(|| uuid::Uuid::new_v4().simple().to_string()),
            },
            settings,
            process: Mutex::new(None),
            temp_dir,
        })
    }

    /// Starts a stopped or killed server on the same data and port, and waits until it accepts connections.
    pub async fn restart(&self) -> Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        self.spawn()?;
        loop {
            match self.connect("postgres").await {
                Ok(_) => return Ok(()),
                Err(error) if Instant::now() >= deadline => {
                    self.terminate(Signal::SIGKILL, STOP_TIMEOUT)?;
                    bail!("no connection within {START_TIMEOUT:?}: {error:#}\n{}", self.log());
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
            if self.reap_if_exited() {
                // Processes of a killed predecessor may still hold its shared memory.
                ensure!(
                    self.log().contains("is still in use") && Instant::now() < deadline,
                    "PostgreSQL did not start:\n{}",
                    self.log()
                );
                tokio::time::sleep(Duration::from_millis(50)).await;
                self.spawn()?;
            }
        }
    }

    /// Performs a fast shutdown, as systemd does: closes connections and keeps all commits.
    pub async fn stop(&self) -> Result<()> {
        self.terminate(Signal::SIGINT, STOP_TIMEOUT)
    }

    /// Kills the server and all its processes with SIGKILL, so that nothing is cleaned up.
    pub async fn kill9(&self) -> Result<()> {
        if let Some(postmaster) = self.pid() {
            // Suspend the postmaster first, so that it can neither start a process nor notice that one has ended.
            kill(postmaster, Signal::SIGSTOP).ok();
            for process in children_of(postmaster) {
                kill(process, Signal::SIGKILL).ok();
            }
        }
        self.terminate(Signal::SIGKILL, STOP_TIMEOUT)
    }

    pub fn is_running(&self) -> bool {
        self.pid().is_some()
    }

    pub fn port(&self) -> u16 {
        self.connection_info.port
    }

    pub fn connection_info(&self) -> &PgConnectionInfo {
        &self.connection_info
    }

    /// Returns `postgres://postgres:<password>@127.0.0.1:<port>/<database>`.
    pub fn url(&self, database: &str) -> String {
        self.connection_info.url(database)
    }

    /// Connects as superuser. The connection is closed when the client is dropped.
    pub async fn connect(&self, database: &str) -> Result<Client> {
        self.connection_info.connect(database).await
    }

    /// Creates an empty database.
    pub async fn create_database(&self, name: &str) -> Result<()> {
        self.connection_info.create_database(name).await
    }

    /// Returns the password of the superuser `postgres`.
    pub fn password(&self) -> &str {
        &self.connection_info.password
    }

    pub fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    /// Returns the Unix socket's directory, for `host` in a connection string.
    pub fn socket_dir(&self) -> &Path {
        self.temp_dir.path()
    }

    pub fn binaries(&self) -> &PgBinaries {
        &self.binaries
    }

    /// Returns the server's log.
    pub fn log(&self) -> String {
        fs::read(self.log_file()).map(|log| String::from_utf8_lossy(&log).into_owned()).unwrap_or_default()
    }

    fn log_file(&self) -> PathBuf {
        self.temp_dir.path().join("postgres.log")
    }

    fn spawn(&self) -> Result<()> {
        let mut process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(process.is_none(), "the server on port {} is already running", self.connection_info.port);
        let log = File::create(self.log_file())?;
        let mut command = self.binaries.server_command("postgres");
        command.arg("-D").arg(&self.data_dir);
        command
            .arg("-c")
            .arg("listen_addresses=127.0.0.1")
            .arg("-c")
            .arg(format!("port={}", self.connection_info.port));
        command.arg("-c").arg(format!("unix_socket_directories={}", self.temp_dir.path().display()));
        for (name, value) in &self.settings {
            command.arg("-c").arg(format!("{name}={value}"));
        }
        // Ctrl-C on a terminal must not reach PostgreSQL, because other processes may still need it.
        command.process_group(0).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().context("cannot start postgres")?;
        child::kill_on_exit(child.id(), AtExit::Quit);
        *process = Some(child);
        Ok(())
    }

    fn pid(&self) -> Option<Pid> {
        let process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        process.as_ref().and_then(|child| i32::try_from(child.id()).ok()).map(Pid::from_raw)
    }

    /// Reaps the process if it has exited; returns whether it has.
    fn reap_if_exited(&self) -> bool {
        let mut process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        let has_exited = process.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(Some(_))));
        if has_exited && let Some(child) = process.take() {
            child::unregister(child.id());
        }
        has_exited
    }

    /// Releases a killed server's System V shared memory, which would otherwise be released only by its next start.
    fn release_shared_memory(&self) {
        let pid_file = fs::read_to_string(self.data_dir.join("postmaster.pid")).unwrap_or_default();
        let segment = pid_file.lines().nth(6).and_then(|line| line.split_whitespace().nth(1));
        if let Some(segment) = segment {
            let mut ipcrm = std::process::Command::new("ipcrm");
            ipcrm.args(["-m", segment]);
            child::run(ipcrm, Duration::from_secs(5)).ok();
        }
    }

    fn terminate(&self, signal: Signal, timeout: Duration) -> Result<()> {
        let pid = self.pid();
        let mut process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        let (Some(mut child), Some(pid)) = (process.take(), pid) else {
            return Ok(());
        };
        kill(pid, signal).ok();
        let has_exited = child::wait_until(&mut child, Instant::now() + timeout).is_some();
        if !has_exited {
            child.kill().ok();
            child.wait().ok();
        }
        child::unregister(child.id());
        ensure!(has_exited, "PostgreSQL needed SIGKILL: it was still running {timeout:?} after {signal}");
        Ok(())
    }
}

impl Drop for PgServer {
    fn drop(&mut self) {
        self.terminate(Signal::SIGQUIT, Duration::from_secs(3)).ok();
        if self.data_dir.starts_with(self.temp_dir.path()) {
            self.release_shared_memory();
        }
    }
}

fn children_of(pid: Pid) -> Vec<Pid> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|child| child.parse().ok()).map(Pid::from_raw).collect()
}
