//! The packages in a fresh Debian root: built twice, installed, started, upgraded, removed, purged.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::root::Root;
use super::{Options, build, has, sbom};
use crate::child;
use crate::net;
use crate::story::{Front, Stack};

const START: Duration = Duration::from_secs(60);
const STOP: Duration = Duration::from_secs(30);
const SERVICE: &str = "svc-platform:svc-platform";
const SETTINGS: &str = "/etc/svc/platform.env";
const EXAMPLE: &str = "/etc/svc/platform.env.example";
const PROGRAM: &str = "/usr/lib/svc/svc";
/// What lintian says of every binary that is linked statically, and of a package that no archive carries; and of a
/// development build, which is not static and names no package of its C library.
const EXPECTED: [&str; 7] = [
    "statically-linked-binary",
    "missing-dependency-on-libc",
    "initial-upload-closes-no-bugs",
    "no-manual-page",
    "maintainer-script-calls-systemctl",
    "non-standard-dir-perm",
    "non-standard-file-perm",
];

/// Tries everything that dpkg does with the packages.
///
/// # Errors
/// The first step that does not hold.
pub async fn check(options: &Options) -> Result<()> {
    let began = Instant::now();
    let mut clock = Clock(Instant::now());
    let first = build(options)?;
    same_bytes(options, &first)?;
    clock.tell("built twice, byte for byte the same");
    lint(&first)?;
    clock.tell("lintian");
    let next = Options {
        version: format!("{}+next", options.version),
        out: options.out.join("next"),
        ..options.clone()
    };
    let second = build(&next)?;
    let [platform, host] = [0, 1].map(|at| [first[at].clone(), second[at].clone()]);
    let mut root = Root::unpack()?;
    clock.tell("a fresh Debian root");
    platform_side(&mut root, options, &platform).await?;
    clock.tell("svc-platform installed, started, upgraded, removed, purged");
    host_side(&Root::unpack()?, &host)?;
    clock.tell("svc-host installed, upgraded, removed, purged; the owner's data stays");
    println!("deb: all in {:.1} s", began.elapsed().as_secs_f64());
    Ok(())
}

struct Clock(Instant);

impl Clock {
    fn tell(&mut self, what: &str) {
        println!("deb: {:>5.1} s  {what}", self.0.elapsed().as_secs_f64());
        self.0 = Instant::now();
    }
}

fn same_bytes(options: &Options, first: &[PathBuf]) -> Result<()> {
    let again = Options { out: options.out.join("again"), ..options.clone() };
    for (one, other) in first.iter().zip(build(&again)?) {
        let (one, other) = (fs::read(one)?, fs::read(&other).with_context(|| other.display().to_string())?);
        ensure!(one == other, "a second build gives other bytes");
    }
    let bill = fs::read_to_string(options.out.join("svc.cdx.json"))?;
    ensure!(bill == sbom::of(&options.source, &options.svc)?, "a second bill of materials is another");
    Ok(())
}

/// lintian's errors, where it is installed; it says so where it is not.
fn lint(packages: &[PathBuf]) -> Result<()> {
    if !has("lintian") {
        println!("deb: lintian SKIPPED: it is not installed");
        return Ok(());
    }
    let mut lintian = std::process::Command::new("lintian");
    lintian.args(["--allow-root", "--fail-on", "none", "--no-tag-display-limit"]).args(packages);
    let said = child::run(lintian, Duration::from_secs(300))?;
    let errors: Vec<_> = said
        .lines()
        .filter(|line| line.starts_with("E: ") && !EXPECTED.iter().any(|tag| line.contains(tag)))
        .collect();
    ensure!(errors.is_empty(), "lintian:\n{}", errors.join("\n"));
    for line in said.lines().filter(|line| line.starts_with("W: ")) {
        println!("deb: lintian {line}");
    }
    Ok(())
}

