//! The main scenario on virtual machines. Steps that do not inspect a machine's disk are shared with the demo.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::data::LIST_EXTRA_DATABASES;
use super::{files, invariants, release};
use kit::bundle;
use kit::pg::PgBinaries;
use kit::s3::{Fault, FaultRule};
use kit::scenario::{
    CONFIRM_FLAGS, HANDLE, IMAGE_VERSION, MachineRecord, RecoveryTimeouts, Stack, USER, eventually,
};
pub use kit::scenario::{
    backup, check_owner_gets_503, check_restored_rows, delete, insert_and_find_rows, insert_later_row,
};

/// Maximum time from power-on to a serving gateway, under emulation.
pub const BOOT_TIMEOUT: Duration = Duration::from_secs(400);
pub const TIMEOUTS: RecoveryTimeouts =
    RecoveryTimeouts { ready: Duration::from_secs(800), removal: Duration::from_secs(300) };
const PRINT_MARKER_TIME: &str = "stat -c %Y.%Z /var/lib/svc/restore-complete";
const PRINT_BOOT_ID: &str = "cat /proc/sys/kernel/random/boot_id";

pub async fn publish(stack: &Stack) -> Result<((), String)> {
    stack.svcctl(&["slot", "set", USER, "--plan", "starter"]).await?.ensure_success()?;
    let mib = publish_as(stack, IMAGE_VERSION, &stack.svc, release::small_options).await?;
    Ok(((), format!("slot {USER}/primary on starter; bundle {IMAGE_VERSION}, {mib} MiB")))
}

/// Creates the options for a bundle from the executable, the PostgreSQL binaries, the version and the output directory.
type BundleOptionsFn = fn(&Path, &PgBinaries, &str, &Path) -> Result<bundle::Options>;

/// Builds and publishes a bundle with these options; returns its size in MiB.
pub async fn publish_as(
    stack: &Stack,
    version: &str,
    svc: &Path,
    make_options: BundleOptionsFn,
) -> Result<u64> {
    let (svc, pg, dir) = (svc.to_owned(), stack.pg.clone(), stack.dir.join(format!("bundle-{version}")));
    let (build_version, key) = (version.to_owned(), stack.signing_key.clone());
    let build = move || {
        let options = make_options(&svc, &pg, &build_version, &dir)?;
        bundle::build(&bundle::Options { signing_keys: vec![key], ..options })
    };
    let built = tokio::task::spawn_blocking(build).await??;
    let dir = built.dir.display().to_string();
    stack.svcctl(&["bundle", "publish", &dir, "--image-version", version]).await?.ensure_success()?;
    Ok(built.size_bytes >> 20)
}

pub async fn provision(stack: &Stack) -> Result<(MachineRecord, String)> {
    let args = ["--json", "provision", USER, "--handle", HANDLE, "--wait=800"];
    let run = stack.svcctl(&[&args[..], &CONFIRM_FLAGS].concat()).await?.ensure_success()?;
    let machine = MachineRecord::parse(&run.stdout)?;
    ensure!(machine.status == "running" && machine.epoch == 1, "the machine is {machine:?}");
    Ok((machine.clone(), format!("machine {} is running at {}", machine.id, machine.ip)))
}

/// Reboots the machine: all rows are present, and nothing is restored.
pub async fn reboot(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let vm = stack.provider.machine(&machine.server)?;
    let timeout = Duration::from_secs(60);
    let (previous_boot_id, marker) = (
        vm.run(PRINT_BOOT_ID, timeout).await?.into_stdout()?,
        vm.run(PRINT_MARKER_TIME, timeout).await?.into_stdout()?,
    );
    let before = stack.web.list_titles(&stack.owner_token()).await?;
    // SSH disconnects before it can return a status.
    vm.run("systemctl reboot", timeout).await.ok();
    let started = std::time::Instant::now();
    eventually("the machine reboots", BOOT_TIMEOUT, || async {
        let boot_id = vm.run(PRINT_BOOT_ID, Duration::from_secs(30)).await?.into_stdout()?;
        ensure!(boot_id != previous_boot_id, "the machine has not rebooted yet");
        Ok(())
    })
    .await?;
    let owner = stack.owner_token();
    let after = eventually("the rows are found", BOOT_TIMEOUT, || stack.web.list_titles(&owner)).await?;
    let seconds = started.elapsed().as_secs_f64();
    ensure!(after == before, "there were {before:?}, now {after:?}");
    ensure!(
        vm.run(PRINT_MARKER_TIME, timeout).await?.into_stdout()? == marker,
        "the machine was restored again"
    );
    Ok(((), format!("served {seconds:.0} s after the reboot; {} rows, nothing restored", after.len())))
}

