//! The story on machines. What does not look at a machine's disk is the demo's own.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::data::BESIDE;
use super::{look, release};
use crate::bundle;
use crate::pg::PgBinaries;
use crate::s3::{Fault, Rule};
use crate::story::{HANDLE, IMAGE_VERSION, MachineRecord, Patience, Stack, USER, eventually};
pub use crate::story::{backup, delete, insert_and_find, insert_later, nobody_is_served, rows_are_back};

/// From a machine's start to its gateway, under emulation.
pub const UP: Duration = Duration::from_secs(400);
pub const PATIENCE: Patience = Patience { up: Duration::from_secs(800), removal: Duration::from_secs(300) };
const MARKER: &str = "stat -c %Y.%Z /var/lib/svc/restore-complete";
const BOOT_ID: &str = "cat /proc/sys/kernel/random/boot_id";

pub async fn publish(stack: &Stack) -> Result<((), String)> {
    stack.svcctl(&["slot", "set", USER, "--plan", "starter"]).await?.success()?;
    let mib = publish_as(stack, IMAGE_VERSION, &stack.svc, release::small).await?;
    Ok(((), format!("slot {USER}/primary on starter; bundle {IMAGE_VERSION}, {mib} MiB")))
}

/// Which parts a bundle has.
type Parts = fn(&Path, &PgBinaries, &str, &Path) -> Result<bundle::Options>;

/// Builds and publishes a bundle of these parts; its size in MiB.
pub async fn publish_as(stack: &Stack, version: &str, svc: &Path, parts: Parts) -> Result<u64> {
    let (svc, pg, dir) = (svc.to_owned(), stack.pg.clone(), stack.dir.join(format!("bundle-{version}")));
    let (version_there, key) = (version.to_owned(), stack.signing_key.clone());
    let build = move || {
        let options = parts(&svc, &pg, &version_there, &dir)?;
        bundle::build(&bundle::Options { signing_keys: vec![key], ..options })
    };
    let built = tokio::task::spawn_blocking(build).await??;
    let dir = built.dir.display().to_string();
    stack.svcctl(&["bundle", "publish", &dir, "--image-version", version]).await?.success()?;
    Ok(built.size_bytes >> 20)
}

pub async fn provision(stack: &Stack) -> Result<(MachineRecord, String)> {
    let args = ["--json", "provision", USER, "--handle", HANDLE, "--wait=800"];
    let run = stack.svcctl(&args).await?.success()?;
    let machine = MachineRecord::read(&run.stdout)?;
    ensure!(machine.status == "running" && machine.epoch == 1, "the machine is {machine:?}");
    Ok((machine.clone(), format!("machine {} is running at {}", machine.id, machine.ip)))
}

/// The machine starts again by itself: everything is there, and nothing is restored.
pub async fn reboot(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let on = stack.provider.machine(&machine.server)?;
    let short = Duration::from_secs(60);
    let (boot, marker) = (on.run(BOOT_ID, short).await?.success()?, on.run(MARKER, short).await?.success()?);
    let before = stack.web.titles(&stack.owner()).await?;
    // Its connection ends before it can say how it went.
    on.run("systemctl reboot", short).await.ok();
    let started = std::time::Instant::now();
    eventually("the machine boots again", UP, || async {
        let now = on.run(BOOT_ID, Duration::from_secs(30)).await?.success()?;
        ensure!(now != boot, "it is still the same boot");
        Ok(())
    })
    .await?;
    let owner = stack.owner();
    let after = eventually("the rows after the reboot", UP, || stack.web.titles(&owner)).await?;
    let seconds = started.elapsed().as_secs_f64();
    ensure!(after == before, "there were {before:?}, now {after:?}");
    ensure!(on.run(MARKER, short).await?.success()? == marker, "it was restored again");
    Ok(((), format!("served again {seconds:.0} s after the order; {} rows, nothing restored", after.len())))
}

/// The server dies and the provider knows nothing of it any more.
pub async fn lose(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    look::keep_journal(stack, machine).await;
    stack.provider.vanish_server(&machine.server).await?;
    ensure!(stack.provider.servers().is_empty(), "the provider still has {:?}", stack.provider.servers());
    Ok(((), "its power is cut and the provider has no server".to_owned()))
}

pub async fn recover(stack: &Stack, first: &MachineRecord) -> Result<(MachineRecord, String)> {
    let run = stack.svcctl(&["--json", "recover", USER, "--yes", "--wait=800"]).await?.success()?;
    let second = MachineRecord::read(&run.stdout)?;
    ensure!(second.status == "running" && second.id != first.id, "the new machine is {second:?}");
    ensure!(second.epoch > first.epoch, "its epoch is {}", second.epoch);
    let on = stack.provider.machine(&second.server)?;
    let restored = on.run(MARKER, Duration::from_secs(60)).await?.success().context("no marker")?;
    ensure!(!restored.trim().is_empty(), "no marker");
    Ok((second.clone(), format!("machine {} is running, epoch {}, restored", second.id, second.epoch)))
}

