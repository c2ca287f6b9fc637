//! `cargo xtask dist`: builds the static executable and verifies it.
//!
//! The target is named explicitly, so that build scripts and procedural macros are not affected by its flags. glibc is
//! linked statically, so the executable needs no libraries on the machine that runs it. It contains no fail points and
//! no paths from the build machine.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use kit::{child, fail_points, fetch};

use crate::{cargo, profile};

/// Maximum size of the executable; the footprint bench has a lower target. The largest additions were: the split into
/// packages, each of which compiles its own copies of generic code (1.8 MiB); host certificates (0.6 MiB); the release
/// checks, which the platform and svcctl both contain, with quotes and the object store probes (0.6 MiB); file backups,
/// with zstd and `.svcignore` matching (2.2 MiB); file history, with its archives, routes and verification (1.4 MiB);
/// and the file backup's status (0.3 MiB).
const MAX_EXECUTABLE_BYTES: u64 = 30 << 20;
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

#[cfg(target_arch = "x86_64")]
const TARGET: &str = "x86_64-unknown-linux-gnu";
#[cfg(target_arch = "aarch64")]
const TARGET: &str = "aarch64-unknown-linux-gnu";

/// Flags for C code in dependencies. It needs no unwind tables, because no panic unwinds through it. The excluded zstd
/// strategies are not used at the compression level of file backups, and decompression does not depend on them.
const C_FLAGS: [&str; 8] = [
    "-fno-asynchronous-unwind-tables",
    "-fno-unwind-tables",
    "-DZSTD_EXCLUDE_GREEDY_BLOCK_COMPRESSOR",
    "-DZSTD_EXCLUDE_LAZY_BLOCK_COMPRESSOR",
    "-DZSTD_EXCLUDE_LAZY2_BLOCK_COMPRESSOR",
    "-DZSTD_EXCLUDE_BTLAZY2_BLOCK_COMPRESSOR",
    "-DZSTD_EXCLUDE_BTOPT_BLOCK_COMPRESSOR",
    "-DZSTD_EXCLUDE_BTULTRA_BLOCK_COMPRESSOR",
];

/// Sources of the executable, relative to the root.
const SOURCES: [&str; 8] = [
    "src",
    "migrations",
    "cloud-init",
    "packaging/crc-fast",
    "packaging/profile",
    "build.rs",
    "Cargo.toml",
    "Cargo.lock",
];

/// Returns `target/dist/svc`, and rebuilds it if it is missing or does not match the sources.
pub fn build_if_outdated() -> Result<PathBuf> {
    let svc = fetch::target_dir().join("dist/svc");
    if svc.is_file() {
        let Some(reason) = outdated_reason(&svc, &cargo::root())? else { return Ok(svc) };
        println!("dist: rebuilding {}: {reason}", svc.display());
    }
    build()
}

/// Returns why an executable does not match the sources at `root`, or `None` if it does. Without git, it is assumed to
/// match.
fn outdated_reason(svc: &Path, root: &Path) -> Result<Option<String>> {
    let mut git = Command::new("git");
    git.args(["rev-parse", "--short=12", "HEAD"]).current_dir(root);
    let Ok(head) = child::run(git, COMMAND_TIMEOUT) else { return Ok(None) };
    let mut version = Command::new(svc);
    version.arg("--version");
    // "svc 0.1.0 (commit …, date)"
    let output = child::run(version, COMMAND_TIMEOUT)?;
    let commit = output.split_once("(commit ").and_then(|(_, rest)| rest.split([',', ')']).next());
    let (commit, head) = (commit.unwrap_or("unknown"), head.trim());
    if commit != head {
        return Ok(Some(format!("it was built from {commit}, but the sources are at {head}")));
    }
    let built = fs::metadata(svc)?.modified()?;
    for source in SOURCES {
        if let Some(path) = find_newer(&root.join(source), built)? {
            let path = path.strip_prefix(root).unwrap_or(&path);
            return Ok(Some(format!("{} has changed since the build", path.display())));
        }
    }
    Ok(None)
}

/// Returns a path at or below `path` that was modified after `time`. A directory is modified when an entry is created
/// or deleted. `git status` would not be enough: it does not list changes that were built and then reverted.
fn find_newer(path: &Path, time: SystemTime) -> Result<Option<PathBuf>> {
    let Ok(meta) = fs::symlink_metadata(path) else { return Ok(None) };
    if meta.is_dir() {
        for entry in fs::read_dir(path)? {
            let newer = find_newer(&entry?.path(), time)?;
            if newer.is_some() {
                return Ok(newer);
            }
        }
    }
    Ok((meta.modified()? > time).then(|| path.to_owned()))
}

