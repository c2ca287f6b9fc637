//! A substitute for a machine's restored database is reported and not backed up, and a database with rows that no
//! restore created is never replaced automatically. A snapshot that lost tables or rows is held back until the loss is
//! accepted or confirmed.

use anyhow::{Context, Result};
use kit::disk::SmallDisk;
use kit::pg::{PgOptions, PgServer};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::gate::{is_restored, old_and_new_machines};
use super::machine::{self, Machine, binaries, wait_until};
use super::platform::{Platform, ScriptedResponse, start_gateway};

const CREATE_ROWS: &str = "CREATE TABLE t (id int); INSERT INTO t SELECT * FROM generate_series(1, 10)";

/// Creates a new user's machine with an open gate, rows and a backup.
async fn machine_with_backup(store: &kit::s3::S3Server) -> Result<Machine> {
    let machine = Machine::new(store, 1).await?;
    machine.write_boot_env(&[("SVC_RESTORE_MODE", "empty")])?;
    machine.run(&["svc-restore"])?.expect(0);
    machine.client().await?.batch_execute(CREATE_ROWS).await?;
    machine.run(&["svc-db-backup"])?.expect(0);
    Ok(machine)
}

/// Simulates the loss of the volume: a new PostgreSQL server, whose database has the same rows, replaces the first.
async fn lose_volume(machine: &mut Machine) -> Result<()> {
    let replacement = PgServer::start(&binaries()?, PgOptions::default()).await?;
    replacement.create_database("svc").await?;
    machine.set_env_vars("host.env", &[("DATABASE_URL", &replacement.url("svc"))])?;
    machine.postgres = Some(replacement);
    machine.client().await?.batch_execute(CREATE_ROWS).await?;
    Ok(())
}

fn read_marker(machine: &Machine) -> Result<Value> {
    Ok(serde_json::from_slice(&std::fs::read(machine.path("opt/svc/restore-complete"))?)?)
}

#[tokio::test]
async fn backup_refuses_a_database_that_lost_its_volume() -> Result<()> {
    let store = machine::start_store()?;
    let mut machine = machine_with_backup(&store).await?;
    let good = machine::read_pointer(&store).await?;
    lose_volume(&mut machine).await?;
    let result = machine.run(&["svc-db-backup"])?.expect(65);
    assert!(
        result.stderr.contains("system identifier") && result.stderr.contains("svc-restore adopt"),
        "{}",
        result.stderr
    );
    assert_eq!(machine::read_pointer(&store).await?, good);
    assert_eq!(machine.backup_records()?.last().context("backup.jsonl is empty")?["status"], "error");
    // After a restart of the host, the backup is still refused.
    machine.run(&["svc-restore"])?.expect(0);
    machine.run(&["svc-db-backup"])?.expect(65);

    let platform = Platform::start(ScriptedResponse::Json(400, json!({ "code": "invalid_request" }))).await?;
    platform.configure(&machine)?;
    let listen = start_gateway(&machine).await?.to_string();
    let running =
        machine.spawn(&["svc-sync-agent"], &[("GATEWAY_LISTEN", &listen), ("HEARTBEAT_SECONDS", "1")])?;
    wait_until("a heartbeat and its retry without `attention`", || platform.calls().len() >= 2).await?;
    running.signal(Signal::SIGTERM)?;
    tokio::task::spawn_blocking(move || running.wait()).await??.expect(0);
    let calls = platform.calls();
    let (first, second): (Value, Value) =
        (serde_json::from_str(&calls[0].body)?, serde_json::from_str(&calls[1].body)?);
    assert_eq!(first["health"]["database"], "failing");
    assert_eq!(first["attention"][0]["code"], "database_mismatch", "{first}");
    assert!(
        second.get("attention").is_none(),
        "the retry must omit `attention`, which an earlier platform rejects: {second}"
    );

    machine.run(&["svc-restore", "adopt"])?.expect(0);
    machine.run(&["svc-db-backup"])?.expect(0);
    Ok(())
}

