//! `cargo xtask dist`: the one static executable, and the proof that it is one.
//!
//! The target is named, so that build scripts and procedural macros stay what they are; glibc is linked in, so nothing
//! of the machine that it runs on is needed. No fail point is in it, and no path of the machine that built it.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::{child, fetch};

use crate::cargo;

/// The largest that it may be.
const MAX_BYTES: u64 = 29 << 20;
const DEADLINE: Duration = Duration::from_secs(30);
/// The variable that arms fail points: a build that knows it has them.
const FAIL_POINTS: &[u8] = b"FAILPOINTS";

#[cfg(target_arch = "x86_64")]
const TARGET: &str = "x86_64-unknown-linux-gnu";
#[cfg(target_arch = "aarch64")]
const TARGET: &str = "aarch64-unknown-linux-gnu";

/// What goes into the executable, below the root.
const SOURCES: [&str; 6] = ["src", "migrations", "cloud-init", "build.rs", "Cargo.toml", "Cargo.lock"];

/// `target/dist/svc`, built anew where it is missing or not of this tree's sources.
pub fn of_this_tree() -> Result<PathBuf> {
    let there = fetch::target_dir().join("dist/svc");
    if there.is_file() {
        let Some(why) = outdated(&there, &cargo::root())? else { return Ok(there) };
        println!("dist: {} is built anew: {why}", there.display());
    }
    build()
}

/// Why an executable is not of the sources at `root`. Without git nobody knows, and it is taken as it is.
fn outdated(svc: &Path, root: &Path) -> Result<Option<String>> {
    let git = |args: &[&str]| {
        let mut git = Command::new("git");
        git.args(args).current_dir(root);
        child::run(git, DEADLINE).ok()
    };
    let Some(head) = git(&["rev-parse", "--short=12", "HEAD"]) else { return Ok(None) };
    let mut ask = Command::new(svc);
    ask.arg("--version");
    // "svc 0.1.0 (commit …, date)"
    let said = child::run(ask, DEADLINE)?;
    let commit = said.split_once("(commit ").and_then(|(_, rest)| rest.split([',', ')']).next());
    let (commit, head) = (commit.unwrap_or("unknown"), head.trim());
    if commit != head {
        return Ok(Some(format!("it is of commit {commit}, the sources are of {head}")));
    }
    let built = fs::metadata(svc)?.modified()?;
    let mut status = vec!["status", "--porcelain", "-z", "--no-renames", "--untracked-files=all", "--"];
    status.extend(SOURCES);
    let changed = git(&status).unwrap_or_default();
    // "XY path"
    let newer = changed.split_terminator('\0').filter_map(|entry| entry.get(3..)).find(|path| {
        let modified = fs::metadata(root.join(path)).and_then(|meta| meta.modified());
        // What is gone has no time.
        modified.map_or(true, |modified| modified > built)
    });
    Ok(newer.map(|path| format!("{path} has changed since")))
}

/// Builds `target/dist/svc` with its `.sha256`, and checks it.
pub fn build() -> Result<PathBuf> {
    let built = compile()?;
    let dir = fetch::target_dir().join("dist");
    fs::create_dir_all(&dir)?;
    let svc = dir.join("svc");
    // Another name first: whoever runs the old one goes on with it.
    let fresh = dir.join(".svc-new");
    fs::copy(&built, &fresh).with_context(|| format!("copy {}", built.display()))?;
    fs::rename(&fresh, &svc)?;
    check(&svc)?;
    let sha256 = fetch::sha256(&svc)?;
    fs::write(dir.join("svc.sha256"), format!("{sha256}  svc\n"))?;
    fs::write(dir.join("svc.cdx.json"), kit::deb::sbom::of(&cargo::root(), &svc)?)?;
    let mib = fs::metadata(&svc)?.len() as f64 / f64::from(1 << 20);
    println!("dist: {}, {mib:.1} MiB, statically linked, sha256 {sha256}", svc.display());
    Ok(svc)
}

fn compile() -> Result<PathBuf> {
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
    let mut flags: Vec<String> = vec![
        "-Ctarget-feature=+crt-static".to_owned(),
        // Found by name in a dynamic glibc, it is not found in a static one, and each few bytes are read from a file.
        "--cfg=getrandom_backend=\"linux_getrandom\"".to_owned(),
        // 40,000 places hold an address of it and are moved with it: as a bitmap they take 12 KB, as a list 1 MB. The
        // program moves itself, so it needs no such C library but the one that it is built with.
        "-Clink-arg=-Wl,-z,pack-relative-relocs".to_owned(),
    ];
    if cfg!(target_arch = "x86_64") {
        // Functions with the same code share one copy: 2 % smaller. Nothing compares addresses of functions. Elsewhere
        // Rust does not link with LLD, which can do this.
        flags.push("-Clink-arg=-Wl,--icf=all".to_owned());
    }
    flags.extend(maps.iter().map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display())));
    // The C of dependencies names its files in the same way.
    let c: Vec<String> =
        maps.iter().map(|(from, to)| format!("-ffile-prefix-map={}={to}", from.display())).collect();
    build.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"));
    build.env(format!("CFLAGS_{}", TARGET.replace('-', "_")), c.join(" "));
    cargo::succeed(build)?;
    Ok(fetch::target_dir().join(TARGET).join("release/svc"))
}

