//! An update takes a snapshot before it switches releases, and waits until it has one. The tests use the real
//! `svc-db-backup`, a real PostgreSQL and a real S3 server.

use std::fs;

use anyhow::Result;
use kit::s3::S3Server;
use serde_json::Value;

use super::machine::{self, Machine, wait_until};
use super::update_fixture::{NEW_VERSION, OLD_VERSION, PublishedRelease, UpdateFixture};

const BACKUP_START_CALL: &str = "start --no-block svc-db-backup-request.service";

/// Creates a machine with a database and a store, whose backup unit runs the real program.
async fn start_fixture(store: &S3Server) -> Result<UpdateFixture> {
    let machine = Machine::in_use(store, 1).await?;
    machine.client().await?.batch_execute("CREATE TABLE t (id int); INSERT INTO t VALUES (1)").await?;
    let fixture = UpdateFixture::for_machine(machine).await?;
    PublishedRelease::new(NEW_VERSION, &[])?.serve(&fixture.source)?;
    fixture.set_backup_command(&backup_command())?;
    Ok(fixture)
}

fn backup_command() -> String {
    format!("exec {} svc-db-backup run --request\n", env!("CARGO_BIN_EXE_svc"))
}

fn count_backup_starts(fixture: &UpdateFixture) -> Result<usize> {
    Ok(fixture.service_calls()?.iter().filter(|call| *call == BACKUP_START_CALL).count())
}

fn read_waiting_state(fixture: &UpdateFixture) -> Option<Value> {
    let text = fs::read(fixture.machine.path("var/lib/svc/update/journal.json")).ok()?;
    let journal: Value = serde_json::from_slice(&text).ok()?;
    journal.get("waiting").filter(|waiting| waiting.is_object()).cloned()
}

#[tokio::test]
async fn update_takes_a_snapshot_before_the_switch() -> Result<()> {
    let store = machine::start_store()?;
    let fixture = start_fixture(&store).await?;
    // An earlier snapshot does not count.
    fixture.machine.run(&["svc-db-backup"])?.expect(0);
    let before = machine::read_pointer(&store)
        .await?
        .and_then(|pointer| pointer.snapshot)
        .expect("the pointer should name a snapshot");
    let script = format!("readlink \"$SVC_ROOT/opt/svc/current\" >\"$SVC_ROOT/was\"\n{}", backup_command());
    fixture.set_backup_command(&script)?;
    fixture.apply(NEW_VERSION).await?.expect(0);
    fixture.assert_running(NEW_VERSION)?;
    let after = machine::read_pointer(&store)
        .await?
        .and_then(|pointer| pointer.snapshot)
        .expect("the pointer should name a snapshot");
    assert!(after.taken_at > before.taken_at, "{after:?}");
    assert!(
        fs::read_to_string(fixture.machine.path("was"))?.contains(OLD_VERSION),
        "the snapshot was taken after the switch"
    );
    Ok(())
}

#[tokio::test]
async fn update_without_a_snapshot_waits_then_fails() -> Result<()> {
    let store = machine::start_store()?;
    let mut fixture = start_fixture(&store).await?;
    fixture.set_env("SVC_UPDATE_SNAPSHOT_SECONDS", "3");
    // The store refuses every upload.
    let _hits = store.add_fault(kit::s3::FaultRule::new(kit::s3::Fault::Status(403)).method("POST").always());
    fixture.request_update(NEW_VERSION)?;
    let running = fixture.spawn(&["apply", "--request"])?;
    wait_until("a reason to wait", || {
        read_waiting_state(&fixture)
            .is_some_and(|waiting| !waiting["why"].as_str().unwrap_or_default().is_empty())
    })
    .await?;
    let table = fixture.run(&["status"], None).await?.expect(0).stdout;
    assert!(table.contains("has been waiting for a snapshot since"), "{table}");
    tokio::task::spawn_blocking(move || running.wait()).await??.expect(70);
    fixture.assert_running(OLD_VERSION)?;
    let last = fixture.last_update()?;
    assert_eq!((&last["outcome"], &last["stage"]), (&"failed".into(), &"snapshot".into()), "{last}");
    let error = last["error"].as_str().unwrap_or_default();
    assert!(error.contains("--without-snapshot") && error.contains("svc-db-backup"), "{error}");
    assert!(
        !fixture.service_calls()?.iter().any(|call| call.starts_with("restart")),
        "a service was restarted"
    );
    Ok(())
}

