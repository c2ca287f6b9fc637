//! File backup benchmark: `svc-sync-agent files` saves a home directory to the store, and `restore-home` restores it.
//! It is compared with stock restic, which writes the same format, and with rclone, which only copies. Each run uses a
//! new store.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use jiff::Timestamp;
use kit::child::OwnedChild;
use kit::restic::Restic;
use serde_json::Value;

use super::bench_store::{BUCKET, BenchStore};
use super::database::create_run_dir;
use super::figures::{PRODUCT, Spec, Tally, Target};
use super::peers::rclone::Rclone;
use super::process;
use super::task;
use super::{Options, print_round};

/// The measured service's unit: the environment that it sets is part of the measurement.
const UNIT: &str = include_str!("../../../systemd/system/svc-files.service");

const FIRST_SAVE: &str = "first save";
const FIRST_CPU: &str = "CPU time of the first save";
const FIRST_MEMORY: &str = "peak memory of the first save";
const STORED_BYTES: &str = "stored bytes";
const OBJECTS_WRITTEN: &str = "objects written";
const UNCHANGED_SAVE: &str = "save without changes";
const FULL_COMPARISON: &str = "comparison of the whole home directory";
const CHANGE_DELAY: &str = "time until a changed file is saved";
const RESTORE: &str = "restore";
const RESTORE_CPU: &str = "CPU time of the restore";
const RESTORE_MEMORY: &str = "peak memory of the restore";
const WATCHER_MEMORY: &str = "memory of the watcher";
const SERVICE_MEMORY: &str = "memory of the service after the first save";
const WATCHER_IDLE_CPU: &str = "CPU of the idle watcher";
const SERVICE_IDLE_CPU: &str = "CPU of the idle service";
const RESTIC: &str = "restic 0.14";
pub const RCLONE: &str = "rclone 1.75";

pub const ROWS: [Spec; 18] = [
    Spec { name: FIRST_SAVE, unit: "s", against: Some(RESTIC), target: Target::RatioAtMost(1.2) },
    Spec { name: FIRST_SAVE, unit: "s", against: Some(RCLONE), target: Target::None },
    Spec { name: FIRST_CPU, unit: "s", against: Some(RESTIC), target: Target::None },
    Spec { name: FIRST_MEMORY, unit: "MiB", against: Some(RESTIC), target: Target::None },
    Spec { name: STORED_BYTES, unit: "MB", against: Some(RESTIC), target: Target::None },
    Spec { name: OBJECTS_WRITTEN, unit: "objects", against: Some(RESTIC), target: Target::None },
    Spec { name: UNCHANGED_SAVE, unit: "s", against: Some(RESTIC), target: Target::RatioAtMost(0.1) },
    Spec { name: UNCHANGED_SAVE, unit: "s", against: Some(RCLONE), target: Target::None },
    Spec { name: FULL_COMPARISON, unit: "s", against: Some(RESTIC), target: Target::None },
    Spec { name: CHANGE_DELAY, unit: "s", against: None, target: Target::AtMost(2.0) },
    Spec { name: RESTORE, unit: "s", against: Some(RESTIC), target: Target::RatioAtMost(1.0) },
    Spec { name: RESTORE, unit: "s", against: Some(RCLONE), target: Target::RatioAtMost(1.0) },
    Spec { name: RESTORE_CPU, unit: "s", against: Some(RESTIC), target: Target::None },
    Spec { name: RESTORE_MEMORY, unit: "MiB", against: Some(RESTIC), target: Target::None },
    Spec { name: WATCHER_MEMORY, unit: "MiB", against: None, target: Target::None },
    Spec { name: SERVICE_MEMORY, unit: "MiB", against: None, target: Target::AtMost(128.0) },
    Spec { name: WATCHER_IDLE_CPU, unit: "ms/s", against: None, target: Target::AtMost(1.0) },
    Spec { name: SERVICE_IDLE_CPU, unit: "ms/s", against: None, target: Target::AtMost(5.0) },
];

const TIMEOUT: Duration = Duration::from_secs(3600);
const CHANGED_FILES_PER_ROUND: u32 = 5;
/// Longer than the service's minimum pause after a save, which is 15 s.
const CHANGE_INTERVAL: Duration = Duration::from_secs(17);
/// Interval over which idle CPU time is measured. The kernel counts CPU time in steps of 10 ms.
const IDLE_INTERVAL: Duration = Duration::from_secs(20);
const USER: &str = "user_bench";
const FILES_PER_DIRECTORY: u32 = 50;