/// Builds `target/dist/svc` with its `.sha256` and SBOM, and verifies it.
pub fn build() -> Result<PathBuf> {
    let built = compile()?;
    let dir = fetch::target_dir().join("dist");
    fs::create_dir_all(&dir)?;
    let svc = dir.join("svc");
    // Renamed into place, so that processes that are running the old executable keep it.
    let staged = dir.join(".svc-new");
    fs::copy(&built, &staged).with_context(|| format!("cannot copy {}", built.display()))?;
    fs::rename(&staged, &svc)?;
    verify_executable(&svc)?;
    let sha256 = fetch::sha256(&svc)?;
    fs::write(dir.join("svc.sha256"), format!("{sha256}  svc\n"))?;
    fs::write(dir.join("svc.cdx.json"), kit::deb::sbom::generate(&cargo::root(), &svc)?)?;
    let mib = fs::metadata(&svc)?.len() as f64 / f64::from(1 << 20);
    println!("dist: {}, {mib:.1} MiB, statically linked, sha256 {sha256}", svc.display());
    if let Some(changes) = profile::describe_changes() {
        println!("dist: changes in src since the profile was recorded (`cargo xtask profile`): {changes}");
    }
    Ok(svc)
}

/// Compiles the executable with the recorded profile.
fn compile() -> Result<PathBuf> {
    let mut flags = Vec::new();
    if let Some(profile) = profile::unpack()? {
        flags.push(format!("-Cprofile-use={}", profile.display()));
        // Functions that have changed since the profile was recorded must not cause warnings.
        flags.push("-Cllvm-args=-no-pgo-warn-mismatch".to_owned());
    }
    compile_with(flags, &fetch::target_dir())
}

/// Compiles an executable instrumented for profiling. At each normal exit, it adds its execution counts to the files in
/// `counts`.
pub fn compile_instrumented(counts: &Path, target_dir: &Path) -> Result<PathBuf> {
    compile_with(vec![format!("-Cprofile-generate={}", counts.display())], target_dir)
}

fn compile_with(mut flags: Vec<String>, target_dir: &Path) -> Result<PathBuf> {
    let args = [
        "build",
        "--package",
        "svc",
        "--bin",
        "svc",
        "--release",
        "--no-default-features",
        "--target",
        TARGET,
    ];
    let mut build = cargo::command(&args);
    let home = cargo_home()?;
    let maps = [(home.as_path(), "/cargo"), (&cargo::root(), "/svc")];
    flags.extend([
        "-Ctarget-feature=+crt-static".to_owned(),
        // Without this flag, getrandom looks up the libc function by name, does not find it in a static glibc, and
        // reads a file for every few bytes.
        "--cfg=getrandom_backend=\"linux_getrandom\"".to_owned(),
        // 40,000 relocations take 12 KB as a bitmap and 1 MB as a list. The program relocates itself, so the format
        // depends only on the C library that it is built with.
        "-Clink-arg=-Wl,-z,pack-relative-relocs".to_owned(),
        // Cargo ignores `strip` in the profile if the package `svc` overrides the optimization level.
        "-Clink-arg=-Wl,--strip-all".to_owned(),
    ]);
    if cfg!(target_arch = "x86_64") {
        // Calls between crates are direct instead of going through the global offset table, which a static executable
        // does not need. This affects 230,000 of 361,000 calls.
        flags.push("-Cllvm-args=-force-remove-attribute=nonlazybind".to_owned());
        // Functions with the same code share one copy, which makes the executable 2% smaller. Nothing compares function
        // addresses. This needs LLD, which is not Rust's default linker on other architectures.
        flags.push("-Clink-arg=-Wl,--icf=all".to_owned());
    }
    flags.extend(maps.iter().map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display())));
    // C code in dependencies embeds file names in the same way.
    let mut c_flags: Vec<String> =
        maps.iter().map(|(from, to)| format!("-ffile-prefix-map={}={to}", from.display())).collect();
    c_flags.extend(C_FLAGS.map(str::to_owned));
    build.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"));
    build.env(format!("CFLAGS_{}", TARGET.replace('-', "_")), c_flags.join(" "));
    build.env("CARGO_TARGET_DIR", target_dir);
    cargo::run_checked(build)?;
    Ok(target_dir.join(TARGET).join("release/svc"))
}