#[tokio::test]
async fn update_continues_once_a_backup_succeeds() -> Result<()> {
    let store = machine::start_store()?;
    let fixture = start_fixture(&store).await?;
    fixture.set_backup_command(&format!("[ -e \"$SVC_ROOT/back\" ] || exit 1\n{}", backup_command()))?;
    let running = fixture.spawn(&["apply", "--version", NEW_VERSION])?;
    wait_until("the start of the backup", || count_backup_starts(&fixture).is_ok_and(|starts| starts > 0))
        .await?;
    assert_eq!(
        fs::read_link(fixture.machine.path("opt/svc/current"))?,
        std::path::Path::new("releases").join(OLD_VERSION)
    );
    fs::write(fixture.machine.path("back"), "")?;
    tokio::task::spawn_blocking(move || running.wait()).await??.expect(0);
    fixture.assert_running(NEW_VERSION)?;
    assert!(machine::read_pointer(&store).await?.is_some_and(|pointer| pointer.snapshot.is_some()));
    Ok(())
}

/// Like [`start_fixture`], but the next snapshot is held back, because the database has lost half of its rows.
async fn start_fixture_with_lost_rows(store: &S3Server) -> Result<UpdateFixture> {
    let fixture = start_fixture(store).await?;
    let client = fixture.machine.client().await?;
    client.batch_execute("INSERT INTO t SELECT generate_series(2, 10)").await?;
    fixture.machine.run(&["svc-db-backup"])?.expect(0);
    client.batch_execute("DELETE FROM t WHERE id > 5").await?;
    Ok(fixture)
}

async fn wait_until_held_back(fixture: &UpdateFixture) -> Result<()> {
    wait_until("the held-back snapshot", || {
        read_waiting_state(fixture).is_some_and(|waiting| {
            let reason = waiting["why"].as_str().unwrap_or_default();
            reason.contains("svc-db-backup accept") && reason.contains("5 rows instead of 10")
        })
    })
    .await
}

#[tokio::test]
async fn waiting_update_skips_backup_after_held_back_snapshot() -> Result<()> {
    let store = machine::start_store()?;
    let mut fixture = start_fixture_with_lost_rows(&store).await?;
    // Longer than the delay before a failed backup is started again.
    fixture.set_env("SVC_UPDATE_SNAPSHOT_SECONDS", "6");
    fixture.request_update(NEW_VERSION)?;
    let running = fixture.spawn(&["apply", "--request"])?;
    wait_until_held_back(&fixture).await?;
    let starts = count_backup_starts(&fixture)?;
    tokio::task::spawn_blocking(move || running.wait()).await??.expect(70);
    assert_eq!(count_backup_starts(&fixture)?, starts, "another snapshot was taken");
    fixture.assert_running(OLD_VERSION)?;
    let last = fixture.last_update()?;
    assert_eq!((&last["outcome"], &last["stage"]), (&"failed".into(), &"snapshot".into()), "{last}");
    let error = last["error"].as_str().unwrap_or_default();
    assert!(error.contains("--without-snapshot") && error.contains("svc-db-backup accept"), "{error}");
    Ok(())
}

