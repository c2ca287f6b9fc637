//! The platform's package on a real systemd: its unit starts it, confined as it is, and starts it again.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::deb;

use crate::story::{MachineRecord, Stack, eventually};
use crate::vm::HOST_FROM_GUEST;

const SHORT: Duration = Duration::from_secs(60);
const LONG: Duration = Duration::from_secs(400);
const API: &str = "127.0.0.1:9701";
const ROUTER: &str = "127.0.0.1:9702";
const READY: &str = "curl -sS --max-time 10 http://127.0.0.1:9701/readyz";
const PID: &str = "systemctl show -P MainPID svc-platform.service";

/// Installed as the README says, one more process of the lab's platform: ready, well by its doctor, up again after a kill,
/// stopped and purged.
pub async fn platform_package(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let on = stack.provider.machine(&machine.server)?;
    let (svc, out) = (stack.svc.clone(), stack.dir.join("deb"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let build = move || deb::build(&deb::Options::new(svc, source, out));
    let debs: Vec<PathBuf> = tokio::task::spawn_blocking(build).await??;
    let platform = debs.iter().find(|deb| deb.to_string_lossy().contains("svc-platform_"));
    on.bring(platform.context("no package of the platform")?, "/var/tmp/svc-platform.deb", LONG).await?;
    on.run("dpkg -i /var/tmp/svc-platform.deb", LONG).await?.good()?;
    let install =
        "install -o root -g svc-platform -m 0640 /etc/svc/platform.env.example /etc/svc/platform.env";
    on.run(install, SHORT).await?.good()?;
    let settings = stack.dir.join("platform-on-machine.env");
    fs::write(&settings, settings_of(stack))?;
    on.bring(&settings, "/etc/svc/platform.env", SHORT).await?;

    on.run("systemctl enable --now svc-platform.service", LONG).await?.good().context("start it")?;
    let ready = async || {
        let said = on.run(READY, SHORT).await?.good()?;
        ensure!(said.contains("\"database\":\"ok\""), "/readyz says {said}");
        Ok(())
    };
    eventually("the packaged platform is ready", LONG, ready).await?;
    let user =
        on.run("ps -o user= -p $(systemctl show -P MainPID svc-platform.service)", SHORT).await?.good()?;
    ensure!(user.trim().starts_with("svc-plat"), "it runs as {}", user.trim());
    let doctor = on.run("/usr/bin/svcctl doctor platform", LONG).await?;
    ensure!(doctor.status.success(), "its doctor says {}{}", doctor.stdout, doctor.stderr);
    let lines = doctor.stdout.lines().filter(|line| line.starts_with("ok")).count();

    let first = on.run(PID, SHORT).await?.good()?;
    on.run(&format!("kill -9 {}", first.trim()), SHORT).await?.good()?;
    eventually("the packaged platform is up again", LONG, async || {
        let second = on.run(PID, SHORT).await?.good()?;
        ensure!(second != first && second.trim() != "0", "its process is {}", second.trim());
        ready().await
    })
    .await?;
    let stopped = "systemctl stop svc-platform && systemctl show -P Result svc-platform.service";
    let stopped = on.run(stopped, LONG).await?.good()?;
    ensure!(stopped.trim() == "success", "stopped, it says {}", stopped.trim());
    on.run("dpkg --purge svc-platform && rm /var/tmp/svc-platform.deb && ! systemctl cat svc-platform.service 2>/dev/null", LONG)
        .await?
        .good()
        .context("purge it")?;
    Ok((
        (),
        format!(
            "ready as svc-platform under its unit, {lines} checks of doctor ok, up again after a kill, purged"
        ),
    ))
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
