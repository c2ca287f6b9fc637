//! Backup benchmark: `svc-db-backup` dumps the database, hashes, verifies and uploads the dump, and moves the pointer.
//! It is compared with a dump to a file, and with an upload without verification.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::bench_store::{BUCKET, BenchStore, MachineDir};
use super::database;
use super::figures::{PRODUCT, Spec, Tally, Target};
use super::peers::s5cmd::S5cmd;
use super::task::{self, RunStats};
use super::{Options, print_round};
use kit::pg::PgServer;

const WALL_TIME: &str = "one backup";
const CPU: &str = "CPU time, excluding the servers";
const STORE_CPU: &str = "CPU time of the store";
const DISK_WRITES: &str = "written to disk";
const DUMP_TO_FILE: &str = "pg_dump to a file";
const DUMP_TO_STORE: &str = "pg_dump | s5cmd pipe";

const MEMORY: &str = "peak memory, 1.9 GB database";
/// The names of the memory figures for other database sizes, with each database's scale. Memory use must not grow with
/// the database.
const OTHER_SIZES: [(&str, u32); 3] = [
    ("peak memory, 0.1 GB database", 5),
    ("peak memory, 1 GB database", 53),
    ("peak memory, 4 GB database", 210),
];

pub const ROWS: [Spec; 10] = [
    Spec { name: WALL_TIME, unit: "s", against: Some(DUMP_TO_FILE), target: Target::RatioAtMost(1.25) },
    Spec { name: WALL_TIME, unit: "s", against: Some(DUMP_TO_STORE), target: Target::RatioAtMost(1.1) },
    Spec { name: CPU, unit: "s", against: Some(DUMP_TO_FILE), target: Target::None },
    Spec { name: CPU, unit: "s", against: Some(DUMP_TO_STORE), target: Target::None },
    Spec { name: STORE_CPU, unit: "s", against: Some(DUMP_TO_STORE), target: Target::None },
    Spec { name: OTHER_SIZES[0].0, unit: "MiB", against: None, target: Target::AtMost(32.0) },
    Spec { name: OTHER_SIZES[1].0, unit: "MiB", against: None, target: Target::AtMost(32.0) },
    Spec { name: MEMORY, unit: "MiB", against: None, target: Target::AtMost(32.0) },
    Spec { name: OTHER_SIZES[2].0, unit: "MiB", against: None, target: Target::AtMost(32.0) },
    // A run writes only its records to disk, never the dump.
    Spec { name: DISK_WRITES, unit: "KiB", against: None, target: Target::AtMost(512.0) },
];

/// Space for the cached database, the largest other database, their WAL, one dump, and a margin.
const MIN_FREE_BYTES: u64 = 14 << 30;
const TIMEOUT: Duration = Duration::from_secs(1800);
/// Maximum growth of the machine's directory in one run, for its records.
const MAX_RECORD_BYTES: u64 = 256 << 10;
/// Maximum size difference between two dumps of the same rows.
const MAX_SIZE_DIFFERENCE_BYTES: u64 = 64 << 10;