/// Cuts the machine's power, and removes its server from the provider.
pub async fn lose_machine(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    invariants::save_journal(stack, machine).await;
    stack.provider.lose_server(&machine.server).await?;
    ensure!(stack.provider.servers().is_empty(), "the provider still has {:?}", stack.provider.servers());
    Ok(((), "power cut, and no server at the provider".to_owned()))
}

/// Recovers the lost machine. `files_mib` is the size of the owner's files, which determines how long to wait.
pub async fn recover(
    stack: &Stack,
    first: &MachineRecord,
    files_mib: u64,
) -> Result<(MachineRecord, String)> {
    let ready = TIMEOUTS.ready + files::processing_timeout(files_mib);
    let wait = format!("--wait={}", ready.as_secs());
    let recover = ["--json", "recover", USER, "--yes", &wait];
    let run = stack.svcctl_with_timeout(ready + Duration::from_secs(60), &recover).await?.ensure_success()?;
    let second = MachineRecord::parse(&run.stdout)?;
    ensure!(second.status == "running" && second.id != first.id, "the new machine is {second:?}");
    ensure!(second.epoch > first.epoch, "the new machine has epoch {}", second.epoch);
    let vm = stack.provider.machine(&second.server)?;
    let marker = vm
        .run(PRINT_MARKER_TIME, Duration::from_secs(60))
        .await?
        .into_stdout()
        .context("cannot read the marker")?;
    ensure!(!marker.trim().is_empty(), "the marker is empty");
    Ok((second.clone(), format!("machine {} is running, epoch {}, restored", second.id, second.epoch)))
}

/// Powers on the first machine: once it detects that it has been replaced, it stops serving and cannot back up.
pub async fn check_old_machine_fenced(stack: &Stack, first: &MachineRecord) -> Result<((), String)> {
    let vm = stack.provider.machine(&first.server)?;
    let pointer = || stack.slot.read_pointer(&stack.store);
    let (before, timeout) = (pointer()?, Duration::from_secs(60));
    vm.power_on_at_previous_size()?;
    eventually("the old machine detects that it has been replaced", BOOT_TIMEOUT, || async {
        vm.run("test -e /var/lib/svc/superseded.json", timeout).await?.into_stdout().map(drop)
    })
    .await?;
    eventually("the old machine's gateway stops", Duration::from_secs(60), || async {
        let state =
            vm.run("systemctl show -P ActiveState svc-gateway.service", timeout).await?.into_stdout()?;
        ensure!(state.trim() == "inactive", "the gateway is {}", state.trim());
        Ok(())
    })
    .await?;
    let backup = vm.run("systemctl start svc-db-backup.service", timeout).await?;
    ensure!(!backup.status.success(), "a replaced machine's backup was not refused");
    let journal = vm
        .run("journalctl -b -u svc-db-backup.service -n 20 -o cat --no-pager", timeout)
        .await?
        .into_stdout()?;
    ensure!(journal.contains("replaced"), "the backup failed for another reason: {journal}");
    let state = "systemctl show -P ActiveState svc-gateway.service; ss -Hltn sport = 443";
    let state = vm.run(state, timeout).await?.into_stdout()?;
    ensure!(state.trim() == "inactive", "the gateway is running again: {state}");
    ensure!(pointer()? == before, "the pointer moved: {}", pointer()?);
    vm.save_journal().await.ok();
    vm.cut_power();
    Ok((
        (),
        "the old machine is superseded: its gateway stops and stays stopped, and its backup is refused"
            .to_owned(),
    ))
}

/// Runs the units that check snapshots: the latest snapshot is restored in a drill and re-read, and both results are
/// reported to the platform.
pub async fn run_drill(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let vm = stack.provider.machine(&machine.server)?;
    let (timeout, long_timeout) = (Duration::from_secs(60), Duration::from_secs(400));
    for unit in ["svc-db-drill.service", "svc-db-verify.service"] {
        vm.run(&format!("systemctl start {unit}"), long_timeout).await?.into_stdout().context(unit)?;
    }
    let latest = "/opt/svc/bin/svc-db-backup verify --latest";
    let verify = format!("systemd-run --wait --pipe -q -p User=svc-gateway -p Group=svc-gateway {latest}");
    let output = vm.run(&verify, long_timeout).await?.into_stdout().context("verify --latest")?;
    let checks = eventually("both results are reported", BOOT_TIMEOUT, || async {
        let run = stack.svcctl(&["--json", "status", HANDLE]).await?.ensure_success()?;
        let record: serde_json::Value = run.json()?;
        let checks = record["checks"].clone();
        let has_both_results = ["drill", "verify"].iter().all(|kind| checks[*kind]["status"] == "success");
        ensure!(has_both_results, "the record has {checks}");
        Ok(checks)
    })
    .await?;
    let leftover = vm
        .run(&format!("set -e\n{LIST_EXTRA_DATABASES}\nls /var/lib/svc/drill"), timeout)
        .await?
        .into_stdout()?;
    ensure!(leftover.trim() == "lock", "left over from a drill: {leftover}");
    Ok(((), format!("{} restored in a drill; {}", checks["drill"]["key"], output.trim())))
}