pub async fn measure(options: &Options) -> Result<Tally> {
    let bytes = u64::from(options.files) * u64::from(options.file_bytes);
    let dir = create_run_dir(&options.out, bytes * 5)?;
    let rclone = if options.without_rclone { None } else { Some(Rclone::fetch()?) };
    let source = dir.path().join("source");
    println!("  {} files of {} bytes on average", options.files, options.file_bytes);
    create_tree(&source, options.files, options.file_bytes)?;
    let mut tally = Tally::default();
    for round in 0..options.rounds {
        print_round(round, options.rounds);
        let round_dir = tempfile::Builder::new().prefix("round-").tempdir_in(dir.path())?;
        let mut sides = [PRODUCT, RESTIC, RCLONE];
        sides.rotate_left(round as usize % 3);
        for side in sides {
            let side_dir = tempfile::Builder::new().prefix("side-").tempdir_in(round_dir.path())?;
            let store = BenchStore::start(side_dir.path())?;
            nix::unistd::sync();
            match side {
                PRODUCT => measure_product(options, &source, side_dir.path(), &store, &mut tally)?,
                RESTIC => measure_restic(&source, side_dir.path(), &store, &mut tally)?,
                _ => {
                    if let Some(rclone) = &rclone {
                        measure_rclone(rclone, &source, side_dir.path(), &store, &mut tally)?;
                    }
                }
            }
        }
    }
    Ok(tally)
}

/// Creates files whose sizes differ, half of them compressible, below `home/projects`.
fn create_tree(home: &Path, files: u32, average_bytes: u32) -> Result<()> {
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = || {
        // xorshift64*: the files only need to differ.
        random ^= random >> 12;
        random ^= random << 25;
        random ^= random >> 27;
        random.wrapping_mul(0x2545_f491_4f6c_dd1d)
    };
    let mut content = Vec::new();
    for number in 0..files {
        let directory =
            home.join(format!("home/projects/{:03}/{:04}", number / 5000, number / FILES_PER_DIRECTORY));
        if number % FILES_PER_DIRECTORY == 0 {
            fs::create_dir_all(&directory)?;
        }
        // From a tenth to ten times the median, which is 0.465 times the average.
        let exponent = (next() % 2001) as f64 / 1000.0 - 1.0;
        let size = (f64::from(average_bytes) * 0.465 * 10_f64.powf(exponent)) as usize;
        content.clear();
        while content.len() < size {
            let word = next();
            if number % 2 == 0 {
                content.extend_from_slice(&word.to_le_bytes());
            } else {
                content
                    .extend_from_slice(format!("let value_{} = {};\n", word % 97, word % 10_007).as_bytes());
            }
        }
        content.truncate(size);
        File::create(directory.join(format!("file-{number}")))?.write_all(&content)?;
    }
    Ok(())
}

/// A machine's directory. The platform is unreachable, so the machine uses its stored key.
struct Machine {
    root: PathBuf,
    env: Vec<(String, String)>,
}

impl Machine {
    fn new(dir: &Path, name: &str, epoch: u32, store: &BenchStore) -> Result<Self> {
        let root = dir.join(name);
        for sub in
            ["var/lib/svc/files", "var/lib/svc/requests", "opt/svc/env", "run/svc/hooks", "tmp", "home"]
        {
            fs::create_dir_all(root.join(sub))?;
        }
        fs::write(root.join("var/lib/svc/files/key"), BASE64_URL_SAFE_NO_PAD.encode([7; 32]))?;
        let settings = [
            ("PATH", std::env::var("PATH")?),
            ("SVC_ROOT", root.display().to_string()),
            ("SVC_MACHINE_ID", uuid::Uuid::now_v7().to_string()),
            ("SVC_USER_ID", USER.to_owned()),
            ("SVC_HANDLE", "ada".to_owned()),
            ("SVC_SLOT", "primary".to_owned()),
            ("SVC_EPOCH", epoch.to_string()),
            ("PLATFORM_INTERNAL_URL", "http://127.0.0.1:9".to_owned()),
            ("UPGRADE_TOKEN", "upgrade-token-of-the-bench".to_owned()),
            ("TMPDIR", root.join("tmp").display().to_string()),
        ];
        let mut env = store.server.env(BUCKET);
        env.extend(settings.map(|(name, value)| (name.to_owned(), value)));
        Ok(Self { root, env })
    }

    fn command(&self, svc: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(svc);
        command.args(arguments).env_clear().envs(self.env.iter().map(|(name, value)| (name, value)));
        if arguments[0] == "svc-sync-agent" {
            command.envs(unit_environment());
        }
        command
    }

    fn spawn(&self, svc: &Path, arguments: &[&str]) -> Result<OwnedChild> {
        let log = File::options().create(true).append(true).open(self.root.join("log"))?;
        let mut command = self.command(svc, arguments);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Ok(OwnedChild::spawn(&mut command)?)
    }

