//! Init tests with a stand-in for the product's binary: order, gate, readiness, restarts, reports, and cleanup.

mod boots;
mod lifetime;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use tempfile::TempDir;

use super::super::tests::Api;
use super::super::{BootState, HostSettings, Power, Simulator, SimulatorOptions};
use crate::pg::PgBinaries;

const TIMEOUT: Duration = Duration::from_secs(120);
const USER_DATA: &str = "#cloud-config\n{\"write_files\": [{\"path\": \"/opt/svc/env/host.env\", \
    \"permissions\": \"0600\", \"content\": \"SVC_HANDLE=ada\\n\"}], \"runcmd\": []}";

/// A call to the stand-in: a line of `calls.jsonl`.
#[derive(Debug, Deserialize)]
struct StandinCall {
    unit: String,
    args: Vec<String>,
    env: BTreeMap<String, String>,
    pid: i32,
    child: Option<i32>,
}

struct Testbed {
    simulator: Simulator,
    api: Api,
    /// Disks and the stand-in; dropped last.
    _dir: TempDir,
}

impl Testbed {
    /// `standin` defines the units' behavior.
    async fn start(standin: &str) -> Result<Self> {
        Self::start_with(standin, |_| {}).await
    }

    async fn start_with(standin: &str, adjust: impl FnOnce(&mut HostSettings)) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let pg = PgBinaries::locate_or_fetch(&crate::fetch::target_dir())?;
        let mut settings = HostSettings::new(write_standin(dir.path())?, pg, dir.path().join("hosts"));
        settings.extra_env.push(("STANDIN".to_owned(), standin.to_owned()));
        adjust(&mut settings);
        let simulator = Simulator::start(SimulatorOptions::process(settings)).await?;
        let api = Api::for_simulator(&simulator);
        Ok(Self { simulator, api, _dir: dir })
    }

    /// Creates a server and waits until it has booted.
    async fn boot(&self, name: &str) -> Result<i64> {
        let id = self.api.create(name, USER_DATA).await?;
        self.simulator.wait_for_power(name, Power::Running).await?;
        self.simulator.wait_until_booted(name, TIMEOUT).await?;
        Ok(id)
    }

    /// Creates a server whose boot fails, and returns the stage and the message.
    async fn expect_boot_failure(&self, name: &str) -> Result<(String, String)> {
        ensure!(self.boot(name).await.is_err(), "the boot succeeded");
        match self.simulator.hosts()?.into_iter().find(|host| host.name == name).map(|host| host.boot) {
            Some(BootState::Failed { stage, message }) => Ok((stage, message)),
            state => anyhow::bail!("the boot state is {state:?}"),
        }
    }

    fn calls(&self, name: &str) -> Result<Vec<StandinCall>> {
        let log = fs::read_to_string(self.simulator.disk(name)?.join("calls.jsonl"))?;
        Ok(log.lines().map(serde_json::from_str).collect::<Result<_, _>>()?)
    }

    /// Returns `unit args…` for each call.
    fn call_lines(&self, name: &str) -> Result<Vec<String>> {
        let line = |call: StandinCall| [vec![call.unit], call.args].concat().join(" ");
        Ok(self.calls(name)?.into_iter().map(line).collect())
    }

    fn file(&self, name: &str, path: &str) -> Result<PathBuf> {
        Ok(self.simulator.disk(name)?.join(path))
    }
}

/// Writes the stand-in as an executable; its interpreter is not looked up in `PATH`.
fn write_standin(dir: &Path) -> Result<PathBuf> {
    static PYTHON: OnceLock<String> = OnceLock::new();
    let python = PYTHON.get_or_init(|| {
        let mut command = Command::new("python3");
        command.args(["-c", "import sys; print(sys.executable)"]);
        crate::child::run(command, TIMEOUT).map(|path| path.trim().to_owned()).unwrap_or_default()
    });
    ensure!(!python.is_empty(), "this test requires python3");
    let path = dir.join("svc");
    fs::write(&path, format!("#!{python} -S\n{}", include_str!("standin.py")))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

async fn wait_for(description: &str, mut condition: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while !condition() {
        ensure!(Instant::now() < deadline, "timed out waiting until {description}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

fn is_running(pid: i32) -> bool {
    // A zombie counts as ended.
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or_default().trim_start().starts_with('Z'))
}

async fn query(url: &str, sql: &str) -> Result<String> {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
    let connection = tokio::spawn(connection);
    let rows = client.simple_query(sql).await?;
    drop(client);
    connection.await??;
    let value = rows.iter().find_map(|message| match message {
        tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    });
    Ok(value.unwrap_or_default())
}

/// Returns the database URL that the init wrote.
fn database_url(testbed: &Testbed, name: &str) -> Result<String> {
    let env = fs::read_to_string(testbed.file(name, "opt/svc/env/host.env")?)?;
    let url = env.lines().find_map(|line| line.strip_prefix("DATABASE_URL="));
    url.map(str::to_owned).context("no DATABASE_URL in host.env")
}