/// Resizes the machine: the same disk with the same data, more cores and memory.
pub async fn resize(stack: &Stack, machine: &MachineRecord) -> Result<((), String)> {
    let vm = stack.provider.machine(&machine.server)?;
    let timeout = Duration::from_secs(60);
    let identity = format!("cat /etc/machine-id; {PRINT_MARKER_TIME}");
    let size = "nproc; awk '/MemTotal/ {print int($2 / 1024)}' /proc/meminfo";
    let (identity_before, small) =
        (vm.run(&identity, timeout).await?.into_stdout()?, vm.run(size, timeout).await?.into_stdout()?);
    let before = stack.web.list_titles(&stack.owner_token()).await?;
    stack.svcctl(&["slot", "set", USER, "--plan", "builder"]).await?.ensure_success()?;
    let run = stack
        .svcctl(&["--json", "resize", HANDLE, "cpx32", "--yes", "--wait=800"])
        .await?
        .ensure_success()?;
    let record: serde_json::Value = run.json()?;
    ensure!(record["status"] == "running" && record["serverType"] == "cpx32", "the record is {record}");
    let owner = stack.owner_token();
    let after = eventually("the rows are found", BOOT_TIMEOUT, || stack.web.list_titles(&owner)).await?;
    ensure!(after == before, "there were {before:?}, now {after:?}");
    let large = vm.run(size, timeout).await?.into_stdout()?;
    ensure!(
        vm.run(&identity, timeout).await?.into_stdout()? == identity_before,
        "the machine has a different disk, or was restored again"
    );
    ensure!(large != small, "the size is still {small}");
    let describe = |text: String| text.split_whitespace().collect::<Vec<_>>().join(" cores, ") + " MiB";
    Ok((
        (),
        format!(
            "{} to {}; same disk, {} rows, nothing restored",
            describe(small),
            describe(large),
            after.len()
        ),
    ))
}

/// Starts a recovery while the store returns corrupted snapshots: the gate stays closed, and the platform reports the
/// failed stage. Then heals the store, so that the next recovery can succeed.
pub async fn check_corrupted_snapshot_refused(stack: &Stack) -> Result<((), String)> {
    stack.store.add_fault(FaultRule::new(Fault::CorruptBody).method("GET").key_suffix(".dump").always());
    let run = stack.svcctl(&["--json", "recover", USER, "--yes", "--wait=800"]).await?;
    ensure!(run.exit_code != Some(0), "a corrupted snapshot was restored: {}", run.stdout);
    let record: serde_json::Value =
        stack.svcctl(&["--json", "status", HANDLE]).await?.ensure_success()?.json()?;
    ensure!(
        record["status"] == "failed",
        "svcctl recover: {}{}; the record is {record}",
        run.stdout,
        run.stderr
    );
    let failure = &record["failure"];
    ensure!(failure["cause"] == "boot_reported" && failure["stage"] == "restore", "the failure is {failure}");
    let id = record["machineId"].as_str().context("the record has no machineId")?;
    let vm = stack.provider.machine(&format!("svc-{id}"))?;
    let units = "systemctl show -P ActiveState svc-restore.service svc-gateway.service; test -e /opt/svc/restore-complete && echo open || echo closed";
    let output = vm.run_when_reachable(units, BOOT_TIMEOUT).await?.into_stdout()?;
    let states: Vec<&str> = output.split_whitespace().collect();
    ensure!(
        states == ["failed", "inactive", "closed"],
        "svc-restore, svc-gateway and the gate are {states:?}"
    );
    vm.save_journal().await.ok();
    stack.store.heal();
    Ok((
        (),
        "svc-restore failed, gateway not started, gate closed; the platform reports a failure at restore"
            .to_owned(),
    ))
}
