//! The Debian packages under a real systemd: their units start, run confined, and stop.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::faults::wait_until_served;
use kit::deb;
use kit::scenario::{MachineRecord, Stack, eventually};
use kit::vm::{HOST_FROM_GUEST, Machine};

const SHORT_TIMEOUT: Duration = Duration::from_secs(60);
const LONG_TIMEOUT: Duration = Duration::from_secs(400);
const API_ADDRESS: &str = "127.0.0.1:9701";
const ROUTER_ADDRESS: &str = "127.0.0.1:9702";
const CHECK_READY: &str = "curl -sS --max-time 10 http://127.0.0.1:9701/readyz/control";
const PRINT_PLATFORM_PID: &str = "systemctl show -P MainPID svc-platform.service";
const PRINT_GATEWAY_PID: &str = "systemctl show -P MainPID svc-gateway.service";
const RUN_CONTAINER: &str = "podman run --detach --name svc-platform --network host --read-only --cap-drop all \
                             --volume /etc/svc/platform.env:/etc/svc/platform.env:ro localhost/svc-platform";
/// Removes the release and the units; keeps cloud-init's files and the machine's state.
const REMOVE_RELEASE_AND_UNITS: &str = "systemctl disable --now svc.target; systemctl stop 'svc-*' && \
                    rm -r /opt/svc/releases /opt/svc/current /opt/svc/bin /opt/svc/app /opt/svc/runtime \
                    /etc/sysusers.d/svc.conf /etc/tmpfiles.d/svc.conf && \
                    find /etc/systemd/system -maxdepth 1 -type f -name 'svc*' ! -name svc-first-boot.service -delete && \
                    systemctl daemon-reload";

/// Installs the platform package as in docs/operating/install.md, and runs it as a second process of the lab's
/// platform. The process becomes ready, passes `svcctl doctor platform`, restarts after a kill, and stops. Then the
/// package is purged, and the same platform runs in a container.
pub async fn check_platform_package(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let vm = stack.provider.machine(&machine.server)?;
    vm.upload(&build_package(stack, "svc-platform").await?, "/var/tmp/svc-platform.deb", LONG_TIMEOUT)
        .await?;
    vm.run("dpkg -i /var/tmp/svc-platform.deb", LONG_TIMEOUT).await?.into_stdout()?;
    let install =
        "install -o root -g svc-platform -m 0640 /etc/svc/platform.env.example /etc/svc/platform.env";
    vm.run(install, SHORT_TIMEOUT).await?.into_stdout()?;
    let settings = stack.dir.join("platform-on-machine.env");
    fs::write(&settings, platform_settings(stack))?;
    vm.upload(&settings, "/etc/svc/platform.env", SHORT_TIMEOUT).await?;

    vm.run("systemctl enable --now svc-platform.service", LONG_TIMEOUT)
        .await?
        .into_stdout()
        .context("cannot start the platform")?;
    let check_ready = async || {
        let body = vm.run(CHECK_READY, SHORT_TIMEOUT).await?.into_stdout()?;
        ensure!(body.contains("\"database\":\"ok\""), "/readyz/control: {body}");
        Ok(())
    };
    eventually("the packaged platform is ready", LONG_TIMEOUT, check_ready).await?;
    let user = vm
        .run("ps -o user= -p $(systemctl show -P MainPID svc-platform.service)", SHORT_TIMEOUT)
        .await?
        .into_stdout()?;
    ensure!(user.trim().starts_with("svc-plat"), "the platform runs as {}", user.trim());
    let doctor = vm.run("/usr/bin/svcctl doctor platform", LONG_TIMEOUT).await?;
    ensure!(doctor.status.success(), "doctor failed: {}{}", doctor.stdout, doctor.stderr);
    let passed_checks = doctor.stdout.lines().filter(|line| line.starts_with("ok")).count();

    let first = vm.run(PRINT_PLATFORM_PID, SHORT_TIMEOUT).await?.into_stdout()?;
    vm.run(&format!("kill -9 {}", first.trim()), SHORT_TIMEOUT).await?.into_stdout()?;
    eventually("the packaged platform has restarted", LONG_TIMEOUT, async || {
        let second = vm.run(PRINT_PLATFORM_PID, SHORT_TIMEOUT).await?.into_stdout()?;
        ensure!(second != first && second.trim() != "0", "the platform's pid is {}", second.trim());
        check_ready().await
    })
    .await?;
    let stopped = "systemctl stop svc-platform && systemctl show -P Result svc-platform.service";
    let stopped = vm.run(stopped, LONG_TIMEOUT).await?.into_stdout()?;
    ensure!(stopped.trim() == "success", "the result after stopping is {}", stopped.trim());
    vm.run("dpkg --purge svc-platform && rm /var/tmp/svc-platform.deb && ! systemctl cat svc-platform.service 2>/dev/null", LONG_TIMEOUT)
        .await?
        .into_stdout()
        .context("cannot purge the package")?;
    let in_container = check_container(&vm).await.context("the platform in a container")?;
    Ok((
        (),
        format!(
            "ready as svc-platform under its unit, {passed_checks} doctor checks ok, restarted after a kill, purged; {in_container}"
        ),
    ))
}