fn cargo_home() -> Result<PathBuf> {
    let home = std::env::var_os("CARGO_HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
    let default = || std::env::home_dir().map(|home| home.join(".cargo"));
    home.or_else(default).context("find cargo's home directory")
}

fn check(svc: &Path) -> Result<()> {
    let size = fs::metadata(svc)?.len();
    ensure!(size <= MAX_BYTES, "{} has {size} bytes, more than {MAX_BYTES}", svc.display());
    let linked = linkage(svc)?;
    let is_static =
        ["statically linked", "not a dynamic executable"].iter().any(|words| linked.contains(words));
    ensure!(is_static, "{} is not static; ldd says: {linked}", svc.display());
    let bytes = fs::read(svc)?;
    ensure!(!holds(&bytes, FAIL_POINTS), "{} carries fail points", svc.display());
    for place in [cargo_home()?, cargo::root()] {
        let text = OsString::from(&place).into_encoded_bytes();
        ensure!(
            !holds(&bytes, &text),
            "{} names {}, a place of this machine",
            svc.display(),
            place.display()
        );
    }
    let mut list = Command::new(svc);
    list.arg("--list").env_clear();
    let applets = child::run(list, DEADLINE)?;
    ensure!(applets.contains("svc-gateway"), "`svc --list` says {applets:?}");
    unknown_names_are_answered(svc)
}

/// A static glibc cannot ask the system's resolver: a name that does not exist must be answered all the same.
fn unknown_names_are_answered(svc: &Path) -> Result<()> {
    let mut ask = Command::new(svc);
    ask.args(["svcctl", "list", "--platform-url", "https://platform.invalid", "--timeout", "5"]);
    ask.env_clear().env("PLATFORM_SECRET", "none-that-is-used-anywhere-0123456789");
    let end = child::run(ask, DEADLINE);
    let said = end.err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(said.contains("exit status: 69"), "an unknown name is not answered as one: {said:?}");
    Ok(())
}

/// What ldd says, on whichever output; it fails for what is not dynamic.
fn linkage(svc: &Path) -> Result<String> {
    let output = Command::new("ldd").arg(svc).output().context("start ldd")?;
    Ok([output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat())
}

fn holds(bytes: &[u8], part: &[u8]) -> bool {
    !part.is_empty() && bytes.windows(part.len()).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::SystemTime;

    use super::*;

    /// A program that says that it is of `commit`.
    fn program(path: &Path, commit: &str) {
        fs::write(path, format!("#!/bin/sh\necho 'svc 0.1.0 (commit {commit}, 2026-01-01)'\n")).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    #[test]
    fn an_executable_of_other_sources_is_built_anew() {
        let dir = tempfile::tempdir().unwrap();
        let (root, svc) = (dir.path().join("tree"), dir.path().join("svc"));
        let source = root.join("src/main.rs");
        fs::create_dir_all(root.join("src")).unwrap();
        fs::write(&source, "fn main() {}").unwrap();
        program(&svc, "of-an-archive");
        let why = || outdated(&svc, &root).unwrap();
        assert_eq!(why(), None, "without git it is taken as it is");

        let git = |args: &[&str]| {
            let mut git = Command::new("git");
            git.args(["-c", "user.name=us", "-c", "user.email=us@localhost"]).args(args).current_dir(&root);
            child::run(git, DEADLINE).unwrap()
        };
        git(&["init", "--quiet"]);
        git(&["add", "."]);
        git(&["commit", "--quiet", "--message", "first"]);
        assert!(why().unwrap().starts_with("it is of commit of-an-archive, the sources are of "));
        program(&svc, git(&["rev-parse", "--short=12", "HEAD"]).trim());
        assert_eq!(why(), None);

        let at = |seconds| SystemTime::now() + Duration::from_secs(seconds);
        fs::write(&source, "fn main() { }").unwrap();
        fs::File::open(&source).unwrap().set_modified(at(60)).unwrap();
        assert_eq!(why().unwrap(), "src/main.rs has changed since");
        fs::File::open(&svc).unwrap().set_modified(at(120)).unwrap();
        assert_eq!(why(), None, "what it was built of");
        fs::write(root.join("README.md"), "no part of it").unwrap();
        assert_eq!(why(), None);
        fs::remove_file(&source).unwrap();
        assert_eq!(why().unwrap(), "src/main.rs has changed since");
    }
}
