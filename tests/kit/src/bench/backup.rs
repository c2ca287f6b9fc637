//! A backup: `svc-db-backup` dumps, hashes, reads the dump through, uploads it and moves the pointer; beside it a dump
//! that only becomes a file, and one that goes to the store with no look at it.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::database;
use super::figures::{OURS, Spec, Tally, Target};
use super::peers::s5cmd::S5cmd;
use super::task::{self, Ran};
use super::vault::{BUCKET, Machine, Vault};
use super::{Options, said};
use crate::pg::PgServer;

const WALL: &str = "one backup";
const CPU: &str = "processor time, without the servers'";
const SERVED: &str = "processor time of the store";
const DISK: &str = "written to disk meanwhile";
const LIMIT: &str = "pg_dump to a file";
const PIPE: &str = "pg_dump | s5cmd pipe";

const MEMORY: &str = "most memory, database of 1.9 GB";
/// Databases of other sizes, by scale; memory does not grow with them.
const OTHERS: [(&str, u32); 3] = [
    ("most memory, database of 0.1 GB", 5),
    ("most memory, database of 1 GB", 53),
    ("most memory, database of 4 GB", 210),
];

pub const ROWS: [Spec; 10] = [
    Spec { name: WALL, unit: "s", against: Some(LIMIT), target: Target::RatioAtMost(1.25) },
    Spec { name: WALL, unit: "s", against: Some(PIPE), target: Target::RatioAtMost(1.1) },
    Spec { name: CPU, unit: "s", against: Some(LIMIT), target: Target::None },
    Spec { name: CPU, unit: "s", against: Some(PIPE), target: Target::None },
    Spec { name: SERVED, unit: "s", against: Some(PIPE), target: Target::None },
    Spec { name: OTHERS[0].0, unit: "MiB", against: None, target: Target::AtMost(32.0) },
    Spec { name: OTHERS[1].0, unit: "MiB", against: None, target: Target::AtMost(32.0) },
    Spec { name: MEMORY, unit: "MiB", against: None, target: Target::AtMost(32.0) },
    Spec { name: OTHERS[2].0, unit: "MiB", against: None, target: Target::AtMost(32.0) },
    // The records of the run, and no dump.
    Spec { name: DISK, unit: "KiB", against: None, target: Target::AtMost(512.0) },
];

/// The database that is kept, the largest other one, their logs, the dumps of some rounds, and air.
const ROOM: u64 = 14 << 30;
const DEADLINE: Duration = Duration::from_secs(1800);
/// What a machine's records of one run may add to its directory.
const RECORDS: u64 = 256 << 10;
/// Of two dumps of the same rows; they differ by the time in their heads.
const SLACK: u64 = 64 << 10;

pub async fn measure(options: &Options) -> Result<Tally> {
    let dir = database::place(&options.out, ROOM)?;
    let s5cmd = S5cmd::fetch()?;
    let vault = Vault::open(dir.path())?;
    let server = database::kept(&options.out).await?;
    let stage = Stage::set(dir.path(), options, &vault, &server, database::SCALE)?;
    let mut tally = Tally::default();
    // The first reads of the database are not the store's, the disk's, or anybody's of the three.
    let size = stage.to_file()?.1;
    println!(
        "  {} MB of database, {} MB of dump",
        database::bytes(&server).await? / 1_000_000,
        size / 1_000_000
    );
    for round in 0..options.rounds {
        said(round, options.rounds);
        // Whoever comes first in a round finds the caches as the last one left them: they take turns.
        for turn in 0..3 {
            // What the last one left to be written is written before the next one begins.
            nix::unistd::sync();
            let (name, (ran, dumped)) = match (turn + round) % 3 {
                0 => (OURS, stage.ours()?),
                1 => (LIMIT, stage.to_file()?),
                _ => (PIPE, stage.to_store(&s5cmd)?),
            };
            ensure!(dumped.abs_diff(size) <= SLACK, "{name} dumped {dumped} bytes, another time {size}");
            tally.add(WALL, name, ran.wall.as_secs_f64());
            tally.add(CPU, name, ran.cpu.as_secs_f64());
            tally.add(SERVED, name, ran.served.as_secs_f64());
            if name == OURS {
                tally.add(MEMORY, OURS, ran.most_mib);
                let written = ran.written.context("the kernel does not count what a process writes")?;
                tally.add(DISK, OURS, written as f64 / 1024.0);
            }
        }
    }
    drop(server);
    for (name, scale) in OTHERS {
        println!("  {name}");
        let dir = tempfile::tempdir_in(dir.path())?;
        let server = database::made(dir.path(), scale).await?;
        let (ran, _) = Stage::set(dir.path(), options, &vault, &server, scale)?.ours()?;
        tally.add(name, OURS, ran.most_mib);
        let (database, most) = (database::bytes(&server).await?, ran.most_mib);
        println!("    {} MB of database: {most:.1} MiB in {:.1?}", database / 1_000_000, ran.wall);
    }
    Ok(tally)
}

/// One database, and who backs it up. A run gives what it took and the size of its dump, which is then forgotten.
struct Stage<'a> {
    dir: &'a Path,
    svc: &'a Path,
    vault: &'a Vault,
    server: &'a PgServer,
    scale: u32,
    machine: Machine,
}

impl<'a> Stage<'a> {
    fn set(
        dir: &'a Path,
        options: &'a Options,
        vault: &'a Vault,
        server: &'a PgServer,
        scale: u32,
    ) -> Result<Self> {
        let machine = Machine::new(dir, vault, server)?;
        machine.open_gate()?;
        Ok(Self { dir, svc: &options.svc, vault, server, scale, machine })
    }

    fn ours(&self) -> Result<(Ran, u64)> {
        let (moves, before) = (self.vault.moves()?, self.machine.bytes()?);
        let ran = task::run(self.machine.command(self.svc, "svc-db-backup"), DEADLINE)?;
        let snapshot = self.vault.snapshot(moves, self.scale)?;
        let left = self.machine.bytes()?.saturating_sub(before);
        ensure!(left <= RECORDS, "{left} bytes were left on the machine");
        self.vault.forget(&self.vault.key(&snapshot));
        Ok((ran, snapshot.size_bytes))
    }

    fn to_file(&self) -> Result<(Ran, u64)> {
        let file = self.dir.join("limit.dump");
        // By the shell: `--file` would wait for the disk.
        let mut command = self.shell(r#""$PG_DUMP" -Fc -Z gzip:1 "$DATABASE" >"$0""#);
        command.arg(&file);
        let ran = task::run(command, DEADLINE)?;
        let size = fs::metadata(&file)?.len();
        fs::remove_file(&file)?;
        Ok((ran, size))
    }

    fn to_store(&self, s5cmd: &S5cmd) -> Result<(Ran, u64)> {
        const KEY: &str = "peer/database.dump";
        let script = r#"set -o pipefail; "$PG_DUMP" -Fc -Z gzip:1 "$DATABASE" | "$S5CMD" pipe "$0""#;
        let mut command = self.shell(script);
        command.arg(format!("s3://{BUCKET}/{KEY}")).envs(s5cmd.env(&self.vault.store));
        let ran = task::run(command, DEADLINE)?;
        let size = self.vault.size(KEY).context("s5cmd left nothing at the store")?;
        self.vault.forget(KEY);
        Ok((ran, size))
    }

    fn shell(&self, script: &str) -> Command {
        let mut command = Command::new("bash");
        command.args(["-c", script]).env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("PG_DUMP", self.server.binaries().dir().join("pg_dump")).env("DATABASE", database::NAME);
        database::connected(&mut command, self.server);
        command
    }
}
