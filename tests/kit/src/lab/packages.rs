//! The packages on a real systemd: their units start what they are for, confined as they are, and end it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::faults::serves_again;
use crate::deb;
use crate::story::{MachineRecord, Stack, eventually};
use crate::vm::{HOST_FROM_GUEST, Machine};

const SHORT: Duration = Duration::from_secs(60);
const LONG: Duration = Duration::from_secs(400);
const API: &str = "127.0.0.1:9701";
const ROUTER: &str = "127.0.0.1:9702";
const READY: &str = "curl -sS --max-time 10 http://127.0.0.1:9701/readyz/control";
const PID: &str = "systemctl show -P MainPID svc-platform.service";
const GATEWAY: &str = "systemctl show -P MainPID svc-gateway.service";
const RUN_CONTAINER: &str = "podman run --detach --name svc-platform --network host --read-only --cap-drop all \
                             --volume /etc/svc/platform.env:/etc/svc/platform.env:ro localhost/svc-platform";
/// What cloud-init wrote stays, and what the machine became.
const BARE: &str = "systemctl disable --now svc.target; systemctl stop 'svc-*' && \
                    rm -r /opt/svc/releases /opt/svc/current /opt/svc/bin /opt/svc/app /opt/svc/runtime \
                    /etc/sysusers.d/svc.conf /etc/tmpfiles.d/svc.conf && \
                    find /etc/systemd/system -maxdepth 1 -type f -name 'svc*' ! -name svc-first-boot.service -delete && \
                    systemctl daemon-reload";

/// Installed as the README says, one more process of the lab's platform: ready, well by its doctor, up again after a kill,
/// stopped and purged.
pub async fn platform_package(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let on = stack.provider.machine(&machine.server)?;
    on.bring(&package(stack, "svc-platform").await?, "/var/tmp/svc-platform.deb", LONG).await?;
    on.run("dpkg -i /var/tmp/svc-platform.deb", LONG).await?.success()?;
    let install =
        "install -o root -g svc-platform -m 0640 /etc/svc/platform.env.example /etc/svc/platform.env";
    on.run(install, SHORT).await?.success()?;
    let settings = stack.dir.join("platform-on-machine.env");
    fs::write(&settings, settings_of(stack))?;
    on.bring(&settings, "/etc/svc/platform.env", SHORT).await?;

    on.run("systemctl enable --now svc-platform.service", LONG).await?.success().context("start it")?;
    let ready = async || {
        let said = on.run(READY, SHORT).await?.success()?;
        ensure!(said.contains("\"database\":\"ok\""), "/readyz/control says {said}");
        Ok(())
    };
    eventually("the packaged platform is ready", LONG, ready).await?;
    let user =
        on.run("ps -o user= -p $(systemctl show -P MainPID svc-platform.service)", SHORT).await?.success()?;
    ensure!(user.trim().starts_with("svc-plat"), "it runs as {}", user.trim());
    let doctor = on.run("/usr/bin/svcctl doctor platform", LONG).await?;
    ensure!(doctor.status.success(), "its doctor says {}{}", doctor.stdout, doctor.stderr);
    let lines = doctor.stdout.lines().filter(|line| line.starts_with("ok")).count();

    let first = on.run(PID, SHORT).await?.success()?;
    on.run(&format!("kill -9 {}", first.trim()), SHORT).await?.success()?;
    eventually("the packaged platform is up again", LONG, async || {
        let second = on.run(PID, SHORT).await?.success()?;
        ensure!(second != first && second.trim() != "0", "its process is {}", second.trim());
        ready().await
    })
    .await?;
    let stopped = "systemctl stop svc-platform && systemctl show -P Result svc-platform.service";
    let stopped = on.run(stopped, LONG).await?.success()?;
    ensure!(stopped.trim() == "success", "stopped, it says {}", stopped.trim());
    on.run("dpkg --purge svc-platform && rm /var/tmp/svc-platform.deb && ! systemctl cat svc-platform.service 2>/dev/null", LONG)
        .await?
        .success()
        .context("purge it")?;
    let contained = contained(&on).await.context("in a container")?;
    Ok((
        (),
        format!(
            "ready as svc-platform under its unit, {lines} checks of doctor ok, up again after a kill, purged; {contained}"
        ),
    ))
}