#[tokio::test]
async fn replace_restores_a_lost_database_and_keeps_the_substitute() -> Result<()> {
    let store = machine::start_store()?;
    let mut machine = machine_with_backup(&store).await?;
    lose_volume(&mut machine).await?;
    machine.client().await?.batch_execute("DELETE FROM t WHERE id > 3").await?;
    machine.run(&["svc-restore", "replace"])?.expect(0);
    let rows: i64 = machine.client().await?.query_one("SELECT count(*) FROM t", &[]).await?.get(0);
    assert_eq!(rows, 10);
    assert!(machine.databases().await?.iter().any(|name| name.starts_with("svc_before_")));
    machine.run(&["svc-db-backup"])?.expect(0);
    Ok(())
}

/// A marker from an old release names no database, so the first backup adopts the current one.
#[tokio::test]
async fn database_with_marker_from_old_release_is_adopted_once() -> Result<()> {
    let store = machine::start_store()?;
    let mut machine = Machine::in_use(&store, 1).await?;
    machine.client().await?.batch_execute(CREATE_ROWS).await?;
    machine.run(&["svc-db-backup"])?.expect(0);
    let identity = read_marker(&machine)?["databaseIdentity"].clone();
    let snapshot = machine::read_pointer(&store)
        .await?
        .and_then(|pointer| pointer.snapshot)
        .context("the pointer names no snapshot")?;
    let key = machine::slot().sidecar(&snapshot.key).context("not a snapshot key")?;
    let sidecar: Value =
        serde_json::from_slice(&store.read(machine::BUCKET, key.as_ref()).context("no sidecar")?)?;
    assert_eq!(sidecar["databaseIdentity"], identity);
    assert!(sidecar["databaseIdentity"]["restoreId"].is_string(), "{sidecar}");
    assert_eq!(sidecar["database"]["settings"], json!([]), "the id must not be recorded as a setting");
    machine.run(&["svc-db-backup"])?.expect(0);
    assert_eq!(
        read_marker(&machine)?["databaseIdentity"],
        identity,
        "the database must be adopted only once"
    );
    lose_volume(&mut machine).await?;
    machine.run(&["svc-db-backup"])?.expect(65);
    Ok(())
}

#[tokio::test]
async fn restore_refuses_to_replace_unknown_rows() -> Result<()> {
    let (_store, _old, new) = old_and_new_machines().await?;
    new.client().await?.batch_execute("INSERT INTO local VALUES (42)").await?;
    let result = new.run(&["svc-restore"])?.expect(65);
    assert!(
        result.stderr.contains("public.local") && result.stderr.contains("svc-restore adopt"),
        "{}",
        result.stderr
    );
    assert!(!new.has_marker(), "the gate must remain closed");
    let rows: i64 = new.client().await?.query_one("SELECT count(*) FROM local", &[]).await?.get(0);
    assert_eq!(rows, 1);
    new.run(&["svc-restore", "adopt"])?.expect(0);
    assert!(new.has_marker());
    std::fs::remove_file(new.path("opt/svc/restore-complete"))?;
    new.run(&["svc-restore", "replace"])?.expect(0);
    assert!(is_restored(&new).await?);
    Ok(())
}

/// An earlier run restored an older snapshot, but never opened the gate, so its database holds no new rows.
#[tokio::test]
async fn never_served_database_is_replaced_after_failed_retry() -> Result<()> {
    let (_store, old, new) = old_and_new_machines().await?;
    new.run_with(&["svc-restore"], &[("FAILPOINTS", "restore.renamed=return(kill)")])?.expect_killed();
    old.client().await?.batch_execute("INSERT INTO kept VALUES (501)").await?;
    old.run(&["svc-db-backup"])?.expect(0);
    new.run_with(&["svc-restore"], &[("FAILPOINTS", "restore.downloaded=return(error)")])?.expect(70);
    new.run(&["svc-restore"])?.expect(0);
    let rows = new.client().await?.query_one("SELECT count(*) FROM kept", &[]).await?;
    assert_eq!(rows.get::<_, i64>(0), 501);
    Ok(())
}

