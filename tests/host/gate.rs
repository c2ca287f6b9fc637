//! The restore gate opens only with a complete snapshot, or if the absence of one is confirmed and permitted.

use std::time::Duration;

use anyhow::{Context, Result};
use kit::s3::{Fault, FaultRule, S3Server};
use nix::sys::signal::Signal;
use svc::machine::epoch::Epoch;
use svc::store::pointer::Fence;
use svc::store::pointer_io;

use super::machine::{
    self, BUCKET, Machine, RunEnv, RunResult, USER, path_str, slot, tools_with_script, wait_until,
};
use super::platform::{Platform, ScriptedResponse};

pub const SHORT_DEADLINE: RunEnv<'static> = &[("RESTORE_STORE_DEADLINE_SECONDS", "1")];
/// Creates the only table of a new machine's database. It is empty, and identifies the database before its restore.
const CREATE_LOCAL_TABLE: &str = "CREATE TABLE local (id int)";

/// Creates a store with a snapshot of 500 rows and a few MiB, the machine that took it, and a new machine with its own
/// table.
pub async fn old_and_new_machines() -> Result<(S3Server, Machine, Machine)> {
    let store = machine::start_store()?;
    let old = Machine::in_use(&store, 1).await?;
    old.client()
        .await?
        .batch_execute(
            "CREATE ROLE app_notes LOGIN; CREATE TABLE kept (id int); ALTER TABLE kept OWNER TO app_notes; \
             INSERT INTO kept SELECT * FROM generate_series(1, 500); CREATE TABLE noise AS \
             SELECT decode(string_agg(md5(n::text || '-' || m), ''), 'hex') AS bytes \
             FROM generate_series(1, 200) n, generate_series(1, 1000) m GROUP BY n",
        )
        .await?;
    old.run(&["svc-db-backup"])?.expect(0);
    let new = Machine::new(&store, 2).await?;
    new.client().await?.batch_execute(CREATE_LOCAL_TABLE).await?;
    Ok((store, old, new))
}

/// Like [`old_and_new_machines`], but after the loss of the old machine.
pub async fn new_machine_after_loss() -> Result<(S3Server, Machine)> {
    let (store, _old, new) = old_and_new_machines().await?;
    Ok((store, new))
}

/// Resets the machine to the state before its restore, with its own table.
pub async fn reset_machine(machine: &Machine) -> Result<()> {
    svc::fsx::remove_if_exists(&machine.path("opt/svc/restore-complete"))?;
    let admin = machine.postgres().connect("postgres").await?;
    for name in machine.databases().await?.iter().filter(|name| name.starts_with("svc")) {
        admin.batch_execute(&format!("DROP DATABASE {name} WITH (FORCE)")).await?;
    }
    admin.batch_execute("CREATE DATABASE svc").await?;
    Ok(machine.client().await?.batch_execute(CREATE_LOCAL_TABLE).await?)
}

#[tokio::test]
async fn backups_and_restores_are_logged_in_activity_log() -> Result<()> {
    const LOGS: &str = "home/svc/home/system/logs";
    let (store, old, new) = old_and_new_machines().await?;
    let key = dump_key(&store);
    let key = key.split_once("/primary/").context("not a key of the slot")?.1.to_owned();
    let read_log = |machine: &Machine| std::fs::read_to_string(machine.path(LOGS).join("activity.log"));
    assert!(
        read_log(&old)?.ends_with(&format!("the database was backed up as {key}\n")),
        "{}",
        read_log(&old)?
    );
    std::fs::create_dir_all(new.path(LOGS))?;
    store.take_down();
    new.run_with(&["svc-restore"], SHORT_DEADLINE)?.expect(69);
    assert!(read_log(&new)?.contains("the restore of the database failed: "), "{}", read_log(&new)?);
    old.run_with(&["svc-db-backup"], &[])?.expect(69);
    assert!(read_log(&old)?.contains("the backup of the database failed: "), "{}", read_log(&old)?);
    store.bring_up()?;
    new.run(&["svc-restore"])?.expect(0);
    assert!(
        read_log(&new)?.ends_with(&format!("the database was restored from {key}\n")),
        "{}",
        read_log(&new)?
    );
    Ok(())
}

