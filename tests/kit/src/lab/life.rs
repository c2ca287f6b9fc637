//! The story on machines. What does not look at a machine's disk is the demo's own.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::release;
use crate::bundle;
use crate::story::{HANDLE, IMAGE_VERSION, MachineRecord, Stack, USER, eventually};
pub use crate::story::{backup, delete, insert_and_find, insert_later, nobody_is_served, rows_are_back};

/// From a machine's start to its gateway, under emulation.
const UP: Duration = Duration::from_secs(400);
const MARKER: &str = "stat -c %Y.%Z /var/lib/svc/restore-complete";
const BOOT_ID: &str = "cat /proc/sys/kernel/random/boot_id";

pub async fn publish(stack: &Stack) -> Result<((), String)> {
    stack.svcctl(&["slot", "set", USER, "--plan", "starter"]).await?.good()?;
    let mib = publish_as(stack, IMAGE_VERSION).await?;
    Ok(((), format!("slot {USER}/primary on starter; bundle {IMAGE_VERSION}, {mib} MiB")))
}

/// Builds and publishes a bundle with what a machine needs; its size in MiB.
pub async fn publish_as(stack: &Stack, version: &str) -> Result<u64> {
    let (svc, pg, dir) = (stack.svc.clone(), stack.pg.clone(), stack.dir.join(format!("bundle-{version}")));
    let version_there = version.to_owned();
    let build = move || bundle::build(&release::options(&svc, &pg, &version_there, &dir)?);
    let built = tokio::task::spawn_blocking(build).await??;
    let dir = built.dir.display().to_string();
    stack.svcctl(&["bundle", "publish", &dir, "--image-version", version]).await?.good()?;
    Ok(built.size_bytes >> 20)
}

pub async fn provision(stack: &Stack) -> Result<(MachineRecord, String)> {
    let args = ["--json", "provision", USER, "--handle", HANDLE, "--wait=800"];
    let run = stack.svcctl(&args).await?.good()?;
    let machine = MachineRecord::read(&run.stdout)?;
    ensure!(machine.status == "running" && machine.epoch == 1, "the machine is {machine:?}");
    Ok((machine.clone(), format!("machine {} is running at {}", machine.id, machine.ip)))
}

/// The machine starts again by itself: everything is there, and nothing is restored.
pub async fn reboot(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let on = stack.provider.machine(&machine.server)?;
    let short = Duration::from_secs(60);
    let (boot, marker) = (on.run(BOOT_ID, short).await?.good()?, on.run(MARKER, short).await?.good()?);
    let before = stack.web.titles(&stack.owner()).await?;
    // Its connection ends before it can say how it went.
    on.run("systemctl reboot", short).await.ok();
    let started = std::time::Instant::now();
    eventually("the machine boots again", UP, || async {
        let now = on.run(BOOT_ID, Duration::from_secs(30)).await?.good()?;
        ensure!(now != boot, "it is still the same boot");
        Ok(())
    })
    .await?;
    let owner = stack.owner();
    let after = eventually("the rows after the reboot", UP, || stack.web.titles(&owner)).await?;
    let seconds = started.elapsed().as_secs_f64();
    ensure!(after == before, "there were {before:?}, now {after:?}");
    ensure!(on.run(MARKER, short).await?.good()? == marker, "it was restored again");
    Ok(((), format!("served again {seconds:.0} s after the order; {} rows, nothing restored", after.len())))
}

/// The server dies and the provider knows nothing of it any more.
pub async fn lose(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    stack.provider.vanish_server(&machine.server).await?;
    ensure!(stack.provider.servers().is_empty(), "the provider still has {:?}", stack.provider.servers());
    Ok(((), "its power is cut and the provider has no server".to_owned()))
}

pub async fn recover(stack: &Stack, first: &MachineRecord) -> Result<(MachineRecord, String)> {
    let run = stack.svcctl(&["--json", "recover", USER, "--yes", "--wait=800"]).await?.good()?;
    let second = MachineRecord::read(&run.stdout)?;
    ensure!(second.status == "running" && second.id != first.id, "the new machine is {second:?}");
    ensure!(second.epoch == first.epoch + 1, "its epoch is {}", second.epoch);
    let on = stack.provider.machine(&second.server)?;
    let restored = on.run(MARKER, Duration::from_secs(60)).await?.good().context("no marker")?;
    ensure!(!restored.trim().is_empty(), "no marker");
    Ok((second.clone(), format!("machine {} is running, epoch {}, restored", second.id, second.epoch)))
}