/// A power cut during an import's swap leaves a marker and an open journal; the next boot completes or undoes the swap.
#[tokio::test]
async fn interrupted_import_is_resolved_at_the_next_boot() -> Result<()> {
    for (point, restored) in [("restore.closed", false), ("restore.renamed", true), ("import.swapped", true)]
    {
        let store = machine::start_store()?;
        let machine = machine_with_backup(&store).await?;
        let archive = machine.path("ada.tar");
        machine.run(&["svc-db-backup", "export", "--output", machine::path_str(&archive)])?.expect(0);
        machine.client().await?.batch_execute("INSERT INTO t VALUES (11)").await?;
        let kill = format!("{point}=return(kill)");
        machine
            .run_with(&["svc-restore", "import", machine::path_str(&archive)], &[("FAILPOINTS", &kill)])?
            .expect_step_killed();
        let saved = machine::read_pointer(&store)
            .await?
            .and_then(|pointer| pointer.snapshot)
            .context("the pointer names no snapshot")?;
        let key = machine::slot().sidecar(&saved.key).context("not a snapshot key")?;
        let sidecar: Value =
            serde_json::from_slice(&store.read(machine::BUCKET, key.as_ref()).context("no sidecar")?)?;
        assert_eq!(
            sidecar["tables"][0]["rows"], 11,
            "a snapshot of the replaced database must be created first: {sidecar}"
        );
        machine.run(&["svc-restore"])?.expect(0);
        let rows: i64 =
            machine.client().await.context(point)?.query_one("SELECT count(*) FROM t", &[]).await?.get(0);
        assert_eq!(rows, if restored { 10 } else { 11 }, "{point}");
        assert!(!machine.path("var/lib/svc/restore/journal.json").exists(), "{point}");
        assert_eq!(machine.path("var/lib/svc/requests/backup").exists(), restored, "{point}");
        machine.run(&["svc-db-backup"])?.expect(0);
    }
    Ok(())
}

#[tokio::test]
async fn interrupted_import_can_be_run_again() -> Result<()> {
    for point in ["restore.closed", "restore.renamed", "import.swapped"] {
        let store = machine::start_store()?;
        let machine = machine_with_backup(&store).await?;
        let archive = machine.path("ada.tar");
        machine.run(&["svc-db-backup", "export", "--output", machine::path_str(&archive)])?.expect(0);
        machine.client().await?.batch_execute("INSERT INTO t VALUES (11)").await?;
        let import = ["svc-restore", "import", machine::path_str(&archive)];
        let kill = format!("{point}=return(kill)");
        let killed = machine.run_with(&import, &[("FAILPOINTS", &kill)])?.expect_step_killed();
        assert!(killed.stdout.contains("restart svc-gateway"), "{point}: {}", killed.stdout);
        // This run resolves the interrupted swap first, and then fails.
        let failed = machine.run_with(&import, &[("FAILPOINTS", "import.loaded=return(error)")])?.expect(70);
        assert!(failed.stdout.contains("restart svc-gateway"), "{point}: {}", failed.stdout);
        machine.run(&import)?.expect(0);
        let rows = machine.client().await?.query_one("SELECT count(*) FROM t", &[]).await?;
        assert_eq!(rows.get::<_, i64>(0), 10, "{point}");
        machine.run(&["svc-db-backup"])?.expect(0);
    }
    Ok(())
}

#[tokio::test]
async fn emptied_database_is_backed_up_after_its_import() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_backup(&store).await?;
    machine.client().await?.batch_execute("DELETE FROM t").await?;
    machine.run(&["svc-db-backup"])?.expect(65);
    let archive = machine.path("ada.tar");
    machine.run(&["svc-db-backup", "export", "--output", machine::path_str(&archive)])?.expect(0);
    machine.run(&["svc-restore", "import", machine::path_str(&archive)])?.expect(0);
    machine.run(&["svc-db-backup", "run", "--request"])?.expect(0);
    Ok(())
}