fn cargo_home() -> Result<PathBuf> {
    let home = std::env::var_os("CARGO_HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
    let default = || std::env::home_dir().map(|home| home.join(".cargo"));
    home.or_else(default).context("cannot find cargo's home directory")
}

fn verify_executable(svc: &Path) -> Result<()> {
    let size = fs::metadata(svc)?.len();
    ensure!(
        size <= MAX_EXECUTABLE_BYTES,
        "{} is {size} bytes; the maximum is {MAX_EXECUTABLE_BYTES}",
        svc.display()
    );
    let linkage = run_ldd(svc)?;
    let is_static =
        ["statically linked", "not a dynamic executable"].iter().any(|text| linkage.contains(text));
    ensure!(is_static, "{} is not static; ldd: {linkage}", svc.display());
    let bytes = fs::read(svc)?;
    ensure!(!fail_points::has_fail_points(&bytes), "{} contains fail points", svc.display());
    for path in [cargo_home()?, cargo::root()] {
        let path_bytes = OsString::from(&path).into_encoded_bytes();
        ensure!(
            !contains(&bytes, &path_bytes),
            "{} contains {}, a path on this machine",
            svc.display(),
            path.display()
        );
    }
    let mut list = Command::new(svc);
    list.arg("--list").env_clear();
    let applets = child::run(list, COMMAND_TIMEOUT)?;
    ensure!(applets.contains("svc-gateway"), "`svc --list` printed {applets:?}");
    check_unknown_host_error(svc)
}

/// A static glibc cannot use the system's resolver, but an unknown host name must still end a command with exit
/// code 69, like any unreachable platform.
fn check_unknown_host_error(svc: &Path) -> Result<()> {
    let mut svcctl = Command::new(svc);
    svcctl.args(["svcctl", "list", "--platform-url", "https://platform.invalid", "--timeout", "5"]);
    svcctl.env_clear().env("PLATFORM_SECRET", "none-that-is-used-anywhere-0123456789");
    let result = child::run(svcctl, COMMAND_TIMEOUT);
    let message = result.err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(message.contains("exit status: 69"), "unexpected result for an unknown host: {message:?}");
    Ok(())
}

/// Returns the output of ldd, from both streams. ldd fails for some static executables, so its status is ignored.
fn run_ldd(svc: &Path) -> Result<String> {
    let output = Command::new("ldd").arg(svc).output().context("cannot start ldd")?;
    Ok([output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat())
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    !part.is_empty() && bytes.windows(part.len()).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// Writes a program whose version names `commit`.
    fn write_program(path: &Path, commit: &str) {
        fs::write(path, format!("#!/bin/sh\necho 'svc 0.1.0 (commit {commit}, 2026-01-01)'\n")).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    #[test]
    fn outdated_reason_detects_changed_sources() {
        let dir = tempfile::tempdir().unwrap();
        let (root, svc) = (dir.path().join("tree"), dir.path().join("svc"));
        let source = root.join("src/main.rs");
        fs::create_dir_all(root.join("src")).unwrap();
        fs::write(&source, "fn main() {}").unwrap();
        write_program(&svc, "unknown");
        let reason = || outdated_reason(&svc, &root).unwrap();
        assert_eq!(reason(), None, "without git, the executable is assumed to match");

        let git = |args: &[&str]| {
            let mut git = Command::new("git");
            git.args(["-c", "user.name=us", "-c", "user.email=us@localhost"]).args(args).current_dir(&root);
            child::run(git, COMMAND_TIMEOUT).unwrap()
        };
        git(&["init", "--quiet"]);
        git(&["add", "."]);
        git(&["commit", "--quiet", "--message", "first"]);
        assert!(reason().unwrap().starts_with("it was built from unknown, but the sources are at "));
        write_program(&svc, git(&["rev-parse", "--short=12", "HEAD"]).trim());
        assert_eq!(reason(), None);

        let set_time = |path: &Path, seconds_ago| {
            let time = SystemTime::now() - Duration::from_secs(seconds_ago);
            fs::File::open(path).unwrap().set_modified(time).unwrap();
        };
        fs::write(&source, "fn main() { }").unwrap();
        set_time(&source, 60);
        set_time(&root.join("src"), 60);
        set_time(&svc, 90);
        assert_eq!(reason().unwrap(), "src/main.rs has changed since the build");
        set_time(&svc, 30);
        assert_eq!(reason(), None, "the change is older than the executable");
        fs::write(root.join("README.md"), "not a source").unwrap();
        assert_eq!(reason(), None);
        git(&["checkout", "--quiet", "--", "src"]);
        assert_eq!(reason().unwrap(), "src/main.rs has changed since the build", "the change was reverted");
        set_time(&source, 60);
        set_time(&root.join("src"), 60);
        assert_eq!(reason(), None);
        fs::remove_file(&source).unwrap();
        assert_eq!(reason().unwrap(), "src has changed since the build");
    }
}