async fn platform_side(root: &mut Root, options: &Options, packages: &[PathBuf; 2]) -> Result<()> {
    let said = root.run(&["dpkg", "--install", &root.bring(&packages[0])?])?;
    ensure!(said.contains("not configured, so not started"), "nobody is told what to do:\n{said}");
    ensure!(
        !root.path("etc/systemd/system/multi-user.target.wants/svc-platform.service").exists(),
        "enabled unasked"
    );
    for (path, mode) in [("etc/svc", 0o750), (EXAMPLE.trim_start_matches('/'), 0o640)] {
        let meta = fs::metadata(root.path(path))?;
        ensure!(
            meta.permissions().mode() & 0o7777 == mode,
            "/{path} has mode {:o}",
            meta.permissions().mode()
        );
        ensure!(meta.uid() == 0 && meta.gid() == group(root, "svc-platform")?, "/{path} has other owners");
    }
    documents(root, "svc-platform", "svc-platform.8")?;

    let dir = tempfile::Builder::new().prefix("svc-deb-").tempdir_in("/tmp")?;
    child::remove_with_us(dir.path());
    // The same parts that the demo has; the installed platform is one more process on the same database.
    let stack = Stack::up(&options.svc, dir.path(), Front::Plain).await?.0;
    let port = net::free_port()?;
    let url = format!("http://127.0.0.1:{port}");
    settings(root, &options.source, &stack, &url)?;
    let ended = runs(root, &url, &dir.path().join("platform-1.log"), &stack).await;
    let upgraded = match ended {
        Ok(()) => {
            // An operator may have deleted it, and dpkg does not bring it back.
            fs::remove_file(root.path(EXAMPLE))?;
            let said = root.run(&["dpkg", "--install", &root.bring(&packages[1])?])?;
            ensure!(!said.contains("not configured"), "the upgrade takes it for unconfigured:\n{said}");
            installed(root, "svc-platform", "+next")?;
            runs(root, &url, &dir.path().join("platform-2.log"), &stack).await
        }
        Err(error) => Err(error),
    };
    stack.down().await;
    upgraded?;

    // An operator's own words in the example are a conffile's: kept by an upgrade, gone with a purge.
    let example = root.path(EXAMPLE);
    ensure!(!example.exists(), "an upgrade brings an example back that was deleted");
    let written = "# my own words\n";
    fs::write(&example, written)?;
    root.run(&["dpkg", "--install", &root.bring(&packages[1])?])?;
    ensure!(fs::read_to_string(&example)? == written, "an upgrade takes an operator's changes away");
    root.run(&["dpkg", "--remove", "svc-platform"])?;
    ensure!(
        !root.path(PROGRAM).exists() && root.path(SETTINGS).exists(),
        "removed: settings must stay, the program not"
    );
    let said = root.run(&["dpkg", "--purge", "svc-platform"])?;
    ensure!(said.contains("platform.env stays"), "a purge does not say what stays:\n{said}");
    ensure!(
        root.path(SETTINGS).exists() && !example.exists(),
        "a purge must leave the key, and nothing of ours"
    );
    left_over(root, "svc-platform")
}

/// `/etc/svc/platform.env` as docs/operating/install.md has an operator make it, after one that the service could not read.
fn settings(root: &Root, source: &Path, stack: &Stack, url: &str) -> Result<()> {
    root.run(&["cp", EXAMPLE, SETTINGS])?;
    let told = doctor(root)?;
    ensure!(
        told.contains("{\"check\":\"env-file\",\"level\":\"problem\"") && told.contains("cannot read"),
        "nobody is told that the service cannot read its settings: {told}"
    );
    let readme = fs::read_to_string(source.join("docs/operating/install.md"))?;
    let line = readme.lines().find(|line| line.starts_with("install ") && line.ends_with(SETTINGS));
    root.run(&["sh", "-c", line.context("docs/operating/install.md does not say how the settings are installed")?])?;
    let mut text = String::new();
    for (name, value) in stack.platform_env() {
        let value = match name.as_str() {
            "PLATFORM_LISTEN" => url.trim_start_matches("http://"),
            "PLATFORM_PUBLIC_URL" => url,
            _ => value,
        };
        text.push_str(&format!("{name}=\"{value}\"\n"));
    }
    Ok(fs::write(root.path(SETTINGS), text)?)
}