#[tokio::test]
async fn shrunken_snapshot_is_held_until_accepted() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_backup(&store).await?;
    let good = machine::read_pointer(&store).await?;
    machine.client().await?.batch_execute("DELETE FROM t WHERE id > 5").await?;
    let result = machine.run(&["svc-db-backup"])?.expect(65);
    assert!(
        result.stderr.contains("5 rows instead of 10") && result.stderr.contains("svc-db-backup accept"),
        "{}",
        result.stderr
    );
    assert_eq!(machine::read_pointer(&store).await?, good, "the held snapshot must not be the latest");
    let held: Value =
        serde_json::from_slice(&std::fs::read(machine.path("var/lib/svc/held-snapshot.json"))?)?;
    let key = held["key"].as_str().context("the held snapshot has no key")?.to_owned();
    let (object, sidecar) = (machine::slot().snapshot(&key), machine::slot().sidecar(&key));
    for object in [object, sidecar] {
        assert!(
            store.read(machine::BUCKET, object.context("not a snapshot key")?.as_ref()).is_some(),
            "the object must be kept"
        );
    }
    let request = machine.path("var/lib/svc/requests/accept");
    svc::fsx::write_atomic(&request, b"{}", 0o600)?;
    store.take_down();
    machine.run(&["svc-db-backup", "run", "--request"])?.expect(69);
    assert!(request.exists(), "the restarted service must serve the request again");
    store.bring_up()?;
    machine.run(&["svc-db-backup", "run", "--request"])?.expect(0);
    assert!(!request.exists());
    let latest = machine::read_pointer(&store)
        .await?
        .and_then(|pointer| pointer.snapshot)
        .context("the pointer names no snapshot")?;
    assert_eq!(latest.key, key);
    assert!(!machine.path("var/lib/svc/held-snapshot.json").exists());
    let activity = std::fs::read_to_string(machine.path("home/svc/home/system/logs/activity.log"))?;
    assert!(
        activity.ends_with(&format!("the held-back snapshot {key} was accepted as the latest\n")),
        "{activity}"
    );
    svc::fsx::write_atomic(&request, b"{}", 0o600)?;
    let result = machine.run(&["svc-db-backup", "run", "--request"])?.expect(65);
    assert!(result.stderr.contains("no snapshot is held back"), "{}", result.stderr);
    assert!(!request.exists(), "a request that can never be served must be removed");
    machine.run(&["svc-db-backup"])?.expect(0);
    Ok(())
}

/// The exit code must be 65: systemd restarts the service after most other failures, and each restart would upload
/// another snapshot.
#[tokio::test]
async fn shrunken_snapshot_is_held_even_if_unrecorded() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_backup(&store).await?;
    let good = machine::read_pointer(&store).await?;
    machine.client().await?.batch_execute("DELETE FROM t WHERE id > 5").await?;
    // A directory in place of the record can be neither read as a file nor replaced by one.
    let record = machine.path("var/lib/svc/held-snapshot.json");
    std::fs::create_dir(&record)?;
    let result = machine.run(&["svc-db-backup"])?.expect(65);
    for message in ["could not record that the snapshot is held back", "5 rows instead of 10"] {
        assert!(result.stderr.contains(message), "{}", result.stderr);
    }
    assert_eq!(machine::read_pointer(&store).await?, good, "the held snapshot must not be the latest");
    std::fs::remove_dir(&record)?;
    machine.run(&["svc-db-backup"])?.expect(65);
    // `accept` deletes the last run's progress, which the gateway would otherwise show as the progress of `accept`.
    let progress = machine.path("var/lib/svc/backup-progress.json");
    assert!(progress.exists());
    machine.run(&["svc-db-backup", "accept"])?.expect(0);
    assert!(!progress.exists());
    Ok(())
}

#[tokio::test]
async fn loss_confirmed_by_three_hourly_snapshots_is_accepted() -> Result<()> {
    const HELD: &str = "var/lib/svc/held-snapshot.json";
    let store = machine::start_store()?;
    let machine = machine_with_backup(&store).await?;
    machine
        .client()
        .await?
        .batch_execute("CREATE TABLE many AS SELECT generate_series(1, 100); DROP TABLE t")
        .await?;
    let good = machine::read_pointer(&store).await?;
    let hourly = ["svc-db-backup", "run", "--retry"];
    let assert_held = |args: &[&str]| -> Result<()> {
        let result = machine.run(args)?.expect(65);
        assert!(
            result.stderr.contains("public.t") && result.stderr.contains("is missing"),
            "{}",
            result.stderr
        );
        Ok(())
    };
    // Requested runs, and runs within the same hour, do not confirm the loss, regardless of their number.
    for _ in 0..3 {
        svc::fsx::write_atomic(&machine.path("var/lib/svc/requests/backup"), b"{}", 0o600)?;
        assert_held(&["svc-db-backup", "run", "--request"])?;
        assert_held(&hourly)?;
    }
    assert_eq!(machine::read_pointer(&store).await?, good);
    let last: Value = serde_json::from_slice(&std::fs::read(machine.path("var/lib/svc/last-backup.json"))?)?;
    assert_eq!(last["status"], "error", "{last}");
    assert_eq!(last["held"]["loss"], "the table public.t with 10 rows is missing", "{last}");
    let simulate_elapsed_hour = || -> Result<()> {
        let mut held: Value = serde_json::from_slice(&std::fs::read(machine.path(HELD))?)?;
        let counted_at = held["countedAtUptimeMs"].as_i64().context("the held snapshot has no uptime")?;
        held["countedAtUptimeMs"] = (counted_at - 3_600_000).into();
        Ok(std::fs::write(machine.path(HELD), held.to_string())?)
    };
    simulate_elapsed_hour()?;
    assert_held(&hourly)?;
    simulate_elapsed_hour()?;
    machine.run(&hourly)?.expect(0);
    assert!(!machine.path(HELD).exists());
    Ok(())
}

