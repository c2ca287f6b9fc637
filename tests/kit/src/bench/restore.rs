//! A restore: `svc-restore` fetches the snapshot, hashes it, loads it into a new database, compares every count with the
//! record, and swaps; beside it the tools that one would use from a shell, which compare nothing.
//!
//! Every run has a new server: no run finds the log files of an earlier one.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use super::database;
use super::figures::{OURS, Spec, Tally, Target};
use super::peers::s5cmd::S5cmd;
use super::task::{self, Ran};
use super::vault::{BUCKET, Machine, Snapshot, Vault};
use super::{Options, said};
use crate::pg::PgServer;

const WALL: &str = "one restore";
const CPU: &str = "processor time, without the servers'";
const SERVED: &str = "processor time of the store";
const MEMORY: &str = "most memory";
const SHELL: &str = "s5cmd cp && createdb && pg_restore -j2";

pub const ROWS: [Spec; 4] = [
    Spec { name: WALL, unit: "s", against: Some(SHELL), target: Target::RatioAtMost(1.05) },
    Spec { name: CPU, unit: "s", against: Some(SHELL), target: Target::None },
    Spec { name: SERVED, unit: "s", against: Some(SHELL), target: Target::None },
    Spec { name: MEMORY, unit: "MiB", against: None, target: Target::AtMost(32.0) },
];

/// The database that is kept, a restored one with its log, dumps, and air.
const ROOM: u64 = 12 << 30;
const DEADLINE: Duration = Duration::from_secs(1800);

pub async fn measure(options: &Options) -> Result<Tally> {
    let dir = database::place(&options.out, ROOM)?;
    let s5cmd = S5cmd::fetch()?;
    let vault = Vault::open(dir.path())?;
    let snapshot = backed_up(dir.path(), options, &vault).await?;
    let mut tally = Tally::default();
    for round in 0..options.rounds {
        said(round, options.rounds);
        for turn in 0..2 {
            let run = Run::prepare(dir.path()).await?;
            let (name, ran) = match (turn + round) % 2 {
                0 => (OURS, run.ours(&options.svc, &vault).await?),
                _ => (SHELL, run.shell(&s5cmd, &vault, &snapshot)?),
            };
            database::check(&run.server, database::SCALE).await.with_context(|| format!("after {name}"))?;
            tally.add(WALL, name, ran.wall.as_secs_f64());
            tally.add(CPU, name, ran.cpu.as_secs_f64());
            tally.add(SERVED, name, ran.served.as_secs_f64());
            if name == OURS {
                tally.add(MEMORY, OURS, ran.most_mib);
            }
        }
    }
    Ok(tally)
}

/// The snapshot that all restore.
async fn backed_up(dir: &Path, options: &Options, vault: &Vault) -> Result<Snapshot> {
    let server = database::kept(&options.out).await?;
    let machine = Machine::new(dir, vault, &server)?;
    machine.open_gate()?;
    task::run(machine.command(&options.svc, "svc-db-backup"), DEADLINE)?;
    let snapshot = vault.snapshot(0, database::SCALE)?;
    let database = database::bytes(&server).await?;
    println!("  {} MB of database, {} MB of dump", database / 1_000_000, snapshot.size_bytes / 1_000_000);
    Ok(snapshot)
}

/// A new server and a directory for one restore; both go with it, the server first.
struct Run {
    server: PgServer,
    dir: TempDir,
}

impl Run {
    async fn prepare(dir: &Path) -> Result<Self> {
        let dir = tempfile::tempdir_in(dir)?;
        let server = database::server(dir.path()).await?;
        // What the last one left to be written is written before this one begins.
        nix::unistd::sync();
        Ok(Self { server, dir })
    }

    /// Into the place of the empty database that a new machine has. There it was made before the server's first restart.
    async fn ours(&self, svc: &Path, vault: &Vault) -> Result<Ran> {
        self.server.create_database(database::NAME).await?;
        self.server.connect(database::NAME).await?.batch_execute("CHECKPOINT").await?;
        nix::unistd::sync();
        let machine = Machine::new(self.dir.path(), vault, &self.server)?;
        let ran = task::run(machine.command(svc, "svc-restore"), DEADLINE)?;
        ensure!(machine.is_open(), "the gate is shut");
        Ok(ran)
    }

    fn shell(&self, s5cmd: &S5cmd, vault: &Vault, snapshot: &Snapshot) -> Result<Ran> {
        let script = r#"set -e; "$S5CMD" cp "$0" "$1"; "$BIN/createdb" "$DATABASE"; "$BIN/pg_restore" -j2 -d "$DATABASE" "$1""#;
        let mut command = Command::new("bash");
        command.args(["-c", script]).env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.arg(format!("s3://{BUCKET}/{}", vault.key(snapshot))).arg(self.dir.path().join("peer.dump"));
        command.env("BIN", self.server.binaries().dir()).env("DATABASE", database::NAME);
        command.envs(s5cmd.env(&vault.store));
        database::connected(&mut command, &self.server);
        task::run(command, DEADLINE)
    }
}