pub fn dump_key(store: &S3Server) -> String {
    let objects = store.objects(BUCKET, &format!("{USER}/primary/system/db/snapshots/"));
    let dump = objects.into_iter().find(|object| object.key.ends_with(".dump"));
    dump.expect("there is a snapshot").key
}

async fn has_table(machine: &Machine, name: &str) -> Result<bool> {
    let row = machine.client().await?.query_one("SELECT to_regclass($1) IS NOT NULL", &[&name]).await?;
    Ok(row.get(0))
}

pub async fn is_restored(machine: &Machine) -> Result<bool> {
    if !has_table(machine, "kept").await? {
        return Ok(false);
    }
    let row = machine.client().await?.query_one("SELECT count(*) FROM kept", &[]).await?;
    Ok(row.get::<_, i64>(0) == 500)
}

/// Asserts that the gate is closed, the old database is still there, and no other database remains.
pub async fn assert_untouched(machine: &Machine, case: &str) -> Result<()> {
    assert!(!machine.has_marker(), "{case}: the gate is open");
    assert!(has_table(machine, "local").await?, "{case}: the old database is missing");
    assert_eq!(machine.databases().await?, ["postgres", "svc"], "{case}");
    Ok(())
}

fn run_restore(machine: &Machine, extra_env: RunEnv<'_>) -> Result<RunResult> {
    machine.run_with(&["svc-restore"], extra_env)
}

#[tokio::test]
async fn requested_earlier_snapshot_is_restored_then_backed_up() -> Result<()> {
    let store = machine::start_store()?;
    let old = Machine::in_use(&store, 1).await?;
    old.client().await?.batch_execute("CREATE TABLE t (id int); INSERT INTO t VALUES (1)").await?;
    old.run(&["svc-db-backup"])?.expect(0);
    let earlier = machine::read_pointer(&store)
        .await?
        .context("there is no pointer")?
        .snapshot
        .context("the pointer names no snapshot")?;
    old.client().await?.batch_execute("INSERT INTO t VALUES (2)").await?;
    old.run(&["svc-db-backup"])?.expect(0);

    let new = Machine::new(&store, 2).await?;
    new.write_boot_env(&[("SVC_RESTORE_SNAPSHOT", &earlier.key)])?;
    for point in ["restore.loaded", "restore.renamed"] {
        let kill = format!("{point}=return(kill)");
        new.run_with(&["svc-restore"], &[("FAILPOINTS", &kill)])?.expect_killed();
    }
    new.run(&["svc-restore"])?.expect(0);
    let rows = new.client().await?.query_one("SELECT count(*) FROM t", &[]).await?.get::<_, i64>(0);
    assert_eq!(rows, 1);
    assert!(
        new.path("var/lib/svc/requests/backup").exists(),
        "a backup must be requested, because the pointer still names a different snapshot"
    );
    new.run(&["svc-db-backup", "run", "--request"])?.expect(0);
    let pointer = machine::read_pointer(&store).await?.context("there is no pointer")?;
    assert_eq!(pointer.snapshot.context("the pointer names no snapshot")?.epoch, new.epoch);

    // `boot.env` still names the earlier snapshot, which lacks the rows that were written since.
    new.client().await?.batch_execute("INSERT INTO t VALUES (3)").await?;
    new.run(&["svc-db-backup"])?.expect(0);
    new.run(&["svc-restore", "replace"])?.expect(0);
    let rows = new.client().await?.query_one("SELECT count(*) FROM t", &[]).await?.get::<_, i64>(0);
    assert_eq!(rows, 2, "a replacement must restore the latest snapshot");

    // If the requested snapshot is missing, the machine must not start empty.
    let third = Machine::new(&store, 3).await?;
    let missing_key = earlier.key.replace("Z-1", "Z-9");
    third.write_boot_env(&[("SVC_RESTORE_SNAPSHOT", &missing_key), ("SVC_RESTORE_MODE", "empty")])?;
    let result = third.run(&["svc-restore"])?.expect(70);
    assert!(result.stderr.contains(&missing_key) && !third.has_marker(), "{}", result.stderr);
    Ok(())
}

