//! Checks that the owner's files survive the loss of the machine: a git repository, a SQLite database that a program is
//! writing to, and random data of a given size.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kit::child;
use kit::scenario::{MachineRecord, Stack};
use sha2::{Digest, Sha256};

use super::faults::{LONG_TIMEOUT, SHORT_TIMEOUT};

/// Size of each part, a file with random data.
const PART_BYTES: u64 = 4 << 20;
/// Minimum throughput: an emulated processor writes, hashes and saves random bytes at only a few MB/s.
const MIN_BYTES_PER_SECOND: u64 = 1 << 20;
/// A script that creates the directories for the files and unpacks the repository.
const UNPACK: &str = "set -e
for dir in /home/svc/home/projects /home/svc/home/projects/lab /home/svc/home/projects/lab/parts; do
  install -d -o svc -g svc $dir
done
tar -C /home/svc/home/projects/lab --no-same-owner -xf /tmp/repository.tar
chown -R svc:svc /home/svc/home/projects/lab";
/// A script that starts a program as the owner's user. The program writes to a database up to a hundred times a second
/// until the machine is lost.
const START_WRITER: &str = r#"
cat >/tmp/writer.py <<'PYTHON'
import os, sqlite3, time
db = sqlite3.connect("/home/svc/home/projects/lab/notes.db", isolation_level=None)
db.execute("pragma journal_mode = wal")
db.execute("create table if not exists notes (id integer primary key, body blob)")
while True:
    db.execute("insert into notes (body) values (?)", (os.urandom(700),))
    time.sleep(0.01)
PYTHON
systemd-run --quiet --unit=lab-writer -p User=svc -p Nice=10 python3 /tmp/writer.py
for _ in $(seq 100); do [ -s /home/svc/home/projects/lab/notes.db-wal ] && exit; sleep 0.3; done
systemctl status lab-writer; exit 1
"#;
/// A script that prints the result of the integrity check and the number of rows.
const CHECK_NOTES: &str = r#"python3 - <<'PYTHON'
import sqlite3
db = sqlite3.connect("/home/svc/home/projects/lab/notes.db", timeout=60)
print(db.execute("pragma integrity_check").fetchone()[0], db.execute("select count(*) from notes").fetchone()[0])
PYTHON
"#;
const HASH_PARTS: &str = "cd /home/svc/home/projects/lab/parts && sha256sum part-* | sha256sum";

/// The files that were saved before the machine was lost.
#[derive(Debug, Clone)]
pub(super) struct SavedFiles {
    /// The repository's last commit.
    commit: String,
    /// The number of rows that were committed before the save began.
    rows: u64,
    parts_hash: String,
    mib: u64,
}

/// Returns the maximum time for a machine to process files of this size.
pub(super) fn processing_timeout(mib: u64) -> Duration {
    Duration::from_secs((mib << 20) / MIN_BYTES_PER_SECOND)
}

/// Returns the timeout for a command that processes all parts.
fn parts_timeout(mib: u64) -> Duration {
    LONG_TIMEOUT + processing_timeout(mib)
}

/// Creates the files on a machine, and waits until they are saved.
pub(super) async fn save(stack: &Stack, machine: &MachineRecord, mib: u64) -> Result<(SavedFiles, String)> {
    let vm = stack.provider.machine(&machine.server)?;
    let timeout = parts_timeout(mib);
    let (archive, commit) = create_repository(&stack.dir)?;
    vm.upload(&archive, "/tmp/repository.tar", SHORT_TIMEOUT).await?;
    vm.run(UNPACK, SHORT_TIMEOUT).await?.into_stdout().context("cannot unpack the repository")?;
    let create = format!(
        "set -e; cd /home/svc/home/projects/lab/parts; \
         head -c {mib}M /dev/urandom | split -b {PART_BYTES} -a 5 -d - part-; chown -R svc:svc ."
    );
    vm.run(&create, timeout).await?.into_stdout().context("cannot create the parts")?;
    let parts_hash = vm.run(HASH_PARTS, timeout).await?.into_stdout()?;
    vm.run(START_WRITER, SHORT_TIMEOUT).await?.into_stdout().context("cannot start the writer")?;
    let rows = parse_row_count(&vm.run(CHECK_NOTES, SHORT_TIMEOUT).await?.into_stdout()?)?;
    let began = Instant::now();
    loop {
        match vm.run("/opt/svc/bin/svc-sync-agent now", timeout).await?.into_stdout() {
            Ok(_) => break,
            // The first save of a large amount of data can exceed the command's timeout.
            Err(error) if began.elapsed() >= timeout => return Err(error.context("the files were not saved")),
            Err(_) => tokio::time::sleep(Duration::from_secs(5)).await,
        }
    }
    let seconds = began.elapsed().as_secs();
    let detail = format!(
        "a git repository, a database with {rows} rows and its writer, {mib} MiB; saved in {seconds} s"
    );
    Ok((SavedFiles { commit, rows, parts_hash, mib }, detail))
}

