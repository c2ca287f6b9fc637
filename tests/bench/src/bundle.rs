//! Bundle benchmark: `svc-update boot` downloads, hashes and unpacks in one pass. It is compared with shell tools that
//! read the archive from memory. All commands write to a tmpfs, because disks vary too much.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use tempfile::TempDir;

use super::archive;
use super::figures::{PRODUCT, Spec, Tally, Target};
use super::peers::pigz;
use super::{Options, print_round, task};
use kit::child;

const WALL_TIME: &str = "download, hash, unpack";
const CPU: &str = "CPU time";
const MEMORY: &str = "peak memory";
const TWO_STEP: &str = "sha256sum -c && tar -xzf";
const ONE_PASS: &str = "tee | sha256sum | pigz | tar";

pub const ROWS: [Spec; 5] = [
    Spec { name: WALL_TIME, unit: "s", against: Some(TWO_STEP), target: Target::RatioAtMost(0.5) },
    Spec { name: WALL_TIME, unit: "s", against: Some(ONE_PASS), target: Target::RatioAtMost(1.0) },
    Spec { name: CPU, unit: "s", against: Some(TWO_STEP), target: Target::None },
    Spec { name: CPU, unit: "s", against: Some(ONE_PASS), target: Target::None },
    Spec { name: MEMORY, unit: "MiB", against: None, target: Target::AtMost(16.0) },
];

const MEMORY_DIR: &str = "/dev/shm";
/// Space for the archive, one unpacked copy, and a margin.
const MIN_FREE_BYTES: u64 = 2 << 30;
const TIMEOUT: Duration = Duration::from_secs(120);

pub async fn measure(options: &Options) -> Result<Tally> {
    let (svc, rounds, out) = (options.svc.clone(), options.rounds, options.out.clone());
    tokio::task::spawn_blocking(move || run_rounds(&svc, rounds, &out)).await?
}

/// A side's name, and its command for a target directory.
type Side<'a> = (&'static str, &'a dyn Fn(&Path) -> Command);

fn run_rounds(svc: &Path, rounds: u32, out: &Path) -> Result<Tally> {
    let (cached, digest) = archive::locate_or_create(&out.join("archive"))?;
    let dir = create_memory_dir()?;
    let archive = dir.path().join("bundle.tar.gz");
    fs::copy(&cached, &archive)?;
    fs::write(dir.path().join("bundle.tar.gz.sha256"), format!("{digest}  bundle.tar.gz\n"))?;
    let packed_mb = fs::metadata(&archive)?.len() / 1_000_000;
    println!(
        "  archive: {packed_mb} MB; unpacked: {} MB in {} files",
        archive::TOTAL_BYTES / 1_000_000,
        archive::FILE_COUNT
    );
    let address = serve(fs::read(&archive)?)?;
    let pigz = pigz::fetch()?.command();
    let mut tally = Tally::default();
    for round in 0..rounds {
        print_round(round, rounds);
        let sides: [Side<'_>; 3] = [
            (PRODUCT, &|root| svc_command(svc, root, address, &digest)),
            (TWO_STEP, &|target| {
                shell_command(
                    dir.path(),
                    target,
                    "sha256sum --quiet -c bundle.tar.gz.sha256 && tar -xzf bundle.tar.gz -C \"$0\"",
                )
            }),
            (ONE_PASS, &|target| {
                let mut command = shell_command(
                    dir.path(),
                    target,
                    "set -o pipefail; tee >(sha256sum >\"$0/.sum\") <bundle.tar.gz | \"$UNPACKER\" -dc | tar -x -C \"$0\"",
                );
                command.env("UNPACKER", pigz.get_program());
                command.envs(pigz.get_envs().filter_map(|(name, value)| Some((name, value?))));
                command
            }),
        ];
        // The order rotates, because each side starts with the CPU caches left by the previous one.
        for turn in 0..sides.len() {
            let (name, command) = sides[(turn + round as usize) % sides.len()];
            let target = tempfile::tempdir_in(dir.path())?;
            let stats = task::run(command(target.path()), TIMEOUT)?;
            check_unpacked(target.path(), name == PRODUCT)?;
            tally.add(WALL_TIME, name, stats.wall.as_secs_f64());
            tally.add(CPU, name, stats.cpu.as_secs_f64());
            if name == PRODUCT {
                tally.add(MEMORY, PRODUCT, stats.peak_mib);
            }
        }
    }
    Ok(tally)
}