#[tokio::test]
async fn snapshot_from_a_newer_postgresql_is_refused() -> Result<()> {
    let store = machine::start_store()?;
    let old = Machine::in_use(&store, 1).await?;
    old.client().await?.batch_execute("CREATE TABLE t (id int); INSERT INTO t VALUES (1)").await?;
    old.run(&["svc-db-backup"])?.expect(0);
    let key = machine::read_pointer(&store)
        .await?
        .context("there is no pointer")?
        .snapshot
        .context("the pointer names no snapshot")?
        .key;
    let sidecar_key = format!("{USER}/primary/{key}.json");
    let sidecar = String::from_utf8(store.read(BUCKET, &sidecar_key).context("the sidecar is missing")?)?;
    let with_pg_version =
        |version: &str| sidecar.replace("\"pgVersion\":\"16.", &format!("\"pgVersion\":\"{version}."));
    let new = Machine::new(&store, 2).await?;
    store.write(BUCKET, &sidecar_key, with_pg_version("17"));
    let result = new.run(&["svc-restore"])?.expect(70);
    assert!(
        result.stderr.contains("was taken with PostgreSQL 17, but this machine has PostgreSQL 16"),
        "{}",
        result.stderr
    );
    assert!(!new.has_marker());
    store.write(BUCKET, &sidecar_key, with_pg_version("15"));
    new.run(&["svc-restore"])?.expect(0);
    assert!(new.has_marker());
    Ok(())
}

#[tokio::test]
async fn interrupted_download_is_resumed_within_a_run() -> Result<()> {
    let (store, new) = new_machine_after_loss().await?;
    // Skips two reads of the sidecar, then truncates the download more often than the store client retries.
    let truncated = FaultRule::new(Fault::TruncateBody(400_000)).method("GET").key(".dump");
    let hits = store.add_fault(truncated.after(2).times(6));
    run_restore(&new, &[])?.expect(0);
    assert_eq!(hits.hits(), 6);
    assert!(is_restored(&new).await? && new.has_marker());
    Ok(())
}

#[tokio::test]
async fn interrupted_download_is_resumed_after_a_kill() -> Result<()> {
    let (store, new) = new_machine_after_loss().await?;
    let kill = "restore.downloading=4*off->1*return(kill)";
    run_restore(&new, &[("FAILPOINTS", kill)])?.expect_killed();
    let partial = std::fs::read_dir(new.path("var/lib/svc/restore"))?
        .flatten()
        .find(|entry| entry.file_name().to_string_lossy().ends_with(".dump"))
        .context("no partial dump")?;
    let partial_size = partial.metadata()?.len();
    let full_size = store.read(BUCKET, &dump_key(&store)).context("the dump is missing")?.len() as u64;
    assert!(partial_size > 0 && partial_size < full_size, "{partial_size} of {full_size}");

    // Existing bytes are hashed, not trusted.
    let mut bytes = std::fs::read(partial.path())?;
    bytes[100] ^= 1;
    std::fs::write(partial.path(), bytes)?;
    run_restore(&new, &[])?.expect(0);
    assert!(is_restored(&new).await?);
    Ok(())
}

