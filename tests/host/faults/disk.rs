//! Fills the disk for each kind of write, by mounting a small file system at the written path. A backup, which needs no
//! free space, succeeds. A restore or an update ends with a clear error and leaves no database or release
//! half-switched; once there is free space, the next run succeeds.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::disk::SmallDisk;
use kit::long_tests::Figures;
use serde_json::{Value, json};

use super::super::gate::{assert_untouched, is_restored, old_and_new_machines, reset_machine};
use super::super::machine::{self, BUCKET, Machine, RunResult, RunningApplet, USER, wait_until};
use super::super::update_fixture::{NEW_VERSION, OLD_VERSION, PublishedRelease, UpdateFixture};
use super::snapshot_checker::SnapshotChecker;

const MIB: u64 = 1 << 20;
/// The size of the file system, of which a run keeps 64 MiB free.
const DISK_MIB: u64 = 160;

async fn wait_for_exit(running: RunningApplet) -> Result<RunResult> {
    tokio::task::spawn_blocking(move || running.wait()).await?
}

#[tokio::test]
async fn backup_on_full_disk_succeeds_and_reports_its_result() -> Result<()> {
    let store = machine::start_store()?;
    let machine = Machine::in_use(&store, 1).await?;
    machine.client().await?.batch_execute("CREATE TABLE t AS SELECT generate_series(1, 9) AS id").await?;
    machine.run(&["svc-db-backup"])?.expect(0);
    let mut checker = SnapshotChecker::new(&store);
    checker.check()?;
    // The sync agent and the gateway read the result from this file.
    let read_last_backup = || -> Result<Value> {
        Ok(serde_json::from_slice(&fs::read(machine.path("var/lib/svc/last-backup.json"))?)?)
    };
    for dir in ["var/lib/svc", "home/svc/home/system/logs"] {
        let Some(disk) = SmallDisk::mount(machine.path(dir), 1)? else { return Ok(()) };
        // The log is removed first, because the free part of its last page could hold another line.
        let log = machine.path("home/svc/home/system/logs/backup.jsonl");
        if dir.ends_with("logs") {
            svc::fsx::remove_if_exists(&log)?;
        }
        disk.fill(0)?;
        let result = machine.run(&["svc-db-backup", "run", "--retry"])?.expect(0);
        let seq = checker.seq();
        checker.check().context(dir)?;
        assert_eq!(checker.seq(), seq + 1, "{dir}: one valid snapshot must be taken");
        let latest = machine::read_pointer(&store).await?.and_then(|pointer| pointer.snapshot);
        let latest = latest.context("the pointer names no snapshot")?;
        let record = read_last_backup()?;
        assert_eq!((&record["status"], &record["key"]), (&json!("success"), &json!(latest.key)), "{record}");
        let failed =
            machine.run_with(&["svc-db-backup"], &[("FAILPOINTS", "backup.begin=return(error)")])?.expect(70);
        assert_eq!(read_last_backup()?["status"], "error", "{dir}");
        if dir.ends_with("logs") {
            for stderr in [result.stderr, failed.stderr] {
                assert!(stderr.contains("could not record the result of the backup"), "{stderr}");
            }
        } else {
            assert_eq!(
                machine.backup_records()?.pop(),
                Some(read_last_backup()?),
                "{dir}: the line must be written"
            );
        }
        disk.delete_filler()?;
        machine.run(&["svc-db-backup"])?.expect(0);
        let line = machine.backup_records()?.pop().context("backup.jsonl is empty")?;
        assert_eq!(line["status"], "success", "{line}");
        checker.check()?;
    }
    Figures {
        faults_injected: 2,
        snapshots_taken: checker.complete_count(),
        ..Figures::new("full disks during backups")
    }
    .record()
}

#[tokio::test]
async fn verify_on_full_disk_reports_damage() -> Result<()> {
    let store = machine::start_store()?;
    let machine = Machine::in_use(&store, 1).await?;
    machine.client().await?.batch_execute("CREATE TABLE t AS SELECT generate_series(1, 9) AS id").await?;
    machine.run(&["svc-db-backup"])?.expect(0);
    machine.run(&["svc-db-backup", "verify", "--all"])?.expect(0);
    let record = machine.backup_records()?.pop().context("backup.jsonl is empty")?;
    let key = record["key"].as_str().context("no key")?;
    store.remove(BUCKET, &format!("{USER}/primary/{key}"));
    let Some(disk) = SmallDisk::mount(machine.path("var/lib/svc"), 1)? else { return Ok(()) };
    disk.fill(0)?;
    let result = machine.run(&["svc-db-backup", "verify", "--all"])?.expect(65);
    assert!(result.stderr.contains(key), "{}", result.stderr);
    let last: Value = serde_json::from_slice(&fs::read(machine.path("var/lib/svc/last-verify.json"))?)?;
    assert_eq!((&last["status"], &last["damaged"]), (&json!("error"), &json!([key])), "{last}");
    Figures { faults_injected: 1, ..Figures::new("full disks during verifications") }.record()
}