#[tokio::test]
async fn update_continues_once_held_back_snapshot_is_accepted() -> Result<()> {
    let store = machine::start_store()?;
    let fixture = start_fixture_with_lost_rows(&store).await?;
    let running = fixture.spawn(&["apply", "--version", NEW_VERSION])?;
    wait_until_held_back(&fixture).await?;
    fixture.machine.run(&["svc-db-backup", "accept"])?.expect(0);
    tokio::task::spawn_blocking(move || running.wait()).await??.expect(0);
    fixture.assert_running(NEW_VERSION)?;
    Ok(())
}

#[tokio::test]
async fn operator_skips_the_snapshot_for_a_waiting_update() -> Result<()> {
    let store = machine::start_store()?;
    let fixture = start_fixture(&store).await?;
    fixture.set_backup_command("exit 1\n")?;
    fixture.request_update(NEW_VERSION)?;
    let running = fixture.spawn(&["apply", "--request"])?;
    wait_until("the update to start waiting", || read_waiting_state(&fixture).is_some()).await?;
    let args = ["apply", "--version", NEW_VERSION, "--without-snapshot"];
    fixture.run(&args, None).await?.expect(0);
    tokio::task::spawn_blocking(move || running.wait()).await??.expect(0);
    fixture.assert_running(NEW_VERSION)?;
    assert!(machine::read_pointer(&store).await?.is_none(), "no snapshot may be taken");
    // The waiver applied only to this update.
    let waiver = fixture.machine.path("var/lib/svc/update/without-snapshot.json");
    assert!(!waiver.exists());
    Ok(())
}

#[tokio::test]
async fn resumed_update_keeps_its_waiver() -> Result<()> {
    let store = machine::start_store()?;
    let fixture = start_fixture(&store).await?;
    let args = ["apply", "--version", NEW_VERSION, "--without-snapshot"];
    fixture.run(&args, Some("update.smoke_tested=return(kill)")).await?.expect_killed();
    // Simulates the expiry of the waiver file, which is for other runs.
    fs::remove_file(fixture.machine.path("var/lib/svc/update/without-snapshot.json"))?;
    fixture.run(&["resume"], None).await?.expect(0);
    fixture.assert_running(NEW_VERSION)?;
    assert_eq!(count_backup_starts(&fixture)?, 0);
    Ok(())
}

#[tokio::test]
async fn rollback_needs_no_snapshot() -> Result<()> {
    let store = machine::start_store()?;
    let fixture = start_fixture(&store).await?;
    fixture.apply(NEW_VERSION).await?.expect(0);
    fixture.set_backup_command("exit 1\n")?;
    let before = count_backup_starts(&fixture)?;
    fixture.run(&["rollback"], None).await?.expect(0);
    fixture.assert_running(OLD_VERSION)?;
    fixture
        .run(&["apply", "--version", NEW_VERSION, "--allow-quarantined", "--without-snapshot"], None)
        .await?
        .expect(0);
    // An update to the previous release, by its version, needs no snapshot either.
    PublishedRelease::new(OLD_VERSION, &[])?.serve(&fixture.source)?;
    fixture.run(&["apply", "--version", OLD_VERSION, "--allow-downgrade"], None).await?.expect(0);
    fixture.assert_running(OLD_VERSION)?;
    assert_eq!(count_backup_starts(&fixture)?, before);
    Ok(())
}

#[tokio::test]
async fn machine_without_a_database_updates_immediately() -> Result<()> {
    let fixture = UpdateFixture::with_release(&PublishedRelease::new(NEW_VERSION, &[])?).await?;
    let env = fixture.machine.path("opt/svc/env/host.env");
    let remaining: String = fs::read_to_string(&env)?
        .lines()
        .filter(|line| !line.starts_with("DATABASE_URL"))
        .map(|line| format!("{line}\n"))
        .collect();
    fs::write(&env, remaining)?;
    fixture.apply(NEW_VERSION).await?.expect(0);
    fixture.assert_running(NEW_VERSION)?;
    assert_eq!(count_backup_starts(&fixture)?, 0);
    Ok(())
}