#[tokio::test]
async fn damaged_snapshot_keeps_the_gate_closed() -> Result<()> {
    let (store, new) = new_machine_after_loss().await?;
    let hits = store.add_fault(FaultRule::new(Fault::CorruptBody).method("GET").key(".dump").after(2));
    run_restore(&new, &[])?.expect(0);
    assert_eq!(hits.hits(), 1, "the fault was not triggered");

    let (store, new) = new_machine_after_loss().await?;
    let key = dump_key(&store);
    let good = store.read(BUCKET, &key).context("the dump is missing")?;
    let mut bad = good.clone();
    let middle = bad.len() / 2;
    bad[middle] ^= 1;
    store.write(BUCKET, &key, bad);
    let result = run_restore(&new, &[])?.expect(70);
    assert!(result.stderr.contains("SHA-256"), "{}", result.stderr);
    assert_untouched(&new, "one bit changed").await?;

    store.write(BUCKET, &key, good[..good.len() - 1].to_vec());
    run_restore(&new, &[])?.expect(70);
    assert_untouched(&new, "one byte short").await?;

    store.write(BUCKET, &key, good);
    run_restore(&new, &[])?.expect(0);
    assert!(is_restored(&new).await?);
    Ok(())
}

#[tokio::test]
async fn unreachable_store_is_not_treated_as_missing_snapshot() -> Result<()> {
    let (store, new) = new_machine_after_loss().await?;
    new.write_boot_env(&[("SVC_RESTORE_MODE", "empty")])?;
    store.take_down();
    run_restore(&new, SHORT_DEADLINE)?.expect(69);
    assert_untouched(&new, "store down").await?;
    store.bring_up()?;
    for status in [500, 503, 403] {
        store.add_fault(FaultRule::new(Fault::Status(status)).always());
        run_restore(&new, SHORT_DEADLINE)?.expect(69);
        assert_untouched(&new, &format!("{status}")).await?;
        store.heal();
    }

    // The store recovers before the deadline, and `empty` does not override an existing snapshot.
    store.take_down();
    let running = new.spawn(&["svc-restore"], &[])?;
    wait_until("an error message", || running.stderr().contains("does not respond")).await?;
    store.bring_up()?;
    running.wait()?.expect(0);
    assert!(is_restored(&new).await?);
    Ok(())
}

#[tokio::test]
async fn confirmed_absence_opens_the_gate_only_if_permitted() -> Result<()> {
    let store = machine::start_store()?;
    let new = Machine::new(&store, 2).await?;
    new.client().await?.batch_execute(CREATE_LOCAL_TABLE).await?;
    let result = run_restore(&new, &[])?.expect(70);
    assert!(result.stderr.contains("SVC_RESTORE_MODE"), "{}", result.stderr);
    assert_untouched(&new, "absent").await?;

    pointer_io::fence(
        &machine::bucket(&store)?,
        &slot(),
        &Fence::unsigned(Epoch(2), svc::machine::id::MachineId::new()),
    )
    .await?;
    run_restore(&new, &[])?.expect(70);
    assert_untouched(&new, "tombstone").await?;

    new.write_boot_env(&[("SVC_RESTORE_MODE", "empty")])?;
    new.client().await?.batch_execute("INSERT INTO local VALUES (1)").await?;
    std::fs::create_dir_all(new.path("home/svc/home/system/logs"))?;
    run_restore(&new, &[])?.expect(0);
    assert!(new.has_marker() && has_table(&new, "local").await?);
    let log = std::fs::read_to_string(new.path("home/svc/home/system/logs/activity.log"))?;
    assert!(log.ends_with("there is no snapshot: kept the existing database\n"), "{log}");
    Ok(())
}

/// As on a real machine, where `/opt/svc` belongs to root, the marker's path is a link to a file in `/var/lib/svc`.
#[tokio::test]
async fn marker_is_written_through_its_link() -> Result<()> {
    let store = machine::start_store()?;
    let new = Machine::new(&store, 2).await?;
    let (link, target) = (new.path("opt/svc/restore-complete"), new.path("var/lib/svc/restore-complete"));
    std::os::unix::fs::symlink(&target, &link)?;
    run_restore(&new, &[])?.expect(70);
    assert!(!new.has_marker(), "a dangling link must not open the gate");
    new.write_boot_env(&[("SVC_RESTORE_MODE", "empty")])?;
    run_restore(&new, &[])?.expect(0);
    assert_eq!(std::fs::read_link(&link)?, target, "the link must remain");
    assert!(new.has_marker() && std::fs::symlink_metadata(&target)?.is_file());
    run_restore(&new, &[])?.expect(0);
    Ok(())
}