/// The same platform from the container recipe, with nothing but its settings: healthy by its own check, and it ends when told.
async fn contained(on: &Machine) -> Result<String> {
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/container/Containerfile");
    on.run("mkdir -p /var/tmp/image && cp /opt/svc/current/bin/svc /var/tmp/image/svc", SHORT)
        .await?
        .success()?;
    on.bring(&recipe, "/var/tmp/Containerfile", SHORT).await?;
    let build = "podman build --format docker -f /var/tmp/Containerfile -t svc-platform /var/tmp/image";
    on.run(build, LONG).await?.success().context("build it")?;
    on.run(&format!("chown 65532 /etc/svc/platform.env && {RUN_CONTAINER}"), LONG)
        .await?
        .success()
        .context("run it")?;
    let healthy = eventually("the container is healthy", LONG, async || {
        on.run("podman healthcheck run svc-platform || { podman logs svc-platform >&2; exit 1; }", LONG)
            .await?
            .success()
    });
    healthy.await?;
    let ended = "podman stop --time 30 svc-platform && podman inspect -f '{{.State.ExitCode}}' svc-platform";
    let ended = on.run(ended, LONG).await?.success()?;
    ensure!(ended.trim().ends_with("\n0"), "told to end, its container says {ended}");
    on.run(
        "podman rm svc-platform; podman rmi svc-platform; rm -r /var/tmp/image /var/tmp/Containerfile",
        LONG,
    )
    .await?
    .success()
    .context("remove it")?;
    Ok("the same from its container recipe, read-only and without capabilities".to_owned())
}

/// On a machine that was provisioned and has neither release nor units, the host's package brings both, and its removal
/// ends all that it started and keeps what is the owner's.
pub async fn host_package(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let on = stack.provider.machine(&machine.server)?;
    let before = stack.web.titles(&stack.owner()).await?;
    on.run(BARE, LONG).await?.success().context("take release and units away")?;
    on.bring(&package(stack, "svc-host").await?, "/var/tmp/svc-host.deb", LONG).await?;
    let told = on.run("dpkg -i /var/tmp/svc-host.deb", LONG).await?.success()?;
    ensure!(!told.contains("not provisioned"), "it takes the machine for unprovisioned: {told}");
    on.run("/usr/lib/svc/svc svc-update boot", LONG).await?.success().context("bring the release")?;
    let began = Instant::now();
    on.run("systemctl enable --now svc.target", LONG).await?.success().context("start it")?;
    let after = serves_again(stack).await?;
    let seconds = began.elapsed().as_secs_f64();
    ensure!(after == before, "there were {before:?}, now {after:?}");
    eventually("its doctor finds it well", LONG, async || {
        let doctor = on.run("/usr/bin/svcctl doctor host", LONG).await?;
        ensure!(doctor.status.success(), "it says {}{}", doctor.stdout, doctor.stderr);
        Ok(())
    })
    .await?;

    let gateway = on.run(GATEWAY, SHORT).await?.success()?;
    on.run("dpkg -i /var/tmp/svc-host.deb", LONG).await?.success().context("install it over itself")?;
    ensure!(
        on.run(GATEWAY, SHORT).await?.success()? == gateway,
        "an upgrade of the package ended the gateway"
    );
    let files = "find /home/svc /var/lib/svc/tls /opt/svc/env -type f | wc -l; podman volume ls -q";
    let owned = on.run(files, SHORT).await?.success()?;
    on.run("dpkg --purge svc-host && rm /var/tmp/svc-host.deb", LONG).await?.success().context("purge it")?;
    let running =
        "systemctl list-units --no-legend --state=active,activating 'svc*'; ss -Hltn 'sport = :443'";
    let running = on.run(running, SHORT).await?.success()?;
    ensure!(running.trim().is_empty(), "purged, there still is {running}");
    let kept = on.run(files, SHORT).await?.success()?;
    ensure!(kept == owned, "of the owner's there was {owned}, now {kept}");
    Ok((
        (),
        format!(
            "bare, it serves {seconds:.0} s after its package's start; {} rows; purged, all is kept",
            after.len()
        ),
    ))
}

/// One of this tree's packages, built of the lab's executable.
async fn package(stack: &Stack, name: &str) -> Result<PathBuf> {
    let (svc, out) = (stack.svc.clone(), stack.dir.join("deb"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let build = move || deb::build(&deb::Options::new(svc, source, out));
    let built: Vec<PathBuf> = tokio::task::spawn_blocking(build).await??;
    let named = built.into_iter().find(|deb| deb.to_string_lossy().contains(&format!("/{name}_")));
    named.with_context(|| format!("no package {name}"))
}

/// The lab's own, as they are from there; without TLS, whose files are here.
fn settings_of(stack: &Stack) -> String {
    let mut text = String::new();
    for (name, value) in stack.platform_env() {
        let value = match name.as_str() {
            "PLATFORM_LISTEN" => API.to_owned(),
            "ROUTER_LISTEN" => ROUTER.to_owned(),
            "PLATFORM_PUBLIC_URL" => format!("http://{API}"),
            "ROUTER_TLS_CERT_FILE" | "ROUTER_TLS_KEY_FILE" => continue,
            _ => value.replace("127.0.0.1", HOST_FROM_GUEST),
        };
        text.push_str(&format!("{name}=\"{value}\"\n"));
    }
    text
}
