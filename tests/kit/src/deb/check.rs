//! Tests the packages in a fresh Debian chroot: build twice, install, start, upgrade, remove, purge.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::chroot::Chroot;
use super::{Options, build, sbom};
use crate::apt::is_in_path;
use crate::child;
use crate::net;
use crate::scenario::{RouterTransport, Stack};

/// The check may run at idle priority alongside virtual machines.
const START_TIMEOUT: Duration = Duration::from_secs(180);
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
const SERVICE_USER: &str = "svc-platform:svc-platform";
const SETTINGS: &str = "/etc/svc/platform.env";
const EXAMPLE_SETTINGS: &str = "/etc/svc/platform.env.example";
const PROGRAM: &str = "/usr/lib/svc/svc";
/// Tags that lintian reports for every statically linked binary, for a package outside the Debian archive, for these
/// packages' maintainer scripts and restricted modes, and for a development build, which is dynamically linked and
/// declares no dependency on libc.
const EXPECTED_TAGS: [&str; 7] = [
    "statically-linked-binary",
    "missing-dependency-on-libc",
    "initial-upload-closes-no-bugs",
    "no-manual-page",
    "maintainer-script-calls-systemctl",
    "non-standard-dir-perm",
    "non-standard-file-perm",
];

/// Builds, installs, upgrades, removes and purges the packages, and checks the result of each step.
///
/// # Errors
/// Returns the first failure.
pub async fn check(options: &Options) -> Result<()> {
    let started = Instant::now();
    let mut timer = StepTimer(Instant::now());
    let first = build(options)?;
    check_reproducible(options, &first)?;
    timer.print_step("built twice with identical bytes");
    lint(&first)?;
    timer.print_step("lintian");
    let next = Options {
        version: format!("{}+next", options.version),
        out: options.out.join("next"),
        ..options.clone()
    };
    let second = build(&next)?;
    let [platform, host] = [0, 1].map(|index| [first[index].clone(), second[index].clone()]);
    let mut chroot = Chroot::unpack()?;
    timer.print_step("Debian chroot unpacked");
    check_platform_package(&mut chroot, options, &platform).await?;
    timer.print_step("svc-platform installed, started, upgraded, removed, purged");
    check_host_package(&Chroot::unpack()?, &host)?;
    timer.print_step("svc-host installed, upgraded, removed, purged; the owner's data was kept");
    println!("deb: total {:.1} s", started.elapsed().as_secs_f64());
    Ok(())
}

struct StepTimer(Instant);

impl StepTimer {
    fn print_step(&mut self, step: &str) {
        println!("deb: {:>5.1} s  {step}", self.0.elapsed().as_secs_f64());
        self.0 = Instant::now();
    }
}

fn check_reproducible(options: &Options, first: &[PathBuf]) -> Result<()> {
    let again = Options { out: options.out.join("again"), ..options.clone() };
    for (package, rebuilt) in first.iter().zip(build(&again)?) {
        let is_equal = fs::read(package)? == fs::read(&rebuilt)?;
        ensure!(is_equal, "a second build produced a different package: {}", rebuilt.display());
    }
    let sbom_json = fs::read_to_string(options.out.join("svc.cdx.json"))?;
    ensure!(
        sbom_json == sbom::generate(&options.source, &options.svc)?,
        "a second build produced a different bill of materials"
    );
    Ok(())
}

/// Runs lintian and fails on unexpected errors. Does nothing if lintian is not installed.
fn lint(packages: &[PathBuf]) -> Result<()> {
    if !is_in_path("lintian") {
        println!("deb: lintian SKIPPED: it is not installed");
        return Ok(());
    }
    let mut lintian = std::process::Command::new("lintian");
    lintian.args(["--allow-root", "--fail-on", "none", "--no-tag-display-limit"]).args(packages);
    let output = child::run(lintian, Duration::from_secs(300))?;
    let errors: Vec<_> = output
        .lines()
        .filter(|line| line.starts_with("E: ") && !EXPECTED_TAGS.iter().any(|tag| line.contains(tag)))
        .collect();
    ensure!(errors.is_empty(), "lintian:\n{}", errors.join("\n"));
    for line in output.lines().filter(|line| line.starts_with("W: ")) {
        println!("deb: lintian {line}");
    }
    Ok(())
}