/// Runs the same platform in a container built from the repository's Containerfile, with only its settings mounted: it
/// becomes healthy, and exits with 0 when it is stopped.
async fn check_container(vm: &Machine) -> Result<String> {
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/container/Containerfile");
    vm.run("mkdir -p /var/tmp/image && cp /opt/svc/current/bin/svc /var/tmp/image/svc", SHORT_TIMEOUT)
        .await?
        .into_stdout()?;
    vm.upload(&recipe, "/var/tmp/Containerfile", SHORT_TIMEOUT).await?;
    let build = "podman build --format docker -f /var/tmp/Containerfile -t svc-platform /var/tmp/image";
    vm.run(build, LONG_TIMEOUT).await?.into_stdout().context("cannot build the image")?;
    vm.run(&format!("chown 65532 /etc/svc/platform.env && {RUN_CONTAINER}"), LONG_TIMEOUT)
        .await?
        .into_stdout()
        .context("cannot run the container")?;
    let healthy = eventually("the container is healthy", LONG_TIMEOUT, async || {
        vm.run(
            "podman healthcheck run svc-platform || { podman logs svc-platform >&2; exit 1; }",
            LONG_TIMEOUT,
        )
        .await?
        .into_stdout()
    });
    healthy.await?;
    let stop = "podman stop --time 30 svc-platform && podman inspect -f '{{.State.ExitCode}}' svc-platform";
    let exit_code = vm.run(stop, LONG_TIMEOUT).await?.into_stdout()?;
    ensure!(exit_code.trim().ends_with("\n0"), "the container's exit code is {exit_code}");
    vm.run(
        "podman rm svc-platform; podman rmi svc-platform; rm -r /var/tmp/image /var/tmp/Containerfile",
        LONG_TIMEOUT,
    )
    .await?
    .into_stdout()
    .context("cannot remove the container")?;
    Ok("the same in a container, read-only and without capabilities".to_owned())
}