/// Fills the disk while the restore pauses at `point`, and waits for the restore to end. A database whose name starts
/// with `database_prefix` indicates that the restore has reached the point.
async fn fill_disk_at(
    machine: &Machine,
    disk: &SmallDisk,
    point: &str,
    database_prefix: &str,
) -> Result<RunResult> {
    let pause = format!("{point}=sleep(2500)");
    let running = machine.spawn(&["svc-restore"], &[("FAILPOINTS", &pause)])?;
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while !machine.databases().await?.iter().any(|name| name.starts_with(database_prefix)) {
        ensure!(std::time::Instant::now() < deadline, "{point}:\n{}", running.stderr());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    disk.fill(0)?;
    wait_for_exit(running).await
}

#[tokio::test(flavor = "multi_thread")]
async fn restore_on_full_disk_keeps_old_database_and_resumes() -> Result<()> {
    let (_store, _old, new) = old_and_new_machines().await?;
    // As on a real machine, the marker's path is a link to a file in `/var/lib/svc`.
    let marker = new.path("var/lib/svc/restore-complete");
    std::os::unix::fs::symlink(&marker, new.path("opt/svc/restore-complete"))?;
    let Some(disk) = SmallDisk::mount(new.path("var/lib/svc"), DISK_MIB)? else { return Ok(()) };

    disk.fill(10 * MIB)?;
    let result = new.run(&["svc-restore"])?.expect(70);
    assert!(
        result.stderr.contains("bytes are free and") && result.stderr.contains("are needed"),
        "{}",
        result.stderr
    );
    assert_untouched(&new, "not started").await?;
    disk.delete_filler()?;

    let running = new.spawn(&["svc-restore"], &[("FAILPOINTS", "restore.downloading=sleep(30)")])?;
    let dump_length = || -> Option<u64> {
        let entries = fs::read_dir(new.path("var/lib/svc/restore")).ok()?.flatten();
        let mut dumps = entries.filter(|entry| entry.file_name().to_string_lossy().ends_with(".dump"));
        dumps.next()?.metadata().ok().map(|meta| meta.len())
    };
    wait_until("a part of the dump", || dump_length().is_some_and(|length| length > 0)).await?;
    disk.fill(0)?;
    let result = wait_for_exit(running).await?.expect(70);
    assert!(result.stderr.contains("No space left on device"), "{}", result.stderr);
    assert_untouched(&new, "during the download").await?;
    disk.delete_filler()?;

    let result = fill_disk_at(&new, &disk, "restore.counted", "svc_restore_").await?.expect(70);
    assert!(result.stderr.contains("journal.json"), "{}", result.stderr);
    assert_untouched(&new, "before the swap").await?;
    disk.delete_filler()?;

    let result = fill_disk_at(&new, &disk, "restore.renamed", "svc_before_").await?.expect(70);
    assert!(result.stderr.contains("restore-complete"), "{}", result.stderr);
    assert!(
        !new.has_marker() && is_restored(&new).await?,
        "the database must be swapped, but not marked yet"
    );
    disk.delete_filler()?;
    new.run(&["svc-restore"])?.expect(0);
    assert!(new.has_marker() && is_restored(&new).await?);
    let names = new.databases().await?;
    assert!(!names.iter().any(|name| name.starts_with("svc_restore_")), "{names:?}");
    svc::fsx::remove_if_exists(&marker)?;
    svc::fsx::remove_if_exists(&new.path("opt/svc/restore-complete"))?;
    reset_machine(&new).await?;
    Figures { faults_injected: 4, ..Figures::new("full disks during restores") }.record()
}

/// Applies an update, fills the disk once the condition holds, and returns the result. `pause` is the fail point that
/// keeps the update waiting meanwhile.
async fn apply_on_full_disk(
    fixture: &UpdateFixture,
    disk: &SmallDisk,
    pause: &str,
    condition: impl FnMut() -> bool,
) -> Result<RunResult> {
    let running = fixture.spawn_with(&["apply", "--version", NEW_VERSION], Some(pause))?;
    wait_until("the condition for filling the disk", condition).await?;
    disk.fill(0)?;
    wait_for_exit(running).await
}

#[tokio::test(flavor = "multi_thread")]
async fn release_is_unpacked_only_with_free_space() -> Result<()> {
    let fixture = UpdateFixture::with_release(&PublishedRelease::new(NEW_VERSION, &[])?).await?;
    let Some(disk) = SmallDisk::mount(fixture.machine.path("opt/svc/releases"), DISK_MIB)? else {
        return Ok(());
    };
    disk.fill(10 * MIB)?;
    let result = fixture.apply(NEW_VERSION).await?.expect(70);
    assert!(result.stderr.contains("bytes are free and"), "{}", result.stderr);
    let last = fixture.last_update()?;
    assert_eq!((&last["outcome"], &last["stage"]), (&"failed".into(), &"preflight".into()), "{last}");
    fixture.assert_untouched()?;
    disk.delete_filler()?;

    let releases = fixture.machine.path("opt/svc/releases");
    let has_partial_release = || {
        fs::read_dir(&releases).is_ok_and(|entries| {
            entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with('.'))
        })
    };
    let result = apply_on_full_disk(&fixture, &disk, "update.downloading=sleep(1000)", has_partial_release)
        .await?
        .expect(70);
    assert!(result.stderr.contains("No space left on device"), "{}", result.stderr);
    let last = fixture.last_update()?;
    assert_eq!((&last["outcome"], &last["stage"]), (&"failed".into(), &"download".into()), "{last}");
    disk.delete_filler()?;
    fixture.assert_untouched()?;

    fixture.apply(NEW_VERSION).await?.expect(0);
    fixture.assert_running(NEW_VERSION)?;
    Figures { faults_injected: 2, ..Figures::new("full disks while unpacking releases") }.record()
}