async fn check_platform_package(
    chroot: &mut Chroot,
    options: &Options,
    packages: &[PathBuf; 2],
) -> Result<()> {
    let output = chroot.run(&["dpkg", "--install", &chroot.copy_in(&packages[0])?])?;
    ensure!(
        output.contains("not configured, so not started"),
        "no hint about the missing configuration:\n{output}"
    );
    ensure!(
        !chroot.path("etc/systemd/system/multi-user.target.wants/svc-platform.service").exists(),
        "the unit is enabled by default"
    );
    for (path, mode) in [("etc/svc", 0o750), (EXAMPLE_SETTINGS.trim_start_matches('/'), 0o640)] {
        let meta = fs::metadata(chroot.path(path))?;
        ensure!(
            meta.permissions().mode() & 0o7777 == mode,
            "/{path} has mode {:o}",
            meta.permissions().mode()
        );
        ensure!(
            meta.uid() == 0 && meta.gid() == group_id(chroot, "svc-platform")?,
            "/{path} has the wrong owner or group"
        );
    }
    check_documentation(chroot, "svc-platform", "svc-platform.8")?;

    let dir = tempfile::Builder::new().prefix("svc-deb-").tempdir_in("/tmp")?;
    child::remove_on_exit(dir.path());
    // The same services as in the demo; the installed platform is an additional process on the same database.
    let stack = Stack::start(&options.svc, dir.path(), RouterTransport::Plain).await?.0;
    let port = net::free_port()?;
    let url = format!("http://127.0.0.1:{port}");
    write_settings(chroot, &options.source, &stack, &url)?;
    let result = run_platform(chroot, &url, &dir.path().join("platform-1.log"), &stack).await;
    let upgrade_result = match result {
        Ok(()) => {
            // An operator may have deleted the example; dpkg does not restore it.
            fs::remove_file(chroot.path(EXAMPLE_SETTINGS))?;
            let output = chroot.run(&["dpkg", "--install", &chroot.copy_in(&packages[1])?])?;
            ensure!(
                !output.contains("not configured"),
                "the upgrade reports the platform as unconfigured:\n{output}"
            );
            check_version(chroot, "svc-platform", "+next")?;
            run_platform(chroot, &url, &dir.path().join("platform-2.log"), &stack).await
        }
        Err(error) => Err(error),
    };
    stack.stop().await;
    upgrade_result?;

    // The example is a conffile: an upgrade keeps an operator's changes, and a purge removes them.
    let example = chroot.path(EXAMPLE_SETTINGS);
    ensure!(!example.exists(), "an upgrade restored the deleted example");
    let changed = "# changed by an operator\n";
    fs::write(&example, changed)?;
    chroot.run(&["dpkg", "--install", &chroot.copy_in(&packages[1])?])?;
    ensure!(fs::read_to_string(&example)? == changed, "an upgrade reverted an operator's changes");
    chroot.run(&["dpkg", "--remove", "svc-platform"])?;
    ensure!(
        !chroot.path(PROGRAM).exists() && chroot.path(SETTINGS).exists(),
        "remove must delete the program and keep the settings"
    );
    let output = chroot.run(&["dpkg", "--purge", "svc-platform"])?;
    ensure!(output.contains("kept /etc/svc/platform.env"), "purge does not report what it keeps:\n{output}");
    ensure!(
        chroot.path(SETTINGS).exists() && !example.exists(),
        "purge must keep the settings, which contain the platform's key, and delete the example"
    );
    check_removed(chroot, "svc-platform")
}

/// Writes `/etc/svc/platform.env` as described in docs/operating/install.md, after checking that unreadable settings
/// are reported.
fn write_settings(chroot: &Chroot, source: &Path, stack: &Stack, url: &str) -> Result<()> {
    chroot.run(&["cp", EXAMPLE_SETTINGS, SETTINGS])?;
    let report = run_doctor(chroot)?;
    ensure!(
        report.contains("{\"check\":\"env-file\",\"level\":\"problem\"") && report.contains("cannot read"),
        "doctor does not report that the settings are unreadable: {report}"
    );
    let guide = fs::read_to_string(source.join("docs/operating/install.md"))?;
    let install_command = guide.lines().find(|line| line.starts_with("install ") && line.ends_with(SETTINGS));
    chroot.run(&[
        "sh",
        "-c",
        install_command.context("docs/operating/install.md has no command that installs the settings")?,
    ])?;
    let mut text = String::new();
    for (name, value) in stack.platform_env() {
        let value = match name.as_str() {
            "PLATFORM_LISTEN" => url.trim_start_matches("http://"),
            "PLATFORM_PUBLIC_URL" => url,
            _ => value,
        };
        text.push_str(&format!("{name}=\"{value}\"\n"));
    }
    Ok(fs::write(chroot.path(SETTINGS), text)?)
}