/// The first machine has power again: it serves until it is told, and writes nothing that counts.
pub async fn old_machine_learns(stack: &Stack, first: &MachineRecord) -> Result<((), String)> {
    let on = stack.provider.machine(&first.server)?;
    let pointer = || stack.slot.pointer(&stack.store);
    let (before, short) = (pointer()?, Duration::from_secs(60));
    on.switch_on_again()?;
    eventually("the old machine learns that it is replaced", UP, || async {
        on.run("test -e /var/lib/svc/superseded.json", short).await?.success().map(drop)
    })
    .await?;
    eventually("the old machine's gateway ends, and stays so", Duration::from_secs(60), || async {
        let state = on.run("systemctl show -P ActiveState svc-gateway.service", short).await?.success()?;
        ensure!(state.trim() == "inactive", "it is {}", state.trim());
        Ok(())
    })
    .await?;
    let backup = on.run("systemctl start svc-db-backup.service", short).await?;
    ensure!(!backup.status.success(), "a replaced machine's backup was not refused");
    let words =
        on.run("journalctl -b -u svc-db-backup.service -n 20 -o cat --no-pager", short).await?.success()?;
    ensure!(words.contains("replaced"), "its backup failed for another reason: {words}");
    let state = "systemctl show -P ActiveState svc-gateway.service; ss -Hltn sport = 443";
    let state = on.run(state, short).await?.success()?;
    ensure!(state.trim() == "inactive", "its gateway came back: {state}");
    ensure!(pointer()? == before, "the pointer has moved: {}", pointer()?);
    on.keep_journal().await.ok();
    on.cut();
    Ok(((), "told that it is replaced: its gateway ends and stays so, its backup is refused".to_owned()))
}

/// The units that look at snapshots: the latest is restored on trial, and read again; the fleet hears of it.
pub async fn drill(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let on = stack.provider.machine(&machine.server)?;
    let (short, long) = (Duration::from_secs(60), Duration::from_secs(400));
    for unit in ["svc-db-drill.service", "svc-db-verify.service"] {
        on.run(&format!("systemctl start {unit}"), long).await?.success().context(unit)?;
    }
    let latest = "/opt/svc/bin/svc-db-backup verify --latest";
    let verified = format!("systemd-run --wait --pipe -q -p User=svc-gateway -p Group=svc-gateway {latest}");
    let said = on.run(&verified, long).await?.success().context("verify --latest")?;
    let told = eventually("the fleet hears of both", UP, || async {
        let run = stack.svcctl(&["--json", "status", HANDLE]).await?.success()?;
        let record: serde_json::Value = run.json()?;
        let checks = record["checks"].clone();
        let both = ["drill", "verify"].iter().all(|kind| checks[*kind]["status"] == "success");
        ensure!(both, "it knows {checks}");
        Ok(checks)
    })
    .await?;
    let left = on.run(&format!("set -e\n{BESIDE}\nls /var/lib/svc/drill"), short).await?.success()?;
    ensure!(left.trim() == "lock", "a drill leaves {left}");
    Ok(((), format!("{} restored on trial; {}", told["drill"]["key"], said.trim())))
}

/// Power off, another type, power on: the same disk with the same data, more of everything else.
pub async fn resize(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let on = stack.provider.machine(&machine.server)?;
    let short = Duration::from_secs(60);
    let look = format!("cat /etc/machine-id; {MARKER}");
    let size = "nproc; awk '/MemTotal/ {print int($2 / 1024)}' /proc/meminfo";
    let (same, small) = (on.run(&look, short).await?.success()?, on.run(size, short).await?.success()?);
    let before = stack.web.titles(&stack.owner()).await?;
    stack.svcctl(&["slot", "set", USER, "--plan", "builder"]).await?.success()?;
    let run = stack.svcctl(&["--json", "resize", HANDLE, "cpx32", "--yes", "--wait=800"]).await?.success()?;
    let record: serde_json::Value = run.json()?;
    ensure!(record["status"] == "running" && record["serverType"] == "cpx32", "the record is {record}");
    let owner = stack.owner();
    let after = eventually("the rows after the resize", UP, || stack.web.titles(&owner)).await?;
    ensure!(after == before, "there were {before:?}, now {after:?}");
    let large = on.run(size, short).await?.success()?;
    ensure!(on.run(&look, short).await?.success()? == same, "another disk, or restored again");
    ensure!(large != small, "it has {small} as before");
    let words = |text: String| text.split_whitespace().collect::<Vec<_>>().join(" cores, ") + " MiB";
    Ok((
        (),
        format!(
            "{} became {}; the same disk, {} rows, nothing restored",
            words(small),
            words(large),
            after.len()
        ),
    ))
}

/// The store gives damaged snapshots: the gate stays shut and the platform knows the stage. With the store whole again,
/// the next recovery works.
pub async fn refused_restore(stack: &Stack) -> Result<((), String)> {
    stack.store.fault(Rule::new(Fault::CorruptBody).method("GET").key_ending(".dump").always());
    let run = stack.svcctl(&["--json", "recover", USER, "--yes", "--wait=800"]).await?;
    ensure!(run.code != Some(0), "a damaged snapshot was restored: {}", run.stdout);
    let record: serde_json::Value = stack.svcctl(&["--json", "status", HANDLE]).await?.success()?.json()?;
    ensure!(
        record["status"] == "failed",
        "svcctl recover: {}{}; the record is {record}",
        run.stdout,
        run.stderr
    );
    let failure = &record["failure"];
    ensure!(failure["cause"] == "boot_reported" && failure["stage"] == "restore", "it says {failure}");
    let id = record["machineId"].as_str().context("no machineId")?;
    let on = stack.provider.machine(&format!("svc-{id}"))?;
    let units = "systemctl show -P ActiveState svc-restore.service svc-gateway.service; test -e /opt/svc/restore-complete && echo open || echo shut";
    let said = on.run_when_up(units, UP).await?.success()?;
    let words: Vec<&str> = said.split_whitespace().collect();
    ensure!(words == ["failed", "inactive", "shut"], "svc-restore, svc-gateway and the gate are {words:?}");
    on.keep_journal().await.ok();
    stack.store.heal();
    Ok((
        (),
        "svc-restore failed, gateway not started, gate shut; the platform shows failed at restore".to_owned(),
    ))
}