#[tokio::test(flavor = "multi_thread")]
async fn update_with_full_journal_disk_completes_later() -> Result<()> {
    let fixture = UpdateFixture::with_release(&PublishedRelease::new(NEW_VERSION, &[])?).await?;
    let Some(disk) = SmallDisk::mount(fixture.machine.path("var/lib/svc"), 4)? else { return Ok(()) };
    disk.fill(0)?;
    let result = fixture.apply(NEW_VERSION).await?.expect(70);
    assert!(result.stderr.contains("No space left on device"), "{}", result.stderr);
    disk.delete_filler()?;
    fixture.assert_untouched()?;

    // The disk is full once the link is switched, so later steps cannot be recorded.
    let current = fixture.machine.path("opt/svc/current");
    let is_switched = || fs::read_link(&current).is_ok_and(|to| to.ends_with(NEW_VERSION));
    let result =
        apply_on_full_disk(&fixture, &disk, "update.linked=sleep(1500)", is_switched).await?.expect(70);
    assert!(result.stderr.contains("No space left on device"), "{}", result.stderr);
    assert!(fixture.machine.path("var/lib/svc/update/journal.json").exists(), "the journal is missing");
    assert!(is_switched() && current.join("bin/svc").is_file(), "the current release must be complete");
    disk.delete_filler()?;
    fixture.run(&["resume"], None).await?.expect(0);
    fixture.assert_running(NEW_VERSION)?;
    assert_eq!(fixture.last_update()?["outcome"], "updated");
    Figures { faults_injected: 2, ..Figures::new("full disks for update journals") }.record()
}

#[tokio::test(flavor = "multi_thread")]
async fn full_disk_during_unit_install_rolls_back_the_update() -> Result<()> {
    let fixture = UpdateFixture::with_release(&PublishedRelease::new(NEW_VERSION, &[])?).await?;
    let Some(disk) = SmallDisk::mount(fixture.machine.path("etc/systemd"), 1)? else { return Ok(()) };
    let drop_in_path = format!("systemd/system/svc-{NEW_VERSION}.service.d/10-long.conf");
    let drop_in = "#\n".repeat(4000);
    PublishedRelease::new(NEW_VERSION, &[(&drop_in_path, &drop_in)])?.serve(&fixture.source)?;
    disk.fill(0)?;
    fixture.apply(NEW_VERSION).await?.expect(65);
    let last = fixture.last_update()?;
    assert_eq!((&last["outcome"], &last["stage"]), (&"rolled_back".into(), &"units".into()), "{last}");
    assert!(last["error"].as_str().is_some_and(|error| error.contains("No space left")), "{last}");
    disk.delete_filler()?;
    fixture.run(&["resume"], None).await?.expect(0);
    let current = fs::read_link(fixture.machine.path("opt/svc/current"))?;
    assert!(current.ends_with(OLD_VERSION), "{}", current.display());
    fixture.run(&["apply", "--version", NEW_VERSION, "--allow-quarantined"], None).await?.expect(0);
    assert_eq!(fixture.last_update()?["outcome"], "updated");
    Figures { faults_injected: 1, ..Figures::new("full disks for units") }.record()
}