/// Lists the databases that restores and imports have replaced.
async fn replaced_databases(machine: &Machine) -> Result<Vec<String>> {
    let mut names = machine.databases().await?;
    names.retain(|name| name.starts_with("svc_before_"));
    Ok(names)
}

/// A replaced database makes it possible to undo a mistaken restore. It is deleted after seven days, or earlier if it
/// is empty or if space is short.
#[tokio::test]
async fn replaced_databases_are_kept_for_seven_days() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_backup(&store).await?;
    let Some(disk) = SmallDisk::mount(machine.path(""), 64)? else { return Ok(()) };
    let admin = machine.postgres().connect("postgres").await?;
    let now = jiff::Timestamp::now().as_millisecond();
    let (old, young, empty) = (now - 8 * 24 * 3_600_000, now - 6 * 24 * 3_600_000, now - 3_600_000);
    for replaced_at_ms in [old, young, empty] {
        admin.batch_execute(&format!("CREATE DATABASE svc_before_{replaced_at_ms}")).await?;
        if replaced_at_ms != empty {
            machine
                .postgres()
                .connect(&format!("svc_before_{replaced_at_ms}"))
                .await?
                .batch_execute(CREATE_ROWS)
                .await?;
        }
    }
    machine.run(&["svc-db-backup"])?.expect(0);
    assert_eq!(replaced_databases(&machine).await?, [format!("svc_before_{young}")]);
    disk.fill(5 << 20)?;
    machine.run(&["svc-db-backup"])?.expect(0);
    assert!(replaced_databases(&machine).await?.is_empty());
    Ok(())
}

/// The owner may have opened a replaced database, and left a transaction open.
#[tokio::test]
async fn backup_does_not_wait_for_locked_replaced_database() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_backup(&store).await?;
    let replaced = format!("svc_before_{}", jiff::Timestamp::now().as_millisecond());
    let admin = machine.postgres().connect("postgres").await?;
    admin.batch_execute(&format!("CREATE DATABASE {replaced}")).await?;
    let owner = machine.postgres().connect(&replaced).await?;
    owner.batch_execute("CREATE TABLE locked (id int)").await?;
    owner.batch_execute("BEGIN; LOCK TABLE locked").await?;
    machine.run(&["svc-db-backup"])?.expect(0);
    assert_eq!(replaced_databases(&machine).await?, [replaced]);
    Ok(())
}

/// A brief failure does not delay the backup by an hour: the hourly run retries, and each attempt is recorded.
#[tokio::test]
async fn failed_hourly_backup_is_retried() -> Result<()> {
    let store = machine::start_store()?;
    let machine = machine_with_backup(&store).await?;
    let before = machine.backup_records()?.len();
    let extra = [("FAILPOINTS", "backup.verified=2*return(error)"), ("BACKUP_RETRY_SECONDS", "1")];
    machine.run_with(&["svc-db-backup", "run", "--retry"], &extra)?.expect(0);
    let records = machine.backup_records()?;
    let statuses: Vec<&str> =
        records[before..].iter().filter_map(|record| record["status"].as_str()).collect();
    assert_eq!(statuses, ["error", "error", "success"]);
    // A run that needs an operator's decision is not retried.
    machine.client().await?.batch_execute("DELETE FROM t WHERE id > 2").await?;
    machine.run_with(&["svc-db-backup", "run", "--retry"], &extra[1..])?.expect(65);
    assert_eq!(machine.backup_records()?.len(), records.len() + 1);
    for invalid in ["0", "2m"] {
        let result = machine.run_with(&["svc-db-backup"], &[("BACKUP_RETRY_SECONDS", invalid)])?.expect(78);
        assert!(result.stderr.contains("BACKUP_RETRY_SECONDS"), "{}", result.stderr);
    }
    Ok(())
}