fn create_memory_dir() -> Result<TempDir> {
    let stats = statfs(MEMORY_DIR).with_context(|| format!("cannot read the file system of {MEMORY_DIR}"))?;
    ensure!(stats.filesystem_type() == TMPFS_MAGIC, "{MEMORY_DIR} is not a tmpfs");
    let free = stats.blocks_available() * u64::try_from(stats.block_size())?;
    ensure!(
        free > MIN_FREE_BYTES,
        "{MEMORY_DIR} has {} MiB free, but {} MiB are needed",
        free >> 20,
        MIN_FREE_BYTES >> 20
    );
    let dir = tempfile::Builder::new().prefix("svc-bench-").tempdir_in(MEMORY_DIR)?;
    child::remove_on_exit(dir.path());
    Ok(dir)
}

fn svc_command(svc: &Path, root: &Path, source: SocketAddr, digest: &str) -> Command {
    let mut command = Command::new(svc);
    command.args(["svc-update", "boot"]).env_clear();
    let url = format!("http://{source}/svc-host-bundle.tar.gz");
    for (name, value) in [
        ("SVC_ROOT", &*root.display().to_string()),
        ("SVC_HOST_BUNDLE_URL", &url),
        ("SVC_BUNDLE_SHA256", digest),
        ("SVC_IMAGE_VERSION", archive::VERSION),
        ("SVC_MACHINE_ID", "019a0000-0000-7000-8000-000000000001"),
        ("PLATFORM_INTERNAL_URL", "http://127.0.0.1:9"),
        ("UPGRADE_TOKEN", "unused"),
    ] {
        command.env(name, value);
    }
    command
}

fn shell_command(dir: &Path, target: &Path, script: &str) -> Command {
    let mut command = Command::new("bash");
    command.args(["-c", script]).arg(target).current_dir(dir);
    command
}

/// Verifies the number of files, and that their total size exceeds [`archive::TOTAL_BYTES`], which does not include the
/// small files `release.json` and `bin/svc`. Files whose names start with a dot, such as the checksum, are ignored.
fn check_unpacked(dir: &Path, is_product: bool) -> Result<()> {
    let root = if is_product { dir.join("opt/svc/releases").join(archive::VERSION) } else { dir.to_owned() };
    let (mut files, mut bytes, mut dirs) = (0, 0, vec![root]);
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).with_context(|| dir.display().to_string())? {
            let entry = entry?;
            let meta = entry.metadata()?;
            if meta.is_dir() {
                dirs.push(entry.path());
            } else if !entry.file_name().as_encoded_bytes().starts_with(b".") {
                files += 1;
                bytes += meta.len();
            }
        }
    }
    ensure!(
        files == archive::FILE_COUNT && bytes > archive::TOTAL_BYTES,
        "expected {} files with more than {} bytes, found {files} files with {bytes} bytes",
        archive::FILE_COUNT,
        archive::TOTAL_BYTES
    );
    Ok(())
}

/// Serves `content` over plain HTTP, so that the measurement does not include TLS.
fn serve(content: Vec<u8>) -> Result<SocketAddr> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let (address, content) = (listener.local_addr()?, Arc::new(content));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let content = Arc::clone(&content);
            // Errors are ignored, because the client reports an incomplete download.
            std::thread::spawn(move || respond(stream, &content).ok());
        }
    });
    Ok(address)
}

fn respond(mut stream: TcpStream, content: &[u8]) -> Result<()> {
    let mut request = Vec::new();
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let mut chunk = [0; 1024];
        let read = stream.read(&mut chunk)?;
        ensure!(read > 0, "the client closed the connection without a complete request");
        request.extend_from_slice(&chunk[..read]);
    }
    let length = content.len();
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\netag: \"bench\"\r\nconnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes())?;
    Ok(stream.write_all(content)?)
}