/// Returns `svcctl doctor`'s report on the installed platform; it may list problems.
fn run_doctor(chroot: &Chroot) -> Result<String> {
    chroot.run(&["sh", "-c", "svcctl doctor platform --json 2>&1 || true"])
}

/// Starts the unit's command, checks the running platform, and stops it with SIGTERM.
async fn run_platform(chroot: &Chroot, url: &str, log: &Path, stack: &Stack) -> Result<()> {
    let unit = fs::read_to_string(chroot.path("usr/lib/systemd/system/svc-platform.service"))?;
    let line = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).context("no ExecStart")?;
    let args: Vec<&str> = line.split(' ').collect();
    let mut process = chroot.spawn(SERVICE_USER, &args, log)?;
    let check_result = check_running_platform(chroot, &mut process, url, stack).await;
    let stop_result = stop(&mut process);
    child::unregister(process.id());
    check_result.with_context(|| fs::read_to_string(log).unwrap_or_default())?;
    stop_result.with_context(|| fs::read_to_string(log).unwrap_or_default())
}

/// Waits until the platform is ready, and checks its environment, its user, its probe and `svcctl doctor`'s report.
async fn check_running_platform(
    chroot: &Chroot,
    process: &mut Child,
    url: &str,
    stack: &Stack,
) -> Result<()> {
    let client = reqwest::Client::builder().timeout(Duration::from_secs(5)).no_proxy().build()?;
    let deadline = Instant::now() + START_TIMEOUT;
    let body = loop {
        match client.get(format!("{url}/readyz/control")).send().await {
            Ok(response) if response.status().is_success() => break response.text().await?,
            Ok(_) | Err(_) if Instant::now() < deadline => {
                ensure!(process.try_wait()?.is_none(), "the platform exited during startup");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Ok(response) => bail!("/readyz/control: {}", response.status()),
            Err(error) => return Err(error.into()),
        }
    };
    ensure!(body.contains("\"database\":\"ok\""), "/readyz/control: {body}");
    let environ = String::from_utf8_lossy(&fs::read(format!("/proc/{}/environ", process.id()))?).into_owned();
    ensure!(!environ.contains(&stack.secret), "the secret is in the process's environment");
    let owner = fs::metadata(format!("/proc/{}", process.id()))?.uid();
    ensure!(owner != 0, "the platform is running as root");
    chroot.run_as(SERVICE_USER, &[PROGRAM, "svc-platform", "probe", "--env-file", SETTINGS])?;
    // Not `bundle`, because the configured version has not been published here.
    let report = run_doctor(chroot)?;
    for check in
        ["env-file", "database", "store", "host-credentials", "provider", "identity-provider", "platform"]
    {
        ensure!(
            report.contains(&format!("{{\"check\":\"{check}\",\"level\":\"ok\"")),
            "check {check} failed: {report}"
        );
    }
    Ok(())
}

fn stop(process: &mut Child) -> Result<()> {
    if process.try_wait()?.is_none() {
        kill(Pid::from_raw(i32::try_from(process.id())?), Signal::SIGTERM)?;
    }
    match child::wait_until(process, Instant::now() + STOP_TIMEOUT) {
        Some(status) if status.success() => Ok(()),
        Some(status) => bail!("exited with {status} after SIGTERM"),
        None => {
            process.kill()?;
            process.wait()?;
            bail!("still running {STOP_TIMEOUT:?} after SIGTERM")
        }
    }
}

fn check_host_package(chroot: &Chroot, packages: &[PathBuf; 2]) -> Result<()> {
    let output = chroot.run(&["dpkg", "--install", &chroot.copy_in(&packages[0])?])?;
    ensure!(
        output.contains("not provisioned, so not started"),
        "no hint about the missing provisioning:\n{output}"
    );
    for user in ["svc-gateway", "svc"] {
        group_id(chroot, user)?;
    }
    for (path, mode) in
        [("opt/svc", 0o755), ("opt/svc/env", 0o750), ("var/lib/svc", 0o1771), ("home/svc", 0o1770)]
    {
        let meta = fs::metadata(chroot.path(path)).with_context(|| format!("/{path}"))?;
        ensure!(
            meta.permissions().mode() & 0o7777 == mode,
            "/{path} has mode {:o}",
            meta.permissions().mode()
        );
    }
    let enabled = fs::read_dir(chroot.path("etc/systemd/system/multi-user.target.wants"));
    let enabled: Vec<_> = enabled.into_iter().flatten().flatten().map(|entry| entry.file_name()).collect();
    ensure!(
        !enabled.iter().any(|name| name.to_string_lossy().starts_with("svc")),
        "units are enabled by default: {enabled:?}"
    );
    ensure!(
        chroot.path("usr/lib/systemd/system/svc-gateway.service").exists(),
        "the gateway's unit is missing"
    );
    check_documentation(chroot, "svc-host", "svc-gateway.8")?;

    let owner_files = ["home/svc/home/diary.txt", "opt/svc/env/host.env", "var/lib/svc/tls/key.pem"];
    for path in owner_files {
        fs::write(chroot.path(path), "the owner's")?;
    }
    chroot.run(&["dpkg", "--install", &chroot.copy_in(&packages[1])?])?;
    check_version(chroot, "svc-host", "+next")?;
    chroot.run(&["dpkg", "--remove", "svc-host"])?;
    let output = chroot.run(&["dpkg", "--purge", "svc-host"])?;
    ensure!(output.contains("they hold the owner's data"), "purge does not report what it keeps:\n{output}");
    for path in owner_files {
        ensure!(
            fs::read_to_string(chroot.path(path))? == "the owner's",
            "/{path} was changed by the upgrade or the purge"
        );
    }
    check_removed(chroot, "svc-host")
}

/// Checks the manual pages, the completions, and the version.
fn check_documentation(chroot: &Chroot, package: &str, page: &str) -> Result<()> {
    let (name, section) = page.split_once('.').context("the page has no section")?;
    for (section, name) in [(section, name), ("1", "svcctl"), ("1", "svcctl-doctor")] {
        // dpkg lists a page even if its configuration excludes manual pages, as in many container images.
        let listed = chroot.run(&["dpkg", "-L", package])?;
        let path = format!("/usr/share/man/man{section}/{name}.{section}.gz");
        ensure!(listed.lines().any(|line| line == path), "{path} is missing");
        if chroot.path(&path).exists() {
            // Warnings do not make man fail.
            let render = format!("man --warnings -l -Tutf8 {path} 2>&1 >/dev/null");
            let warnings = chroot.run(&["sh", "-c", &render])?;
            ensure!(warnings.is_empty(), "{path}: {warnings}");
        }
    }
    for path in [
        "usr/share/bash-completion/completions/svcctl",
        "usr/share/zsh/vendor-completions/_svcctl",
        "usr/share/fish/vendor_completions.d/svcctl.fish",
    ] {
        ensure!(
            fs::read_to_string(chroot.path(path))?.contains("verify-rollout"),
            "/{path} has no completions"
        );
    }
    let version = chroot.run(&["svcctl", "--version"])?;
    ensure!(version.starts_with("svcctl "), "svcctl --version: {version}");
    Ok(())
}

fn check_version(chroot: &Chroot, package: &str, suffix: &str) -> Result<()> {
    let version = chroot.run(&["dpkg-query", "-W", "-f", "${Status} ${Version}", package])?;
    ensure!(
        version.starts_with("install ok installed ") && version.ends_with(suffix),
        "{package}: {version}"
    );
    Ok(())
}

fn check_removed(chroot: &Chroot, package: &str) -> Result<()> {
    for path in [
        "usr/lib/svc",
        "usr/bin/svcctl",
        "usr/lib/systemd/system/svc-platform.service",
        "usr/lib/systemd/system/svc-gateway.service",
        "usr/share/doc",
    ] {
        let path = if path.ends_with("doc") { format!("{path}/{package}") } else { path.to_owned() };
        ensure!(chroot.path(&path).symlink_metadata().is_err(), "/{path} still exists");
    }
    let status = chroot.run(&["sh", "-c", &format!("dpkg -s {package} 2>&1 || true")])?;
    ensure!(status.contains("is not installed"), "dpkg still lists {package}: {status}");
    Ok(())
}

/// Returns the id of the group with this name.
fn group_id(chroot: &Chroot, name: &str) -> Result<u32> {
    let groups = fs::read_to_string(chroot.path("etc/group"))?;
    let line = groups.lines().find(|line| line.split(':').next() == Some(name));
    let line = line.with_context(|| format!("no group {name}"))?;
    Ok(line.split(':').nth(2).context("the group has no id")?.parse()?)
}