/// Installs the host package on a provisioned machine that has neither a release nor units. The package contains the
/// units, and its program installs the release. A second installation does not restart the gateway. A purge stops all
/// units, and keeps the owner's data.
pub async fn check_host_package(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let vm = stack.provider.machine(&machine.server)?;
    let before = stack.web.list_titles(&stack.owner_token()).await?;
    vm.run(REMOVE_RELEASE_AND_UNITS, LONG_TIMEOUT)
        .await?
        .into_stdout()
        .context("cannot remove the release and the units")?;
    vm.upload(&build_package(stack, "svc-host").await?, "/var/tmp/svc-host.deb", LONG_TIMEOUT).await?;
    let output = vm.run("dpkg -i /var/tmp/svc-host.deb", LONG_TIMEOUT).await?.into_stdout()?;
    ensure!(!output.contains("not provisioned"), "the package reports an unprovisioned machine: {output}");
    vm.run("/usr/lib/svc/svc svc-update boot", LONG_TIMEOUT)
        .await?
        .into_stdout()
        .context("cannot install the release")?;
    let started = Instant::now();
    vm.run("systemctl enable --now svc.target", LONG_TIMEOUT)
        .await?
        .into_stdout()
        .context("cannot start the host")?;
    let after = wait_until_served(stack).await?;
    let seconds = started.elapsed().as_secs_f64();
    ensure!(after == before, "there were {before:?}, now {after:?}");
    eventually("doctor reports no problem", LONG_TIMEOUT, async || {
        let doctor = vm.run("/usr/bin/svcctl doctor host", LONG_TIMEOUT).await?;
        ensure!(doctor.status.success(), "doctor failed: {}{}", doctor.stdout, doctor.stderr);
        Ok(())
    })
    .await?;

    let gateway = vm.run(PRINT_GATEWAY_PID, SHORT_TIMEOUT).await?.into_stdout()?;
    vm.run("dpkg -i /var/tmp/svc-host.deb", LONG_TIMEOUT)
        .await?
        .into_stdout()
        .context("cannot reinstall the package")?;
    ensure!(
        vm.run(PRINT_GATEWAY_PID, SHORT_TIMEOUT).await?.into_stdout()? == gateway,
        "reinstalling the package restarted the gateway"
    );
    let files = "find /home/svc /var/lib/svc/tls /opt/svc/env -type f | wc -l; podman volume ls -q";
    let before_purge = vm.run(files, SHORT_TIMEOUT).await?.into_stdout()?;
    vm.run("dpkg --purge svc-host && rm /var/tmp/svc-host.deb", LONG_TIMEOUT)
        .await?
        .into_stdout()
        .context("cannot purge the package")?;
    let running =
        "systemctl list-units --no-legend --state=active,activating 'svc*'; ss -Hltn 'sport = :443'";
    let running = vm.run(running, SHORT_TIMEOUT).await?.into_stdout()?;
    ensure!(running.trim().is_empty(), "still running after the purge: {running}");
    let after_purge = vm.run(files, SHORT_TIMEOUT).await?.into_stdout()?;
    ensure!(
        after_purge == before_purge,
        "before the purge, the owner had {before_purge} files, now {after_purge}"
    );
    Ok((
        (),
        format!(
            "served {seconds:.0} s after the units' start; {} rows; purged, all data is kept",
            after.len()
        ),
    ))
}

/// Builds this source tree's packages with the lab's binary; returns the path of the named one.
async fn build_package(stack: &Stack, name: &str) -> Result<PathBuf> {
    let (svc, out) = (stack.svc.clone(), stack.dir.join("deb"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let build = move || deb::build(&deb::Options::new(svc, source, out));
    let built: Vec<PathBuf> = tokio::task::spawn_blocking(build).await??;
    let package = built.into_iter().find(|deb| deb.to_string_lossy().contains(&format!("/{name}_")));
    package.with_context(|| format!("no package {name}"))
}

/// Returns the lab's platform settings as seen from a guest, without TLS, because the machine lacks the certificate.
fn platform_settings(stack: &Stack) -> String {
    let mut env_file = String::new();
    for (name, value) in stack.platform_env() {
        let value = match name.as_str() {
            "PLATFORM_LISTEN" => API_ADDRESS.to_owned(),
            "ROUTER_LISTEN" => ROUTER_ADDRESS.to_owned(),
            "PLATFORM_PUBLIC_URL" => format!("http://{API_ADDRESS}"),
            "ROUTER_TLS_CERT_FILE" | "ROUTER_TLS_KEY_FILE" => continue,
            _ => value.replace("127.0.0.1", HOST_FROM_GUEST),
        };
        env_file.push_str(&format!("{name}=\"{value}\"\n"));
    }
    env_file
}