/// Checks that the files were restored on the new machine.
pub(super) async fn check_restored(
    stack: &Stack,
    machine: &MachineRecord,
    saved: &SavedFiles,
) -> Result<((), String)> {
    let vm = stack.provider.machine(&machine.server)?;
    let parts_hash = vm.run(HASH_PARTS, parts_timeout(saved.mib)).await?.into_stdout()?;
    ensure!(parts_hash == saved.parts_hash, "the parts' hash was {}, now {parts_hash}", saved.parts_hash);
    let rows = parse_row_count(&vm.run(CHECK_NOTES, SHORT_TIMEOUT).await?.into_stdout()?)?;
    ensure!(rows >= saved.rows, "the database had {} rows when the save began, now {rows}", saved.rows);
    let archive = "tar -C /home/svc/home/projects/lab -c repository | base64 -w 0";
    let archive = vm.run(archive, SHORT_TIMEOUT).await?.into_stdout()?;
    check_repository(&stack.dir, &archive, &saved.commit)?;
    let owners =
        "cd /home/svc/home/projects/lab && stat -c %U:%G notes.db parts/part-00000 repository/.git/HEAD";
    let owners = vm.run(owners, SHORT_TIMEOUT).await?.into_stdout()?;
    ensure!(owners.lines().all(|line| line == "svc:svc"), "the owners are {owners}");
    let detail = format!(
        "git finds no error; the database is intact, {rows} rows (at least {}); {} MiB have the same hash",
        saved.rows, saved.mib
    );
    Ok(((), detail))
}

/// Returns the number of rows from the output of [`CHECK_NOTES`], such as `ok 123`. Fails if the database is corrupt.
fn parse_row_count(output: &str) -> Result<u64> {
    match output.trim().split_once(' ') {
        Some(("ok", count)) => Ok(count.parse()?),
        _ => bail!("the database is corrupt: {output}"),
    }
}

fn run_git(dir: &Path, args: &[&str]) -> Result<String> {
    let mut command = Command::new("git");
    command.current_dir(dir).args(["-c", "user.name=Ada", "-c", "user.email=ada@example.com"]).args(args);
    child::run(command, SHORT_TIMEOUT)
}

fn run_shell(dir: &Path, script: &str) -> Result<()> {
    let mut command = Command::new("sh");
    command.current_dir(dir).args(["-c", script]);
    child::run(command, SHORT_TIMEOUT).map(drop)
}

/// Creates a git repository with several commits, and an archive of it. Returns the archive and the last commit.
fn create_repository(dir: &Path) -> Result<(PathBuf, String)> {
    let repository = dir.join("repository");
    fs::create_dir_all(&repository)?;
    run_git(&repository, &["init", "--quiet"])?;
    for nth in 0..20_u8 {
        let text: String = (0..200_u8).map(|line| hex::encode(Sha256::digest([nth, line])) + "\n").collect();
        fs::write(repository.join(format!("file-{}", nth % 7)), text)?;
        run_git(&repository, &["add", "."])?;
        run_git(&repository, &["commit", "--quiet", "-m", &format!("Change {nth}")])?;
    }
    run_git(&repository, &["gc", "--quiet"])?;
    let commit = run_git(&repository, &["rev-parse", "HEAD"])?;
    run_shell(dir, "tar -cf repository.tar repository")?;
    Ok((dir.join("repository.tar"), commit))
}

/// Checks that the base64 archive contains an intact repository with this last commit and no uncommitted changes.
fn check_repository(dir: &Path, archive: &str, commit: &str) -> Result<()> {
    let unpacked = dir.join("restored-repository");
    fs::create_dir_all(&unpacked)?;
    fs::write(unpacked.join("archive"), archive)?;
    run_shell(&unpacked, "base64 -d archive | tar --no-same-owner -x")?;
    let repository = unpacked.join("repository");
    run_git(&repository, &["fsck", "--strict", "--full"]).context("the repository is corrupt")?;
    let head = run_git(&repository, &["rev-parse", "HEAD"])?;
    ensure!(head == commit, "the last commit was {commit}, now {head}");
    let changed = run_git(&repository, &["status", "--porcelain"])?;
    ensure!(changed.is_empty(), "these files have changed: {changed}");
    Ok(())
}
