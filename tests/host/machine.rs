//! A customer machine in its own `SVC_ROOT`, with its own PostgreSQL and a shared object store.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use kit::child::OwnedChild;
use kit::pg::{PgBinaries, PgOptions, PgServer};
use kit::s3::S3Server;
use svc::machine::epoch::Epoch;
use svc::machine::id::MachineId;
use svc::store::Bucket;
use svc::store::config::{S3Config, StoreConfig};
use svc::store::credentials::TemporaryCredentials;
use svc::store::key::SlotPrefix;
use svc::store::pointer::Pointer;
use svc::store::pointer_io;

pub const BUCKET: &str = "fleet";
pub const USER: &str = "user_1";
/// A run that takes this long has hung.
const RUN_TIMEOUT: Duration = Duration::from_secs(120);

pub fn binaries() -> Result<PgBinaries> {
    PgBinaries::locate_or_fetch(&kit::fetch::target_dir())
}

/// Starts an object store with the bucket for all machines in these tests.
pub fn start_store() -> Result<S3Server> {
    let store = S3Server::start(&std::env::temp_dir())?;
    store.create_bucket(BUCKET);
    Ok(store)
}

pub fn slot() -> SlotPrefix {
    SlotPrefix::new(&USER.parse().expect("the user id is valid"), &svc::machine::name::Slot::primary())
}

/// Opens the bucket with the platform's credentials.
pub fn bucket(store: &S3Server) -> Result<Bucket> {
    config(store)?.open()
}

/// Opens the bucket with the session's credentials.
pub fn bucket_as(store: &S3Server, session: &TemporaryCredentials) -> Result<Bucket> {
    let StoreConfig::S3(s3) = config(store)? else { anyhow::bail!("the kit's store is an S3 store") };
    let session = session.clone();
    let s3 = S3Config {
        access_key: session.access_key,
        secret_key: session.secret_key,
        session_token: session.session_token,
        expires_at: Some(session.expires_at),
        ..s3
    };
    StoreConfig::S3(s3).open()
}