#[tokio::test]
async fn restore_with_open_gate_needs_no_settings() -> Result<()> {
    let machine = Machine::bare(1)?;
    std::fs::remove_dir_all(machine.path("opt/svc/env"))?;
    run_restore(&machine, &[])?.expect(78);
    svc::fsx::write_atomic(&machine.path("opt/svc/restore-complete"), b"", 0o644)?;
    run_restore(&machine, &[])?.expect(0);
    Ok(())
}

#[tokio::test]
async fn unusable_pointer_is_refused_in_both_modes() -> Result<()> {
    let (store, new) = new_machine_after_loss().await?;
    let pointer_key = format!("{USER}/primary/system/db/latest");
    let sidecar_key = format!("{}.json", dump_key(&store));
    let good = (
        store.read(BUCKET, &pointer_key).context("the pointer is missing")?,
        store.read(BUCKET, &sidecar_key).context("the sidecar is missing")?,
    );
    for mode in ["required", "empty"] {
        new.write_boot_env(&[("SVC_RESTORE_MODE", mode)])?;
        for bad in [&b"{"[..], b"", b"{\"version\":9}", b"null"] {
            store.write(BUCKET, &pointer_key, bad.to_vec());
            run_restore(&new, &[])?.expect(70);
            assert_untouched(&new, mode).await?;
        }
        store.write(BUCKET, &pointer_key, good.0.clone());
        store.remove(BUCKET, &sidecar_key);
        run_restore(&new, &[])?.expect(70);
        assert_untouched(&new, "without sidecar").await?;
        store.write(BUCKET, &sidecar_key, good.1.clone());
    }
    let mut sidecar: serde_json::Value = serde_json::from_slice(&good.1)?;
    sidecar["tables"][0]["rows"] = 501.into();
    store.write(BUCKET, &sidecar_key, serde_json::to_vec(&sidecar)?);
    let result = run_restore(&new, &[])?.expect(70);
    assert!(result.stderr.contains("501 rows"), "{}", result.stderr);
    assert_untouched(&new, "a row is missing").await
}

#[tokio::test]
async fn restore_killed_at_any_step_can_be_rerun() -> Result<()> {
    let (_store, new) = new_machine_after_loss().await?;
    for point in svc::host::snapshots::restore::FAILPOINTS {
        let kill = format!("{point}=return(kill)");
        run_restore(&new, &[("FAILPOINTS", &kill)])?.expect_killed();
        assert_eq!(new.has_marker(), *point == "restore.marker", "{point}");
        run_restore(&new, &[])?.expect(0);
        assert!(new.has_marker() && is_restored(&new).await?, "{point}");
        let databases = new.databases().await?;
        assert!(!databases.iter().any(|name| name.starts_with("svc_restore_")), "{point}: {databases:?}");
        let mut files = std::fs::read_dir(new.path("var/lib/svc/restore"))?.flatten();
        assert!(!files.any(|file| file.path().extension().is_some_and(|kind| kind == "dump")), "{point}");
        for replaced in databases.iter().filter(|name| name.starts_with("svc_before_")) {
            new.postgres()
                .connect(replaced)
                .await
                .with_context(|| format!("{point}: {replaced} is closed"))?;
        }
        reset_machine(&new).await?;
    }
    Ok(())
}

#[tokio::test]
async fn failed_step_leaves_the_old_or_the_restored_database() -> Result<()> {
    let (_store, new) = new_machine_after_loss().await?;
    let after_swap = ["restore.renamed", "restore.opened", "restore.marker"];
    for point in svc::host::snapshots::restore::FAILPOINTS.iter().filter(|point| !after_swap.contains(point))
    {
        let error = format!("{point}=return(error)");
        run_restore(&new, &[("FAILPOINTS", &error)])?.expect(70);
        assert_untouched(&new, point).await?;
    }
    for point in &after_swap[..2] {
        let error = format!("{point}=return(error)");
        run_restore(&new, &[("FAILPOINTS", &error)])?.expect(70);
        assert!(!new.has_marker() && is_restored(&new).await?, "{point}");
        run_restore(&new, &[])?.expect(0);
        assert!(new.has_marker(), "{point}");
        reset_machine(&new).await?;
    }
    Ok(())
}

