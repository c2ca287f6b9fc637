//! The init on a stand-in for the product's binary: order, gate, readiness, restarts, reports, and that nothing survives.

mod boots;
mod lives;

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

const LONG: Duration = Duration::from_secs(120);
const USER_DATA: &str = "#cloud-config\n{\"write_files\": [{\"path\": \"/opt/svc/env/host.env\", \
    \"permissions\": \"0600\", \"content\": \"SVC_HANDLE=ada\\n\"}], \"runcmd\": []}";

/// One call of the stand-in.
#[derive(Debug, Deserialize)]
struct Called {
    unit: String,
    args: Vec<String>,
    env: BTreeMap<String, String>,
    pid: i32,
    child: Option<i32>,
}

struct Stage {
    simulator: Simulator,
    api: Api,
    /// Disks and the stand-in; goes last.
    _dir: TempDir,
}

impl Stage {
    /// `standin` says how the units end.
    async fn set(standin: &str) -> Result<Self> {
        Self::set_with(standin, |_| {}).await
    }

    async fn set_with(standin: &str, adjust: impl FnOnce(&mut HostSettings)) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let pg = PgBinaries::locate_or_fetch(&crate::fetch::target_dir())?;
        let mut settings = HostSettings::new(script(dir.path())?, pg, dir.path().join("hosts"));
        settings.extra_env.push(("STANDIN".to_owned(), standin.to_owned()));
        adjust(&mut settings);
        let simulator = Simulator::start(SimulatorOptions::process(settings)).await?;
        let api = Api::of(&simulator);
        Ok(Self { simulator, api, _dir: dir })
    }

    /// Makes a server and waits for its boot's end.
    async fn boot(&self, name: &str) -> Result<i64> {
        let id = self.api.create(name, USER_DATA).await?;
        self.simulator.wait_for_power(name, Power::Running).await?;
        self.simulator.booted(name, LONG).await?;
        Ok(id)
    }

    /// Makes a server whose boot fails; gives the stage and the words.
    async fn fail(&self, name: &str) -> Result<(String, String)> {
        ensure!(self.boot(name).await.is_err(), "the boot came through");
        match self.simulator.hosts()?.into_iter().find(|host| host.name == name).map(|host| host.boot) {
            Some(BootState::Failed { stage, message }) => Ok((stage, message)),
            other => anyhow::bail!("{other:?}"),
        }
    }

    fn calls(&self, name: &str) -> Result<Vec<Called>> {
        let log = fs::read_to_string(self.simulator.disk(name)?.join("calls.jsonl"))?;
        Ok(log.lines().map(serde_json::from_str).collect::<Result<_, _>>()?)
    }

    /// `unit args…` of each call.
    fn order(&self, name: &str) -> Result<Vec<String>> {
        let line = |call: Called| [vec![call.unit], call.args].concat().join(" ");
        Ok(self.calls(name)?.into_iter().map(line).collect())
    }

    fn file(&self, name: &str, path: &str) -> Result<PathBuf> {
        Ok(self.simulator.disk(name)?.join(path))
    }
}

/// The stand-in as an executable that needs no environment to start.
fn script(dir: &Path) -> Result<PathBuf> {
    static PYTHON: OnceLock<String> = OnceLock::new();
    let python = PYTHON.get_or_init(|| {
        let mut ask = Command::new("python3");
        ask.args(["-c", "import sys; print(sys.executable)"]);
        crate::child::run(ask, LONG).map(|path| path.trim().to_owned()).unwrap_or_default()
    });
    ensure!(!python.is_empty(), "python3 is needed for this test");
    let path = dir.join("svc");
    fs::write(&path, format!("#!{python} -S\n{}", include_str!("standin.py")))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) -> Result<()> {
    let end = Instant::now() + LONG;
    while !holds() {
        ensure!(Instant::now() < end, "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

fn is_running(pid: i32) -> bool {
    // A zombie has ended.
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

/// The URL that the init wrote for the applets.
fn database_url(stage: &Stage, name: &str) -> Result<String> {
    let env = fs::read_to_string(stage.file(name, "opt/svc/env/host.env")?)?;
    let url = env.lines().find_map(|line| line.strip_prefix("DATABASE_URL="));
    url.map(str::to_owned).context("no DATABASE_URL in host.env")
}
