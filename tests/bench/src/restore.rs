//! Restore benchmark: `svc-restore` downloads the snapshot, hashes it, loads it into a new database, compares all row
//! counts with the sidecar, and swaps the databases. The baseline is a shell pipeline that verifies nothing.
//!
//! Each run starts a new server, so that no run benefits from an earlier one's WAL files.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use super::bench_store::{BUCKET, BenchStore, MachineDir, Snapshot};
use super::database;
use super::figures::{PRODUCT, Spec, Tally, Target};
use super::peers::s5cmd::S5cmd;
use super::task::{self, RunStats};
use super::{Options, print_round};
use kit::pg::PgServer;

const WALL_TIME: &str = "one restore";
const CPU: &str = "CPU time, excluding the servers";
const STORE_CPU: &str = "CPU time of the store";
const MEMORY: &str = "peak memory";
const SHELL: &str = "s5cmd cp && createdb && pg_restore -j2";

pub const ROWS: [Spec; 4] = [
    Spec { name: WALL_TIME, unit: "s", against: Some(SHELL), target: Target::RatioAtMost(1.05) },
    Spec { name: CPU, unit: "s", against: Some(SHELL), target: Target::None },
    Spec { name: STORE_CPU, unit: "s", against: Some(SHELL), target: Target::None },
    Spec { name: MEMORY, unit: "MiB", against: None, target: Target::AtMost(32.0) },
];

/// Space for the cached database, a restored one with its WAL, the dumps, and a margin.
const MIN_FREE_BYTES: u64 = 12 << 30;
const TIMEOUT: Duration = Duration::from_secs(1800);

pub async fn measure(options: &Options) -> Result<Tally> {
    let dir = database::create_run_dir(&options.out, MIN_FREE_BYTES)?;
    let s5cmd = S5cmd::fetch()?;
    let store = BenchStore::start(dir.path())?;
    let snapshot = create_snapshot(dir.path(), options, &store).await?;
    let mut tally = Tally::default();
    for round in 0..options.rounds {
        print_round(round, options.rounds);
        for turn in 0..2 {
            let run = Run::prepare(dir.path()).await?;
            let (name, stats) = match (turn + round) % 2 {
                0 => (PRODUCT, run.restore(&options.svc, &store).await?),
                _ => (SHELL, run.restore_with_shell(&s5cmd, &store, &snapshot)?),
            };
            database::check_rows(&run.server, database::SCALE)
                .await
                .with_context(|| format!("after {name}"))?;
            tally.add(WALL_TIME, name, stats.wall.as_secs_f64());
            tally.add(CPU, name, stats.cpu.as_secs_f64());
            tally.add(STORE_CPU, name, stats.store_cpu.as_secs_f64());
            if name == PRODUCT {
                tally.add(MEMORY, PRODUCT, stats.peak_mib);
            }
        }
    }
    Ok(tally)
}

/// Creates the snapshot that all runs restore.
async fn create_snapshot(dir: &Path, options: &Options, store: &BenchStore) -> Result<Snapshot> {
    let server = database::open_cached(&options.out).await?;
    let machine = MachineDir::new(dir, store, &server)?;
    machine.open_gate()?;
    task::run(machine.command(&options.svc, "svc-db-backup"), TIMEOUT)?;
    let snapshot = store.verify_snapshot(0, database::SCALE)?;
    let database_bytes = database::size_bytes(&server).await?;
    println!("  database: {} MB, dump: {} MB", database_bytes / 1_000_000, snapshot.size_bytes / 1_000_000);
    Ok(snapshot)
}

/// A new server and its directory, for one restore. The server is dropped before its data directory.
struct Run {
    server: PgServer,
    dir: TempDir,
}

impl Run {
    async fn prepare(dir: &Path) -> Result<Self> {
        let dir = tempfile::tempdir_in(dir)?;
        let server = database::start(dir.path()).await?;
        // Pending writes from the previous run must not slow this one down.
        nix::unistd::sync();
        Ok(Self { server, dir })
    }

    /// Runs `svc-restore`, which replaces an empty database, as on a new machine. On a real machine, PostgreSQL has
    /// been restarted by then, which flushes that database; here, a checkpoint flushes it.
    async fn restore(&self, svc: &Path, store: &BenchStore) -> Result<RunStats> {
        self.server.create_database(database::NAME).await?;
        self.server.connect(database::NAME).await?.batch_execute("CHECKPOINT").await?;
        nix::unistd::sync();
        let machine = MachineDir::new(self.dir.path(), store, &self.server)?;
        let stats = task::run(machine.command(svc, "svc-restore"), TIMEOUT)?;
        ensure!(machine.is_gate_open(), "the restore gate is closed");
        Ok(stats)
    }

    fn restore_with_shell(&self, s5cmd: &S5cmd, store: &BenchStore, snapshot: &Snapshot) -> Result<RunStats> {
        let script = r#"set -e; "$S5CMD" cp "$0" "$1"; "$BIN/createdb" "$DATABASE"; "$BIN/pg_restore" -j2 -d "$DATABASE" "$1""#;
        let mut command = Command::new("bash");
        command.args(["-c", script]).env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command
            .arg(format!("s3://{BUCKET}/{}", store.object_key(snapshot)))
            .arg(self.dir.path().join("baseline.dump"));
        command.env("BIN", self.server.binaries().dir()).env("DATABASE", database::NAME);
        command.envs(s5cmd.env(&store.server));
        database::set_connection_env(&mut command, &self.server);
        task::run(command, TIMEOUT)
    }
}