#[tokio::test]
async fn sessions_of_the_old_database_are_ended_for_the_swap() -> Result<()> {
    let (_store, new) = new_machine_after_loss().await?;
    let client = new.client().await?;
    client.batch_execute("BEGIN; SELECT 1").await?;
    run_restore(&new, &[])?.expect(0);
    assert!(client.batch_execute("SELECT 1").await.is_err());
    assert!(is_restored(&new).await?);
    Ok(())
}

#[tokio::test]
async fn restore_waits_for_a_starting_database() -> Result<()> {
    let (_store, new) = new_machine_after_loss().await?;
    new.postgres().stop().await?;
    run_restore(&new, SHORT_DEADLINE)?.expect(69);
    let running = new.spawn(&["svc-restore"], &[])?;
    tokio::time::sleep(Duration::from_millis(500)).await;
    new.postgres().restart().await?;
    running.wait()?.expect(0);
    assert!(is_restored(&new).await?);
    Ok(())
}

/// The `pg_restore` of a killed run continues for a while; its database is deleted, and it never writes to the next
/// run's database.
#[tokio::test]
async fn leftover_pg_restore_of_a_killed_run_is_harmless() -> Result<()> {
    let (_store, new) = new_machine_after_loss().await?;
    let markers = tempfile::tempdir()?;
    let script = format!(
        "#!/bin/sh\ntouch {0}/begun\nwhile [ ! -e {0}/go ]; do sleep 0.05; done\nREAL \"$@\"\necho $? > {0}/ended\n",
        path_str(markers.path())
    );
    let tools = tools_with_script("pg_restore", &script)?;
    let running = new.spawn(&["svc-restore"], &[("SVC_PG_BIN_DIR", path_str(tools.path()))])?;
    wait_until("the start of pg_restore", || markers.path().join("begun").exists()).await?;
    running.signal(Signal::SIGKILL)?;
    running.wait()?.expect_killed();
    run_restore(&new, &[])?.expect(0);
    std::fs::write(markers.path().join("go"), "")?;
    wait_until("the exit of pg_restore", || markers.path().join("ended").exists()).await?;
    assert_ne!(std::fs::read_to_string(markers.path().join("ended"))?.trim(), "0");
    assert!(is_restored(&new).await? && new.has_marker());
    Ok(())
}

/// The platform receives progress reports, because the restore of a large database would otherwise look like a hung
/// boot. A rejected report does not stop the restore. The platform needs its own thread, because the test's thread
/// waits for the restore.
#[tokio::test(flavor = "multi_thread")]
async fn restore_reports_its_progress_to_the_platform() -> Result<()> {
    for status in [204, 400, 500] {
        let (_store, new) = new_machine_after_loss().await?;
        let platform = Platform::start(ScriptedResponse::Json(status, serde_json::json!({}))).await?;
        platform.configure(&new)?;
        run_restore(&new, &[("FAILPOINTS", "restore.downloaded=sleep(300)")])?.expect(0);
        assert!(is_restored(&new).await?);
        let calls = platform.calls();
        let call = calls.first().context("no call was recorded")?;
        assert_eq!(call.path, format!("/vps/{}/boot-stage", new.id));
        assert_eq!(call.authorization, "Bearer registration-token-of-a-machine");
        let body: serde_json::Value = serde_json::from_str(&call.body)?;
        assert_eq!(body["stage"], "restore");
        assert!(body["progress"]["totalBytes"].as_u64() > Some(1 << 20), "{body}");
        assert!(calls.len() <= 2, "reports must be at least 10 s apart");
    }
    Ok(())
}