fn config(store: &S3Server) -> Result<StoreConfig> {
    let pairs = store.env(BUCKET);
    let mut env =
        svc::config::Env::from_pairs(pairs.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    svc::http::tls::install_provider();
    StoreConfig::read(&mut env).context("the store's settings are incomplete")
}

pub async fn read_pointer(store: &S3Server) -> Result<Option<Pointer>> {
    Ok(pointer_io::read(&bucket(store)?, &slot()).await?.map(|read| read.value))
}

/// The exit status and the output of a run.
#[derive(Debug)]
pub struct RunResult {
    /// `None` if killed by a signal.
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl RunResult {
    #[track_caller]
    pub fn expect(self, exit_code: i32) -> Self {
        assert_eq!(self.exit_code, Some(exit_code), "signal {:?}, stderr:\n{}", self.signal, self.stderr);
        self
    }

    #[track_caller]
    pub fn expect_killed(self) -> Self {
        assert_eq!(self.signal, Some(9), "exit {:?}, stderr:\n{}", self.exit_code, self.stderr);
        self
    }

    /// Asserts that the process that runs a step was killed, and that the run reported it.
    #[track_caller]
    pub fn expect_step_killed(self) -> Self {
        let result = self.expect(svc::applet::Exit::Internal as i32);
        assert!(result.stderr.contains("failed (signal: 9"), "{}", result.stderr);
        result
    }
}

pub struct Machine {
    pub root: tempfile::TempDir,
    pub postgres: Option<PgServer>,
    pub id: MachineId,
    pub epoch: Epoch,
    env: Vec<(String, String)>,
}

/// Environment variables for a single run, for example `FAILPOINTS`.
pub type RunEnv<'a> = &'a [(&'a str, &'a str)];

impl Machine {
    /// Creates a machine whose own PostgreSQL contains an empty database `svc`.
    pub async fn new(store: &S3Server, epoch: u32) -> Result<Self> {
        Self::with_options(store, epoch, PgOptions::default()).await
    }

    /// Like [`Machine::new`], but with the given PostgreSQL options.
    pub async fn with_options(store: &S3Server, epoch: u32, options: PgOptions) -> Result<Self> {
        let binaries = binaries()?;
        let postgres = PgServer::start(&binaries, options).await?;
        postgres.create_database("svc").await?;
        let mut machine = Self::bare(epoch)?;
        machine.write_env("r2.env", &store.env(BUCKET))?;
        machine.set_env_vars("host.env", &[("DATABASE_URL", &postgres.url("svc"))])?;
        machine.env.push(("SVC_PG_BIN_DIR".into(), binaries.dir().display().to_string()));
        machine.postgres = Some(postgres);
        Ok(machine)
    }

    /// Like [`Machine::new`], but with an open gate.
    pub async fn in_use(store: &S3Server, epoch: u32) -> Result<Self> {
        let machine = Self::new(store, epoch).await?;
        svc::fsx::write_atomic(&machine.path("opt/svc/restore-complete"), b"", 0o644)?;
        Ok(machine)
    }

    /// Creates a machine without a database or a store.
    pub fn bare(epoch: u32) -> Result<Self> {
        let root = tempfile::Builder::new().prefix("svc-machine-").tempdir()?;
        let id = MachineId::new();
        let env = vec![
            ("SVC_ROOT".to_owned(), root.path().display().to_string()),
            ("PATH".to_owned(), std::env::var("PATH")?),
            ("RUST_LOG".to_owned(), "info".to_owned()),
        ];
        let machine = Self { root, postgres: None, id, epoch: Epoch(epoch), env };
        machine.write_env(
            "host.env",
            &[
                ("SVC_MACHINE_ID", id.to_string()),
                ("SVC_USER_ID", USER.to_owned()),
                ("SVC_HANDLE", "ada".to_owned()),
                ("SVC_SLOT", "primary".to_owned()),
                ("SVC_EPOCH", epoch.to_string()),
                ("PLATFORM_INTERNAL_URL", "http://127.0.0.1:9".to_owned()),
                ("UPGRADE_TOKEN", "upgrade-token-of-a-machine".to_owned()),
                ("SVC_PROOF_KEYS", r#"{"keys":[{"kid":"first","x":"AAAA"}]}"#.to_owned()),
            ]
            .map(|(name, value)| (name.to_owned(), value)),
        )?;
        machine.write_boot_env(&[])?;
        Ok(machine)
    }

    /// Writes `boot.env` as provisioning does, with the given variables replaced.
    pub fn write_boot_env(&self, overrides: &[(&str, &str)]) -> Result<()> {
        let mut pairs = vec![
            ("REGISTRATION_TOKEN", "registration-token-of-a-machine"),
            ("SVC_IMAGE_VERSION", "1.0.0"),
            ("SVC_RESTORE_MODE", "required"),
        ];
        pairs.retain(|(name, _)| !overrides.iter().any(|(overridden, _)| overridden == name));
        pairs.extend(overrides);
        let pairs: Vec<_> =
            pairs.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        self.write_env("boot.env", &pairs)
    }

    /// Writes `update.env` with the release to install, as provisioning does. Only root reads it.
    pub fn write_update_env(&self, url: &str, sha256: &str) -> Result<()> {
        let pairs = [("SVC_HOST_BUNDLE_URL", url), ("SVC_BUNDLE_SHA256", sha256)];
        self.write_env("update.env", &pairs.map(|(name, value)| (name.to_owned(), value.to_owned())))
    }

    /// Creates a release that contains only its bundle's digest, and makes it current.
    pub fn set_current_release(&self, version: &str, digest: &str) -> Result<()> {
        let release = self.path("opt/svc/releases").join(version);
        fs::create_dir_all(&release)?;
        fs::write(release.join(svc::host::system::release::DIGEST_FILE), format!("{digest}\n"))?;
        Ok(std::os::unix::fs::symlink(Path::new("releases").join(version), self.path("opt/svc/current"))?)
    }

    fn write_env(&self, file: &str, pairs: &[(String, String)]) -> Result<()> {
        let path = self.path("opt/svc/env").join(file);
        fs::create_dir_all(path.parent().context("the path has no parent")?)?;
        let lines: String =
            pairs.iter().map(|(name, value)| svc::config::format_env_line(name, value)).collect();
        Ok(fs::write(path, lines)?)
    }

    /// Sets the variables in an environment file, and keeps its other variables.
    pub fn set_env_vars(&self, file: &str, pairs: &[(&str, &str)]) -> Result<()> {
        let path = self.path("opt/svc/env").join(file);
        let mut text = fs::read_to_string(&path)?;
        for (name, value) in pairs {
            // systemd uses the last line for a name, but the product would use the first, so earlier lines are removed.
            text = text
                .lines()
                .filter(|line| !line.starts_with(&format!("{name}=")))
                .fold(String::new(), |text, line| text + line + "\n");
            text.push_str(&svc::config::format_env_line(name, value));
        }
        Ok(fs::write(path, text)?)
    }

    pub fn path(&self, relative: &str) -> PathBuf {
        self.root.path().join(relative)
    }

    pub fn postgres(&self) -> &PgServer {
        self.postgres.as_ref().expect("the machine has a database")
    }

    /// Connects to the owner's database.
    pub async fn client(&self) -> Result<tokio_postgres::Client> {
        self.postgres().connect("svc").await
    }

    pub async fn databases(&self) -> Result<Vec<String>> {
        let client = self.postgres().connect("postgres").await?;
        let rows = client
            .query("SELECT datname::text FROM pg_database WHERE NOT datistemplate ORDER BY 1", &[])
            .await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// Builds the command that runs an applet on this machine.
    pub fn command(&self, args: &[&str], extra_env: RunEnv<'_>) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_svc"));
        command
            .args(args)
            .env_clear()
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .envs(extra_env.iter().copied())
            .stdin(Stdio::null());
        command
    }

    pub fn spawn(&self, args: &[&str], extra_env: RunEnv<'_>) -> Result<RunningApplet> {
        let out = tempfile::NamedTempFile::new()?;
        let err = tempfile::NamedTempFile::new()?;
        let mut command = self.command(args, extra_env);
        command.stdout(out.reopen()?).stderr(err.reopen()?);
        Ok(RunningApplet { child: OwnedChild::spawn(&mut command)?, out, err })
    }

    /// Runs an applet until it exits.
    pub fn run_with(&self, args: &[&str], extra_env: RunEnv<'_>) -> Result<RunResult> {
        self.spawn(args, extra_env)?.wait()
    }

    pub fn run(&self, args: &[&str]) -> Result<RunResult> {
        self.run_with(args, &[])
    }

    pub fn has_marker(&self) -> bool {
        self.path("opt/svc/restore-complete").exists()
    }

    /// Returns the lines of `backup.jsonl`.
    pub fn backup_records(&self) -> Result<Vec<serde_json::Value>> {
        let text = fs::read_to_string(self.path("home/svc/home/system/logs/backup.jsonl"))?;
        assert!(text.ends_with('\n'), "the last line must be complete");
        text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
    }
}

pub struct RunningApplet {
    child: OwnedChild,
    out: tempfile::NamedTempFile,
    err: tempfile::NamedTempFile,
}

impl RunningApplet {
    pub fn signal(&self, signal: nix::sys::signal::Signal) -> Result<()> {
        self.child.signal(signal)
    }

    /// Returns whether the process has installed a handler for SIGTERM.
    pub fn handles_sigterm(&self) -> bool {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.pid())).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default();
        caught & (1 << (nix::sys::signal::Signal::SIGTERM as i32 - 1)) != 0
    }

    /// Samples the resident anonymous memory until the run ends, and returns its peak in bytes.
    pub async fn measure_peak_memory_bytes(&self) -> u64 {
        let (mut peak, path) = (0, format!("/proc/{}/status", self.child.pid()));
        while let Some(bytes) = fs::read_to_string(&path).ok().as_deref().and_then(parse_resident_bytes) {
            peak = peak.max(bytes);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        peak
    }

    pub fn stderr(&self) -> String {
        fs::read_to_string(self.err.path()).unwrap_or_default()
    }

    pub fn wait(mut self) -> Result<RunResult> {
        let Some(status) = self.child.wait(RUN_TIMEOUT) else {
            bail!("still running after {RUN_TIMEOUT:?}:\n{}", self.stderr());
        };
        Ok(RunResult {
            exit_code: status.code(),
            signal: status.signal(),
            stdout: fs::read_to_string(self.out.path())?,
            stderr: self.stderr(),
        })
    }
}

fn parse_resident_bytes(status: &str) -> Option<u64> {
    let line = status.lines().find(|line| line.starts_with("RssAnon:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// Polls until the condition is true. Fails after a minute.
pub async fn wait_until(event: &str, mut condition: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        if Instant::now() > deadline {
            bail!("timed out waiting for: {event}");
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// Creates a directory with all PostgreSQL programs, in which a shell script replaces one of them. `REAL` in the script
/// is replaced by the path of the original program.
pub fn tools_with_script(program: &str, script: &str) -> Result<tempfile::TempDir> {
    use std::os::unix::fs::PermissionsExt;
    let real = binaries()?;
    let dir = tempfile::tempdir()?;
    for entry in fs::read_dir(real.dir())? {
        let entry = entry?;
        std::os::unix::fs::symlink(entry.path(), dir.path().join(entry.file_name()))?;
    }
    let path = dir.path().join(program);
    fs::remove_file(&path)?;
    let real = real.dir().join(program);
    fs::write(&path, script.replace("REAL", &real.display().to_string()))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(dir)
}

pub fn path_str(path: &Path) -> &str {
    path.to_str().expect("test paths are UTF-8")
}