    fn home(&self) -> PathBuf {
        self.root.join("home/svc")
    }

    fn saved_until(&self) -> Option<Timestamp> {
        let text = fs::read_to_string(self.root.join("var/lib/svc/files/status.json")).ok()?;
        serde_json::from_str::<Value>(&text).ok()?["savedUntil"].as_str()?.parse().ok()
    }

    /// Waits until everything written before `time` is saved.
    fn wait_until_saved(&self, time: Timestamp) -> Result<()> {
        let started = Instant::now();
        while self.saved_until().is_none_or(|saved| saved <= time) {
            if started.elapsed() > TIMEOUT {
                anyhow::bail!("not saved: {}", fs::read_to_string(self.root.join("log"))?);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

fn measure_product(
    options: &Options,
    source: &Path,
    dir: &Path,
    store: &BenchStore,
    tally: &mut Tally,
) -> Result<()> {
    let svc = options.svc.as_path();
    let machine = Machine::new(dir, "machine", 1, store)?;
    // The source itself is moved to the machine and back, so all rounds save the same files, apart from the changes.
    fs::rename(source, machine.home())?;
    let _move_back = MoveBack { from: machine.home(), to: source.to_owned() };
    for sub in ["home/system/logs", "home/apps"] {
        fs::create_dir_all(machine.home().join(sub))?;
    }
    let watcher = machine.spawn(svc, &["svc-watch"])?;
    while !machine.root.join("run/svc/watch/changes.sock").exists() {
        std::thread::sleep(Duration::from_millis(20));
    }
    tally.add(WATCHER_MEMORY, PRODUCT, process::memory_mib(watcher.pid())?);
    let (started, before) = (Instant::now(), Timestamp::now());
    let service = machine.spawn(svc, &["svc-sync-agent", "files"])?;
    machine.wait_until_saved(before)?;
    tally.add(FIRST_SAVE, PRODUCT, started.elapsed().as_secs_f64());
    tally.add(FIRST_CPU, PRODUCT, process::cpu_time(service.pid())?.as_secs_f64());
    tally.add(FIRST_MEMORY, PRODUCT, process::peak_memory_mib(service.pid())?);
    tally.add(SERVICE_MEMORY, PRODUCT, process::memory_mib(service.pid())?);
    add_store_usage(store, PRODUCT, tally);

    // The watcher starts to listen before its first scan ends, so only the second save is measured: by then, the
    // watcher reports no changes.
    machine.command(svc, &["svc-sync-agent", "now"]).output()?;
    let unchanged = task::run(machine.command(svc, &["svc-sync-agent", "now"]), TIMEOUT)?;
    tally.add(UNCHANGED_SAVE, PRODUCT, unchanged.wall.as_secs_f64());
    let cpu_times = || anyhow::Ok((process::cpu_time(watcher.pid())?, process::cpu_time(service.pid())?));
    let before = cpu_times()?;
    std::thread::sleep(IDLE_INTERVAL);
    let after = cpu_times()?;
    let millis_per_second = |used: Duration| used.as_secs_f64() * 1e3 / IDLE_INTERVAL.as_secs_f64();
    tally.add(WATCHER_IDLE_CPU, PRODUCT, millis_per_second(after.0 - before.0));
    tally.add(SERVICE_IDLE_CPU, PRODUCT, millis_per_second(after.1 - before.1));
    for number in 0..CHANGED_FILES_PER_ROUND {
        std::thread::sleep(CHANGE_INTERVAL);
        let path = machine.home().join(format!("home/projects/000/0000/file-{number}"));
        let before = Timestamp::now();
        let started = Instant::now();
        fs::write(path, format!("changed at {before}"))?;
        machine.wait_until_saved(Timestamp::now())?;
        tally.add(CHANGE_DELAY, PRODUCT, started.elapsed().as_secs_f64());
    }
    drop(watcher);
    // Without the watcher, the whole home directory is compared with the last snapshot.
    let whole = task::run(machine.command(svc, &["svc-sync-agent", "now"]), TIMEOUT)?;
    tally.add(FULL_COMPARISON, PRODUCT, whole.wall.as_secs_f64());
    drop(service);

    let next = Machine::new(dir, "next", 2, store)?;
    for sub in ["home/svc/home/system", "home/svc/home/apps"] {
        fs::create_dir_all(next.root.join(sub))?;
    }
    let restored = task::run(next.command(svc, &["svc-sync-agent", "restore-home"]), TIMEOUT)?;
    check_restored(&next.home(), &machine.home())?;
    tally.add(RESTORE, PRODUCT, restored.wall.as_secs_f64());
    tally.add(RESTORE_CPU, PRODUCT, restored.cpu.as_secs_f64());
    tally.add(RESTORE_MEMORY, PRODUCT, restored.peak_mib);
    Ok(())
}

/// Moves a directory back when it is dropped.
struct MoveBack {
    from: PathBuf,
    to: PathBuf,
}

impl Drop for MoveBack {
    fn drop(&mut self) {
        // If the move fails, the next measurement fails because its source is missing.
        let _ = fs::rename(&self.from, &self.to);
    }
}

fn measure_restic(source: &Path, dir: &Path, store: &BenchStore, tally: &mut Tally) -> Result<()> {
    let url = format!("s3:{}/{BUCKET}/restic", store.server.endpoint());
    let (access, secret) = (store.server.access_key(), store.server.secret_key());
    let restic = Restic::for_store(url, "bench", access, secret)?;
    restic.run(&["init"])?;
    let source_path = source.display().to_string();
    let first = task::run(restic.command(&["backup", &source_path]), TIMEOUT)?;
    tally.add(FIRST_SAVE, RESTIC, first.wall.as_secs_f64());
    tally.add(FIRST_CPU, RESTIC, first.cpu.as_secs_f64());
    tally.add(FIRST_MEMORY, RESTIC, first.peak_mib);
    add_store_usage(store, RESTIC, tally);
    let unchanged = task::run(restic.command(&["backup", &source_path]), TIMEOUT)?;
    tally.add(UNCHANGED_SAVE, RESTIC, unchanged.wall.as_secs_f64());
    tally.add(FULL_COMPARISON, RESTIC, unchanged.wall.as_secs_f64());
    let target = dir.join("restored");
    let restored = task::run(
        restic.command(&["restore", "latest", "--target", &target.display().to_string()]),
        TIMEOUT,
    )?;
    check_restored(&target.join(source.strip_prefix("/")?), source)?;
    tally.add(RESTORE, RESTIC, restored.wall.as_secs_f64());
    tally.add(RESTORE_CPU, RESTIC, restored.cpu.as_secs_f64());
    tally.add(RESTORE_MEMORY, RESTIC, restored.peak_mib);
    Ok(())
}

fn measure_rclone(
    rclone: &Rclone,
    source: &Path,
    dir: &Path,
    store: &BenchStore,
    tally: &mut Tally,
) -> Result<()> {
    let (remote, local) = (format!(":s3:{BUCKET}/rclone"), source.display().to_string());
    let first = task::run(rclone.sync_command(&store.server, &local, &remote), TIMEOUT)?;
    tally.add(FIRST_SAVE, RCLONE, first.wall.as_secs_f64());
    let unchanged = task::run(rclone.sync_command(&store.server, &local, &remote), TIMEOUT)?;
    tally.add(UNCHANGED_SAVE, RCLONE, unchanged.wall.as_secs_f64());
    let target = dir.join("restored");
    let restored =
        task::run(rclone.sync_command(&store.server, &remote, &target.display().to_string()), TIMEOUT)?;
    check_restored(&target, source)?;
    tally.add(RESTORE, RCLONE, restored.wall.as_secs_f64());
    Ok(())
}

fn add_store_usage(store: &BenchStore, side: &'static str, tally: &mut Tally) {
    let objects = store.server.objects(BUCKET, "");
    let bytes: u64 = objects.iter().map(|object| object.size).sum();
    tally.add(STORED_BYTES, side, bytes as f64 / 1e6);
    tally.add(OBJECTS_WRITTEN, side, objects.len() as f64);
}

/// Checks that `home/projects` has the same number of files and the same total size in both trees. Files whose names
/// begin with a dot are not counted.
fn check_restored(restored: &Path, source: &Path) -> Result<()> {
    let (actual, expected) = (measure_tree(restored)?, measure_tree(source)?);
    ensure!(actual == expected, "restored (files, bytes): {actual:?}, expected: {expected:?}");
    Ok(())
}

fn measure_tree(root: &Path) -> Result<(u64, u64)> {
    let (mut files, mut bytes, mut pending) = (0, 0, vec![root.join("home/projects")]);
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(&dir).with_context(|| dir.display().to_string())? {
            let entry = entry?;
            let meta = entry.metadata()?;
            if meta.is_dir() {
                pending.push(entry.path());
            } else if !entry.file_name().as_bytes().starts_with(b".") {
                files += 1;
                bytes += meta.len();
            }
        }
    }
    Ok((files, bytes))
}

/// Returns the environment variables that the unit sets.
fn unit_environment() -> impl Iterator<Item = (&'static str, &'static str)> {
    UNIT.lines().filter_map(|line| line.strip_prefix("Environment=")?.split_once('='))
}