/// What it says of the installed platform; not all has to be well.
fn doctor(root: &Root) -> Result<String> {
    root.run(&["sh", "-c", "svcctl doctor platform --json 2>&1 || true"])
}

/// Starts what the unit starts, sees it ready, and ends it by SIGTERM.
async fn runs(root: &Root, url: &str, log: &Path, stack: &Stack) -> Result<()> {
    let unit = fs::read_to_string(root.path("usr/lib/systemd/system/svc-platform.service"))?;
    let line = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).context("no ExecStart")?;
    let words: Vec<&str> = line.split(' ').collect();
    let mut process = root.spawn(SERVICE, &words, log)?;
    let seen = seen_ready(root, &mut process, url, stack).await;
    let ended = end(&mut process);
    child::ended(process.id());
    seen.with_context(|| fs::read_to_string(log).unwrap_or_default())?;
    ended.with_context(|| fs::read_to_string(log).unwrap_or_default())
}

async fn seen_ready(root: &Root, process: &mut Child, url: &str, stack: &Stack) -> Result<()> {
    let client = reqwest::Client::builder().timeout(Duration::from_secs(5)).no_proxy().build()?;
    let deadline = Instant::now() + START;
    let answer = loop {
        match client.get(format!("{url}/readyz/control")).send().await {
            Ok(answer) if answer.status().is_success() => break answer.text().await?,
            Ok(_) | Err(_) if Instant::now() < deadline => {
                ensure!(process.try_wait()?.is_none(), "the platform ended at its start");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Ok(answer) => bail!("/readyz/control: {}", answer.status()),
            Err(error) => return Err(error.into()),
        }
    };
    ensure!(answer.contains("\"database\":\"ok\""), "/readyz/control says {answer}");
    let environ = String::from_utf8_lossy(&fs::read(format!("/proc/{}/environ", process.id()))?).into_owned();
    ensure!(!environ.contains(&stack.secret), "the secret is in the process's environment");
    let owner = fs::metadata(format!("/proc/{}", process.id()))?.uid();
    ensure!(owner != 0, "it runs as root");
    root.run_as(SERVICE, &[PROGRAM, "svc-platform", "probe", "--env-file", SETTINGS])?;
    // The version that is asked for has not been published here; all else is well.
    let told = doctor(root)?;
    for check in
        ["env-file", "database", "store", "host-credentials", "provider", "identity-provider", "platform"]
    {
        ensure!(
            told.contains(&format!("{{\"check\":\"{check}\",\"level\":\"ok\"")),
            "{check} is not well: {told}"
        );
    }
    Ok(())
}

fn end(process: &mut Child) -> Result<()> {
    if process.try_wait()?.is_none() {
        kill(Pid::from_raw(i32::try_from(process.id())?), Signal::SIGTERM)?;
    }
    match child::wait_until(process, Instant::now() + STOP) {
        Some(status) if status.success() => Ok(()),
        Some(status) => bail!("told to end, it ended with {status}"),
        None => {
            process.kill()?;
            process.wait()?;
            bail!("told to end, it runs on after {STOP:?}")
        }
    }
}

fn host_side(root: &Root, packages: &[PathBuf; 2]) -> Result<()> {
    let said = root.run(&["dpkg", "--install", &root.bring(&packages[0])?])?;
    ensure!(said.contains("not provisioned, so not started"), "nobody is told what to do:\n{said}");
    for user in ["svc-gateway", "svc"] {
        group(root, user)?;
    }
    for (path, mode) in
        [("opt/svc", 0o755), ("opt/svc/env", 0o750), ("var/lib/svc", 0o1771), ("home/svc", 0o1770)]
    {
        let meta = fs::metadata(root.path(path)).with_context(|| format!("/{path}"))?;
        ensure!(
            meta.permissions().mode() & 0o7777 == mode,
            "/{path} has mode {:o}",
            meta.permissions().mode()
        );
    }
    let enabled = fs::read_dir(root.path("etc/systemd/system/multi-user.target.wants"));
    let enabled: Vec<_> = enabled.into_iter().flatten().flatten().map(|entry| entry.file_name()).collect();
    ensure!(
        !enabled.iter().any(|name| name.to_string_lossy().starts_with("svc")),
        "enabled unasked: {enabled:?}"
    );
    ensure!(root.path("usr/lib/systemd/system/svc-gateway.service").exists(), "no unit of the gateway");
    documents(root, "svc-host", "svc-gateway.8")?;

    let owners = ["home/svc/home/diary.txt", "opt/svc/env/host.env", "var/lib/svc/tls/key.pem"];
    for path in owners {
        fs::write(root.path(path), "the owner's")?;
    }
    root.run(&["dpkg", "--install", &root.bring(&packages[1])?])?;
    installed(root, "svc-host", "+next")?;
    root.run(&["dpkg", "--remove", "svc-host"])?;
    let said = root.run(&["dpkg", "--purge", "svc-host"])?;
    ensure!(said.contains("they are the owner's"), "a purge does not say what stays:\n{said}");
    for path in owners {
        ensure!(fs::read_to_string(root.path(path))? == "the owner's", "/{path} went with the package");
    }
    left_over(root, "svc-host")
}

/// Manual pages that `man` finds, completions, the bill of materials.
fn documents(root: &Root, package: &str, page: &str) -> Result<()> {
    let (name, section) = page.split_once('.').context("a page")?;
    for (section, name) in [(section, name), ("1", "svcctl"), ("1", "svcctl-doctor")] {
        // dpkg of a minimal root leaves pages out; the package has them all the same.
        let listed = root.run(&["dpkg", "-L", package])?;
        let path = format!("/usr/share/man/man{section}/{name}.{section}.gz");
        ensure!(listed.lines().any(|line| line == path), "no {path}");
        if root.path(&path).exists() {
            root.run(&["man", "--warnings", "-l", "-Tutf8", &path])?;
        }
    }
    for path in [
        "usr/share/bash-completion/completions/svcctl",
        "usr/share/zsh/vendor-completions/_svcctl",
        "usr/share/fish/vendor_completions.d/svcctl.fish",
    ] {
        ensure!(fs::read_to_string(root.path(path))?.contains("verify-rollout"), "/{path} completes nothing");
    }
    let version = root.run(&["svcctl", "--version"])?;
    ensure!(version.starts_with("svcctl "), "svcctl --version: {version}");
    Ok(())
}

fn installed(root: &Root, package: &str, version_ends: &str) -> Result<()> {
    let version = root.run(&["dpkg-query", "-W", "-f", "${Status} ${Version}", package])?;
    ensure!(
        version.starts_with("install ok installed ") && version.ends_with(version_ends),
        "{package}: {version}"
    );
    Ok(())
}

fn left_over(root: &Root, package: &str) -> Result<()> {
    for path in
        ["usr/lib/svc", "usr/bin/svcctl", "usr/lib/systemd/system/svc-platform.service", "usr/share/doc"]
    {
        let path = if path.ends_with("doc") { format!("{path}/{package}") } else { path.to_owned() };
        ensure!(root.path(&path).symlink_metadata().is_err(), "/{path} is left");
    }
    let known = root.run(&["sh", "-c", &format!("dpkg -s {package} 2>&1 || true")])?;
    ensure!(known.contains("is not installed"), "dpkg still knows {package}: {known}");
    Ok(())
}

/// The number of the group that a system user has.
fn group(root: &Root, name: &str) -> Result<u32> {
    let groups = fs::read_to_string(root.path("etc/group"))?;
    let line = groups.lines().find(|line| line.split(':').next() == Some(name));
    let line = line.with_context(|| format!("there is no group {name}"))?;
    Ok(line.split(':').nth(2).context("a number")?.parse()?)
}