pub async fn measure(options: &Options) -> Result<Tally> {
    let dir = database::create_run_dir(&options.out, MIN_FREE_BYTES)?;
    let s5cmd = S5cmd::fetch()?;
    let store = BenchStore::start(dir.path())?;
    let server = database::open_cached(&options.out).await?;
    let testbed = Testbed::prepare(dir.path(), options, &store, &server, database::SCALE)?;
    let mut tally = Tally::default();
    // Warms up the caches: the first reads of the database would distort the first measurement.
    let expected_bytes = testbed.dump_to_file()?.1;
    println!(
        "  database: {} MB, dump: {} MB",
        database::size_bytes(&server).await? / 1_000_000,
        expected_bytes / 1_000_000
    );
    for round in 0..options.rounds {
        print_round(round, options.rounds);
        // The order rotates, because each side starts with the caches left by the previous one.
        for turn in 0..3 {
            // Flush pending writes from the previous run.
            nix::unistd::sync();
            let (name, (stats, dump_bytes)) = match (turn + round) % 3 {
                0 => (PRODUCT, testbed.run_svc_backup()?),
                1 => (DUMP_TO_FILE, testbed.dump_to_file()?),
                _ => (DUMP_TO_STORE, testbed.dump_to_store(&s5cmd)?),
            };
            ensure!(
                dump_bytes.abs_diff(expected_bytes) <= MAX_SIZE_DIFFERENCE_BYTES,
                "{name} dumped {dump_bytes} bytes, expected about {expected_bytes}"
            );
            tally.add(WALL_TIME, name, stats.wall.as_secs_f64());
            tally.add(CPU, name, stats.cpu.as_secs_f64());
            tally.add(STORE_CPU, name, stats.store_cpu.as_secs_f64());
            if name == PRODUCT {
                tally.add(MEMORY, PRODUCT, stats.peak_mib);
                let written_bytes = stats.written_bytes.context("the kernel does not count written bytes")?;
                tally.add(DISK_WRITES, PRODUCT, written_bytes as f64 / 1024.0);
            }
        }
    }
    drop(server);
    for (name, scale) in OTHER_SIZES {
        println!("  {name}");
        let dir = tempfile::tempdir_in(dir.path())?;
        // Each database has its own store: in a shared store, a second machine with the same epoch would be fenced.
        let store = BenchStore::start(dir.path())?;
        let server = database::create(dir.path(), scale).await?;
        let (stats, _) = Testbed::prepare(dir.path(), options, &store, &server, scale)?.run_svc_backup()?;
        tally.add(name, PRODUCT, stats.peak_mib);
        let (database_bytes, peak_mib) = (database::size_bytes(&server).await?, stats.peak_mib);
        println!(
            "    {} MB database: peak of {peak_mib:.1} MiB in {:.1?}",
            database_bytes / 1_000_000,
            stats.wall
        );
    }
    Ok(tally)
}

/// One database and the machine that backs it up. A run deletes its dump, and returns its statistics and the dump's
/// size.
struct Testbed<'a> {
    dir: &'a Path,
    svc: &'a Path,
    store: &'a BenchStore,
    server: &'a PgServer,
    scale: u32,
    machine: MachineDir,
}

impl<'a> Testbed<'a> {
    fn prepare(
        dir: &'a Path,
        options: &'a Options,
        store: &'a BenchStore,
        server: &'a PgServer,
        scale: u32,
    ) -> Result<Self> {
        let machine = MachineDir::new(dir, store, server)?;
        machine.open_gate()?;
        Ok(Self { dir, svc: &options.svc, store, server, scale, machine })
    }

    fn run_svc_backup(&self) -> Result<(RunStats, u64)> {
        let (pointer_seq, before) = (self.store.pointer_seq()?, self.machine.disk_bytes()?);
        let stats = task::run(self.machine.command(self.svc, "svc-db-backup"), TIMEOUT)?;
        let snapshot = self.store.verify_snapshot(pointer_seq, self.scale)?;
        let leftover_bytes = self.machine.disk_bytes()?.saturating_sub(before);
        ensure!(leftover_bytes <= MAX_RECORD_BYTES, "the backup left {leftover_bytes} bytes on the machine");
        self.store.purge(&self.store.object_key(&snapshot));
        Ok((stats, snapshot.size_bytes))
    }

    fn dump_to_file(&self) -> Result<(RunStats, u64)> {
        let file = self.dir.join("baseline.dump");
        // Redirected by the shell, because `--file` would fsync.
        let mut command = self.shell_command(r#""$PG_DUMP" -Fc -Z gzip:1 "$DATABASE" >"$0""#);
        command.arg(&file);
        let stats = task::run(command, TIMEOUT)?;
        let dump_bytes = fs::metadata(&file)?.len();
        fs::remove_file(&file)?;
        Ok((stats, dump_bytes))
    }

    fn dump_to_store(&self, s5cmd: &S5cmd) -> Result<(RunStats, u64)> {
        const KEY: &str = "peer/database.dump";
        let script = r#"set -o pipefail; "$PG_DUMP" -Fc -Z gzip:1 "$DATABASE" | "$S5CMD" pipe "$0""#;
        let mut command = self.shell_command(script);
        command.arg(format!("s3://{BUCKET}/{KEY}")).envs(s5cmd.env(&self.store.server));
        let stats = task::run(command, TIMEOUT)?;
        let dump_bytes = self.store.object_size(KEY).context("s5cmd stored no object")?;
        self.store.purge(KEY);
        Ok((stats, dump_bytes))
    }

    fn shell_command(&self, script: &str) -> Command {
        let mut command = Command::new("bash");
        command.args(["-c", script]).env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("PG_DUMP", self.server.binaries().dir().join("pg_dump")).env("DATABASE", database::NAME);
        database::set_connection_env(&mut command, self.server);
        command
    }
}
